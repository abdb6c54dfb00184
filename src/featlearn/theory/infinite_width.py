"""Kernels of infinitely wide multilayer perceptrons without biases (Shan & Bordelon 2021a, Fig. 2).

Weights N(0, weight_variance / fan_in), activations phi: S <- v E[phi phi], T <- S + v E[phi' phi'] * T, from
S = T = v x . x' / d, v the weight variance. `hidden_layers` counts nonlinear layers; the readout is one layer more.

Angles are carried as 1 - cos and 1 + cos, each from the differences or sums of the normalized inputs where it is
small: nothing cancels between inputs that are nearly parallel or nearly opposite, where cos itself has lost half of its
digits.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import checked_count, checked_number

__all__ = ["nngp", "ntk"]

Activation = Literal["relu", "linear", "erf"]

# Entries that go through the layers together, few enough for a cache.
BLOCK = 1 << 17
# A product of matrices leaves this share of |u - u'|^2 two digits short; pairs below it are taken one by one, ...
NEAR = 1e-2
# ... this many numbers at once.
CHUNK_NUMBERS = 1 << 23


def ntk(
    x: Tensor,
    x2: Tensor | None = None,
    *,
    hidden_layers: int,
    activation: Activation = "relu",
    weight_variance: float = 2.0,
) -> Tensor:
    """Neural tangent kernel of an infinitely wide network, (P, P2), for inputs (P, d) and (P2, d).

    Of Jacot et al. 2018, in the parametrization in which every layer is multiplied by sqrt(weight_variance / fan_in)
    and weights are N(0, 1).
    """
    return _kernels(x, x2, hidden_layers, activation, weight_variance)[1]


def nngp(
    x: Tensor,
    x2: Tensor | None = None,
    *,
    hidden_layers: int,
    activation: Activation = "relu",
    weight_variance: float = 2.0,
) -> Tensor:
    """Covariance of the outputs of an infinitely wide network at initialization, (P, P2) (Lee et al. 2019)."""
    return _kernels(x, x2, hidden_layers, activation, weight_variance)[0]


class _LayerKernel(NamedTuple):
    """Covariance of one layer's preactivations."""

    left: Tensor
    """(P, 1) standard deviations"""
    right: Tensor
    """(1, P2) standard deviations"""
    cosine: Tensor
    """(P, P2): cos of the angle"""
    gap: Tensor
    """(P, P2): 1 - cos"""
    rest: Tensor
    """(P, P2): 1 + cos"""

    def covariance(self) -> Tensor:
        return self.left * self.right * self.cosine

    def split(self) -> Iterator["_LayerKernel"]:
        """Some rows at a time."""
        size = max(1, BLOCK // max(1, self.right.shape[1]))
        for begin in range(0, len(self.left), size):
            rows = slice(begin, begin + size)
            yield _LayerKernel(self.left[rows], self.right, self.cosine[rows], self.gap[rows], self.rest[rows])


Step = Callable[[_LayerKernel, float], tuple[_LayerKernel, Tensor]]


def _kernels(
    x: Tensor, x2: Tensor | None, hidden_layers: int, activation: str, variance: float
) -> tuple[Tensor, Tensor]:
    first = checked_finite(x, "x")
    second = first if x2 is None else checked_finite(x2, "x2").to(first.device)
    if first.dim() != 2 or second.dim() != 2 or first.shape[1] != second.shape[1] or not first.numel():
        raise InputValueError(
            f"x has shape {tuple(first.shape)} and x2 {tuple(second.shape)}, expected (P, d), (P2, d); flatten images"
        )
    variance = checked_number(variance, "weight_variance", above=0.0)
    hidden_layers = checked_count(hidden_layers, "hidden_layers", 0)
    steps = {"relu": _relu, "linear": _linear, "erf": _erf}
    if activation not in steps:
        raise InputValueError(f"activation={activation!r}, expected 'relu', 'linear' or 'erf'")
    layer = _inputs(first, second, variance)
    parts = [_recursion(rows, hidden_layers, steps[activation], variance) for rows in layer.split()]
    covariances, tangents = zip(*parts, strict=True)
    return torch.cat(covariances), torch.cat(tangents)


def _recursion(layer: _LayerKernel, hidden_layers: int, step: Step, variance: float) -> tuple[Tensor, Tensor]:
    covariance = tangent = layer.covariance()
    for _ in range(hidden_layers):
        layer, derivative = step(layer, variance)
        covariance = layer.covariance()
        tangent = covariance + derivative * tangent
    return covariance, tangent


def _inputs(x: Tensor, x2: Tensor, variance: float) -> _LayerKernel:
    sizes = [part.norm(dim=1, keepdim=True) for part in (x, x2)]
    # an input of zero has no angle, and none is needed
    left, right = (part / torch.where(size == 0, 1.0, size) for part, size in zip((x, x2), sizes, strict=True))
    scale = math.sqrt(variance / x.shape[1])
    gap = _half_squares(left, right)
    return _LayerKernel(scale * sizes[0], scale * sizes[1].T, left @ right.T, gap, _half_squares(left, -right))


def _half_squares(left: Tensor, right: Tensor) -> Tensor:
    """|u - u'|^2 / 2 for rows u (P, d) and u' (P2, d): (P, P2), to all digits relative to each."""
    middle = left.mean(0)  # inputs often share a large part, which no difference needs
    a, b = left - middle, right - middle
    squares = a.square().sum(1)[:, None] / 2 + b.square().sum(1) / 2
    distances = squares - a @ b.T
    pairs = (distances < NEAR * squares).nonzero()
    for few in pairs.split(max(1, CHUNK_NUMBERS // left.shape[1])):
        i, j = few.unbind(1)
        distances[i, j] = (left[i] - right[j]).square().sum(1) / 2
    return distances


def _bend(angle: Tensor) -> Tensor:
    """(sin t - t cos t) / pi, from 0 at t = 0 to 1 at t = pi."""
    bend = torch.sin(angle) - angle * torch.cos(angle)
    near = angle < 0.05
    t = angle[near]
    bend[near] = t**3 / 3 - t**5 / 30 + t**7 / 840 - t**9 / 45360
    return bend / math.pi


def _relu(layer: _LayerKernel, variance: float) -> tuple[_LayerKernel, Tensor]:
    """Arc-cosine: E[phi phi] = sqrt(a b) (sin t + (pi - t) cos t) / (2 pi), E[phi' phi'] = (pi - t) / (2 pi)."""
    root, other = layer.gap.sqrt(), layer.rest.sqrt()
    angle, supplement = 2 * torch.atan2(root, other), 2 * torch.atan2(other, root)  # t and pi - t
    # cos of the next layer is _bend(pi - t), and 1 - cos is gap - _bend(t)
    cosine, half = _bend(supplement), math.sqrt(variance / 2)
    derivative = variance / 2 * supplement / math.pi
    return _LayerKernel(half * layer.left, half * layer.right, cosine, layer.gap - _bend(angle), 1 + cosine), derivative


def _linear(layer: _LayerKernel, variance: float) -> tuple[_LayerKernel, Tensor]:
    grown = math.sqrt(variance)
    same = layer._replace(left=grown * layer.left, right=grown * layer.right)
    return same, torch.full_like(layer.gap, variance)


def _erf(layer: _LayerKernel, variance: float) -> tuple[_LayerKernel, Tensor]:
    """E[erf erf] = 2/pi asin(2 c / sqrt((1 + 2a)(1 + 2b))), E[erf' erf'] = 4/pi / sqrt((1 + 2a)(1 + 2b) - 4 c^2).

    The last root is that of 1 + 2a + 2b + 4 a b (1 - cos)(1 + cos), which does not cancel for large inputs, and the
    arcsine is the arctangent of 2 c by it.
    """
    a, b = layer.left.square(), layer.right.square()
    root = (1 + 2 * a + 2 * b + 4 * (a * layer.gap) * (b * layer.rest)).sqrt()
    moment = torch.atan2(2 * layer.covariance(), root)
    left, right = (torch.atan2(2 * norm, (1 + 4 * norm).sqrt()).sqrt() for norm in (a, b))
    size = left * right
    cosine = torch.where(size == 0, 1.0, moment / torch.where(size == 0, 1.0, size)).clamp(-1, 1)
    grown = math.sqrt(variance * 2 / math.pi)
    return _LayerKernel(grown * left, grown * right, cosine, 1 - cosine, 1 + cosine), variance * 4 / math.pi / root
