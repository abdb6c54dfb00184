"""A copy of the network in another precision, for measurements in double."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import InputTypeError, UnsupportedModelError
from featlearn.network.inputs import Inputs, map_tensors
from featlearn.network.inventory import Inventory


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """The `dtype` argument, refused unless it is a precision to measure in."""
    if dtype not in (None, torch.float32, torch.float64):
        raise InputTypeError(f"dtype is {dtype!r}, expected torch.float32, torch.float64 or None")
    return dtype


def needs_copy(inside: Inventory, dtype: torch.dtype | None) -> bool:
    """Whether the model must be copied: another dtype is asked for, or it holds inference tensors."""
    kinds = {kind.to_real() for _, kind, _ in inside.kind if kind.is_floating_point or kind.is_complex}
    return (dtype is not None and bool(kinds - {dtype})) or any(tensor.is_inference() for tensor in inside.tensors)


def copied(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy with the same parameter names, in `dtype`; the original is only read."""
    memo: dict[int, Any] = {}
    for value in kept_results(model):
        # Left by an earlier forward pass (old-style weight norm), they cannot be deep-copied and are made anew.
        memo[id(value)] = value.detach().clone()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_inference():
            clone = tensor.clone().detach()
            memo[id(tensor)] = nn.Parameter(clone, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else clone
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"the model cannot be copied to {dtype}: {type(error).__name__}: {error}; "
            "convert it yourself, model.double(), and measure that"
        ) from error
    if dtype is not None:
        for tensor in (*twin.parameters(), *twin.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.data = tensor.data.to(dtype.to_complex() if tensor.is_complex() else dtype)
    return twin


def kept_results(model: nn.Module) -> list[Tensor]:
    """Tensors with a graph that a module keeps as attributes, results of computations outside its forward pass."""
    held = [value for part in model.modules() for value in part.__dict__.values()]
    return [value for value in held if isinstance(value, Tensor) and value.grad_fn is not None]


def cast_inputs(x: Inputs, dtype: torch.dtype | None) -> Inputs:
    """Floating point inputs in `dtype`, and none of them inference tensors."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone() if tensor.is_inference() else tensor
        if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        cast = tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype)
        return cast.requires_grad_(tensor.requires_grad)

    return map_tensors(x, change)
