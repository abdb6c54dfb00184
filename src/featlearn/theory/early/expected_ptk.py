"""The pre-activation tangent kernel of the first layer: its expectation, and single draws.

See Beaglehole et al. 2024, App. D.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.arguments import Numbers, checked_count, checked_generator, checked_numbers, checked_rows
from featlearn.theory.early.symmetric import gaussian

Activation = Literal["relu", "quadratic"]


def expected_ptk(
    X: Tensor,
    width: int | tuple[int, int],
    activation: Activation,
    hidden_layers: int,
    variances: Numbers,
    exact: bool | None = None,
) -> Tensor:
    """E[calK] of the first layer over networks, (n, n), for inputs `X` (n, d): calK = J J^T, J = df/dh_0, no 1/n.

    | hidden layers | network | variances |
    | --- | --- | --- |
    | 1 | a . phi(W0 x) | (s0, sa) of the entries of W0, a |
    | 2 | a . phi(W1 phi(W0 x)) | (s0, s1, sa) of the entries of W0, W1, a |

    No biases, one output, Gaussian weights; `activation` phi is `"relu"` or `"quadratic"`, z^2 (phi' = 2 z). `width` k
    is that of all hidden layers, or (k1, k2). With S = s0 X X^T, S01 the entry of two inputs, S00
    and S11 their own:

    - one hidden ReLU layer: k sa (pi - t0) / (2 pi), cos t0 = S01 / sqrt(S00 S11); exact;
    - one hidden quadratic layer: 4 k sa S01; exact;
    - two hidden ReLU layers: k1 k2 s1 sa (pi - t0) / (2 pi) (pi - t1) / (2 pi), t1 the angle after the first layer,
      cos t1 = (sin t0 + (pi - t0) cos t0) / pi; the limit of large k1 (2 percent off at k1 = 16, 1 percent at 64);
    - two hidden quadratic layers: 16 sa s1^2 k2 [k1 (k1 - 1) S01 (S00 S11 + 2 S01^2) + 3 k1 (9 S00 S11 S01 + 6 S01^3)];
      exact; its leading order in k1, 16 sa s1^2 k2 k1^2 S01 (S00 S11 + 2 S01^2), is `exact=False`.

    `exact`: None takes the exact form where there is one; True asks for it and is refused for two hidden ReLU layers;
    False takes the leading order in the width. Angles come from differences of the normalized inputs: exactly 0 on the
    diagonal. An input of zero has phi'(0) = 0 and a row of zeros.

    Beaglehole et al. 2024 name E[calK] and give no formula. The first-order prediction of the early C-NFC (App. D, Fig.
    7) is ``derivative_correlation(X, y, expected_ptk(X, ...))``.
    """
    network = _network(X, width, activation, hidden_layers, variances)
    if exact is True and network.widths[1:] and activation == "relu":
        raise InputValueError(
            "exact=True for two hidden ReLU layers, expected None or False: only the limit of large width is known"
        )
    leading = exact is False
    return _relu(network) if activation == "relu" else _quadratic(network, leading)


def drawn_ptk(
    X: Tensor,
    width: int | tuple[int, int],
    activation: Activation,
    hidden_layers: int,
    variances: Numbers,
    generator: torch.Generator | None = None,
) -> Tensor:
    """calK = J J^T of the first layer of one random network, (n, n): a draw of what `expected_ptk` averages.

    Arguments as there (Beaglehole et al. 2024, App. D). Weights are drawn first layer first, each (fan-out, fan-in), a
    last, as standard normal numbers times the root of the variance. Without `generator` every call draws the same
    network.
    """
    network = _network(X, width, activation, hidden_layers, variances)
    source = checked_generator(generator)
    sizes = (*network.widths, 1)
    fan_in, signal, slopes, weights = network.rows.shape[1], network.rows, [], []
    for size, variance in zip(sizes, network.variances, strict=True):
        weights.append(math.sqrt(variance) * gaussian(size, fan_in, generator=source, like=network.rows))
        fan_in = size
    for weight in weights[:-1]:
        h = signal @ weight.T
        signal, slope = (h.relu(), (h > 0).to(h)) if activation == "relu" else (h.square(), 2 * h)
        slopes.append(slope)
    rows = weights[-1] * slopes[-1]
    for weight, slope in zip(weights[-2:0:-1], slopes[-2::-1], strict=True):
        rows = (rows @ weight) * slope
    return rows @ rows.T


class _Network(NamedTuple):
    rows: Tensor
    """(n, d)"""
    widths: tuple[int, ...]
    """of the hidden layers"""
    variances: tuple[float, ...]
    """of the weight layers, first to last"""


def _network(X: Any, width: Any, activation: Any, hidden_layers: Any, variances: Any) -> _Network:
    rows = checked_rows(X)
    if activation not in ("relu", "quadratic"):
        raise InputValueError(f"activation={activation!r}, expected 'relu' or 'quadratic'")
    hidden_layers = checked_count(hidden_layers, "hidden_layers", 1, 2)
    widths = width if isinstance(width, tuple) else (width,) * hidden_layers
    if len(widths) != hidden_layers:
        raise InputValueError(f"width={width!r}, expected one width or {hidden_layers}: one per hidden layer")
    layer_variances = checked_numbers(variances, "variances", above=0.0)
    if layer_variances.shape != (hidden_layers + 1,):
        names = "(s0, s1, sa)" if hidden_layers == 2 else "(s0, sa)"
        raise InputValueError(
            f"variances={variances!r}, expected {hidden_layers + 1} positive numbers {names}, one per weight layer"
        )
    return _Network(rows, tuple(checked_count(width, "width") for width in widths), tuple(layer_variances.tolist()))


def _quadratic(network: _Network, leading: bool) -> Tensor:
    covariance = network.variances[0] * network.rows @ network.rows.T
    readout = network.variances[-1]
    if len(network.widths) == 1:
        return 4 * network.widths[0] * readout * covariance
    k1, k2 = network.widths
    product = torch.outer(covariance.diagonal(), covariance.diagonal())
    pairs = covariance * (product + 2 * covariance**2)  # E[h h'] E[h^2 h'^2], of two different units
    same_unit = 9 * product * covariance + 6 * covariance**3  # E[h^3 h'^3], of one unit
    total = k1**2 * pairs if leading else k1 * (k1 - 1) * pairs + 3 * k1 * same_unit
    return 16 * readout * network.variances[1] ** 2 * k2 * total


def _relu(network: _Network) -> Tensor:
    angle, active = _angle(network.rows)
    kernel = network.widths[0] * network.variances[-1] * (1 - angle / math.pi) / 2
    if len(network.widths) == 2:
        # 1 - cos t1 = (1 - cos t0) - (sin t0 - t0 cos t0) / pi, of which nothing is left at t0 = 0
        gap = 2 * (angle / 2).sin().square() - (angle.sin() - angle * angle.cos()) / math.pi
        after = 2 * torch.asin((gap / 2).clamp(0, 1).sqrt())
        kernel = kernel * network.widths[1] * network.variances[1] * (1 - after / math.pi) / 2
    return torch.where(active, kernel, torch.zeros_like(kernel))


def _angle(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Angles between all rows, (n, n), exactly 0 on the diagonal, and where both rows have one."""
    sizes = rows.norm(dim=1, keepdim=True)
    unit = rows / torch.where(sizes == 0, 1.0, sizes)
    apart, together = (torch.cdist(unit, other, compute_mode="donot_use_mm_for_euclid_dist") for other in (unit, -unit))
    some = sizes[:, 0] > 0
    return 2 * torch.atan2(apart, together), some[:, None] & some
