"""What every public quantity must pass: it leaves no trace, refuses what it cannot measure, and agrees with a Session.

A quantity is a public name of `featlearn` whose first arguments are a model and its inputs. A new one is tested without
being listed, unless it needs an argument that `ARGUMENTS` does not have.
"""

import copy
import dataclasses
import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from tests.contracts.public_names import public

P, D, C = 9, 5, 3
X = torch.randn(P, D, generator=torch.Generator().manual_seed(0))
ARGUMENTS = {
    "y": torch.randn(P, C, generator=torch.Generator().manual_seed(1)),
    "layer": "4",
    "loss": "sum-half",
    "memory": "1GiB",  # a plan would otherwise say how much memory is free
}
USES: dict[str, Callable[[Any], Any]] = {
    "NTKOperator": lambda operator: operator @ torch.ones(P, C),
    "Session": lambda session: session.ntk(),
    "gradients": lambda items: [(samples.start, name, part.tensor()) for samples, name, part in items],
}
"""How to use objects that measure nothing while they are made."""


def takes_a_model_and_inputs(thing: Any) -> bool:
    if not inspect.isfunction(thing) and not (inspect.isclass(thing) and not issubclass(thing, BaseException)):
        return False
    names = list(inspect.signature(thing).parameters)
    return names[:1] == ["model"] and names[1:2] in (["x"], ["data"])


QUANTITIES = {name: thing for name, thing in public().items() if takes_a_model_and_inputs(thing)}
METHODS = [name for name in vars(fl.Session) if not name.startswith("_") and callable(getattr(fl.Session, name))]
quantities = pytest.mark.parametrize("name", QUANTITIES)


def arguments(function: Callable[..., Any], *given: str) -> dict[str, Any]:
    """Everything that a function needs beside the arguments named, and what it takes of `ARGUMENTS`."""
    parameters = inspect.signature(function).parameters
    needed = {
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and key not in given and key != "self"
    }
    unknown = needed - ARGUMENTS.keys()
    assert not unknown, f"give ARGUMENTS a value for {sorted(unknown)}"
    return {key: value for key, value in ARGUMENTS.items() if key in parameters}


def measured(name: str, model: Any, x: Any) -> Any:
    thing = QUANTITIES.get(name) or QUANTITIES[f"quantities.{name}"]
    result = thing(model, x, **arguments(thing, "model", "x", "data"))
    return used(name, result)


def used(name: str, result: Any) -> Any:
    return USES[name.split(".")[-1]](result) if name.split(".")[-1] in USES else result


def network() -> nn.Sequential:
    """Partly in training mode, with gradients, buffers, dropout and a frozen parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(D, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, C)
        )
        model(X).square().sum().backward()
    model[6].bias.requires_grad_(False)
    model[6].bias.grad = None
    model[2].eval()
    return model


ARGUMENTS["initial"] = {
    key: value + 0.3 * torch.sin(torch.arange(value.numel())).reshape(value.shape)
    if value.is_floating_point()
    else value
    for key, value in network().state_dict().items()
}


def trace(model: nn.Module) -> dict[str, Any]:
    """All that a measurement could change, copied."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "state": {key: tensor.detach().clone() for key, tensor in tensors.items()},
        "identity": {key: id(tensor) for key, tensor in tensors.items()},
        "gradients": {key: None if t.grad is None else t.grad.clone() for key, t in tensors.items()},
        "needed": {key: tensor.requires_grad for key, tensor in tensors.items()},
        "training": {key: part.training for key, part in model.named_modules()},
        "attributes": {key: sorted(vars(part)) for key, part in model.named_modules()},
        "hooks": {
            key: [len(value) for attribute, value in vars(part).items() if "hooks" in attribute and value is not None]
            for key, part in model.named_modules()
        },
        "random": (torch.get_rng_state(), repr(numpy.random.get_state()), random.getstate()),
        "settings": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")),
        "inputs": X.clone(),
    }


def same(one: Any, other: Any, rounding: float = 0.0) -> bool:
    """Equal in all that it holds; numbers to `rounding`, relative to the largest."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point() or not one.numel() or not rounding:
            return torch.equal(one, other)
        return float((one - other).abs().max()) <= rounding * float(other.abs().max())
    if isinstance(one, float):
        return abs(one - other) <= rounding * abs(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], rounding) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b, rounding) for a, b in zip(one, other, strict=True))
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, key), getattr(other, key), rounding) for key in fields)
    return bool(one == other)


def test_quantities_are_collected():
    assert {"ntk", "plan", "quantities.ntk_diagonal", "estimate_alignment", "NTKOperator"} <= set(QUANTITIES)
    assert not {"watch", "diagnose", "Directions", "FeatlearnError"} & set(QUANTITIES)


@quantities
def test_a_quantity_leaves_no_trace(name: str):
    model = network()
    before = trace(model)
    measured(name, model, X)
    after = trace(model)
    assert [key for key in before if not same(before[key], after[key])] == []


@quantities
@pytest.mark.parametrize("wrong", ["no module", "not finite", "empty"])
def test_a_quantity_refuses_what_it_cannot_measure(name: str, wrong: str):
    model = network()
    before = trace(model)
    x = X.clone()
    x[0, 1] = torch.nan
    given = {"no module": (torch.tanh, X), "not finite": (model, x), "empty": (model, X[:0])}
    with pytest.raises(fl.FeatlearnError):
        measured(name, *given[wrong])
    after = trace(model)
    assert [key for key in before if not same(before[key], after[key])] == []


@pytest.mark.parametrize("name", METHODS)
def test_a_session_gives_what_the_function_of_the_same_name_gives(name: str):
    """In its first call and in a later one, which reuses what the first has found out."""
    session = fl.Session(network(), X, memory=ARGUMENTS["memory"])
    public_name = {"operator": "NTKOperator"}.get(name, name)
    expected, method = measured(public_name, network(), X), getattr(session, name)
    for _ in range(2):
        assert same(used(public_name, method(**arguments(method))), expected, 1e-5)


def changed(what: str, model: nn.Sequential) -> None:
    if what == "state":
        model[0].weight.data[0, 0] += 1e-6
    elif what == "gradients":
        model[0].weight.grad = None
    elif what == "training":
        model[2].train()
    elif what == "hooks":
        model[0].register_forward_hook(lambda module, args, output: None)
    elif what == "random":
        torch.rand(())
    elif what == "attributes":
        model[0].note = 1


@pytest.mark.parametrize("what", ["state", "gradients", "training", "hooks", "random", "attributes"])
def test_a_trace_is_seen(what: str):
    model = network()
    with torch.random.fork_rng():
        before = trace(model)
        changed(what, model)
        after = trace(model)
    assert not same(before[what], after[what])


def test_a_difference_between_results_is_seen():
    features = fl.neural_features(network(), X)
    other = copy.deepcopy(features)
    assert same(features, other)
    next(iter(other.values())).weight[0, 0] += 1.0
    assert not same(features, other, 1e-5)


def test_a_missing_argument_is_named():
    with pytest.raises(AssertionError, match="temperature"):
        arguments(lambda model, x, *, temperature: None, "model", "x")
