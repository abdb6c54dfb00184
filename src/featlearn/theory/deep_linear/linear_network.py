"""The boundary checks of the theory of linear networks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_count, checked_time_axis, checked_times, checked_vector


def checked_depth(weight_layers: Any, least: int = 1) -> int:
    """Return a number of weight matrices."""
    return checked_count(weight_layers, "weight_layers", least, hint="it counts weight matrices, the readout included")


def checked_path_times(value: Any, *, increasing: bool = False) -> Tensor:
    """Times (T,), finite; their axis is asked for, since one number is a time without an axis in this theory."""
    times = checked_times(value)
    if times.dim() == 0:
        raise InputValueError(f"times={float(times)}, expected finite times (T,); put one time in a list")
    return checked_time_axis(times, increasing=increasing)


def checked_outputs(value: Any, rows: Tensor, name: str = "y") -> Tensor:
    """Targets (P,) or (P, C), on the device of the inputs; the axes stay."""
    targets = checked_finite(value, name).to(rows.device)
    if targets.dim() not in (1, 2) or len(targets) != len(rows) or targets.numel() == 0:
        raise InputValueError(
            f"{name} has shape {tuple(targets.shape)}, expected (P,) or (P, C) with P = {len(rows)}, the rows of X"
        )
    return targets


def checked_direction(value: Any, columns: int, name: str = "beta") -> Tensor:
    """Return a unit vector (D,)."""
    vector = checked_vector(value, name, columns)
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
    matrices = [checked_finite(weight, f"weights[{i}]") for i, weight in enumerate(weights)]
    if matrices[-1].dim() == 1:
        matrices[-1] = matrices[-1][None]
    shapes = [tuple(weight.shape) for weight in matrices]
    chained = all(len(shape) == 2 and 0 not in shape for shape in shapes)
    if not chained or any(a[0] != b[1] for a, b in pairwise(shapes)):
        raise InputValueError(
            f"weights have shapes {', '.join(map(str, shapes))}, expected (N1, D), (N2, N1), ... (C, N): the outputs "
            "of one layer are the inputs of the next"
        )
    return [weight.to(matrices[0].device) for weight in matrices]
