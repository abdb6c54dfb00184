"""Parametrizations as powers of the width of every kind of weight, and the match of a network.

A scheme sets initial scales, multipliers, and learning rates as powers of the width n (Yang & Hu 2021). In function
space, two powers per weight remain for any multipliers:

- the gain: the size of the weight's output for random inputs of size one, including multipliers;
- the rate: the power by which its first update moves the weight's output along the gradient, for inputs and, if the
  update is proportional to the gradient, gradients of size one. For SGD that is lr m^2 |h|^2, for Adam lr m |h|, with
  multiplier m and |h|^2 = n where the inputs of the weight grow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Update = Literal["proportional", "normalized"]
"""Whether doubling the loss doubles the update (SGD, momentum), or leaves it unchanged (Adam and most others)."""
Kind = Literal["input", "hidden", "output", "vector", "finite"]
"""Sides of a weight that grow with the width: outputs, both, inputs; or a growing vector (bias, gain), or none."""


MATRICES = ("input", "hidden", "output")
"""Kinds that determine the scheme."""


@dataclass(frozen=True)
class ScalingScheme:
    """A parametrization for a kind of update."""

    name: str
    readout_gain: float
    """power of the initial output; all other gains are 0"""
    rates: dict[str, float]
    """by kind"""
    shifts: tuple[float, ...] = (0.0,)
    """common powers of all rates that belong to the scheme"""
    readout_weight: float | None = None
    """power of the spectral norm of the stored readout weight; 1/2 for entries of order one"""
    hidden_weight: float | None = None
    """the same for hidden weights"""


def _scheme(name: str, gain: float, rates: Sequence[float], **more: Any) -> ScalingScheme:
    kinds = ("input", "hidden", "output", "vector", "finite")
    return ScalingScheme(name, gain, dict(zip(kinds, rates, strict=True)), **more)


STEPS = (0.0, -0.25, -0.5, -0.75, -1.0)
"""Powers of a common learning rate of the standard parametrization: there is no single choice."""

TABLES: dict[Update, tuple[ScalingScheme, ...]] = {
    # rates in the order input, hidden, output, vector, finite
    "proportional": (
        _scheme("standard", 0.0, (0, 1, 1, 0, 0), shifts=STEPS, readout_weight=0.0, hidden_weight=0.0),
        _scheme("ntk", 0.0, (0, 0, 0, 0, 0), readout_weight=0.5, hidden_weight=0.5),
        _scheme("mean_field", -0.5, (1, 1, 0, 1, 0), readout_weight=0.5),
        _scheme("mup", -0.5, (1, 1, 0, 1, 0)),
    ),
    "normalized": (
        _scheme("standard", 0.0, (0, 1, 1, 0, 0), shifts=STEPS, readout_weight=0.0, hidden_weight=0.0),
        _scheme("ntk", 0.0, (0, 0.5, 0.5, 0, 0), shifts=(0.0, -0.5), readout_weight=0.5, hidden_weight=0.5),
        _scheme("mean_field", -0.5, (0, 0.5, 0, 0, 0), shifts=(0.0, -0.5), readout_weight=0.5, hidden_weight=0.5),
        _scheme("mup", -0.5, (0, 0, 0, 0, 0)),
    ),
}
"""Gains and rates of Yang & Hu 2021, Table 1, and Yang et al. 2022, Tables 3, 8 and 9, multipliers taken in.

