"""The boundary checks of the latent-variable model."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_tensor


def checked_number(value: Any, name: str, *, positive: bool = False) -> float:
    """A finite real number, given as one or as a tensor of one element; `positive` allows none below zero."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise InputTypeError(f"{name} is {type(value).__name__}{shape}, expected one real number")
    number = float(value)
    if not math.isfinite(number) or (positive and number < 0):
        raise InputValueError(f"{name}={number}, expected a finite number{' >= 0' if positive else ''}")
    return number


def checked_numbers(value: Any, name: str, *, positive: bool = False) -> Tensor:
    """Numbers of any shape, one or a tensor of them, in double."""
    if not isinstance(value, Tensor):
        return torch.tensor(checked_number(value, name, positive=positive), dtype=torch.float64)
    numbers = checked_tensor(value, name)
    if not bool(numbers.isfinite().all()) or (positive and bool((numbers < 0).any())):
        raise InputValueError(f"{name} has values from {float(numbers.min())} to {float(numbers.max())}, expected "
                              f"finite numbers{' >= 0' if positive else ''}")  # fmt: skip
    return numbers


def checked_times(value: Any, name: str = "times") -> Tensor:
    """Times (T,) >= 0, a tensor or a sequence of numbers, or one number; inf is the end of training."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = torch.tensor([float(moment) for moment in value], dtype=torch.float64)
    times = checked_tensor(value, name)
    times = times[None] if times.dim() == 0 else times
    if times.dim() != 1 or bool((times < 0).any()) or bool(times.isnan().any()):
        raise InputValueError(f"{name} have shape {tuple(times.shape)}, expected (T,) numbers >= 0")
    return times


def checked_network(u: Any, W: Any) -> tuple[Tensor, Tensor]:
    """Readout (d,) and input layer (d, d0), finite, in double, on one device."""
    readout, weight = checked_tensor(u, "u"), checked_tensor(W, "W")
    if readout.dim() != 1 or weight.dim() != 2 or len(weight) != len(readout) or 0 in weight.shape:
        raise InputValueError(
            f"u has shape {tuple(readout.shape)} and W {tuple(weight.shape)}, expected (d,) and (d, d0): the readout "
            "and the input layer of f(x) = scale u . W x"
        )
    checked_finite(readout, "u")
    return readout, checked_finite(weight, "W").to(readout.device)


def checked_points(value: Any, weight: Tensor, name: str) -> Tensor:
    """Inputs (d0,) or (N, d0) of the network, finite, in double."""
    points = checked_tensor(value, name).to(weight.device)
    if points.dim() not in (1, 2) or points.shape[-1] != weight.shape[1] or points.numel() == 0:
        raise InputValueError(
            f"{name} has shape {tuple(points.shape)}, expected (d0,) = ({weight.shape[1]},) or (N, d0): what W acts on"
        )
    return checked_finite(points, name)


def checked_finite(values: Tensor, name: str) -> Tensor:
    """The values, none of them inf or nan."""
    if not bool(values.isfinite().all()):
        raise InputValueError(f"{name} has inf or nan among its values, expected finite numbers")
    return values


def length(vectors: Tensor) -> Tensor:
    """Euclidean norm over the last axis, without squares that underflow or overflow."""
    largest = vectors.abs().amax(-1, keepdim=True)
    safe = torch.where(largest == 0, 1.0, largest)
    norm: Tensor = safe[..., 0] * torch.linalg.vector_norm(vectors / safe, dim=-1)
    return norm
