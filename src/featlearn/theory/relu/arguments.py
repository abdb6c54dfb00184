"""The boundary checks of the theory of two-layer ReLU networks."""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_kernel, checked_targets, checked_tensor


def checked_vector(value: Any, name: str, length: int | None = None) -> Tensor:
    """(P,), of the given length."""
    vector = checked_tensor(value, name)
    if vector.dim() != 1 or len(vector) == 0 or (length is not None and len(vector) != length):
        wanted = "(P,)" if length is None else f"(P,) = ({length},)"
        raise InputValueError(f"{name} has shape {tuple(vector.shape)}, expected {wanted}")
    return vector


def checked_outputs(f: Any, target: Tensor) -> Tensor:
    """Outputs (..., P) for targets (P,)."""
    outputs = checked_tensor(f, "f").to(target.device)
    if outputs.dim() == 0 or outputs.shape[-1] != len(target):
        raise InputValueError(f"f has shape {tuple(outputs.shape)}, expected (..., P) with P = {len(target)}, as y")
    return outputs


def checked_rate(value: Any) -> float:
    """A number >= 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InputValueError(f"rate={value!r}, expected a number >= 0; see fl.dynamics.rate")
    return float(value)


def checked_times(value: Any) -> Tensor:
    """(T,), >= 0, in order."""
    times = checked_tensor(torch.as_tensor(value, dtype=torch.float64), "times")
    if times.dim() != 1 or len(times) == 0 or not bool((times >= 0).all()) or bool((times.diff() < 0).any()):
        raise InputValueError(f"times have shape {tuple(times.shape)}, expected (T,), >= 0 and in increasing order")
    return times


def checked_square(value: Any, name: str, target: Tensor) -> Tensor:
    """One kernel (P, P) for targets (P,)."""
    kernel = checked_kernel(value, name).to(target.device)
    checked_targets(target, kernel)
    if kernel.dim() != 2:
        raise InputValueError(f"{name} has shape {tuple(kernel.shape)}, expected (P, P)")
    return kernel
