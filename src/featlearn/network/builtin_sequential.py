"""Networks of torch's own layers alone, in sequence: what a forward pass does to samples and to itself is known.

Each of these layers reads its weights and treats samples along the first axis one by one, writes to nothing and draws
no random number in eval mode. No code of the user runs, so that none of it needs to be asked of the network again.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_globals

from featlearn.network.inputs import Inputs, Readout
from featlearn.network.inventory import Inventory

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
)
_POOLING = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _rowwise(layer: nn.Linear, x: Tensor) -> bool:
    del x
    own: dict[str, Any] = layer.__dict__["_parameters"]  # as an attribute it takes a call of Python
    weight, bias = own.get("weight"), own.get("bias")
    return weight is not None and weight.dim() == 2 and (bias is None or bias.dim() == 1)


def _batched(layer: Any, x: Tensor) -> bool:
    """Without a batch axis samples would stand where channels do."""
    return x.dim() == len(layer.kernel_size) + 2 and layer.in_channels != len(x)


def _always(layer: nn.Module, x: Tensor) -> bool:
    del layer, x
    return True


# What no graph shows where weights are frozen, or comes before the first that is not.
_CONDITIONS: Mapping[type[nn.Module], Callable[[Any, Tensor], bool]] = {
    **dict.fromkeys((nn.Sequential, nn.Identity, nn.GroupNorm, *_ELEMENTWISE, *_POOLING, *_DROPOUT), _always),
    **dict.fromkeys(_CONVOLUTIONS, _batched),
    nn.Linear: _rowwise,
    nn.LayerNorm: lambda layer, x: layer.weight is not None and layer.weight.dim() == 1,
    nn.Flatten: lambda layer, x: layer.start_dim == 1,
}
"""Which layers they are, and under what condition."""

_STEPS = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "forward", "_conv_forward", "_output_padding")
"""Methods that run in a forward pass."""


def _is_torchs(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is None or Path(torch.__file__).parent in Path(code.co_filename).parents


def _methods(kind: type[nn.Module]) -> tuple[Callable[[type], Any], Any]:
    fetch = attrgetter(*(name for name in _STEPS if hasattr(kind, name)))
    return fetch, fetch(kind)


_METHODS: Mapping[type[nn.Module], tuple[Callable[[type], Any], Any]] = {
    kind: _methods(kind) for kind in _CONDITIONS if all(_is_torchs(getattr(kind, name, None)) for name in _STEPS)
}
"""What fetches these methods, and what it has to give."""
# What layers, and functions of torch.nn.functional, take from torch itself by name.
_BELOW = ("celu", "group_norm", "layer_norm", "relu", "selu", "sigmoid", "tanh")
_FUNCTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (vars(functional), {name: value for name, value in vars(functional).items() if callable(value)}),
    (vars(torch), {name: getattr(torch, name) for name in _BELOW}),
)
"""Modules with what is in them, unless it has been replaced."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = attrgetter(*(f"_global{hooks}" for hooks in _HOOKS))
_TABLES = frozenset(nn.Module().__dict__)
_VALUES = frozenset((bool, int, float, str, tuple, list, type(None)))
"""Types of the attributes that these layers have beside their tables."""


def is_builtin_sequential(inside: Inventory, x: Inputs, readout: Readout | None) -> bool:
    """Whether a network that holds this, with these inputs, is such a one: no hooks, no readout, nothing replaced."""
    if readout is not None or type(x) is not Tensor or x.dim() < 2 or x.requires_grad or x.is_inference():
        return False
    if not inside.types <= _METHODS.keys():
        return False
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():  # they may do anything
        return False
    if any(_GLOBAL_HOOKS(module_globals)):
        return False
    if not all(all(map(is_, map(table.get, kept), kept.values())) for table, kept in _FUNCTIONS):
        return False
    for kind in inside.types:
        fetch, kept = _METHODS[kind]
        if fetch(kind) != kept:
            return False
    return all(_is_as_torch_made_it(part) and _CONDITIONS[type(part)](part, x) for part in inside.modules)


def _is_as_torch_made_it(layer: nn.Module) -> bool:
    own = layer.__dict__
    for key in own.keys() - _TABLES:
        if type(own[key]) not in _VALUES:
            return False  # a method, or a weight, in the place of torch's
    if own["_buffers"] or own.get("inplace"):
        return False
    for hooks in _HOOKS:
        if own[hooks]:
            return False
    held = [p for p in own["_parameters"].values() if p is not None]
    return not [p for p in held if type(p) is not nn.Parameter or p._backward_hooks]
