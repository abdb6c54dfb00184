"""Gaussian inputs with power-law variances."""

from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.data.draws import checked_count, checked_generator, standard_normal
from featlearn.errors import InputValueError

__all__ = ["GaussianInputs", "power_law_gaussian", "power_law_spectrum"]


@dataclass(frozen=True, eq=False)
class GaussianInputs:
    """Samples of N(0, diag(spectrum)).

    Attributes:
        x: inputs, shape (P, d).
        spectrum: Variances of the coordinates, shape (d,), float64, descending.
    """

    x: Tensor
    spectrum: Tensor

    @property
    def covariance(self) -> Tensor:
        """Covariance of the distribution, diag(spectrum): (d, d), float64."""
        return torch.diag(self.spectrum)


def power_law_gaussian(
    samples: int,
    dimension: int,
    exponent: float,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> GaussianInputs:
    """Draw inputs N(0, diag(lambda)) with lambda_k = 1 / (1 + k^exponent), k = 1 ... d.

    See Beaglehole et al. 2024, Fig. 7 to 10.

    With k from 1, the spectrum tends to 1/2 on the first coordinate and 0 elsewhere for large exponents. Exponent 0 is
    isotropic with variance 1/2.

    Targets: ``chain_monomial(samples, dimension, spectrum=power_law_spectrum(dimension, exponent))`` draws the same
        inputs from a generator in the same state.

    Args:
        samples: P.
        dimension: d.
        exponent: alpha >= 0.
        generator: Source of random numbers; seed 0 by default.
        dtype: Dtype of x.

    Returns:
        `x` (P, d), `spectrum` (d,) and `covariance` (d, d), the latter two exact.
    """
    rows = checked_count(samples, "samples")
    generator = checked_generator(generator)
    variances = power_law_spectrum(dimension, exponent).to(generator.device)
    x = standard_normal(rows, len(variances), generator=generator) * variances.sqrt()
    return GaussianInputs(x.to(dtype), variances)


def power_law_spectrum(dimension: int, exponent: float) -> Tensor:
    """Return lambda_k = 1 / (1 + k^exponent) for k = 1 ... dimension, in float64."""
    count = checked_count(dimension, "dimension")
    if not 0 <= exponent < float("inf"):
        raise InputValueError(f"exponent is {exponent!r}, expected a number >= 0: lambda_k = 1 / (1 + k^exponent)")
    return 1 / (1 + torch.arange(1, count + 1, dtype=torch.float64) ** exponent)
