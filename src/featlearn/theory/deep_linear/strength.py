"""Learning of a mode of a balanced linear network (Atanasov et al. 2022, Sec. 4.1.1, App. E.1).

A balanced network has the layers W^l = u r_{l+1} r_l^T with unit vectors r; c = u^L is the strength of its one mode,
s that of the teacher, L = `weight_layers` the number of weight matrices. On whitened inputs

    du/dt = u^(L-1) (s - u^L),        dc/dt = L |c|^(2 - 2/L) (s - c).

Time is that of Atanasov et al. 2022: loss 1/(2P) sum (f - y)^2, rate 1, covariance X^T X / P a projector. With
df/dt = -rate K (f - y) and X^T X = k times a projector, t here is rate k t there; X^T X = 1 with rate 1/P multiplies
all times by P.

Errata: Atanasov et al. 2022, Eq. 59 has u^(2L-2) for u^(L-1); Eq. 60 and Sec. 4.1.1 leave out the factor L; Eq. 61 has
(L-2)/L for L-2.
"""

import math
from typing import Any

import torch
from torch import Tensor

from featlearn.theory.arguments import checked_numbers, checked_times
from featlearn.theory.deep_linear.linear_network import checked_depth
from featlearn.theory.deep_linear.time_integral import COORDINATES, Coordinate

_FARTHEST = 1e4
"""No coordinate has to go beyond: exp(-1e4) is zero in doubles."""


def strength(times: Any, s: Any, c0: Any, weight_layers: int) -> Tensor:
    """Strength c(t) of a mode that starts at c0, toward s (Atanasov et al. 2022, Eq. 60 with its factor L).

    `times` (any shape), `s` and `c0` are numbers or tensors, broadcast against each other; the result has their common
    shape. Any sign: c0 beyond s comes back to s; c0 = 0 stays there (with two layers or more), and c0 against s goes
    to 0, the saddle that a balanced network cannot leave. Infinite times are the end of training.

    Two layers: c = s e^(2st) / (e^(2st) - 1 + s / c0). Deeper: `time_to` inverted, to rounding.
    """
    return _path(times, s, c0, weight_layers)[0]


def remaining(times: Any, s: Any, c0: Any, weight_layers: int) -> Tensor:
    """s - c(t), what is left to learn, to all digits also when c is s to rounding; arguments as for `strength`.

    The loss of the mode is its square, times |X beta|^2. See Atanasov et al. 2022, App. E.1.
    """
    return _path(times, s, c0, weight_layers)[1]


def time_to(c: Any, s: Any, c0: Any, weight_layers: int) -> Tensor:
    """Time at which the strength is c; numbers or tensors, broadcast against each other.

    See Atanasov et al. 2022, Eq. 60 (integrated).

        t = 1/(L s) [c^(1-p) / (1-p) 2F1(1, 1-p; 2-p; c/s)] from c0 to c,      p = 2 - 2/L, L > 2
        t = 1/(2s) log(c (s - c0) / (c0 (s - c))),                              L = 2

    inf for c = s and other values that are only approached, nan for values that are never reached.
    """
    depth = checked_depth(weight_layers)
    value, teacher, start = torch.broadcast_tensors(
        checked_numbers(c, "c"), checked_numbers(s, "s"), checked_numbers(c0, "c0")
    )
    times = torch.full_like(value, torch.nan)
    end = _end(teacher, start, depth)
    between = (value - start) * (end - value) > 0
    for regime, here in _regimes(teacher, start, depth).items():
        mask = here & between
        if bool(mask.any()):
            times[mask] = _time(regime, value[mask], teacher[mask], start[mask], depth)
    times = torch.where(value == end, torch.inf, times)
    return torch.where(value == start, torch.zeros_like(times), times)


def half_time(s: Any, c0: Any, weight_layers: int) -> Tensor:
    """Time at which the loss is half of that of f = 0: t(s (1 - 1/sqrt 2)) (Atanasov et al. 2022, Fig. 3a, C.2b).

    Two layers: log((s / c0 - 1) (sqrt 2 - 1)) / (2s). nan where the start is beyond, or against s. Random small weights
    of two layers start, typically, at c0 = <q0> / 2 (`initial_statistics`).
    """
    return time_to(checked_numbers(s, "s") * (1 - math.sqrt(0.5)), s, c0, weight_layers)


def half_time_scaling(s: Any, c0: Any, weight_layers: int) -> Tensor:
    """`half_time` to leading order in small c0 (Atanasov et al. 2022, Sec. 4.1.1, Eq. 61).

    sigma^(2-L) / (s (L - 2)) for c0 = sigma^L and L > 2, log((sqrt 2 - 1) s / c0) / (2s) for two layers. Positive s and
    c0, broadcast against each other.

    Erratum: the print has L / (s (L-2)) sigma^(2-L) and, in the text, s (L-2) sigma^(2-L).
    """
    depth = checked_depth(weight_layers, 2)
    teacher, start = checked_numbers(s, "s", above=0.0), checked_numbers(c0, "c0", above=0.0)
    if depth == 2:
        return torch.log((math.sqrt(2) - 1) * teacher / start) / (2 * teacher)
    return start ** (2 / depth - 1) / (teacher * (depth - 2))


