"""Curves over time: crossing times, log-log slopes, and agreement of two predictors."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.correlation import correlation
from featlearn.shapes import checked_number, checked_tensor, ratio, scaled

Values = Tensor | Sequence[float]
"""One number per time."""


def _curve(times: Values, values: Values, name: str) -> tuple[Tensor, Tensor]:
    t, v = _vector(times, "times"), _vector(values, name)
    if t.dim() != 1 or t.shape != v.shape or len(t) < 2:
        raise InputValueError(
            f"times have shape {tuple(t.shape)} and {name} {tuple(v.shape)}, expected equal length, at least two"
        )
    if not bool((t.diff() > 0).all()):
        raise InputValueError("times are not increasing, expected them in order")
    return t, v.to(t.device)


def _vector(values: Values, name: str) -> Tensor:
    if isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values):
        values = torch.tensor(values, dtype=torch.float64)
    return checked_tensor(values, name)


def time_to(times: Values, values: Values, fraction: float, of: Literal["final", "initial"] = "final") -> float:
    """Return the first time a curve reaches `fraction` of its final (or initial) value, by linear interpolation.

    `time_to(t, alignment, 0.9)` is t_90 of an alignment; `time_to(t, loss, 0.5, of="initial")` is the half-loss time.
    If the curve starts exactly at the level, the result is the first time. If it never reaches the level, the result is
    nan. A rising curve that starts above the level does not reach it unless it falls back: the crossing happened before
    the first measurement, or never. For example, t_10 of the kernel norm of a lazy run is nan, since the norm starts
    near its final value.
    """
    t, v = _curve(times, values, "values")
    fraction = checked_number(fraction, "fraction")
    if of not in ("final", "initial"):
        raise InputValueError(f"of={of!r}, expected 'final' or 'initial'")
    above = v - fraction * v[-1 if of == "final" else 0]
    if float(above[0]) == 0.0:
        return float(t[0])
    crossed = (above * above[0].sign() <= 0).nonzero().flatten()
    if not len(crossed):
        return float("nan")
    i = int(crossed[0])
    share = above[i - 1] / (above[i - 1] - above[i])
    return float(t[i - 1] + share * (t[i] - t[i - 1]))


def log_slope(times: Values, loss: Values) -> Tensor:
    """Compute the local exponent d log loss / d log time at every time, by central differences.

    The slope is -a if the loss falls as t^-a. It is nan where time or loss is not positive.
    """
    t, v = _curve(times, loss, "loss")
    defined = (t > 0) & (v > 0)
    if int(defined.sum()) < 2:
        return torch.full_like(v, torch.nan)
    slope = torch.full_like(v, torch.nan)
    (slope[defined],) = torch.gradient(v[defined].log(), spacing=(t[defined].log(),))
    return slope


class Agreement(NamedTuple):
    """Difference between two predictors."""

    relative_error: Tensor
    """|f - g| / |g|"""
    correlation: Tensor
    """Pearson's correlation of all entries."""


def agreement(f: Tensor, g: Tensor) -> Agreement:
    """Compute the relative error of predictions f against g, and their correlation; shapes must be equal.

    The error is nan if g is zero, the correlation if f or g is constant.
    """
    a, b = checked_tensor(f, "f"), checked_tensor(g, "g")
    if a.shape != b.shape or a.numel() == 0:
        raise InputValueError(f"f has shape {tuple(a.shape)} and g {tuple(b.shape)}, expected equal shapes, not empty")
    (a, b), _ = scaled(torch.stack([a.flatten(), b.to(a.device).flatten()]), (0, 1))
    return Agreement(ratio((a - b).norm(), b.norm()), correlation(a, b, "pearson", (-1,)))
