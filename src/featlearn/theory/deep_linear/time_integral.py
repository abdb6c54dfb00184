"""The time that a mode of a balanced linear network takes, as an integral in closed form.

With m = |c / s| and the scaled time |s|^(2 - 2/L) t, a coordinate x in which the flow is smooth at both ends:

| where | x | d time / dx |
| --- | --- | --- |
| below: 0 < c < s | log(m / (1 - m)) | m^-a / L = (1 + e^-x)^a / L |
| above: c > s | log(m / (m - 1)) | m^-a / L = (1 - e^-x)^a / L |
| against: c of the other sign | log((1 + m) / m) | m^-a / L = (e^x - 1)^a / L |

with a = 1 - 2/L. For L = 2 time is x / 2 everywhere. Deeper, the integrals are incomplete beta functions: the
hypergeometric function of Atanasov et al. 2022, Eq. 60, split so that neither end cancels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor


class Coordinate(ABC):
    """One way toward a fixed point; x grows with time."""

    @abstractmethod
    def start(self, s: Tensor, c: Tensor) -> Tensor:
        """x of a strength c."""

    @abstractmethod
    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """c / s and 1 - c / s."""

    @abstractmethod
    def time(self, x: Tensor, depth: int) -> Tensor:
        """Scaled time, up to a constant."""

    @abstractmethod
    def slope(self, x: Tensor, depth: int) -> Tensor:
        """d time / dx."""

    def bracket(self, start: Tensor, farthest: float) -> tuple[Tensor, Tensor]:
        """Where to look for a later x."""
        return start, torch.full_like(start, farthest)

    def between(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the middle, in the geometric sense where x > 0: x runs over orders of magnitude."""
        return low.sqrt() * high.sqrt()


class _Below(Coordinate):
    """From c0 up to s."""

    def start(self, s: Tensor, c: Tensor) -> Tensor:
        return torch.log(c.abs()) - torch.log((s - c).abs())

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(x), torch.sigmoid(-x)

    def time(self, x: Tensor, depth: int) -> Tensor:
        """1 / (v^(L-1) (1 - v^L)) = v^(1-L) + v / (1 - v^L), v = m^(1/L), each term integrated."""
        if depth == 2:
            return x / 2
        share, gap = self.shares(x)
        b = 2 / depth
        grown = torch.exp(-b * _softplus(-x)) * _series(b, share, gap, -_softplus(x)) / depth
        return grown - depth * self.slope(x, depth) / (depth - 2)

    def slope(self, x: Tensor, depth: int) -> Tensor:
        return torch.exp((1 - 2 / depth) * _softplus(-x)) / depth

    def between(self, low: Tensor, high: Tensor) -> Tensor:
        return (low + high) / 2


class _Above(Coordinate):
    """From c0 down to s."""

    def start(self, s: Tensor, c: Tensor) -> Tensor:
        return torch.log1p((s / (c - s)).abs())

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gap = -1 / torch.expm1(x)
        return 1 - gap, gap

    def time(self, x: Tensor, depth: int) -> Tensor:
        """Counted from c = infinity."""
        if depth == 2:
            return x / 2
        b = 2 - 2 / depth
        inverse = -torch.expm1(-x)  # s / c
        return inverse**b * _series(b, inverse, torch.exp(-x), -x) / depth

    def slope(self, x: Tensor, depth: int) -> Tensor:
        return (-torch.expm1(-x)) ** (1 - 2 / depth) / depth


class _Against(Coordinate):
    """From c0 on the other side toward 0."""

    def start(self, s: Tensor, c: Tensor) -> Tensor:
        return torch.log1p((s / c).abs())

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = -1 / torch.expm1(x)
        return share, 1 - share

    def time(self, x: Tensor, depth: int) -> Tensor:
        """Counted from infinity: the incomplete beta function B(y; 1+a, -a), y = 1 / (1 + m), one step up in -a."""
        if depth == 2:
            return x / 2
        from scipy.special import betainc

        a = 1 - 2 / depth
        y = -torch.expm1(-x)
        part = torch.as_tensor(betainc(1 + a, 1 - a, y.cpu().numpy()), dtype=y.dtype, device=y.device)
        return (y * torch.expm1(x) ** a - math.pi * a / math.sin(math.pi * a) * part) / (a * depth)

    def slope(self, x: Tensor, depth: int) -> Tensor:
        return torch.expm1(x) ** (1 - 2 / depth) / depth

    def bracket(self, start: Tensor, farthest: float) -> tuple[Tensor, Tensor]:
        return start, torch.full_like(start, min(farthest, 709.0))  # expm1 overflows beyond; no time is that long


COORDINATES: Mapping[str, Coordinate] = {"below": _Below(), "above": _Above(), "against": _Against()}


def _softplus(x: Tensor) -> Tensor:
    """Compute log(1 + e^x); torch's softplus omits the 1 for x >= 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _series(b: float, z: Tensor, rest: Tensor, log_rest: Tensor) -> Tensor:
    """sum_k z^k / (k + b) = 2F1(1, b; 1 + b; z) / b for 0 <= z < 1, from z, 1 - z and log(1 - z).

    The series itself up to z = 1/2, beyond it the one in 1 - z with the logarithm (Abramowitz and Stegun 15.3.10).
    """
    k = torch.arange(60, dtype=z.dtype, device=z.device)
    near = (z.clamp(max=0.5)[..., None] ** k / (k + b)).sum(-1)
    rising = torch.cat([torch.ones_like(k[:1]), torch.cumprod((k[:-1] + b) / (k[:-1] + 1), 0)])  # (b)_k / k!
    digamma = torch.digamma(k + 1) - torch.digamma(k + b)
    far = (rising * (digamma - log_rest[..., None]) * rest.clamp(max=0.5)[..., None] ** k).sum(-1)
    return torch.where(z <= 0.5, near, far)
