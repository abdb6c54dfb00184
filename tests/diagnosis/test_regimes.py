"""Small networks whose regime theory fixes, trained and watched as a user would."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.diagnosis import Diagnosis, diagnose
from featlearn.diagnosis.evidence import GAP

Loss = Callable[[Tensor, Tensor], Tensor]


def square(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum(1).mean()


binary: Loss = nn.functional.binary_cross_entropy_with_logits


def data(outputs: int = 1, samples: int = 96) -> tuple[Tensor, Tensor]:
    """A target with a linear part and a product of two inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    y = x @ torch.randn(8, outputs, generator=generator) / 3 + (x[:, 0] * x[:, 1])[:, None]
    return x, y


def network(outputs: int = 1, width: int = 48, *, sigma: float = 1.0) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))
    return fl.steer.scale_init(model, sigma)


def watched(
    path: Path,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    *,
    loss: Loss = square,
    lr: float = 0.0,
    groups: list[dict] | None = None,
    batch: int | None = None,
) -> Diagnosis:
    """Half of the samples are trained on and probed, the rest are test points."""
    half = len(x) // 2
    torch.manual_seed(2)
    trained = groups or [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr or 0.1)
    with fl.watch(
        model,
        (x[:half], y[:half]),
        out=path,
        test=(x[half:], y[half:]),
        optimizer=optimizer,
        budget=None,
        every=steps // 6,
        quantities=["gap", "weights", "kernel", "test"],
    ) as watch:
        for _ in range(steps):
            some = torch.arange(half) if batch is None else torch.randperm(half)[:batch]
            optimizer.zero_grad()
            value = loss(model(x[some]), y[some])
            value.backward()
            optimizer.step()
            watch.step(loss=value)
    found = diagnose(watch.run)
    assert float(found.numbers["loss_left"]) < 0.5, "the run did not learn, and shows nothing"
    return found


def test_a_linear_model_is_lazy(tmp_path: Path):
    x, _ = data()
    torch.manual_seed(1)
    found = watched(tmp_path / "run", nn.Linear(8, 2), x, x @ torch.randn(8, 2), 120, lr=0.05)
    assert found.regime == "lazy"
    assert float(found.gap) < 1e-4
    assert float(found.turning) < 1e-6


def test_batch_norm_before_the_only_trained_layer_is_lazy(tmp_path: Path):
    """Its averages settle far from where they begin, so that the kernel turns; nothing is learned but the readout."""
    x, y = data()
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(8, 80), nn.ReLU(), nn.BatchNorm1d(80, affine=False))
    with torch.no_grad():
        body[0].weight.mul_(torch.linspace(0.2, 6.0, 80)[:, None])
    for parameter in body.parameters():
        parameter.requires_grad_(False)
    found = watched(tmp_path / "run", nn.Sequential(body, nn.Linear(80, 1)), x, y, 240, lr=0.01, batch=24)
    assert found.regime == "lazy"
    assert float(found.gap) < 1e-3
    assert float(found.turning) > 0.05  # by which it was once called rich
    assert "BatchNorm" in found.full


def test_small_first_weights_are_rich(tmp_path: Path):
    x, y = data()
    found = watched(tmp_path / "run", network(sigma=0.3), x, y, 600, lr=0.1)
    assert found.regime == "rich"
    assert float(found.gap) > 0.6


def test_a_constant_in_the_targets_hides_nothing(tmp_path: Path):
    """Most of the outputs' change, and of the loss, is that of the constant, which the last bias learns lazily."""
    x, y = data()
    found = watched(tmp_path / "run", network(sigma=0.3), x, y + 8, 800, lr=0.05)
    assert found.regime == "rich"
    assert float(found.gap) > 0.6


@pytest.mark.parametrize("width", [64, 256])
def test_mean_field_networks_are_rich_at_any_width(tmp_path: Path, width: int):
    x, y = data()
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, width, bias=False), nn.Tanh(), nn.Linear(width, 1, bias=False))
    model, groups = fl.steer.parametrize(plain, "mean_field", 0.05, base_width=1)
    found = watched(tmp_path / "run", model, x, y, 400, groups=groups)
    assert found.regime == "rich"
    assert float(found.gap) > GAP.high


@pytest.mark.parametrize("regime", ["lazy", "rich"])
def test_multi_label_binary_cross_entropy(tmp_path: Path, regime: str):
    x, y = data(outputs=2, samples=60)
    labels = (y > 0).float()
    if regime == "lazy":
        model = fl.steer.scale_output(network(2), 100.0)
        found = watched(tmp_path / "run", model, x, labels, 300, loss=binary, lr=0.8 * model.rate_factor)
    else:
        found = watched(tmp_path / "run", network(2, sigma=0.4), x, labels, 600, loss=binary, lr=1.0)
    assert found.regime == regime
