"""The boundary checks of the theory of linear networks."""

from collections.abc import Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_tensor


def checked_depth(weight_layers: Any, least: int = 1) -> int:
    """A number of weight matrices."""
    if not isinstance(weight_layers, int) or isinstance(weight_layers, bool) or weight_layers < least:
        raise InputValueError(
            f"weight_layers={weight_layers!r}, expected a number of weight matrices >= {least}: hidden layers and one"
        )
    return weight_layers


def checked_numbers(value: Any, name: str) -> Tensor:
    """A number, or a tensor of them, as a double tensor; neither nan nor infinite."""
    numbers = checked_tensor(_tensor(value), name)
    if not bool(torch.isfinite(numbers).all()):
        raise InputValueError(f"{name} holds {numbers[~torch.isfinite(numbers)][0]:g}, expected finite numbers")
    return numbers


def _tensor(value: Any) -> Any:
    """Numbers, and lists of them, as a tensor; all else as it is."""
    if isinstance(value, list | tuple) and all(isinstance(each, Real) for each in value):
        return torch.tensor([float(each) for each in value], dtype=torch.float64)
    if isinstance(value, bool):
        return value
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, Real) else value


def checked_positive(value: Any, name: str, *, zero: bool = False) -> Tensor:
    """Numbers > 0, or >= 0 where `zero` may be."""
    numbers = checked_numbers(value, name)
    if bool((numbers < 0).any()) or (not zero and bool((numbers == 0).any())):
        raise InputValueError(f"{name} is as small as {numbers.min():g}, expected numbers {'>=' if zero else '>'} 0")
    return numbers


def checked_times(value: Any) -> Tensor:
    """Times >= 0, of any shape; infinity, the end of training, is one of them."""
    times = checked_tensor(_tensor(value), "times")
    if not bool((times >= 0).all()):  # nan is not
        raise InputValueError(f"times go from {times.min():g} to {times.max():g}, expected numbers >= 0")
    return times


def checked_line(value: Any) -> Tensor:
    """Times (T,) >= 0, finite."""
    times = checked_times(value)
    if times.dim() != 1 or len(times) == 0 or not bool(torch.isfinite(times).all()):
        raise InputValueError(f"times have shape {tuple(times.shape)}, expected finite times (T,), T >= 1")
    return times


def checked_rows(value: Any, name: str = "X", columns: int | None = None) -> Tensor:
    """Inputs (P, D), one row per sample."""
    rows = checked_tensor(value, name)
    if rows.dim() != 2 or 0 in rows.shape or (columns is not None and rows.shape[1] != columns):
        wanted = "(P, D)" if columns is None else f"(P, D) = (P, {columns})"
        raise InputValueError(
            f"{name} has shape {tuple(rows.shape)}, expected {wanted}, one row per sample; transpose or flatten it"
        )
    return rows


def checked_outputs(value: Any, rows: Tensor, name: str = "y") -> Tensor:
    """Targets (P,) or (P, C), on the device of the inputs; the axes stay."""
    targets = checked_tensor(value, name).to(rows.device)
    if targets.dim() not in (1, 2) or len(targets) != len(rows) or targets.numel() == 0:
        raise InputValueError(
            f"{name} has shape {tuple(targets.shape)}, expected (P,) or (P, C) with P = {len(rows)}, the rows of X"
        )
    return targets


def checked_direction(value: Any, columns: int, name: str = "beta") -> Tensor:
    """A unit vector (D,)."""
    vector = checked_tensor(value, name)
    if vector.shape != (columns,):
        raise InputValueError(f"{name} has shape {tuple(vector.shape)}, expected (D,) = ({columns},)")
    size = float(vector.norm())
    if not abs(size - 1) <= 1e-6:
        raise InputValueError(f"{name} has norm {size:g}, expected a unit vector; its length belongs into s")
    return vector / size


def checked_weights(weights: Any) -> list[Tensor]:
    """Weight matrices from the first to the last, each (outputs, inputs), that fit; a last one (N,) is (1, N)."""
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence) or not weights:
        raise InputTypeError(
            f"weights are {type(weights).__name__}, expected a list of matrices, first layer first, each "
            "(outputs, inputs) as in nn.Linear"
        )
    found = [checked_tensor(weight, f"weights[{i}]") for i, weight in enumerate(weights)]
    if found[-1].dim() == 1:
        found[-1] = found[-1][None]
    shapes = [tuple(weight.shape) for weight in found]
    chained = all(len(shape) == 2 and 0 not in shape for shape in shapes)
    if not chained or any(a[0] != b[1] for a, b in pairwise(shapes)):
        raise InputValueError(
            f"weights have shapes {', '.join(map(str, shapes))}, expected (N1, D), (N2, N1), ... (C, N): the outputs "
            "of one layer are the inputs of the next"
        )
    return [weight.to(found[0].device) for weight in found]