Deep mean field is that of entries of order one, divided by sqrt(n) in hidden layers and by n in the readout, with one
rate for all. Under SGD at rates lr n its limit is that of muP, and only how the weights are stored differs."""

WORDS = {
    "standard": "standard parametrization: weights of 1 / sqrt(fan_in), one learning rate",
    "ntk": "NTK parametrization: weights of order one, divided by sqrt(fan_in)",
    "mean_field": "mean-field parametrization: weights of order one, the output divided by the width",
    "mup": "maximal update parametrization (muP)",
    "other": "none of the known parametrizations",
}

TOLERANCE = 0.2
"""Powers that differ by less are equal; schemes differ by 1/2."""


@dataclass(frozen=True)
class WeightPowers:
    """Powers of a weight that determine the scheme."""

    parameter: str
    kind: str
    gain: float
    """nan if unknown, as for weights that start at zero"""
    gain_error: float
    rate: float
    rate_error: float
    weight: float
    """power of the spectral norm of the stored weight"""
    tied: bool = False
    is_readout: bool = True
    constant_rate: float | None = None
    """rate at a constant learning rate, for updates that follow neither the gradient nor its signs"""


@dataclass(frozen=True)
class Match:
    """A scheme, and the deviation of a network from it."""

    scheme: ScalingScheme
    shift: float
    """power by which all rates differ from the table"""
    cost: float
    deviating: int
    """number of weights with another gain or rate"""


def off(value: float, expected: float, error: float) -> float:
    """Return the deviation of a power; 0 if it is insignificant or unknown."""
    if math.isnan(value) or math.isnan(expected):
        return 0.0
    margin = max(TOLERANCE, 0.0 if math.isnan(error) else 3 * error)
    return value - expected if abs(value - expected) > margin else 0.0


def expected_gain(scheme: ScalingScheme, weight: WeightPowers) -> float:
    """Return the gain of a weight; nan for tied weights, which fit only one of their uses without a multiplier."""
    if weight.tied and scheme.name in ("standard", "ntk"):
        return math.nan
    if weight.kind != "output":
        return 0.0
    if weight.is_readout or math.isnan(weight.gain):
        return scheme.readout_gain
    return min((0.0, scheme.readout_gain), key=lambda power: abs(weight.gain - power))  # routers, gates


def expected_rate(scheme: ScalingScheme, weight: WeightPowers, shift: float) -> float:
    """Return the rate of a weight. All but muP keep one learning rate, whatever the optimizer makes of it."""
    if weight.constant_rate is not None and scheme.name != "mup":
        return weight.constant_rate + shift
    return scheme.rates[weight.kind] + shift


def nearest(weights: Sequence[WeightPowers], update: Update) -> Match:
    """Return the scheme with the fewest deviations of matrices."""
    matrices = [match for match in weights if match.kind in MATRICES]
    options = [
        _match(matrices, scheme, shift)
        for scheme in TABLES[update]
        for shift in sorted({0.0, -0.5, -1.0, 0.5, 1.0, -1.5, 1.5, *scheme.shifts}, key=abs)
    ]
    return min(options, key=lambda match: match.cost)


def _match(weights: Sequence[WeightPowers], scheme: ScalingScheme, shift: float) -> Match:
    cost, deviating, total = 0.0, 0, 0.0
    for weight in weights:
        gain = off(weight.gain, expected_gain(scheme, weight), weight.gain_error)
        expected = expected_rate(scheme, weight, shift)
        rate = off(weight.rate, expected, weight.rate_error)
        # a wrong multiplier changes both
        cost += 1.2 if gain and rate else 1.0 if gain else 0.9 if rate else 0.0
        deviating += bool(gain or rate)
        total += abs(weight.rate - expected) if weight.rate == weight.rate else 0.0
    cost += 0.0 if shift in scheme.shifts else 1.5
    cost += 0.05 * scheme.shifts.index(shift) if shift in scheme.shifts else 0.0
    cost += 0.4 * _stored_otherwise(weights, scheme, "output", scheme.readout_weight)
    cost += 1.0 * _stored_otherwise(weights, scheme, "hidden", scheme.hidden_weight)
    return Match(scheme, shift, cost + 0.1 * total / max(len(weights), 1), deviating)


def _stored_otherwise(
    weights: Sequence[WeightPowers], scheme: ScalingScheme, kind: str, expected: float | None
) -> bool:
    """Whether most weights of a kind are stored at another scale than the scheme's; tied ones serve two purposes."""
    selected = [
        weight for weight in weights if weight.kind == kind and weight.weight == weight.weight and not weight.tied
    ]
    if expected is None:
        return False
    if not selected:
        return scheme.name == "mean_field" and kind == "output"  # a readout of zero, or a tied one: muP
    return sum(abs(weight.weight - expected) > 0.25 for weight in selected) * 2 > len(selected)
