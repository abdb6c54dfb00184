"""Quantities conserved by gradient flow between layers of a linear network, and distance from balance.

W^l W^lT - W^(l+1)T W^(l+1) stays what it was at the start, for any loss (Atanasov et al. 2022, Eq. 55, App. D). `u_l`
is the singular value of a learned mode in layer l; the product of all is s.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite
from featlearn.theory.arguments import Numbers, checked_numbers
from featlearn.theory.deep_linear.linear_network import checked_weights


class RefinedBalance(NamedTuple):
    """Squared singular values of a learned mode, layer by layer."""

    u_squared: Tensor
    """(L,): u_l^2, first layer first; their product is s^2."""
    first_order: Tensor
    """u_L^2 to first order, s^(2/L) - sum d_l / L."""


def conserved_matrices(weights: Sequence[Tensor], rates: Numbers | None = None) -> list[Tensor]:
    """B_l = W^l W^lT / eta_l - W^(l+1)T W^(l+1) / eta_(l+1) for l = 1 ... L-1: constant in time.

    See Atanasov et al. 2022, Eq. 52 to 56, 81; Shan & Bordelon 2021b, Eq. 10, 22.

    `weights` [W^1 (N1, D), ..., W^L (C, N)], first layer first; `rates` the learning rates of the layers, by default
    equal (and 1). For measured models see `fl.quantities.layer_balance`.
    """
    layers = checked_weights(weights)
    layer_rates = checked_numbers([1.0] * len(layers) if rates is None else rates, "rates", above=0.0)
    if layer_rates.shape != (len(layers),):
        raise InputValueError(
            f"rates have shape {tuple(layer_rates.shape)}, expected ({len(layers)},), one for each layer"
        )
    eta = layer_rates.tolist()
    pairs = zip(layers, layers[1:], eta, eta[1:], strict=False)
    return [first @ first.T / rate - second.T @ second / later for first, second, rate, later in pairs]


def width_corrections(widths: Numbers) -> Tensor:
    """g_l = sum_(k=l+1..L) (1 - N_(k+1) / N_k) of Atanasov et al. 2022, Eq. 83, corrected: (L,), the last 0.

    `widths` N_1 = D, N_2, ..., N_(L+1) = C: inputs, hidden layers, outputs. Erratum: the print sums from k = l.
    """
    sizes = checked_numbers(widths, "widths", above=0.0)
    if sizes.dim() != 1 or len(sizes) < 2:
        raise InputValueError(f"widths={widths!r}, expected inputs, hidden layers and outputs: L + 1 numbers > 0")
    steps = 1 - sizes[2:] / sizes[1:-1]  # k = 2 ... L
    return torch.cat([steps.flip(0).cumsum(0).flip(0), sizes.new_zeros(1)])


def refined_balance(s: Any, sigma: Any, g: Tensor) -> RefinedBalance:
    """u_l^2 = u_L^2 + sigma^2 g_l with prod u_l^2 = s^2, solved: the *paper's formula*.

    See Atanasov et al. 2022, Eq. 83 to 85 (corrected).

    `s` > 0 the strength of the mode, `sigma` the scale of the initial weights, `g` (L,) as `width_corrections(widths)`
    gives it (or any differences u_l^2 - u_L^2 with sigma = 1: `exact_balance`). To first order
    u_L^2 = s^(2/L) - sigma^2 sum g / L.

    For anything quantitative use `exact_balance`. The paper replaces W W^T of the initial weights by its mean; but the
    modes that are learned are built from these same weights, and see other values: see `wide_difference`.

    Errata: the print has prod = s for s^2, sums g_l from k = l, and u^2 = s^(2/L) - g sigma^2 / (2 L s^(1/L)), which
    is the correction of u, not of u^2.
    """
    size, scale = checked_numbers(s, "s", above=0.0), checked_numbers(sigma, "sigma", least=0.0)
    shifts = scale.square() * checked_numbers(g, "g")
    if size.dim() or scale.dim() or shifts.dim() != 1 or not len(shifts):
        raise InputValueError(
            f"s and sigma have shapes {tuple(size.shape)} and {tuple(scale.shape)}, g {tuple(shifts.shape)}, expected "
            "numbers, and g (L,)"
        )
    depth = len(shifts)
    return RefinedBalance(_root(size, shifts), size ** (2 / depth) - shifts.sum() / depth)


def exact_balance(W0: Tensor, A0: Tensor, s: Any, z: Tensor, v: Tensor) -> RefinedBalance:
    """u_1^2, u_2^2 of one learned mode of a two-layer network f = A W x, from its own initial weights.

    The conserved matrix B = W W^T - A^T A, taken along the hidden direction h that the mode grows in, gives
    u_1^2 - u_2^2 = h^T B h; small weights choose h ~ A0^T z + W0 v (`early_kernel`), and u_1 u_2 = s.

    `W0` (N, D), `A0` (C, N) or (N,); the mode s z v^T of the teacher: `z` (C,), `v` (D,) unit vectors (z = [1] for one
    output). Exact for h, the approximation is in h alone. Not in Atanasov et al. 2022, App. D; the mean over
    wide networks is `wide_difference`.
    """
    first, last = checked_weights([W0, A0])
    left, right = checked_finite(z, "z").to(first.device), checked_finite(v, "v").to(first.device)
    if left.shape != last.shape[:1] or right.shape != first.shape[1:]:
        raise InputValueError(
            f"z has shape {tuple(left.shape)} and v {tuple(right.shape)}, expected (C,) = ({len(last)},) and (D,) = "
            f"({first.shape[1]},)"
        )
    direction = last.T @ left + first @ right
    direction = direction / direction.norm()
    difference = (first.T @ direction).square().sum() - (last @ direction).square().sum()
    return refined_balance(s, 1.0, torch.stack([difference, torch.zeros_like(difference)]))


def wide_difference(sigma: Any, D: Any, N: Any, C: Any) -> Tensor:
    """u_1^2 - u_2^2 of a wide two-layer network: sigma^2 (N / D - C / N), the mean of `exact_balance` over networks.

    See Atanasov et al. 2022, Eq. 82.

    `D` inputs, `N` hidden units, `C` outputs: numbers or tensors, broadcast; weights N(0, sigma^2 / fan_in).

    Erratum: Atanasov et al. 2022, Eq. 82, 83 give sigma^2 (1 - C / N).
    """
    inputs, width, outputs = (checked_numbers(size, name, above=0.0) for size, name in ((D, "D"), (N, "N"), (C, "C")))
    return checked_numbers(sigma, "sigma", least=0.0).square() * (width / inputs - outputs / width)


def _root(s: Tensor, shifts: Tensor) -> Tensor:
    """u_l^2 with the given differences and the product s^2: bisection in the logarithm of the smallest of them."""
    above = torch.log(shifts - shifts.min())
    target = 2 * torch.log(s)
    high = target / len(shifts)  # the others are not smaller
    low = high - 1
    while float(torch.logaddexp(low, above).sum()) > float(target):
        low = high - 2 * (high - low)
    for _ in range(80):
        middle = (low + high) / 2
        enough = torch.logaddexp(middle, above).sum() > target
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return torch.logaddexp((low + high) / 2, above).exp()
