"""Which networks are known to treat samples one by one and to leave no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from featlearn.network.builtin_sequential import _METHODS, is_builtin_sequential
from featlearn.network.inventory import Inventory


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def is_builtin(model: nn.Module, x: Any = None, readout: Any = None) -> bool:
    return is_builtin_sequential(Inventory(model), torch.zeros(5, 3) if x is None else x, readout)


def test_every_layer_of_the_table_is_one_that_torch_has_written():
    assert len(_METHODS) > 40
    assert nn.Softmax not in _METHODS
    assert nn.BatchNorm1d not in _METHODS
    assert nn.RReLU not in _METHODS  # draws numbers
    assert nn.Embedding not in _METHODS  # rewrites its weights, with max_norm


@pytest.mark.parametrize(
    "model",
    [
        network(),
        nn.Linear(3, 2),
        nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)),
    ],
)
def test_sequences_of_torchs_own_layers(model: nn.Module):
    assert is_builtin(model)
    assert is_builtin(model.eval())


class Own(nn.Linear):
    pass


class OwnParameter(nn.Parameter):
    pass


def _forwarded(model: nn.Sequential) -> None:
    model[0].forward = lambda x: x  # type: ignore[method-assign]


Change = Callable[[nn.Sequential], Any]
CHANGES: dict[str, Change] = {
    "forward hook": lambda m: m[1].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m[2][0].register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m[0].register_full_backward_pre_hook(lambda *_: None),
    "hook of a weight": lambda m: m[0].weight.register_hook(lambda g: g),
    "own forward": _forwarded,
    "own class": lambda m: m.append(Own(2, 2)),
    "any other module": lambda m: m.append(nn.Softmax(0)),
    "parametrization": lambda m: parametrizations.weight_norm(m[0]),
    "pruning": lambda m: prune.random_unstructured(m[0], "weight", 0.5),
    "in place": lambda m: m.append(nn.ReLU(inplace=True)),
    "samples joined": lambda m: m.append(nn.Flatten(0)),
    "shape without weight": lambda m: m.append(nn.LayerNorm(2, elementwise_affine=False)),
    "lazy": lambda m: m.append(nn.LazyLinear(2)),
    "own call": lambda m: setattr(m[0], "_call_impl", lambda x: x),
    "compiled": lambda m: setattr(m, "_compiled_call_impl", lambda x: x),
    "weight as attribute": lambda m: (delattr(m[0], "weight"), setattr(m[0], "weight", torch.zeros(4, 3))),
    "weight as buffer": lambda m: (delattr(m[0], "weight"), m[0].register_buffer("weight", torch.zeros(4, 3))),
    "parameter of a class of its own": lambda m: setattr(m[0], "weight", OwnParameter(torch.zeros(4, 3))),
    "bias of every sample": lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(5, 4))),
    "norm over samples": lambda m: m.insert(0, nn.LayerNorm((5, 3))),
    "samples as channels": lambda m: m.insert(0, nn.Conv1d(5, 5, 1)),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_what_the_user_has_changed_is_no_builtin_sequential(change: Change):
    model = network()
    change(model)
    assert not is_builtin(model)


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(3, 2),
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 2, 4, 4), True),
        ((2, 2, 4, 4), False),
        ((2, 4, 4), False),
        ((5, 2, 4, 4, 4), False),
    ],
)
def test_convolutions_take_batches_whose_samples_are_no_channels(shape: tuple[int, ...], expected: bool):
    assert is_builtin(images(), torch.zeros(shape)) is expected


@pytest.mark.parametrize(
    "place",
    [
        (nn.Conv2d, "_conv_forward"),
        (nn.Conv2d, "forward"),
        (nn.Module, "__call__"),
        (nn.Module, "_call_impl"),
        (functional, "linear"),
        (functional, "relu"),
        (torch, "relu"),
    ],
)
def test_what_was_replaced_in_torch_is_seen(place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(5, 2, 4, 4)
    assert is_builtin(images(), x)
    with monkeypatch.context() as patch:
        patch.setattr(*place, lambda *arguments: arguments)
        found = is_builtin(images(), x)
    assert not found
    assert is_builtin(images(), x)


def test_a_replaced_convolution_of_one_layer_is_seen():
    model = images()
    model[0]._conv_forward = lambda *_: None  # type: ignore[method-assign]
    assert not is_builtin(model, torch.zeros(5, 2, 4, 4))


class Function(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Function, Dispatch])
def test_modes_may_do_anything(mode: Any):
    with mode():
        assert not is_builtin(network())
    assert is_builtin(network())


def test_hooks_of_all_modules_are_seen():
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert not is_builtin(network())
    assert is_builtin(network())


def test_a_layer_whose_class_was_changed_is_seen(monkeypatch: pytest.MonkeyPatch):
    real = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: real(self, x) - x.mean())
    assert not is_builtin(network())


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(5, 3)


@pytest.mark.parametrize(
    "x",
    [
        (torch.zeros(5, 3),),
        {"input": torch.zeros(5, 3)},
        torch.zeros(5),
        torch.zeros(5, 3, requires_grad=True),
        nn.Parameter(torch.zeros(5, 3), requires_grad=False),
        _inference(),
    ],
)
def test_other_inputs(x: Any):
    assert not is_builtin(network(), x)


def test_a_readout_is_code_of_the_user():
    assert not is_builtin(network(), readout=lambda output: output)
