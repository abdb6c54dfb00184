"""The chain monomial: a low-rank polynomial whose relevant directions are known exactly.

See Beaglehole et al. 2024, Eq. 2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.data.draws import checked_count, checked_generator, checked_spectrum, standard_normal
from featlearn.data.regression_task import Regression
from featlearn.errors import InputValueError

__all__ = ["ChainMonomial", "chain_monomial"]


@dataclass(frozen=True)
class ChainMonomial:
    """x -> sum over k of x_k x_{k+1} / deviation, k from 0 to degree - 1 and k + 1 taken modulo degree.

    Attributes:
        degree: r, the number of coordinates in the ring.
        deviation: Divisor of the sum.
    """

    degree: int
    deviation: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., d) to (...), differentiably."""
        ring = x[..., : self.degree]
        return (ring * ring.roll(-1, dims=-1)).sum(-1) / self.deviation


def chain_monomial(
    samples: int,
    dimension: int,
    degree: int = 5,
    *,
    spectrum: Tensor | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> Regression:
    """Draw Gaussian inputs and y = sum_k x_k x_{k+1} over a ring of `degree` coordinates, with unit variance.

    See Beaglehole et al. 2024, Eq. 2, with r = `degree`. y does not depend on the other coordinates. It is divided by
    its standard deviation over the input distribution, not the sample: sqrt(r) for r >= 3 and isotropic inputs, sqrt(2)
    and 2 for r = 1 and 2. It is not centered, but its mean is zero except for r = 1. `target` and `egop` thus do not
    depend on the draw.

    With S the adjacency matrix of the ring (gradient S x: x_{i-1} + x_{i+1}) the EGOP is S Lambda S / Var y, with
    Lambda the input covariance. For isotropic inputs S S is 2 on the diagonal and 1 at ring distance 2, with
    eigenvalues 4 cos^2(2 pi m / r). Errata of Beaglehole et al. 2024, Sec. 2: the rank is r - 2, not r, where 4 divides
    r; the entries at distance 2 are 2 for r = 4, and all off-diagonal ones are 1 for r = 3.

    Args:
        samples: P.
        dimension: d, at least `degree`.
        degree: r.
        spectrum: Variances of the coordinates, (d,), for inputs N(0, diag(spectrum)); ones by default.
            `power_law_spectrum` gives those of Beaglehole et al. 2024, Fig. 7 to 10.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x and y.

    Returns:
        `x` (P, d), `y` (P,), and the exact `target`, `egop` and `covariance`.
    """
    rows, columns, ring = (
        checked_count(value, name)
        for value, name in ((samples, "samples"), (dimension, "dimension"), (degree, "degree"))
    )
    if ring > columns:
        raise InputValueError(f"degree is {ring} and dimension {columns}, expected degree <= dimension")
    generator = checked_generator(generator)
    variances = checked_spectrum(spectrum, columns).to(generator.device)
    neighbors = torch.zeros(columns, columns, dtype=torch.float64, device=generator.device)
    for k in range(ring):  # both ends of every edge; r = 1 and 2 repeat a pair
        neighbors[k, (k + 1) % ring] += 1
        neighbors[(k + 1) % ring, k] += 1
    gradient_outer = neighbors @ (variances[:, None] * neighbors)
    # Var of x^T (S / 2) x for x ~ N(0, Lambda) is Tr(S Lambda S Lambda) / 2
    variance = float((gradient_outer.diagonal() * variances).sum()) / 2
    if variance == 0:
        raise InputValueError(
            "the target is constant: spectrum is zero on the first coordinates, expected positive variances"
        )
    target = ChainMonomial(ring, math.sqrt(variance))
    x = standard_normal(rows, columns, generator=generator) * variances.sqrt()
    return Regression(x.to(dtype), target(x).to(dtype), target, gradient_outer / variance, torch.diag(variances))
