"""Mean and spread of the PTK over networks in the early correlation (Beaglehole et al. 2024, Eq. 7)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.theory.arguments import checked_count, checked_generator
from featlearn.theory.early.derivative import checked_ptk, correlation, products, residual_rows


@dataclass(frozen=True)
class Decomposition:
    """E[<P, Q>] = <E P, E Q> + tr Cov(P, Q) for one pair of matrices; `total` is exactly `mean` + `covariance`."""

    total: Estimate
    """E[<P, Q>]"""
    mean: Estimate
    """<E P, E Q>: all that is left of it in the limit of infinite width"""
    covariance: Estimate
    """E[<P - E P, Q - E Q>]"""


@dataclass(frozen=True)
class MeanAndCovarianceTerms:
    """The three traces of Eq. 6, each split as in Eq. 7, and the correlations they make."""

    numerator: Decomposition
    """P = X^T L calK L X, Q = X^T L calK^2 L X: Eq. 7 as printed"""
    den1: Decomposition
    """P = Q = X^T L calK L X"""
    den2: Decomposition
    """P = Q = X^T L calK^2 L X"""
    correlation: Estimate
    """E[numerator] / sqrt(E[den1] E[den2]), from the totals (Assumption 7: the expectation before the ratio)"""
    mean_correlation: Estimate
    """The same from the mean terms alone: the infinitely wide network of the same mean and mean square of the PTK"""
    average_correlation: Estimate
    """The average over networks of Eq. 6 itself"""


def mean_and_covariance_terms(
    X: Tensor,
    residual: Tensor,
    ptks: Tensor | Callable[[torch.Generator], Tensor],
    *,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> MeanAndCovarianceTerms:
    """Split the early correlation into contributions of the mean PTK and of its spread over networks.

    See Beaglehole et al. 2024, Eq. 7.

        E <P, Q> = <E P, E Q> + tr Cov(P, Q),      P = X^T L calK L X,  Q = X^T L calK^2 L X,

    and the same for |P|^2 and |Q|^2. It is an identity, not an approximation, and is estimated here from independent
    networks: `ptks` is a stack (S, N, N) of their calK = J J^T (no 1/n), or a function that draws one, called `samples`
    times with `generator`: ``lambda g: early.drawn_ptk(X, 64, "relu", 2, variances, g)``. `X`, `residual` and the rows
    of the PTKs are those of `derivative_matrices`; the residuals are the same for all networks (f = 0: the targets).
    At least three networks. Without `generator` every call makes the same draws.

    Mean terms average <P_s, Q_t> over pairs of different networks s != t, covariances have S - 1: both are unbiased
    and they still add up to the total exactly. Standard errors are jackknife errors over networks. The correlations
    are ratios, with a bias of order 1/S. The second denominator has eighth powers of the readout: its rare large
    values are easily missed, and with it the errors of a few networks are too small.

    Erratum: Eq. 7 writes K for calK. At width near the input dimension the covariance term is not small (one hidden
    quadratic layer, width 32: 0.928 observed, 0.995 from the mean term).
    """
    weighted, outputs = residual_rows(X, residual)
    first, second = _drawn(weighted, outputs, ptks, samples, generator)
    pairs = {"numerator": (first, second), "den1": (first, first), "den2": (second, second)}
    terms = {name: _Terms.of(p, q) for name, (p, q) in pairs.items()}
    return MeanAndCovarianceTerms(
        **{name: term.decomposition() for name, term in terms.items()},
        correlation=_ratio(*(term.total for term in terms.values())),
        mean_correlation=_ratio(*(term.mean for term in terms.values())),
        average_correlation=Estimate.from_samples(correlation(first, second)),
    )


def _drawn(weighted: Tensor, outputs: int, ptks: Any, samples: Any, generator: Any) -> tuple[Tensor, Tensor]:
    """P and Q of every network, (S, d, d); a function is called network by network, to hold one PTK at a time."""
    if callable(ptks):
        count = checked_count(samples, "samples", least=3)
        source = checked_generator(generator)
        kernels = (ptks(source) for _ in range(count))
    elif isinstance(ptks, Tensor):
        if samples is not None or generator is not None:
            raise InputValueError("samples or generator given with a stack of PTKs, expected them with a function only")
        if ptks.dim() < 3 or len(ptks) < 3:
            raise InputValueError(
                f"ptks have shape {tuple(ptks.shape)}, expected (S, N, N) with S >= 3 networks, for an error to show"
            )
        kernels = iter(ptks)
    else:
        raise InputTypeError(f"ptks are {type(ptks).__name__}, expected a stack (S, N, N) or a function of a generator")
    matrices = [products(weighted, checked_ptk(kernel, weighted, outputs)) for kernel in kernels]
    return torch.stack([m.nfm for m in matrices]), torch.stack([m.agop for m in matrices])


@dataclass(frozen=True)
class _Terms:
    """Estimates of total and mean term, and their values without one network each, (S,): (all, left out)."""

    total: tuple[Tensor, Tensor]
    mean: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, p: Tensor, q: Tensor) -> "_Terms":
        count = len(p)
        p, q = p.flatten(1), q.flatten(1)
        same_network = (p * q).sum(1)
        across = (p.sum(0) * q.sum(0)).sum() - same_network.sum()  # sum over pairs of different networks
        lost = p @ q.sum(0) + q @ p.sum(0) - 2 * same_network  # the pairs that one network takes part in
        total = same_network.mean(), (same_network.sum() - same_network) / (count - 1)
        mean = across / (count * (count - 1)), (across - lost) / ((count - 1) * (count - 2))
        return cls(total, mean)

    def decomposition(self) -> Decomposition:
        rest = self.total[0] - self.mean[0], self.total[1] - self.mean[1]
        return Decomposition(_jackknife(*self.total), _jackknife(*self.mean), _jackknife(*rest))


def _ratio(numerator: tuple[Tensor, Tensor], den1: tuple[Tensor, Tensor], den2: tuple[Tensor, Tensor]) -> Estimate:
    parts = zip(numerator, den1, den2, strict=True)
    return _jackknife(*(top / (first.sqrt() * second.sqrt()) for top, first, second in parts))


def _jackknife(value: Tensor, left_out: Tensor) -> Estimate:
    """Return the value with the error that leaving out one network at a time shows."""
    count = len(left_out)
    error = ((count - 1) * (left_out - left_out.mean()).square().mean()).sqrt()
    return Estimate(float(value), float(error), count)
