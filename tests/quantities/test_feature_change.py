"""The change of features against features taken by hooks, and for networks where it is known."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import InputValueError

P, D, C = 13, 5, 3


def centered(h: Tensor) -> Tensor:
    return h - h.mean(0)


def relative_change(h: Tensor, h0: Tensor) -> float:
    h, h0 = h.detach(), h0.detach()
    return float((centered(h) - centered(h0)).norm() / centered(h0).norm())


def linear_cka(h: Tensor, h0: Tensor) -> float:
    """In the space of features, where the library compares samples."""
    a, b = centered(h), centered(h0)
    return float((a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()))


def moved(model: nn.Module, size: float = 0.3) -> dict[str, Tensor]:
    """Move all weights and buffers; return the state before."""
    model.double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += size * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return before


def entering(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(x)
    handle.remove()
    return torch.cat([part.flatten(1) for part in seen], 1)


def earlier(model: nn.Module, before: dict[str, Tensor]) -> nn.Module:
    start = copy.deepcopy(model)
    start.load_state_dict(before)
    return start


NETWORKS = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, C)),
        (D,),
        "4",
    ),
    "softmax behind the head": (
        lambda: nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C), nn.LogSoftmax(1)),
        (D,),
        "2",
    ),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, C)
        ),
        (1, 5, 5),
        "5",
    ),
    "transformer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(24, C)),
        (4, 6),
        "2",
    ),
}


@pytest.mark.parametrize("name", list(NETWORKS))
def test_it_is_the_change_of_what_enters_the_layers(name: str):
    make, shape, last = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(P, *shape, dtype=torch.float64)
    before = moved(model)
    start = earlier(model, before)
    layers = fl.quantities.features_moved(model, x, before, by="layer")
    compared = [layer for layer in layers if layer in dict(model.named_modules()) and "self_attn" not in layer]
    assert last in compared
    for layer in compared:
        h, h0 = entering(model, layer, x), entering(start, layer, x)
        assert float(layers[layer]) == pytest.approx(relative_change(h, h0), rel=1e-10)
        assert layers[layer].cka == pytest.approx(linear_cka(h, h0), rel=1e-10)
    whole = fl.quantities.features_moved(model, x, before)
    assert (float(whole), whole.cka) == (float(layers[last]), layers[last].cka)


def test_linear_models_and_heads_alone_move_no_features():
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(D, C), nn.LogSoftmax(1))
    before = moved(linear)
    x = torch.randn(P, D, dtype=torch.float64)
    change = fl.quantities.features_moved(linear, x, before)
    assert (float(change), change.cka) == (0.0, pytest.approx(1.0))
    head = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C), nn.Sigmoid())
    body = {key: value.clone() for key, value in head.double().state_dict().items() if key.startswith("0.")}
    before = moved(head)
    head.load_state_dict(body, strict=False)
    before |= body
    assert float(fl.quantities.features_moved(head, x, before)) == 0.0


def test_a_frozen_head_is_the_last_layer():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)), torch.randn(P, D, dtype=torch.float64)
    before = moved(model)
    expected = float(fl.quantities.features_moved(model, x, before))
    model[2].requires_grad_(False)
    assert float(fl.quantities.features_moved(model, x, before)) == expected > 0.1
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


def test_a_frozen_copy_beside_the_network_does_not_dilute_its_features():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)).double()
    x = torch.randn(P, D, dtype=torch.float64)
    scaled = fl.steer.scale_output(network, 0.1)
    before = {name: value.clone() for name, value in scaled.state_dict().items()}
    alone = moved(network)
    assert float(fl.quantities.features_moved(scaled, x, before)) == pytest.approx(
        float(fl.quantities.features_moved(network, x, alone)), rel=1e-12
    )


def test_weights_that_no_module_applies_are_seen():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(D, 7)), nn.Parameter(torch.randn(7))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.first) @ self.second

    torch.manual_seed(0)
    model, x = Functional(), torch.randn(P, D, dtype=torch.float64)
    before = moved(model)
    expected = relative_change(torch.relu(x @ model.first), torch.relu(x @ before["first"]))
    assert float(fl.quantities.features_moved(model, x, before)) == pytest.approx(expected, rel=1e-10)


def test_an_adapted_head_moves_no_features():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(7, C).requires_grad_(False)
            self.down, self.up = nn.Linear(7, 2, bias=False), nn.Linear(2, C, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2.0 * self.up(self.down(x))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), Adapted())
    body = {key: value.clone() for key, value in model.double().state_dict().items() if key.startswith("0.")}
    before = moved(model) | body
    model.load_state_dict(body, strict=False)
    change = fl.quantities.features_moved(model, torch.randn(P, D, dtype=torch.float64), before)
    assert (float(change), change.cka) == (0.0, pytest.approx(1.0))


@pytest.mark.parametrize("relu", [torch.relu, lambda h: torch.where(h > 0, h, 0.0), lambda h: h * (h > 0)])
def test_units_that_are_added_up_without_weights_have_no_last_layer(relu):
    class Committee(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 7)

        def forward(self, x: Tensor) -> Tensor:
            return relu(self.layer(x)).mean(1)

    torch.manual_seed(0)
    model = Committee()
    before = moved(model)
    change = fl.quantities.features_moved(model, torch.randn(P, D, dtype=torch.float64), before)
    assert math.isnan(float(change))
    assert change.reason == "no weight matrix is known to come last"


def test_a_fixed_mask_behind_the_last_layer_makes_no_units():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 7)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * (torch.arange(7) < 4)).mean(1)

    torch.manual_seed(0)
    model = Masked()
    before = moved(model)
    assert float(fl.quantities.features_moved(model, torch.randn(P, D, dtype=torch.float64), before)) == 0


def test_rotated_features_have_a_cka_of_one():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, D, bias=False), nn.Linear(D, C)).double(), torch.randn(P, D).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.copy_(torch.linalg.qr(torch.randn(D, D).double())[0] @ model[0].weight)
    change = fl.quantities.features_moved(model, x, before)
    assert float(change) > 0.5
    assert change.cka == pytest.approx(1.0, abs=1e-12)


def test_the_standard_error_is_that_of_other_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C))
    before = moved(model)
    generator = torch.Generator().manual_seed(5)
    session = fl.Session(model, torch.randn(96, D, generator=generator, dtype=torch.float64))
    batches = [torch.randn(96, D, generator=generator, dtype=torch.float64) for _ in range(60)]
    changes = [session.features_moved(before, x=x) for x in batches]
    values = torch.tensor([float(change) for change in changes])
    errors = torch.tensor([change.relative.stderr for change in changes])
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.35)


def test_rounding_is_stated():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)), torch.randn(P, D)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight *= 1 + 1e-7
    change = fl.quantities.features_moved(model, x, before)
    assert float(change) < change.rounding < change.relative.stderr < 1e-5


def test_half_precision_is_measured_in_single():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight += 0.05
    x = torch.randn(P, D).bfloat16()
    single = copy.deepcopy(model).float()
    expected = fl.quantities.features_moved(single, x.float(), {key: value.float() for key, value in before.items()})
    change = fl.quantities.features_moved(model, x, before)
    assert float(change) == pytest.approx(float(expected), rel=1e-6)
    assert change.rounding < 1e-4


@pytest.mark.parametrize(
    ("argument", "words"),
    [({"by": "parameter"}, "expected 'network' or 'layer'"), ({"x": torch.randn(1, D)}, "at least 2")],
)
def test_what_makes_no_sense_is_refused(argument: dict, words: str):
    model = nn.Linear(D, C)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputValueError, match=words):
        fl.quantities.features_moved(model, **{"x": torch.randn(P, D), "initial": before, **argument})
