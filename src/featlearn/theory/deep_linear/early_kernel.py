"""The kernel of a two-layer linear network on whitened inputs, in its early phase and along the whole path.

Conventions of `two_layer`: K(x, x') = x^T M x', M = W^T W + |a|^2, (D, D).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_numbers, checked_times
from featlearn.theory.deep_linear.linear_network import checked_direction


def early_kernel(
    times: Any, W0: Tensor, a0: Tensor, beta: Tensor, s: Any, *, covariance: Tensor | None = None
) -> Tensor:
    """M(t) of phase I, while the output is small, with the cross terms of the weights.

    See Atanasov et al. 2022, Eq. 6, 7, 36 (corrected).

        M = M0 + (q - q0)(1 + beta beta^T) + (w - w0) beta^T + beta (w - w0)^T,     w = w0 cosh st + p0 sinh st,

    w0 = P W0^T W0 beta, p0 = P W0^T a0, P = 1 - beta beta^T; q as in `early_path`. Exact for the linearized dynamics
    da/dt = s W beta, dW/dt = s a beta^T.

    Args:
        times: a number or a tensor; the result has its shape and (D, D) after it.
        W0, a0: initial weights (N, D) and (N,).
        beta, s: the teacher: unit vector (D,) and its strength.
        covariance: Sigma = X^T X / P (D, D) where inputs are not whitened: da/dt = s W Sigma beta, which is the same
            with Sigma beta, normalized, for beta (Atanasov et al. 2022, Sec. 3.2, App. C.3: the spike first grows along
            Sigma beta).

    Erratum: the print has q0 cosh(2st) [beta beta^T + 1] + M0: q for q - q0, no r0, and no cross terms, though these
    grow as sigma^2 e^(st). Refused where cosh overflows, s t > 350, long after the phase has ended.
    """
    moments = checked_times(times)
    start = TwoLayerStart.of(W0, a0, beta, s, covariance)
    latest = float(moments.max() * start.s)
    if latest > 350:
        raise InputValueError(
            f"s t goes up to {latest:g}, expected times in phase I, s t < log(s / sigma^2) / 2; use two_layer_kernel "
            "for the whole path"
        )
    return start.metric(moments, saturating=False)


def two_layer_kernel(
    times: Any, W0: Tensor, a0: Tensor, beta: Tensor, s: Any, *, covariance: Tensor | None = None
) -> Tensor:
    """M(t) along the whole path, both phases matched: q and w of `early_kernel`, over the denominator of `two_layer`.

    See Atanasov et al. 2022, Eq. 5, 8. The matched form is not in the paper.

    For small weights the output across beta, p = P W^T a, and the cross term w = P W^T W beta follow dw/dt = (s - 2c)
    p, dp/dt = (s - c) w - c p once the layers are aligned, and go as q and r do. Outside the span of the data nothing
    pulls p back, dw/dt = (s - c) p, dp/dt = (s - c) w, and the denominator is the root of the same. The error is
    O(sigma^2), relative to s.

    Arguments as for `early_kernel`; `covariance` is a projector, by default 1: the inputs span everything. Infinite
    times give the end.
    """
    start = TwoLayerStart.of(W0, a0, beta, s, covariance)
    if start.span is not None and float((start.span @ start.span - start.span).abs().max()) > 1e-6:
        raise InputValueError("covariance is not a projector, expected whitened inputs; use flow for others")
    return start.metric(checked_times(times, infinite=True), saturating=True)


@dataclass(frozen=True)
class TwoLayerStart:
    """Statistics of the initial weights that enter the solution."""

    s: Tensor
    """> 0"""
    beta: Tensor
    metric0: Tensor
    """M0 (D, D)"""
    q0: Tensor
    r0: Tensor
    w0: Tensor
    """P W0^T W0 beta (D,)"""
    p0: Tensor
    """P W0^T a0 (D,)"""
    span: Tensor | None
    """Projector on the span of the data (D, D); None where that is everything."""

    @staticmethod
    def of(W0: Any, a0: Any, beta: Any, s: Any, covariance: Any = None) -> "TwoLayerStart":
        """Create the statistics from checked weights."""
        first, last = checked_finite(W0, "W0"), checked_finite(a0, "a0")
        if first.dim() != 2 or last.shape != first.shape[:1]:
            raise InputValueError(
                f"W0 has shape {tuple(first.shape)} and a0 {tuple(last.shape)}, expected (N, D) and (N,)"
            )
        last = last.to(first.device)
        direction = checked_direction(beta, first.shape[1]).to(first.device)
        size = checked_numbers(s, "s").to(first.device)
        if size.dim() != 0 or size == 0:
            raise InputValueError(f"s={s!r}, expected one number, not 0")
        span = None if covariance is None else _checked_covariance(covariance, first)
        if span is not None:
            tilted = span @ direction
            direction, size = tilted / tilted.norm(), size * tilted.norm()
        direction, size = direction * size.sign(), size.abs()
        forward, back = first @ direction, first.T @ last
        second = first.T @ forward
        eye = torch.eye(first.shape[1], dtype=first.dtype, device=first.device)
        return TwoLayerStart(
            s=size,
            beta=direction,
            metric0=first.T @ first + last.square().sum() * eye,
            q0=(last.square().sum() + forward.square().sum()) / 2,
            r0=last @ forward,
            w0=second - (direction @ second) * direction,
            p0=back - (direction @ back) * direction,
            span=span,
        )

    def strength(self, moments: Tensor) -> Tensor:
        """r(t), the shape of `moments`."""
        return self._hyperbolic(moments, self.r0[None], self.q0[None], 2, 1.0)[..., 0]

    def across(self, moments: Tensor) -> Tensor:
        """p(t) = P W^T a, the output weights across beta, (..., D)."""
        return self._tilted(moments, self.p0, self.w0, 1.0)

    def metric(self, moments: Tensor, *, saturating: bool) -> Tensor:
        """M(t), (..., D, D); that of phase I, or of the whole path."""
        power = 1.0 if saturating else 0.0
        grown = self._hyperbolic(moments, self.q0[None], self.r0[None], 2, power) - self.q0
        tilted = self._tilted(moments, self.w0, self.p0, power) - self.w0
        cross = tilted[..., :, None] * self.beta
        spike = torch.outer(self.beta, self.beta) + torch.eye(len(self.beta), dtype=cross.dtype, device=cross.device)
        return self.metric0 + grown[..., None] * spike + cross + cross.mT

    def _tilted(self, moments: Tensor, even: Tensor, odd: Tensor, power: float) -> Tensor:
        """Return the coefficients of cosh st and sinh st, inside and outside the span of the data."""
        if self.span is None or power == 0:
            return self._hyperbolic(moments, even, odd, 1, power)
        even_in, odd_in = self.span @ even, self.span @ odd
        outside = self._hyperbolic(moments, even - even_in, odd - odd_in, 1, power / 2)
        return self._hyperbolic(moments, even_in, odd_in, 1, power) + outside

    def _hyperbolic(self, moments: Tensor, even: Tensor, odd: Tensor, factor: int, power: float) -> Tensor:
        """even cosh(k st) + odd sinh(k st) over a power of the denominator of `two_layer`; the axis of `even` last.

        Numerator and denominator times e^(-2st) to that power, so that nothing overflows.
        """
        angle = (self.s * moments)[..., None]
        share = (self.q0 + self.r0) / (2 * self.s)
        # the smallest double where nothing grows (share = 0) and all decays to 0 / 0
        denominator = (torch.exp(-2 * angle) - share * torch.expm1(-2 * angle)).clamp(min=5e-324) ** power
        speed = factor - 2 * power
        rising = torch.exp(speed * angle) if speed else torch.ones_like(angle)  # 0 times an infinite time
        falling = torch.exp(-(factor + 2 * power) * angle)
        return ((even + odd) / 2 * rising + (even - odd) / 2 * falling) / denominator


def _checked_covariance(value: Any, like: Tensor) -> Tensor:
    matrix = checked_finite(value, "covariance").to(like.device)
    size = like.shape[1]
    if matrix.shape != (size, size):
        raise InputValueError(f"covariance has shape {tuple(matrix.shape)}, expected (D, D) = ({size}, {size})")
    return matrix
