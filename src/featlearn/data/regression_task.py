"""Samples with real targets, and known properties of the task."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from featlearn.errors import InputValueError

__all__ = ["Regression"]


@dataclass(frozen=True, eq=False)
class Regression:
    """Samples and their targets; ``x, y = task`` unpacks the two.

    Attributes:
        x: inputs, shape (P, d).
        y: targets, shape (P,), or (P, C) for C > 1 targets.
        target: Target function without noise, differentiable, from inputs (P, d) to the shape of y; None if there is
            none.
        egop: expected gradient outer product E[grad target grad target^T] over the distribution of the inputs, exact,
            summed over targets, shape (d, d), float64; None if unknown.
        covariance: Exact covariance of the input distribution, shape (d, d), float64; None if unknown.
    """

    x: Tensor
    y: Tensor
    target: Callable[[Tensor], Tensor] | None = None
    egop: Tensor | None = None
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        multiple = self.y.dim() == 2 and self.y.shape[1] > 1
        if self.y.shape[:1] != self.x.shape[:1] or not (self.y.dim() == 1 or multiple):
            raise InputValueError(
                f"y has shape {tuple(self.y.shape)}, expected (P,) = ({len(self.x)},), or (P, C) with C > 1; pass one "
                "number per sample and target"
            )

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y))
