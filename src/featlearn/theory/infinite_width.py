"""Kernels of infinitely wide multilayer perceptrons without biases (000 Fig. 2; sheet 2.27).

Weights N(0, weight_variance / fan_in), activations phi: S <- v E[phi phi], T <- S + v E[phi' phi'] * T, from
S = T = v x . x' / d, v the weight variance. `hidden_layers` counts nonlinear layers; the readout is one layer more.

Angles are carried as 1 - cos, from the differences of the normalised inputs: nothing cancels between inputs that are
nearly parallel, where cos itself has lost half of its digits.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_tensor

Activation = Literal["relu", "linear", "erf"]


def ntk(x: Tensor, x2: Tensor | None = None, *, hidden_layers: int, activation: Activation = "relu",
        weight_variance: float = 2.0) -> Tensor:  # fmt: skip
    """Neural tangent kernel of an infinitely wide network, (P, P2), for inputs (P, d) and (P2, d).

    In the parametrisation in which every layer is multiplied by sqrt(weight_variance / fan_in) and weights are N(0, 1).
    """
    return _kernels(x, x2, hidden_layers, activation, weight_variance)[1]


def nngp(x: Tensor, x2: Tensor | None = None, *, hidden_layers: int, activation: Activation = "relu",
         weight_variance: float = 2.0) -> Tensor:  # fmt: skip
    """Covariance of the outputs of an infinitely wide network at initialisation, (P, P2)."""
    return _kernels(x, x2, hidden_layers, activation, weight_variance)[0]


class _Layer(NamedTuple):
    """Covariance of one layer's preactivations."""

    left: Tensor
    """(P, 1) variances"""
    right: Tensor
    """(1, P2) variances"""
    gap: Tensor
    """(P, P2): 1 - cos of the angle"""

    def covariance(self) -> Tensor:
        return (self.left * self.right).sqrt() * (1 - self.gap)


def _kernels(
    x: Tensor, x2: Tensor | None, hidden_layers: int, activation: str, variance: float
) -> tuple[Tensor, Tensor]:
    first = checked_tensor(x, "x")
    second = first if x2 is None else checked_tensor(x2, "x2").to(first.device)
    if first.dim() != 2 or second.dim() != 2 or first.shape[1] != second.shape[1]:
        raise InputValueError(
            f"x has shape {tuple(first.shape)} and x2 {tuple(second.shape)}, expected (P, d), (P2, d); flatten images"
        )
    if not isinstance(hidden_layers, int) or hidden_layers < 0 or not variance > 0:
        raise InputValueError(
            f"hidden_layers={hidden_layers!r} and weight_variance={variance!r}, expected a number of layers >= 0 and a "
            "positive variance"
        )
    steps = {"relu": _relu, "linear": _linear, "erf": _erf}
    if activation not in steps:
        raise InputValueError(f"activation={activation!r}, expected 'relu', 'linear' or 'erf'")
    layer = _inputs(first, second, variance)
    covariance = tangent = layer.covariance()
    for _ in range(hidden_layers):
        layer, derivative = steps[activation](layer, variance)
        covariance = layer.covariance()
        tangent = covariance + derivative * tangent
    return covariance, tangent


def _inputs(x: Tensor, x2: Tensor, variance: float) -> _Layer:
    sizes = [part.norm(dim=1, keepdim=True) for part in (x, x2)]
    left, right = (part / torch.where(size == 0, 1.0, size) for part, size in zip((x, x2), sizes, strict=True))
    # 1 - cos = |u - u'|^2 / 2, by differences; an input of zero has no angle, and none is needed
    gap = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    scale = variance / x.shape[1]
    return _Layer(scale * sizes[0].square(), scale * sizes[1].square().T, gap.clamp(0, 2))


def _relu(layer: _Layer, variance: float) -> tuple[_Layer, Tensor]:
    """Arc-cosine: E[phi phi] = sqrt(a b) (sin t + (pi - t) cos t) / (2 pi), E[phi' phi'] = (pi - t) / (2 pi)."""
    angle = 2 * torch.asin((layer.gap / 2).sqrt().clamp(max=1))
    # 1 - cos of the next layer is gap - (sin t - t cos t) / pi; the bracket is t^3 / 3 - t^5 / 30 + t^7 / 840 ...
    exact = torch.sin(angle) - angle * torch.cos(angle)
    series = angle**3 / 3 - angle**5 / 30 + angle**7 / 840
    lost = torch.where(angle < 0.05, series, exact) / math.pi
    half = variance / 2
    derivative = half * (1 - angle / math.pi)
    return _Layer(half * layer.left, half * layer.right, layer.gap - lost), derivative


def _linear(layer: _Layer, variance: float) -> tuple[_Layer, Tensor]:
    same = _Layer(variance * layer.left, variance * layer.right, layer.gap)
    return same, torch.full_like(layer.gap, variance)


def _erf(layer: _Layer, variance: float) -> tuple[_Layer, Tensor]:
    """E[erf erf] = 2/pi asin(2 c / sqrt((1 + 2a)(1 + 2b))), E[erf' erf'] = 4/pi / sqrt((1 + 2a)(1 + 2b) - 4 c^2)."""
    product = (1 + 2 * layer.left) * (1 + 2 * layer.right)
    covariance = layer.covariance()
    moment = 2 / math.pi * torch.asin((2 * covariance / product.sqrt()).clamp(-1, 1))
    derivative = variance * 4 / math.pi / (product - 4 * covariance.square()).sqrt()
    left, right = (2 / math.pi * torch.asin(2 * part / (1 + 2 * part)) for part in (layer.left, layer.right))
    size = (left * right).sqrt()
    cosine = torch.where(size == 0, torch.ones_like(size), moment / torch.where(size == 0, 1.0, size))
    return _Layer(variance * left, variance * right, (1 - cosine).clamp(0, 2)), derivative
