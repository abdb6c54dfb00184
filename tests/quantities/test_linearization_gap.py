"""The linearization gap against dense Jacobians and closed forms, and for models that are linear by design."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.audited_model import AuditedModel
from featlearn.errors import InputValueError
from featlearn.linearization.two_states import TwoStates

P, D, C = 11, 5, 3


def centered(f: Tensor) -> Tensor:
    return f - f.mean(0)


def inputs(*shape: int) -> Tensor:
    return torch.randn(P, *(shape or (D,)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def moved(model: nn.Module, size: float = 0.3) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in double after a random step of all weights and buffers, and its state before."""
    model = model.double().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += size * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return model, before


def dense_gap(model: nn.Module, x: Tensor, before: dict[str, Tensor]) -> float:
    """From the Jacobian at the first weights, row by row, with the buffers of now."""
    start = copy.deepcopy(model)
    buffers = {name for name, _ in model.named_buffers()}
    start.load_state_dict({**before, **{k: v for k, v in model.state_dict().items() if k in buffers}})
    first = start(x)
    linear = torch.zeros_like(first)
    way = [now.detach() - then.detach() for now, then in zip(model.parameters(), start.parameters(), strict=True)]
    for i in range(first.shape[0]):
        for c in range(first.shape[1]):
            rows = torch.autograd.grad(first[i, c], list(start.parameters()), retain_graph=True, allow_unused=True)
            linear[i, c] = sum(float((r * w).sum()) for r, w in zip(rows, way, strict=True) if r is not None)
    change = (model(x) - first).detach()
    return float(centered(change - linear.detach()).norm() / centered(change).norm())


