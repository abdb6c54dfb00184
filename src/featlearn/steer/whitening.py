"""Inputs with an equal, or a flatter, spectrum (Atanasov et al. 2022, Sec. 3 and 4.2)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_finite, checked_number
from featlearn.signatures import name_keywords

__all__ = ["Whitened", "whiten"]

DROPPED = 1e-6
"""Directions with singular values below this share of the largest are dropped: there is nothing but rounding."""


@dataclass(frozen=True, eq=False)
class Whitened:
    """Whitened inputs, and the map that made them."""

    x: Tensor
    """the inputs that were given, whitened; their shape and format"""
    matrix: Tensor
    """(D, D), symmetric, float64: rows are multiplied by it"""
    rank: int
    """directions that were kept"""

    def transform(self, x: Tensor) -> Tensor:
        """Other inputs by the same map: test points see the transform of the training points."""
        rows = _rows(x)
        if rows.shape[1] != len(self.matrix):
            raise InputValueError(
                f"x has {rows.shape[1]} numbers per sample, expected {len(self.matrix)} as the inputs it was made from"
            )
        return (rows @ self.matrix.to(rows.device)).reshape(x.shape).to(x.dtype)


@name_keywords()
def whiten(x: Tensor, power: float = 0.0, *, mean_eigenvalue: float | None = None) -> Whitened:
    """Whiten inputs, wholly (`power` 0) or in part: eigenvalues l of X^T X become as l^power.

    See Atanasov et al. 2022, Sec. 4.2.

    With X = U S V^T, samples in rows, the result is proportional to U S^power V^T, by the map V S^(power - 1) V^T on
    each sample; power 1 changes nothing. Not centered, as in Atanasov et al. 2022: the eigenvalues are those of
    X^T X / P, not of the covariance. Directions with singular values below 1e-6 of the largest are dropped, from test
    points too.

    Args:
        x: (P, ...) inputs; all axes after the first are one vector.
        power: 0 for equal eigenvalues, 1 for those of x; the gamma of Atanasov et al. 2022, Fig. 4.
        mean_eigenvalue: mean, over the directions kept, of the eigenvalues of X^T X / P afterwards. By default that of
            x, so that learning rates stay comparable; 1 with power 0 is the whitened data of Atanasov et al. 2022, a
            projector.
    """
    rows, exponent = _rows(x), checked_number(power, "power")
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    if not float(sizes[0]) > 0:
        raise InputValueError("x is zero, expected inputs with at least one direction")
    kept = sizes > DROPPED * sizes[0]
    sizes, directions = sizes[kept], directions[kept]
    # relative to the largest, so that no power overflows
    new = (sizes / sizes[0]).pow(exponent)
    wanted = sizes.square().sum()
    if mean_eigenvalue is not None:
        mean = checked_number(mean_eigenvalue, "mean_eigenvalue")
        if not mean > 0:
            raise InputValueError(f"mean_eigenvalue={mean_eigenvalue!r}, expected a number > 0")
        wanted = torch.full_like(wanted, mean * len(rows) * len(sizes))
    new = new * (wanted / new.square().sum()).sqrt()
    matrix = directions.mT @ ((new / sizes)[:, None] * directions)
    return Whitened((rows @ matrix).reshape(x.shape).to(x.dtype), matrix, len(sizes))


def _rows(x: Tensor) -> Tensor:
    """(P, D) in double."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise InputTypeError(f"x has format {x.dtype}, expected floating point numbers; convert it with x.float()")
    values = checked_finite(x, "x")
    if values.dim() < 2 or values.numel() == 0:
        raise InputValueError(f"x has shape {tuple(values.shape)}, expected (P, D) or (P, ...), P samples")
    return values.reshape(len(values), math.prod(values.shape[1:]))
