"""Check sequences of torch's own layers: exact on every call, also after a layer has changed."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.errors import CoupledSamplesError, InputValueError
from featlearn.network.inputs import ModelWithInputs
from featlearn.planning import kernel_plan
from tests.references.jacobian import dense_ntk

SAMPLES = 23


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.GELU(),
        nn.GroupNorm(1, 3),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.LayerNorm(12),
        nn.Linear(12, 3),
    )


def shared() -> nn.Sequential:
    square = nn.Linear(3, 3)
    return nn.Sequential(square, nn.SiLU(), square, nn.SiLU(), nn.Linear(3, 2))


def positions() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Softplus(), nn.Flatten(), nn.Linear(14, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "perceptron": (perceptron, (3,)),
    "convolutional": (convolutional, (2, 4, 4)),
    "shared": (shared, (3,)),
    "positions": (positions, (7, 3)),
}


def made(name: str) -> tuple[nn.Sequential, Tensor]:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    return build().double(), torch.randn(SAMPLES, *shape, dtype=torch.float64)


def assert_exact(session: fl.Session, **arguments: Any) -> None:
    expected = dense_ntk(session.model, session.x, outputs=arguments.get("outputs", "mean"))
    found = session.ntk(**arguments)
    assert float((found - expected).abs().max()) <= 1e-11 * float(expected.abs().max())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each forward pass has."""
    seen: list[int] = []
    plain = ModelWithInputs.outputs

    def outputs(self: ModelWithInputs, *args: Any) -> Tensor:
        found = plain(self, *args)
        seen.append(len(found))
        return found

    monkeypatch.setattr(ModelWithInputs, "outputs", outputs)
    return seen


@pytest.mark.parametrize("outputs", ["mean", "sum", "each", "full", 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_pass_and_the_same_kernel(name: str, outputs: Any, passes: list[int]):
    model, x = made(name)
    session = fl.Session(model, x)
    for seed in range(4):
        passes.clear()
        found = session.ntk(x=x + seed, outputs=outputs)
        expected = dense_ntk(model, x + seed, outputs="each" if outputs == 1 else outputs)
        expected = expected[1] if outputs == 1 else expected
        assert float((found - expected).abs().max()) <= 1e-11 * float(expected.abs().max())
        assert seed == 0 or passes == [SAMPLES]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_plan_counts_no_check_passes(name: str):
    plan = fl.plan(*made(name))
    assert plan.check_passes == 0
    assert plan.backward_passes == plan.directions
    assert "checked by its ops" in str(plan)


def test_directions_one_by_one(passes: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_plan, "MANY_NUMBERS", 0)
    session = fl.Session(*made("perceptron"))
    for _ in range(3):
        passes.clear()
        assert_exact(session, outputs="each")
    assert passes == [SAMPLES]


def test_nothing_is_changed():
    model, x = made("convolutional")
    model[0].eval()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    inputs, session = x.clone(), fl.Session(model, x)
    session.ntk()
    numpy.random.seed(3)
    random.seed(3)
    before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())
    state, grads = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    flags = [part.training for part in model.modules()]
    versions = [p._version for p in model.parameters()]
    session.ntk()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert flags == [part.training for part in model.modules()]
    assert versions == [p._version for p in model.parameters()]
    assert torch.equal(x, inputs)
    assert x._version == 0


def test_precision_and_autocast_are_those_of_a_measurement():
    model, x = made("perceptron")
    session = fl.Session(model.float(), x.float())
    expected = session.ntk()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(session.ntk(), session.ntk())
        torch.testing.assert_close(session.ntk(), expected)
    with torch.no_grad():
        torch.testing.assert_close(session.ntk(), expected)
    with torch.inference_mode():
        torch.testing.assert_close(session.ntk(), expected)


def test_what_is_put_into_the_network_later_is_seen():
    model, x = made("perceptron")
    session = fl.Session(model, x)
    for _ in range(2):
        assert_exact(session)
    handle = model[1].register_forward_hook(lambda module, inputs, output: output - output.mean(0))
    with pytest.raises(CoupledSamplesError):
        session.ntk()
    handle.remove()
    assert_exact(session)
    model[1] = nn.Sigmoid()
    assert_exact(session)
    model[1] = nn.Softmax(0)
    with pytest.raises(CoupledSamplesError):
        session.ntk()
    model[1] = nn.Softmax(1)
    assert_exact(session)


def test_a_backward_hook_that_is_put_on_later_does_not_fire():
    model, x = made("perceptron")
    session = fl.Session(model, x)
    expected = session.ntk()
    fired: list[int] = []
    model[0].register_full_backward_hook(lambda *_: fired.append(1))
    model[2].weight.register_hook(lambda gradient: fired.append(2))
    torch.testing.assert_close(session.ntk(), expected, rtol=1e-12, atol=1e-12)
    assert not fired


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused(value: float):
    model, x = made("perceptron")
    session = fl.Session(model, x)
    session.ntk()
    x[7, 1] = value
    with pytest.raises(InputValueError, match="not finite"):
        session.ntk()


def test_outputs_that_overflow_are_refused():
    """Their kernel would be finite."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(SAMPLES, 3)
    session = fl.Session(model, x)
    session.ntk()
    with torch.no_grad():
        model[2].bias.fill_(float("inf"))
    with pytest.raises(InputValueError, match="not finite"):
        session.ntk()


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.LeakyReLU(),
        nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def tied(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "padding": lambda model: setattr(model[0], "padding", (0, 2)),
    "stride": lambda model: setattr(model[0], "stride", (2, 1)),
    "dilation": lambda model: setattr(model[2], "dilation", (2, 2)),
    "slope": lambda model: setattr(model[1], "negative_slope", 0.5),
    "groups of a norm": lambda model: setattr(model[3], "num_groups", 1),
    "eps": lambda model: setattr(model[3], "eps", 0.5),
    "pooling": lambda model: setattr(model[4], "kernel_size", 3),
    "another layer": lambda model: model.__setitem__(1, nn.Tanh()),
    "one layer less": lambda model: model.__setitem__(4, nn.Identity()),
    "frozen": lambda model: model[2].weight.requires_grad_(not model[2].weight.requires_grad),
    "no bias": lambda model: setattr(model[2], "bias", None),
    "tied": tied,
    "other weights": lambda model: model.load_state_dict(
        {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    ),
}


def image_network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return images().double(), torch.randn(SAMPLES, 4, 15, 15, dtype=torch.float64)


@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_change_between_calls_are_read_anew(name: str):
    model, x = image_network()
    session = fl.Session(model, x)
    for _ in range(2):
        assert_exact(session)
    CHANGES[name](model)
    for _ in range(2):
        assert_exact(session)


@pytest.mark.parametrize("seed", range(4))
def test_changes_one_after_the_other(seed: int):
    model, x = image_network()
    session, draws = fl.Session(model, x), random.Random(seed)
    for name in draws.sample([name for name in CHANGES if name not in ("tied", "no bias")], 5):
        CHANGES[name](model)
        session.x = torch.randn(draws.choice([SAMPLES, 9]), 4, 15, 15, dtype=torch.float64)
        assert_exact(session)
        assert_exact(session)
