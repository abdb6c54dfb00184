"""The one function of time in the model: how far p grows and q shrinks (Xu & Ziyin 2024, Theorem 1, corrected)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.theory.arguments import checked_numbers, checked_times


class GrowthFactors(NamedTuple):
    """alpha(t) and what follows from it, broadcast over times and parameters."""

    root: Tensor
    """sqrt(alpha): p(t) = p(0) root, q(t) = q(0) / root"""
    decay: Tensor
    """(f(t) - y) / (f(0) - y)"""
    reach: Tensor
    """(root - 1/root) / (scale rho sqrt(rate_u rate_w) (y - f(0))), without the cancellation at root = 1"""


class Speed(NamedTuple):
    """Omega = sqrt(s^2 + 4 a b) and its two parts."""

    omega: Tensor
    plus: Tensor
    """sqrt((Omega + s) / (2 Omega)); sqrt(1/2) where Omega = 0"""
    minus: Tensor
    """sqrt((Omega - s) / (2 Omega))"""


def speed(root_a: Tensor, root_b: Tensor, s: Tensor) -> Speed:
    """1 / t_c = Omega (Eq. 7). The smaller of Omega + s and Omega - s is 4 a b divided by the larger."""
    root_a, root_b, s = torch.broadcast_tensors(root_a, root_b, s)
    omega = torch.hypot(s, 2 * root_a * root_b)
    safe = torch.where(omega == 0, 1.0, omega)
    larger = ((1 + s.abs() / safe) / 2).sqrt()
    kernel_part = torch.where(omega == 0, 1.0, 2 * root_a * root_b / safe)
    smaller = kernel_part / (2 * larger)
    return Speed(omega, torch.where(s >= 0, larger, smaller), torch.where(s >= 0, smaller, larger))


def growth(times: Tensor, root_a: Tensor, root_b: Tensor, s: Tensor) -> GrowthFactors:
    """alpha = N / D for every a, b >= 0 and every s, from the square roots of a and b.

    With Omega as above, E = exp(-4 Omega t), F = 1 - E:

        N = (Omega + s) + (Omega - s) E + 2 b F,   D = (Omega - s) + (Omega + s) E + 2 a F,
        alpha = N / D,   (f - y) / (f(0) - y) = 4 Omega^2 E / (N D),   alpha - 1 = 2 F (s + b - a) / D.

    n = sqrt(N / 2 Omega) and m = sqrt(D / 2 Omega) are sums of squares, taken by hypot: nothing cancels, nothing
    underflows before its root does, and Omega = 0 (n^2 = 1 + 4 b t, m^2 = 1 + 4 a t) needs no formula of its own.
    """
    omega, plus, minus = speed(root_a, root_b, s)
    times, omega, plus, minus = torch.broadcast_tensors(times, omega, plus, minus)
    e = torch.where(omega == 0, 1.0, torch.exp(-2 * omega * times))
    h = _saturated(times, omega)
    n = torch.hypot(torch.hypot(plus, _product(root_b, h.sqrt())), minus * e)
    m = torch.hypot(torch.hypot(minus, _product(root_a, h.sqrt())), plus * e)
    return GrowthFactors(n / m, _decay(e, n, m), h / (n * m))


def _saturated(times: Tensor, omega: Tensor) -> Tensor:
    """F / Omega, which is 4 t as long as Omega t is small."""
    phase = 4 * omega * times
    early = 4 * times * (1 - torch.where(phase < 1e-8, phase, 0.0) / 2)
    late = -torch.expm1(-phase) / torch.where(omega == 0, 1.0, omega)
    return torch.where((omega == 0) | (phase < 1e-8), early, late)


def _product(root: Tensor, other: Tensor) -> Tensor:
    """Zero times infinity is zero: what is not there at the start never grows."""
    root, other = torch.broadcast_tensors(root, other)
    return torch.where(root == 0, 0.0, root * other)


def _decay(e: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """(e / (n m))^2; the larger of n and m is at least sqrt(1/2)."""
    small, large = torch.minimum(n, m), torch.maximum(n, m)
    # below the range of numbers the smaller one is e alone, on the way into a saddle
    ratio = torch.where(small < 1e-300, 1.0, e / small.clamp(min=1e-300))
    return (ratio / large).square()


class Scales(NamedTuple):
    """Quantities determined by P and Q, broadcast over their parameters."""

    alpha: Tensor
    """alpha at the times asked for"""
    alpha_plus: Tensor
    """alpha at the end; inf on the way into the saddle from P = 0"""
    time_scale: Tensor
    """t_c = 1 / Omega; inf where Omega = 0"""
    ntk: Tensor
    """K(x, x) at the times asked for"""
    final_ntk: Tensor
    """K(x, x) at the end: 2 / t_c, or 0 in a saddle"""
    feature_share: Tensor
    """s^2 / Omega^2, the part of the squared speed that comes from the target; nan where Omega = 0"""


def scales(
    times: Any,
    P: Any,
    Q: Any,
    y: Any,
    *,
    width: Any,
    rho: Any = 1.0,
    scale: Any = 1.0,
    rate_u: Any = 1.0,
    rate_w: Any = 1.0,
) -> Scales:
    """Growth, time scale and kernel of a start given by P = mean p^2 and Q = mean q^2.

    See Xu & Ziyin 2024, Eq. 5 to 10 (corrected).

    Every argument is a number or a tensor; they are broadcast against each other and the result has that shape. For
    weights at hand use `solve`; here P and Q may be population values (`initial_statistics`) or a grid. `width` is d,
    `rho` the length of the input, `scale` the gamma of the paper. A rate of zero makes P = Q.
    """
    root_a, root_b = (
        checked_numbers(scale, "scale").abs()
        * checked_numbers(rho, "rho", least=0.0)
        * (checked_numbers(width, "width", least=0.0) * checked_numbers(value, name, least=0.0)).sqrt()
        for value, name in ((P, "P"), (Q, "Q"))
    )
    rates = [checked_numbers(rate, name, least=0.0).sqrt() for rate, name in ((rate_u, "rate_u"), (rate_w, "rate_w"))]
    s = checked_numbers(scale, "scale") * checked_numbers(rho, "rho") * rates[0] * rates[1] * checked_numbers(y, "y")
    moments = checked_times(times)
    now, end = (growth(t, root_a, root_b, s).root for t in (moments, torch.full_like(moments, torch.inf)))
    omega = speed(root_a, root_b, s).omega
    return Scales(
        alpha=now.square(),
        alpha_plus=end.square(),
        time_scale=1 / omega,
        ntk=tangent_kernel(root_a, root_b, now),
        final_ntk=tangent_kernel(root_a, root_b, end),
        feature_share=feature_share(omega, s),
    )


def tangent_kernel(root_a: Tensor, root_b: Tensor, root: Tensor) -> Tensor:
    """K(x, x) = 2 (a alpha + b / alpha)."""
    return 2 * (_product(root_a, root).square() + _product(root_b, 1 / root).square())


def feature_share(omega: Tensor, s: Tensor) -> Tensor:
    """s^2 / Omega^2, nan where Omega = 0."""
    return torch.where(omega == 0, torch.nan, (s / torch.where(omega == 0, 1.0, omega)).square())


class StartStatistics(NamedTuple):
    """Mean and variance of P, which Q shares, over random starts."""

    mean: Tensor
    variance: Tensor


def initial_statistics(
    width: Any, variance_u: Any, variance_w: Any, *, rate_u: Any = 1.0, rate_w: Any = 1.0
) -> StartStatistics:
    """P and Q for independent u_i ~ N(0, variance_u), w_ij ~ N(0, variance_w) (Xu & Ziyin 2024, below Eq. 14).

    E P = E Q = (rate_w variance_u + rate_u variance_w) / 4 and Var P = Var Q = 2 (E P)^2 / width, for an input of any
    length and direction. Numbers or tensors, broadcast.
    """
    mean = (
        checked_numbers(rate_w, "rate_w", least=0.0) * checked_numbers(variance_u, "variance_u", least=0.0)
        + checked_numbers(rate_u, "rate_u", least=0.0) * checked_numbers(variance_w, "variance_w", least=0.0)
    ) / 4
    return StartStatistics(mean, 2 * mean.square() / checked_numbers(width, "width", least=0.0))
