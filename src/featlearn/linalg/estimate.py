"""Estimates with standard errors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number, or a tensor of numbers, estimated from independent samples.

    `str()` gives "value ± standard error"; `float()` gives the value of a single number, and `f"{estimate:.2f}"` that
    value in the format of a float.
    """

    value: Tensor | float
    """The estimate."""
    stderr: Tensor | float
    """Standard error, of the shape of `value`; nan for a single sample."""
    samples: int
    """Number of independent samples."""
    freedom: float | None = None
    """Degrees of freedom, if `stderr` is widened so that value ± 2 stderr has 95% coverage; None for a plain standard
    error or an exact value."""

    def __post_init__(self) -> None:
        shapes = [tuple(part.shape) if isinstance(part, Tensor) else () for part in (self.value, self.stderr)]
        if shapes[0] != shapes[1]:
            raise InputValueError(f"value has shape {shapes[0]} and stderr {shapes[1]}, expected equal shapes")
        if not isinstance(self.samples, int) or isinstance(self.samples, bool) or self.samples < 1:
            raise InputValueError(f"samples={self.samples!r}, expected the number of samples, an integer >= 1")

    @classmethod
    def from_samples(cls, values: Any) -> "Estimate":
        """Return the mean of independent samples `values` (S, ...) over the first axis, and its standard error.

        The error is the standard deviation, with S - 1, divided by sqrt(S); nan for S = 1. Samples (S,) of a single
        number give plain floats.
        """
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise InputTypeError(f"values are {type(values).__name__}, expected a tensor of real numbers")
        if values.dim() == 0 or len(values) == 0:
            raise InputValueError(f"values have shape {tuple(values.shape)}, expected (S, ...) with S >= 1 samples")
        mean, count = values.mean(0), len(values)
        error = values.std(0) / count**0.5 if count > 1 else torch.full_like(mean, torch.nan)
        return cls(float(mean), float(error), count) if mean.dim() == 0 else cls(mean, error, count)

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __str__(self) -> str:
        if self.samples == 1 and not isinstance(self.value, Tensor) and self.stderr == 0:
            return f"{self.value:.6g} (exact)"
        ending = f"({self.samples} sample{'s' if self.samples > 1 else ''})"
        if not isinstance(self.value, Tensor) or not isinstance(self.stderr, Tensor):
            return f"{_pair(float(self.value), float(self.stderr))} {ending}"
        if self.value.numel() > 8:
            largest = float(self.stderr.max())
            return f"tensor of shape {tuple(self.value.shape)}, standard errors up to {largest:.2g} {ending}"
        pairs = zip(self.value.flatten().tolist(), self.stderr.flatten().tolist(), strict=True)
        listed = ", ".join(_pair(value, error) for value, error in pairs)
        return f"{listed if self.value.dim() == 0 else f'[{listed}]'} {ending}"


def _pair(value: float, error: float) -> str:
    return f"{value:.6g} ± {error:.2g}"
