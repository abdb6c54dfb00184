"""Moments of the weights of a quadratic network, R = W^T diag(a^2) W (Beaglehole et al. 2024, App. E)."""

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.estimate import Estimate
from featlearn.theory.arguments import checked_count, checked_generator
from featlearn.theory.early.symmetric import gaussian
from featlearn.theory.early.words import LONGEST, cycle_weights, odd_factorial


def quadratic_moments(
    width: int, dimension: int, order: int = 4, *, kind: Literal["limit", "exact"] = "limit"
) -> Tensor:
    """r_m = E Tr(R^m) / d for m = 1 ... `order`, (order,), of R = W^T diag(a^2) W, (d, d), d = `dimension`.

    f = a^T (W x)^2 with a_s ~ N(0, 1) and W_si ~ N(0, 1/k), k = `width` (Beaglehole et al. 2024, App. E and Prop. 8).

    - `kind="limit"`: k and d to infinity at fixed ratio. R is a free compound Poisson element with free cumulants
      (k/d) (d/k)^m E[a^2m], E[a^2m] = 1, 3, 15, 105, ...; k = d gives 1, 4, 25, 202. What `free_probability` is for.
    - `kind="exact"`: at this very width and dimension, order <= 6, as `exact_trace` does it; k = d = 400 gives
      1, 4.0125, 25.24065, 206.072.

    A single network is far from these in the higher moments (tails of a^8); see `sampled_quadratic_moments`.
    """
    width, dimension = checked_count(width, "width"), checked_count(dimension, "dimension")
    order = checked_count(order, "order")
    if kind not in ("limit", "exact"):
        raise InputValueError(f"kind={kind!r}, expected 'limit' or 'exact'")
    if kind == "exact" and order > LONGEST:
        raise InputValueError(f"order={order}, expected at most {LONGEST} for kind='exact'; the limit has every order")
    if kind == "limit":
        values = _limit(Fraction(width, dimension), order)
    else:
        values = [_exact(width, dimension, m) for m in range(1, order + 1)]
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def sampled_quadratic_moments(
    width: int, dimension: int, order: int = 4, *, samples: int = 30, generator: torch.Generator | None = None
) -> Estimate:
    """r_m = Tr(R^m) / d for m = 1 ... `order`, averaged over `samples` networks: value and error (order,).

    As Beaglehole et al. 2024, App. I, do with 30 networks. R as in `quadratic_moments`, whose `kind="exact"` is the
    expectation of this. The errors of the higher moments are heavy-tailed and tend to be understated. Without
    `generator` every call makes the same draws.
    """
    width, dimension = checked_count(width, "width"), checked_count(dimension, "dimension")
    powers = torch.arange(1, checked_count(order, "order") + 1, dtype=torch.float64)
    source = checked_generator(generator)
    drawn = []
    for _ in range(checked_count(samples, "samples", least=2)):
        readout = gaussian(width, 1, generator=source)
        weights = gaussian(width, dimension, generator=source) / math.sqrt(width)
        values = torch.linalg.svdvals(readout * weights)  # R = V^T V with V = diag(a) W
        drawn.append((values[:, None] ** (2 * powers.to(values.device))).sum(0) / dimension)
    return Estimate.from_samples(torch.stack(drawn))


def _limit(ratio: Fraction, order: int) -> list[Fraction]:
    """Moments from free cumulants: m_n = sum over s of kappa_s [z^(n - s)] M(z)^s, M(z) = 1 + m_1 z + m_2 z^2 + ..."""
    cumulants = [ratio ** (1 - m) * odd_factorial(m) for m in range(1, order + 1)]
    moments = [Fraction(1)]
    for n in range(1, order + 1):
        power, total = [Fraction(1)] + [Fraction(0)] * n, Fraction(0)
        for s in range(1, n + 1):
            power = [sum((power[i] * moments[j - i] for i in range(j + 1)), Fraction(0)) for j in range(n - s + 1)]
            total += cumulants[s - 1] * power[n - s]
        moments.append(total)
    return moments[1:]


def _exact(width: int, dimension: int, order: int) -> Fraction:
    """Tr(I^j) = d for every cycle."""
    total = sum(
        weight * math.perm(width, parts) * dimension ** (len(cycles) - 1)
        for (parts, cycles), weight in cycle_weights(order).items()
    )
    return Fraction(total, width**order)