def early_strength(times: Any, s: Any, c0: Any, weight_layers: int) -> Tensor:
    """c(t) while it is much smaller than s: [c0^(-(L-2)/L) - (L-2) s t]^(-L/(L-2)), c0 e^(2st) for L = 2.

    See Atanasov et al. 2022, Eq. 61.

    Positive s and c0, broadcast. inf from the time on at which this form, without the saturation at s, diverges.
    """
    depth = checked_depth(weight_layers, 2)
    moments = checked_times(times, infinite=True)
    teacher, start = checked_numbers(s, "s", above=0.0), checked_numbers(c0, "c0", above=0.0)
    if depth == 2:
        return start * torch.exp(2 * teacher * moments)
    left = start ** (2 / depth - 1) - (depth - 2) * teacher * moments
    return torch.where(left > 0, left.clamp(min=0) ** (-depth / (depth - 2)), torch.inf)


def _path(times: Any, s: Any, c0: Any, weight_layers: int) -> tuple[Tensor, Tensor]:
    """c and s - c."""
    depth = checked_depth(weight_layers)
    moments, teacher, start = torch.broadcast_tensors(
        checked_times(times, infinite=True), checked_numbers(s, "s"), checked_numbers(c0, "c0")
    )
    ended = torch.isinf(moments)
    value = torch.where(ended, _end(teacher, start, depth), start)
    left = teacher - value
    for regime, here in _regimes(teacher, start, depth).items():
        mask = here & (moments > 0) & ~ended
        if bool(mask.any()):
            value[mask], left[mask] = _moved(regime, moments[mask], teacher[mask], start[mask], depth)
    return value, left


def _regimes(s: Tensor, c0: Tensor, depth: int) -> dict[str, Tensor]:
    """Return masks of the regimes; all False at fixed points."""
    if depth == 1:
        return {"linear": c0 != s}
    ahead = torch.where(c0.sign() == s.sign(), c0.abs() - s.abs(), torch.nan)
    moving = (c0 != 0) & (s != 0)
    return {
        "below": moving & (ahead < 0),
        "above": moving & (ahead > 0),
        "against": moving & (c0.sign() != s.sign()),
        "untaught": (c0 != 0) & (s == 0),
    }


def _end(s: Tensor, c0: Tensor, depth: int) -> Tensor:
    """Return the limit of c."""
    stuck = (c0.sign() != s.sign()) & (depth > 1)
    return torch.where(stuck, torch.zeros_like(s), s)


def _moved(regime: str, times: Tensor, s: Tensor, c0: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    if regime == "linear":
        # Each by the form that does not cancel: c near c0 at first, s - c near 0 in the end.
        return c0 - (s - c0) * torch.expm1(-times), (s - c0) * torch.exp(-times)
    power = 2 - 2 / depth
    if regime == "untaught":
        # d|c|/dt = -L |c|^(1+p), p L = 2 (L-1)
        value = c0 * (1 + 2 * (depth - 1) * c0.abs() ** power * times) ** (-1 / power)
        return value, -value
    form = COORDINATES[regime]
    share, gap = form.shares(_position(form, form.start(s, c0), s.abs() ** power * times, depth))
    return s * share, s * gap


def _time(regime: str, c: Tensor, s: Tensor, c0: Tensor, depth: int) -> Tensor:
    if regime == "linear":
        return torch.log((s - c0) / (s - c))
    power = 2 - 2 / depth
    if regime == "untaught":
        return (c.abs() ** -power - c0.abs() ** -power) / (2 * (depth - 1))
    form = COORDINATES[regime]
    elapsed = form.time(form.start(s, c), depth) - form.time(form.start(s, c0), depth)
    return elapsed / s.abs() ** power


def _position(form: Coordinate, start: Tensor, elapsed: Tensor, depth: int) -> Tensor:
    """Return the coordinate after a scaled time: bisection, then Newton's steps for the last digits."""
    if depth == 2:
        return start + 2 * elapsed
    target = form.time(start, depth) + elapsed
    low, high = form.bracket(start, _FARTHEST)
    for _ in range(20):  # 1e4 wide at most, or 1e300 in the geometric sense: then narrower than where Newton is at home
        middle = form.between(low, high)
        short = form.time(middle, depth) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    position = form.between(low, high)
    for _ in range(8):
        step = (target - form.time(position, depth)) / form.slope(position, depth)
        position = torch.minimum(torch.maximum(position + step, low), high)
    return position
