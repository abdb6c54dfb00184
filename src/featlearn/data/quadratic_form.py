"""A positive quadratic form of full rank: the high-rank polynomial of Beaglehole et al. 2024, Fig. 7."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.data.draws import checked_count, checked_generator, checked_spectrum, standard_normal
from featlearn.data.regression_task import Regression
from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite

__all__ = ["QuadraticForm", "quadratic_form"]


@dataclass(frozen=True, eq=False)
class QuadraticForm:
    """x -> |Q x|^2 / deviation.

    Attributes:
        matrix: Q, shape (r, d), float64.
        deviation: Divisor of the form.
    """

    matrix: Tensor
    deviation: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., d) to (...), differentiably."""
        return (x @ self.matrix.to(x).mT).square().sum(-1) / self.deviation


def quadratic_form(
    samples: int,
    dimension: int,
    *,
    matrix: Tensor | None = None,
    spectrum: Tensor | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """Draw Gaussian inputs and y = sum_i (Q x)_i^2, with Q of independent N(0, 1) entries, scaled to unit variance.

    See Beaglehole et al. 2024, App. I, for Fig. 7. Let M = Q^T Q and L the input covariance. y is divided by sqrt(2
    Tr(M L M L)), its standard deviation over the input distribution, not the sample. It is not centered: its mean is
    Tr(M L) divided by that deviation, sqrt(d) / 2 for isotropic inputs and large d. The EGOP is 4 M L M / Var y.

    Args:
        samples: P.
        dimension: d.
        matrix: Q, (r, d); drawn (d, d) after the inputs by default. ``matrix=task.target.matrix`` draws more samples of
            the same task.
        spectrum: Variances of the coordinates, (d,), for inputs N(0, diag(spectrum)); ones by default.
        generator: Source of random numbers; seed 0 by default. The inputs equal those of `chain_monomial` and
            `power_law_gaussian` from a generator in the same state.
        dtype: Dtype of x and y.

    Returns:
        `x` (P, d), `y` (P,), and the exact `target`, `egop` and `covariance`.
    """
    rows, columns = checked_count(samples, "samples"), checked_count(dimension, "dimension")
    generator = checked_generator(generator)
    variances = checked_spectrum(spectrum, columns).to(generator.device)
    x = standard_normal(rows, columns, generator=generator) * variances.sqrt()
    q = standard_normal(columns, columns, generator=generator) if matrix is None else checked_finite(matrix, "matrix")
    if q.dim() != 2 or q.shape[1] != columns:
        raise InputValueError(f"matrix has shape {tuple(q.shape)}, expected (r, d) = (r, {columns})")
    q = q.to(x.device)
    form = q.mT @ q
    gradient_outer = 4 * form @ (variances[:, None] * form)
    # Var of x^T M x for x ~ N(0, Lambda) is 2 Tr(M Lambda M Lambda)
    variance = float((gradient_outer.diagonal() * variances).sum()) / 2
    if variance == 0:
        raise InputValueError("the target is constant: matrix times spectrum is zero, expected a nonzero product")
    target = QuadraticForm(q, math.sqrt(variance))
    return Regression(x.to(dtype), target(x).to(dtype), target, gradient_outer / variance, torch.diag(variances))
