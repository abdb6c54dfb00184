"""Every argument of a Session acts on every method, or the method refuses it by name."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import featlearn as fl

P = 9
X = torch.randn(P, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(P, 3, generator=torch.Generator().manual_seed(1))
METHODS = [name for name, part in vars(fl.Session).items() if inspect.isfunction(part) and not name.startswith("_")]
DIVIDED = {"ntk", "neural_features", "estimate_alignment", "operator"}
"""Methods whose samples are divided among ranks; tests/distributed compares them with one process."""

SATISFIED = {("layer_alignment", "dtype"), ("layer_balance", "dtype")}
"""Products of two weights are computed in double whatever the `dtype`."""


class Network(nn.Module):
    """It returns hidden values and outputs of one shape: a readout chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.b(torch.tanh(self.a(x)))
        return hidden, self.c(torch.relu(hidden))


def network() -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network()


def last(output: Any) -> Tensor:
    return output[1]


def measure(method: str, **settings: Any) -> Any:
    """Call a method, with what it needs."""
    model = network()
    if method != "representation_kernels":
        settings = {"readout": last, **settings}
    session = fl.Session(model, X, **{"memory": "1GiB", **settings})
    needed: dict[str, Any] = {"y": Y, "layer": "b"}
    needed["initial"] = {name: value + 0.3 * torch.sin(7 * value) for name, value in model.state_dict().items()}
    function = getattr(session, method)
    result = function(**{name: needed[name] for name in inspect.signature(function).parameters if name in needed})
    if method == "gradients":
        return [(name, part.tensor()) for _, name, part in result]
    return result @ torch.ones(P, 3) if method == "operator" else str(result) if method == "plan" else result


def numbers(result: Any) -> Iterator[Any]:
    """Yield every number and name that a result holds."""
    if isinstance(result, Tensor):
        yield from result.detach().double().flatten().tolist()
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield str(key)
            yield from numbers(value)
    elif dataclasses.is_dataclass(result):
        for field in dataclasses.fields(result):
            yield from numbers(getattr(result, field.name))
    elif isinstance(result, list | tuple):
        for value in result:
            yield from numbers(value)
    else:
        yield result


def same(a: Any, b: Any) -> bool:
    return repr(list(numbers(a))) == repr(list(numbers(b)))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_repeats_its_result(method: str):
    assert same(measure(method), measure(method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("argument", "value"),
    [("readout", lambda output: output[0]), ("parameters", "b.*"), ("dtype", torch.float64)],
    ids=["readout", "parameters", "dtype"],
)
def test_an_argument_acts_or_is_refused(method: str, argument: str, value: Any):
    try:
        result = measure(method, **{argument: value})
    except fl.FeatlearnError as error:
        message = str(error)
    else:
        message = "" if same(result, measure(method)) else f"{argument}= acts"
    assert f"{argument}=" in message or (method, argument) in SATISFIED


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_is_refused_or_makes_more_passes(method: str, monkeypatch: pytest.MonkeyPatch):
    passes = []
    forward = Network.forward

    def counted(model: Network, x: Tensor) -> tuple[Tensor, Tensor]:
        passes.append(len(x))
        return forward(model, x)

    monkeypatch.setattr(Network, "forward", counted)
    measure(method)
    plenty = len(passes)
    passes.clear()
    try:
        measure(method, memory=1)
    except fl.errors.MemoryBudgetError:
        return
    assert len(passes) > plenty


@pytest.fixture
def group() -> Iterator[str]:
    """The group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield "world"
    dist.destroy_process_group()


@pytest.mark.parametrize("method", METHODS)
def test_a_group_divides_samples_or_is_refused(method: str, group: str):
    if method not in DIVIDED:
        with pytest.raises(fl.FeatlearnError, match="group="):
            measure(method, group=group)
        return
    result, expected = measure(method, group=group), measure(method)
    if method == "ntk":
        torch.testing.assert_close(result.full_tensor(), expected)
    else:
        assert same(result, expected)


def test_an_effect_is_seen():
    assert not same(measure("ntk"), measure("ntk") + 1e-6)
    assert not same(measure("neural_features"), {})