class Tied(nn.Module):
    """One weight used twice, once transposed, with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(7, D)), nn.LayerNorm(7)
        self.read = nn.Linear(D, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(x @ self.weight.T))
        out: Tensor = self.read(h @ self.weight)
        return out


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(3)
    return {
        "perceptron": (nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)), inputs()),
        "tied": (Tied(), inputs()),
        "batch norm": (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, C)),
            inputs(1, 5, 5),
        ),
        "attention": (
            nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(24, C)),
            inputs(4, 6),
        ),
        "weight norm": (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 7)), nn.GELU(), nn.Linear(7, C)),
            inputs(),
        ),
    }


@pytest.mark.parametrize("name", list(models()))
def test_it_is_what_a_dense_jacobian_gives(name: str):
    model, x = models()[name]
    model, before = moved(model)
    expected = dense_gap(model, x, before)
    assert expected > 0.05
    assert fl.linearization_gap(model, x, before, effective=False) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", list(models()))
def test_parts_of_layers_add_up_to_it(name: str):
    model, x = models()[name]
    model, before = moved(model)
    parts = fl.linearization_gap(model, x, before, by="layer")
    assert set(parts) == {key.rpartition(".")[0] for key, _ in model.named_parameters()}
    assert sum(parts.values()) == pytest.approx(fl.linearization_gap(model, x, before), rel=1e-9)


def test_two_linear_layers_miss_the_product_of_their_changes():
    """f = B A x: with changes a, b the linearization misses b a x, half of it the part of each layer."""
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, 7, bias=False), nn.Linear(7, C, bias=False)))
    x = inputs()
    a, b = (model[i].weight.detach() - before[f"{i}.weight"] for i in (0, 1))
    change = x @ (model[1].weight @ model[0].weight - before["1.weight"] @ before["0.weight"]).detach().T
    missed = x @ (b @ a).T
    expected = float(centered(missed).norm() / centered(change).norm())
    assert fl.linearization_gap(model, x, before) == pytest.approx(expected, rel=1e-10)
    assert fl.linearization_gap(model, x, before, by="layer") == pytest.approx({"0": expected / 2, "1": expected / 2})


def test_models_that_are_linear_in_what_was_trained_have_none():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.BatchNorm1d(9))
    model, before = moved(nn.Sequential(body, nn.Linear(9, C)))
    model[0].load_state_dict({k.removeprefix("0."): v for k, v in before.items() if k.startswith("0.")})
    # averages that settle are no learning: they are those of now in all terms
    model[0][2].running_mean += 5.0
    model[0][2].running_var *= 7.0
    assert fl.linearization_gap(model, inputs(), before) < 1e-12


def test_a_constant_that_all_samples_learn_does_not_hide_it():
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)))
    expected = fl.linearization_gap(model, inputs(), before)
    with torch.no_grad():
        model[2].bias += 1e3
    assert fl.linearization_gap(model, inputs(), before) == pytest.approx(expected, rel=1e-6)


def test_outputs_that_have_not_changed_have_no_gap():
    model = nn.Linear(D, C)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert math.isnan(fl.linearization_gap(model, inputs().float(), before))
    assert all(math.isnan(part) for part in fl.linearization_gap(model, inputs().float(), before, by="layer").values())


def test_parameters_that_were_frozen_later_still_count():
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)))
    expected = dense_gap(model, inputs(), before)
    model[0].requires_grad_(False)
    assert fl.linearization_gap(model, inputs(), before) == pytest.approx(expected, rel=1e-9)


def test_a_readout_is_applied():
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)))
    tail = nn.Sequential(model, nn.Linear(C, 1, bias=False).double())
    nn.init.ones_(tail[1].weight)
    start = {**{f"0.{key}": value for key, value in before.items()}, "1.weight": torch.ones(1, C).double()}
    found = fl.linearization_gap(model, inputs(), before, readout=lambda out: out.sum(1))
    assert found == pytest.approx(fl.linearization_gap(tail, inputs(), start), rel=1e-10)


def test_layers_that_only_shrank_are_followed():
    """Weights c W + small noise: from c W the network is nearly linear, from W it is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 40, bias=False), nn.Tanh(), nn.Linear(40, C, bias=False)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(1e-4 * torch.randn_like(parameter))
    states = TwoStates(AuditedModel(model), before, unshrunk=True)
    assert states.shrinking == pytest.approx({"0": 0.5, "2": 0.5}, abs=1e-3)
    assert states.gap(inputs()).value < 0.01
    assert TwoStates(AuditedModel(model), before).gap(inputs()).value > 0.2


def test_the_standard_error_is_that_of_other_samples():
    torch.manual_seed(0)
    model, before = moved(nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)))
    generator = torch.Generator().manual_seed(5)
    states = TwoStates(AuditedModel(model), before)
    found = [states.gap(torch.randn(96, D, generator=generator, dtype=torch.float64)) for _ in range(60)]
    values = torch.tensor([one.value for one in found])
    errors = torch.tensor([one.stderr for one in found])
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.35)


def test_it_can_be_pickled_and_copied():
    model, before = moved(nn.Sequential(nn.Linear(D, C), nn.LogSoftmax(-1)))
    gap = fl.linearization_gap(model, inputs(), before)
    for twin in (pickle.loads(pickle.dumps(gap)), copy.deepcopy(gap)):
        assert type(twin) is type(gap)
        assert (float(twin), twin.plain, twin.rounding) == (float(gap), gap.plain, gap.rounding)
        assert (twin.link, twin.merged, float(twin.estimate.stderr)) == (gap.link, (), float(gap.estimate.stderr))
    assert gap.link


@pytest.mark.parametrize(
    ("given", "words"),
    [({"by": "parameter"}, "expected 'network' or 'layer'"), ({"x": inputs()[:1]}, "at least 2")],
)
def test_what_makes_no_sense_is_refused(given: dict, words: str):
    model, before = moved(nn.Sequential(nn.Linear(D, C)))
    with pytest.raises(InputValueError, match=words):
        fl.linearization_gap(model, **{"x": inputs(), "initial": before, **given})
