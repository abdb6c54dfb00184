"""Whiten inputs fully or partially (Atanasov et al. 2022, Sec. 3 and 5)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_finite, checked_number
from featlearn.signatures import name_keywords

__all__ = ["Whitened", "whiten"]

DROPPED = 1e-6
"""Singular values below this fraction of the largest are dropped as rounding."""


@dataclass(frozen=True, eq=False)
class Whitened:
    """Whitened inputs and the whitening map."""

    x: Tensor
    """whitened inputs, with the shape and dtype of the inputs"""
    matrix: Tensor
    """(D, D), symmetric, float64; multiplies rows from the right"""
    rank: int
    """number of directions that were not dropped"""

    def transform(self, x: Tensor) -> Tensor:
        """Apply the same map to other inputs, such as test points."""
        rows = _rows(x)
        if rows.shape[1] != len(self.matrix):
            raise InputValueError(
                f"x has {rows.shape[1]} numbers per sample, expected {len(self.matrix)} as in the original inputs"
            )
        return (rows @ self.matrix.to(rows.device)).reshape(x.shape).to(x.dtype)


@name_keywords()
def whiten(x: Tensor, power: float = 0.0, *, mean_eigenvalue: float | None = None) -> Whitened:
    """Whiten inputs fully (`power` 0) or partially: eigenvalues l of X^T X become proportional to l^power.

    See Atanasov et al. 2022, Sec. 5.

    With X = U S V^T and samples in rows, the result is proportional to U S^power V^T. The map on each sample is V
    S^(power - 1) V^T; power 1 is the identity. Inputs are not centered, as in Atanasov et al. 2022: the eigenvalues are
    those of X^T X / P, not of the covariance. Directions with singular values below 1e-6 of the largest are dropped,
    from test points too.

    Args:
        x: Inputs (P, ...), flattened after the first axis.
        power: 0 for equal eigenvalues, 1 for the eigenvalues of x; gamma in Atanasov et al. 2022, Fig. 4.
        mean_eigenvalue: Mean eigenvalue of X^T X / P of the result, over remaining directions. By default that of x, so
            that learning rates remain comparable. 1 with power 0 gives the whitened data of Atanasov et al. 2022, a
            projector.
    """
    rows, exponent = _rows(x), checked_number(power, "power")
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    if not float(sizes[0]) > 0:
        raise InputValueError("x is zero, expected inputs with at least one direction")
    significant = sizes > DROPPED * sizes[0]
    sizes, directions = sizes[significant], directions[significant]
    # relative to the largest, to avoid overflow
    scaled_sizes = (sizes / sizes[0]).pow(exponent)
    target_power = sizes.square().sum()
    if mean_eigenvalue is not None:
        mean = checked_number(mean_eigenvalue, "mean_eigenvalue")
        if not mean > 0:
            raise InputValueError(f"mean_eigenvalue={mean_eigenvalue!r}, expected a number > 0")
        target_power = torch.full_like(target_power, mean * len(rows) * len(sizes))
    scaled_sizes = scaled_sizes * (target_power / scaled_sizes.square().sum()).sqrt()
    matrix = directions.mT @ ((scaled_sizes / sizes)[:, None] * directions)
    return Whitened((rows @ matrix).reshape(x.shape).to(x.dtype), matrix, len(sizes))


def _rows(x: Tensor) -> Tensor:
    """Flatten to (P, D) in float64."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise InputTypeError(f"x has dtype {x.dtype}, expected floating-point numbers; convert it with x.float()")
    values = checked_finite(x, "x")
    if values.dim() < 2 or values.numel() == 0:
        raise InputValueError(f"x has shape {tuple(values.shape)}, expected (P, D) or (P, ...), P samples")
    return values.reshape(len(values), math.prod(values.shape[1:]))
