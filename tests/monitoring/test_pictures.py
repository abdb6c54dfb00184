"""What pictures of a report need: samples and leading eigenvectors, against a dense reference."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.monitoring.pictures import image_shape
from featlearn.record import Run


def watched(path: Path, model: nn.Module, x: torch.Tensor, y: torch.Tensor, **options) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with fl.watch(model, (x, y), out=path, loss="cross-entropy", budget=None, **options) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return watch.run


def table_network(columns: int = 9, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, 17), nn.Tanh(), nn.Linear(17, classes)).double()


def test_sensitivity_is_that_of_the_dense_gradients(tmp_path: Path):
    x, y = torch.randn(40, 9, dtype=torch.float64), torch.arange(40) % 3
    model = table_network()
    run = watched(tmp_path / "run", model, x, y)
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z).sum(0), x)  # (C, P, d): samples are independent
    product = torch.einsum("cpi,cpj->ij", jacobian, jacobian)
    recorded = run.array("pictures", 3)
    eigenvalues = torch.linalg.eigvalsh(product).flip(0) / product.trace()
    assert recorded["shares"] == pytest.approx(eigenvalues[:4].numpy(), rel=1e-6)
    shares = product.diagonal() / product.trace()
    assert recorded["columns"].tolist() == shares.argsort(descending=True)[:8].tolist()
    assert recorded["column_shares"] == pytest.approx(shares.sort(descending=True).values[:8].numpy(), rel=1e-6)


def test_patterns_are_eigenvectors(tmp_path: Path):
    digits = fl.data.digits()
    x, y = digits.x[:50].flatten(1).double(), digits.labels[:50]
    model = table_network(64, 10)
    run = watched(tmp_path / "run", model, x, y)
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z).sum(0), x)
    product = torch.einsum("cpi,cpj->ij", jacobian, jacobian)
    vectors = torch.linalg.eigh(product).eigenvectors
    patterns = torch.from_numpy(run.array("pictures", 3)["patterns"]).double().flatten(1)
    cosines = (patterns * vectors.flip(1)[:, :4].mT).sum(1).abs()
    assert cosines.tolist() == pytest.approx([1.0] * 4, abs=1e-4)
    first = run.array("pictures", 0)
    assert first["thumbnails"].shape == (50, 8, 8)
    assert first["samples"].tolist() == list(range(50))
    pixels = digits.x[:50].reshape(50, 8, 8).double().numpy()
    assert first["thumbnails"] == pytest.approx(pixels / pixels.max() * 255, abs=0.51)
    assert "thumbnails" not in run.array("pictures", 3)


@pytest.mark.parametrize(
    ("shape", "images"),
    [((20, 3, 9, 5), (3, 9, 5)), ((20, 1, 9, 9), (1, 9, 9)), ((20, 64), None), ((20, 7, 8), None), ((20, 50), None)],
)
def test_rows_of_noise_are_no_images(shape: tuple[int, ...], images: tuple[int, int, int] | None):
    torch.manual_seed(0)
    assert image_shape(torch.randn(shape)) == images


def test_smooth_rows_are_images():
    waves = torch.sin(torch.arange(64.0).reshape(1, 8, 8) / 5 + torch.arange(6.0)[:, None, None])
    assert image_shape(waves.flatten(1)) == image_shape(waves) == (1, 8, 8)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(x).mean(1))


def test_tokens_have_their_nearest_embeddings(tmp_path: Path):
    torch.manual_seed(0)
    x, y = torch.randint(0, 11, (30, 7)), torch.arange(30) % 4
    model = Tokens()
    run = watched(tmp_path / "run", model, x, y)
    assert run.array("pictures", 0)["tokens"].tolist() == x.tolist()
    recorded = run.array("pictures", 3)
    weight = nn.functional.normalize(model.embedding.weight.detach(), dim=1)
    for word, nearest in zip(recorded["words"], recorded["nearest"], strict=True):
        order = [i for i in (weight @ weight[word]).argsort(descending=True).tolist() if i != word]
        assert nearest.tolist() == order[:5]


def test_pictures_change_nothing_and_can_be_left_out(tmp_path: Path):
    x, y = torch.randn(40, 3, 8, 8), torch.arange(40) % 3
    states = []
    for pictures in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 3))
        run = watched(tmp_path / str(pictures), model, x, y, pictures=pictures)
        states.append(({name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()))
        assert ("pictures" in run.arrays) is pictures
        assert ("pictures" in run.config["quantities"]) is pictures
    assert all(torch.equal(states[0][0][name], value) for name, value in states[1][0].items())
    assert torch.equal(states[0][1], states[1][1])


def test_pictures_of_large_images_are_small(tmp_path: Path):
    x, y = torch.rand(80, 3, 96, 120), torch.arange(80) % 3
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(540, 3))
    run = watched(tmp_path / "run", model, x, y, quantities={"features": False})
    sizes = [run.array("pictures", step) for step in run.arrays["pictures"]]
    assert sizes[0]["thumbnails"].shape == (64, 64, 64, 3)
    assert sum(array.nbytes for arrays in sizes for array in arrays.values()) < 2e6
    assert numpy.isfinite(sizes[1]["patterns"]).all()
