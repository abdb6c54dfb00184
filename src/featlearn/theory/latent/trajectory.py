"""The solution itself: weights, output, kernel and layer alignment at every time.

See Xu & Ziyin 2024, Theorem 1 (corrected).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_time_axis, checked_times
from featlearn.theory.latent.feature_growth import GrowthFactors, feature_share, growth, speed, tangent_kernel
from featlearn.theory.latent.latent_network import checked_points, length
from featlearn.theory.latent.mechanism import (
    Attribution,
    Mechanism,
    Rescaling,
    ends_in_saddle,
    mechanism_of,
    rescaling_of,
)
from featlearn.theory.latent.start import Start, start
from featlearn.theory.prediction import Prediction


class Norms(NamedTuple):
    """Lengths over time, (T,) each, or one number each."""

    u: Tensor
    """|u|, the readout"""
    W: Tensor
    """Frobenius norm of the input layer"""
    Wx: Tensor
    """|W x|, the hidden activity on the data"""


class State(NamedTuple):
    """The network at one time."""

    u: Tensor
    """(d,)"""
    W: Tensor
    """(d, d0)"""
    output: Tensor
    loss: Tensor
    ntk: Tensor
    layer_alignment: Tensor
    norms: Norms


@dataclass(frozen=True, eq=False)
class Latent(Prediction):
    """The exact path of f(x) = scale u . W x under gradient flow on (f(x) - y)^2. T times, d units, d0 inputs."""

    start: Start
    """The problem and its initial values."""
    times: Tensor
    """(T,): one unit is one step of gradient descent with step sizes rate_u and rate_w."""

    @cached_property
    def _growth(self) -> GrowthFactors:
        return growth(self.times, self.start.root_a, self.start.root_b, self.start.s)

    @cached_property
    def u(self) -> Tensor:
        """(T, d): the readout."""
        return self._layers[0]

    @property
    def W(self) -> Tensor:
        """(T, d, d0): the input layer, made anew at each call. Directions orthogonal to x never change."""
        x = self.start.x / self.start.rho
        return self.start.W + ((self._hidden - self.start.v) / self.start.rho)[:, :, None] * x

    @property
    def _hidden(self) -> Tensor:
        """(T, d): W x."""
        return self._layers[1]

    @cached_property
    def _layers(self) -> tuple[Tensor, Tensor]:
        """u and W x, from u = (p - q) / sqrt(rate_w) and W x = rho (p + q) / sqrt(rate_u), without dividing by a rate.

        For root >= 1: u(t) = u / root + (root - 1/root) p / sqrt(rate_w), and the bracket has the factor sqrt(rate_w);
        for root < 1 the same with q. root - 1 never changes its sign.
        """
        problem, (root, _, reach) = self.start, self._growth
        drive = -problem.scale * float(problem.residual)
        part, sign = (problem.p, 1.0) if drive >= 0 else (problem.q, -1.0)
        shrink = torch.minimum(root, 1 / root)[:, None]
        # a part that is zero stays zero, and so does everything where nothing drives it, however long the reach
        moved = (problem.rho * drive * reach)[:, None] * part
        moved = torch.where((part == 0) | (drive == 0), 0.0, moved)
        u = shrink * problem.u + problem.rate_u**0.5 * moved
        hidden = shrink * problem.v + problem.rho * (sign * problem.rate_w**0.5) * moved
        return u, hidden

    @cached_property
    def output(self) -> Tensor:
        """(T,): f(x)."""
        residual = self.start.residual * self._growth.decay
        direct = self.start.scale * (self.u * self._hidden).sum(-1)
        # two exact expressions: the one that subtracts the smaller numbers
        rounding = abs(self.start.scale) * self.norms.u * self.norms.Wx
        return torch.where(rounding < abs(self.start.y) + residual.abs(), direct, self.start.y + residual)

    @property
    def loss(self) -> Tensor:
        """(T,): (f(x) - y)^2."""
        return (self.start.residual * self._growth.decay).square()

    @property
    def alpha(self) -> Tensor:
        """(T,): p(t)^2 / p(0)^2 = q(0)^2 / q(t)^2; inf beyond the range of numbers, on the way into a saddle."""
        return self._growth.root.square()

    @property
    def ntk(self) -> Tensor:
        """(T,): K(x, x) = scale^2 (rate_u |W x|^2 + rate_w |u|^2 |x|^2), with df/dt = -2 K (f - y)."""
        return tangent_kernel(self.start.root_a, self.start.root_b, self._growth.root)

    def kernel(self, t: Numbers, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """K(x1, x2) = scale^2 (rate_u (W x1) . (W x2) + rate_w |u|^2 x1 . x2) at any time (Eq. 10, corrected).

        The learning rates are inside, as in ``fl.ntk(model, x, optimizer=...)``. Erratum: the print exchanges the
        rates and has the wrong sign in df/dt.

        Args:
            t: one time, or (T,) times, which become the first axis of the result.
            x1: (P, d0) or one input (d0,), whose axis then falls away.
            x2: the same; by default `x1`.

        Returns:
            (P, P2), or (T, P, P2).
        """
        problem = self.start
        asked = checked_times(t, "t", infinite=True)
        there = Latent(problem, checked_time_axis(asked, "t", infinite=True).to(problem.u.device))
        first = checked_points(x1, problem.W, "x1")
        second = first if x2 is None else checked_points(x2, problem.W, "x2")
        moved = (there._hidden - problem.v) / problem.rho  # (T, d)

        def hidden(points: Tensor) -> Tensor:  # (T, P, d)
            return points @ problem.W.T + (points @ problem.x / problem.rho)[:, None] * moved[:, None, :]

        rows = [points if points.dim() == 2 else points[None] for points in (first, second)]
        readout = torch.einsum("tpd,tqd->tpq", *(hidden(points) for points in rows))
        inner = there.norms.u.square()[:, None, None] * (rows[0] @ rows[1].T)
        kernel = problem.scale**2 * (problem.rate_u * readout + problem.rate_w * inner)
        kernel = kernel if first.dim() == 2 else kernel[:, 0]
        kernel = kernel if second.dim() == 2 else kernel[..., 0]
        return kernel if asked.dim() else kernel[0]

    @cached_property
    def layer_alignment(self) -> Tensor:
        """(T,): zeta = u . W x / (|u| |W x|) (Eq. 11), signed and monotone. nan where u or W x is zero."""
        lengths = self.norms.u, self.norms.Wx
        u, hidden = (
            ratio(part, size[:, None].expand_as(part)) for part, size in zip(self._layers, lengths, strict=True)
        )
        return (u * hidden).sum(-1).clamp(-1, 1)

    @cached_property
    def norms(self) -> Norms:
        """Norms of u, W and W x. Erratum: Sec. 3.3 omits the 1/rate_w and 1/rate_u of |u|^2 and |W x|^2."""
        hidden = length(self._hidden)
        across = self.start.W - torch.outer(self.start.v / self.start.rho, self.start.x / self.start.rho)
        return Norms(length(self.u), torch.hypot(length(across.flatten()), hidden / self.start.rho), hidden)

    @property
    def P(self) -> Tensor:
        """mean_i p_i(0)^2; layers that start anti-parallel and balanced have P = 0."""
        return self.start.p.square().mean()

    @property
    def Q(self) -> Tensor:
        """mean_i q_i(0)^2; layers that start parallel and balanced have Q = 0."""
        return self.start.q.square().mean()

    @property
    def time_scale(self) -> Tensor:
        """t_c = 1 / Omega (Eq. 7): the loss falls as exp(-8 t / t_c) at the end. inf where Omega = 0."""
        return 1 / self._omega

    @property
    def _omega(self) -> Tensor:
        return speed(self.start.root_a, self.start.root_b, self.start.s).omega

    @property
    def alpha_plus(self) -> Tensor:
        """alpha at the end of training (Eq. 8, first root). inf or 0 where training ends at u = W x = 0."""
        return self._end.alpha[0]

    @property
    def feature_share(self) -> Tensor:
        """s^2 / Omega^2 = 1 - 4 a b / Omega^2: the part of t_c^-2 that the target brings. nan where Omega = 0."""
        return feature_share(self._omega, self.start.s)

    @cached_property
    def _end(self) -> "Latent":
        return Latent(self.start, self.times.new_full((1,), torch.inf))

    @property
    def final(self) -> State:
        """Network at the end of training. K(x, x) is 2 / t_c there, exactly, unless it ends in the saddle."""
        end = self._end
        norms = Norms(*(part[0] for part in end.norms))
        return State(end.u[0], end.W[0], end.output[0], end.loss[0], end.ntk[0], end.layer_alignment[0], norms)

    @property
    def saddle(self) -> bool:
        """Whether training ends at u = W x = 0 with the loss y^2 left.

        Only where P or Q is exactly zero. Rounding of W x usually leaves P near 1e-33 instead, and the path then leaves
        the saddle again after a time of order t_c ln(1 / P) / 4.
        """
        return ends_in_saddle(self.start)

    @property
    def mechanism(self) -> Mechanism:
        """Learning by alignment, by disalignment, or by rescaling alone (Sec. 3.2 to 3.4)."""
        return mechanism_of(self.start)

    @property
    def rescaling(self) -> Rescaling:
        """Change of the norms of both layers (Sec. 3.3). A layer with learning rate zero keeps its norm."""
        return rescaling_of(self.start, self.final.output)

    @property
    def attribution(self) -> Attribution:
        """Attribute the change of the output to its factors: |f| = |scale| |u| |W x| |zeta|, in logarithms.

        The logarithms are nan where f changes its sign, or is zero at the start or at the end.
        """
        first, last = Latent(self.start, torch.zeros_like(self._end.times)), self._end
        same_sign = (first.output * last.output > 0)[0]

        def change(before: Tensor, after: Tensor) -> Tensor:
            return torch.where(same_sign, (after[0] / before[0]).abs().log(), torch.nan)

        return Attribution(
            log_output=change(first.output, last.output),
            log_u=change(first.norms.u, last.norms.u),
            log_Wx=change(first.norms.Wx, last.norms.Wx),
            log_layer_alignment=change(first.layer_alignment, last.layer_alignment),
            layer_alignment=(last.layer_alignment - first.layer_alignment)[0],
            ntk=ratio(last.ntk, first.ntk)[0],
        )

    def curves(self) -> dict[str, Tensor]:
        """Loss, output, kernel, layer alignment, norms of W (first layer) and u (second layer)."""
        return {
            "loss": self.loss,
            "output": self.output,
            "ntk/value": self.ntk,
            "layers/alignment": self.layer_alignment,
            "layers/first_norm": self.norms.W,
            "layers/second_norm": self.norms.u,
        }


def solve(
    u: Tensor,
    W: Tensor,
    x: Tensor,
    y: float | Tensor,
    *,
    times: Numbers,
    scale: float | Tensor = 1.0,
    rate_u: float | Tensor = 1.0,
    rate_w: float | Tensor = 1.0,
) -> Latent:
    """Return the exact path of a two-layer linear network on one sample (Xu & Ziyin 2024, Theorem 1, corrected).

    See Xu & Ziyin 2024, Eq. 3, 4, 19 to 30; saddles: Eq. 31 to 35.

    f(x) = scale u . W x, loss (f(x) - y)^2 without 1/2, du/dt = -rate_u dL/du, dW/dt = -rate_w dL/dW. Exact for every
    width, every start and both signs of `y` and `scale`; also for P = 0, Q = 0, y = 0, saddles, f(0) = y and learning
    rates of zero. Samples on a line become one sample by `reduce_line`; for other data there is `integrate`.

    Errata that are corrected here: rho is the length of x (Eq. 4 has a 1/d0); Eq. 5 and 8 need the positive alpha_-;
    W moves by 1 / (sqrt(rate_u) rho) times the change of p + q (the print has rate_w); Eq. 10 exchanges the rates. The
    xi of Eq. 6 is not used: near P = 0 it loses every digit (17 % at p = 1e-10).

    Args:
        u: (d,) readout. The paper's words "first" and "second layer" for u and w are exchanged.
        W: (d, d0) input layer.
        x: (d0,) the sample.
        y: its target.
        times: (T,) times >= 0, in any order, or one; inf is the end.
        scale: gamma of the paper, larger is lazier.
        rate_u: learning rate of u.
        rate_w: learning rate of W.
    """
    problem = start(u, W, x, y, scale, rate_u, rate_w)
    return Latent(problem, checked_time_axis(times, infinite=True).to(problem.u.device))
