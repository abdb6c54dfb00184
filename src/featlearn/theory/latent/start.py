"""Initial values in the variables of the solution (Xu & Ziyin 2024, Eq. 4, corrected)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.arguments import checked_number
from featlearn.theory.latent.latent_network import checked_network, checked_points, length


@dataclass(frozen=True, eq=False)
class Start:
    """One network and one sample, with p_i = (sqrt(rate_u) v_i / rho + sqrt(rate_w) u_i) / 2, q_i with a minus."""

    u: Tensor
    """(d,)"""
    W: Tensor
    """(d, d0)"""
    x: Tensor
    """(d0,)"""
    y: float
    scale: float
    rate_u: float
    rate_w: float
    rho: Tensor
    """length of x"""
    v: Tensor
    """(d,): W x"""
    p: Tensor
    """(d,)"""
    q: Tensor
    """(d,)"""
    root_a: Tensor
    """sqrt(a), a = scale^2 rho^2 d P"""
    root_b: Tensor
    """sqrt(b), b = scale^2 rho^2 d Q"""
    s: Tensor
    """scale rho sqrt(rate_u rate_w) y"""
    residual: Tensor
    """f(0) - y, from u and W themselves: right also where a learning rate is zero"""

    @property
    def output(self) -> Tensor:
        """f(0)"""
        return self.scale * (self.u @ self.v)

    @property
    def moves(self) -> bool:
        """Whether training changes anything: not where f(0) = y to rounding, nor where the gradient vanishes."""
        size = abs(self.y) + abs(self.scale) * float((self.u * self.v).abs().sum())
        at_target = abs(float(self.residual)) <= 8 * torch.finfo(torch.float64).eps * size
        return not at_target and float(self.root_a + self.root_b) > 0


def start(u: Any, W: Any, x: Any, y: Any, scale: Any, rate_u: Any, rate_w: Any) -> Start:
    """Return the checked problem."""
    readout, weight = checked_network(u, W)
    point = checked_points(x, weight, "x")
    if point.dim() != 1:
        raise InputValueError(
            f"x has shape {tuple(point.shape)}, expected one sample (d0,); samples on a line become one by reduce_line"
        )
    rho = length(point)
    if float(rho) == 0:
        raise InputValueError("x is zero, expected an input that reaches the network: f(0) = 0 for all weights")
    target, gamma = checked_number(y, "y"), checked_number(scale, "scale")
    rates = checked_number(rate_u, "rate_u", least=0.0), checked_number(rate_w, "rate_w", least=0.0)
    v = weight @ point
    hidden, visible = rates[0] ** 0.5 * (v / rho), rates[1] ** 0.5 * readout
    p, q = (hidden + visible) / 2, (hidden - visible) / 2
    root_a, root_b = (abs(gamma) * rho * length(part) for part in (p, q))
    s = gamma * rho * (rates[0] ** 0.5 * rates[1] ** 0.5 * target)
    residual = gamma * (readout @ v) - target
    if not bool(
        torch.stack([root_a * root_b, root_a.square(), root_b.square(), s, residual.square()]).isfinite().all()
    ):
        raise InputValueError("the loss or the kernel of this start is beyond the range of numbers; rescale it")
    return Start(readout, weight, point, target, gamma, *rates, rho, v, p, q, root_a, root_b, s, residual)
