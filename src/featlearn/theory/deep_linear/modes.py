"""When the modes of a linear network with many outputs are learned, and whether all align before.

See Atanasov et al. 2022, Sec. 4.2.

Time as in `strength`. Small weights, whitened inputs; s_a the singular values of the teacher, c0 the initial strength.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.theory.arguments import checked_numbers
from featlearn.theory.deep_linear.linear_network import checked_depth


class Separation(NamedTuple):
    """Alignment times against learning times."""

    alignment: Tensor
    """(R,): 1 / (s_a u0^(L-2)), the time in which a mode of the layers grows e-fold at the start; 1 / s_a for L = 2."""
    learning: Tensor
    """(R,): `mode_times`."""
    ratio: Tensor
    """Earliest learning over slowest alignment; silent alignment needs it well above 1."""
    holds: bool
    """ratio > 1: all modes align before any is learned."""


def mode_times(singular_values: Tensor, c0: Any, weight_layers: int) -> Tensor:
    """Time at which each mode is learned: when its early growth, left to itself, would reach s_a.

        t_a = log(s_a / c0) / (2 s_a),                                  L = 2 (Atanasov et al. 2022, Sec. 4.2 corrected)
        t_a = [c0^(-(L-2)/L) - s_a^(-(L-2)/L)] / (s_a (L - 2)),         L > 2

    and the latter goes as s_a^-1 sigma^(2-L) / (L-2) for c0 = sigma^L (Atanasov et al. 2022, App. H).

    `singular_values` and `c0` > 0, numbers or tensors, broadcast. 0 for modes that start at s_a or beyond. The exact
    half-loss time of a mode is `half_time(s_a, c0, L)`.

    Erratum: the print has 1/s for 1/(2s) (also t_2 of Sec. 3.1 and Fig. 2).
    """
    depth = checked_depth(weight_layers)
    s, start = torch.broadcast_tensors(
        checked_numbers(singular_values, "singular_values", above=0.0), checked_numbers(c0, "c0", above=0.0)
    )
    a = 1 - 2 / depth
    logarithm = torch.log(s / start).clamp(min=0)
    # (c0^-a - s^-a) / (L - 2) = s^-a (e^(a log(s / c0)) - 1) / (a L), a = 0 for two layers
    grown = torch.expm1(a * logarithm) / a if a else logarithm
    times: Tensor = s**-a * grown / (depth * s)
    return times


def separation(singular_values: Tensor, c0: Any, weight_layers: int) -> Separation:
    """Return whether all modes align before any is learned: 1 / s_min << log(s_max / c0) / (2 s_max).

    See Atanasov et al. 2022, Sec. 4.2 (corrected).

    `singular_values` (R,) > 0; `c0` a number or (R,). For two layers a smaller c0 makes the ratio larger, without
    bound. For L > 2 both times go as sigma^(2-L) and the ratio stays below s_min / (s_max (L-2)): small weights alone
    do not separate the two (Atanasov et al. 2022, Sec. 4.1.1), though single modes do align before they are learned.
    """
    depth = checked_depth(weight_layers, 2)
    s, start = torch.broadcast_tensors(
        checked_numbers(singular_values, "singular_values", above=0.0).reshape(-1), checked_numbers(c0, "c0", above=0.0)
    )
    alignment = start ** (2 / depth - 1) / s
    learning = mode_times(s, start, depth)
    ratio = learning.min() / alignment.max()
    return Separation(alignment, learning, ratio, bool(ratio > 1))
