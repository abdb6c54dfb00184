"""Parametrizations, as powers of the width of every kind of weight; which of them a network follows.

A scheme draws weights, multiplies what they give, and sets learning rates, each as a power of the width n (Yang & Hu
2021). In function space two powers of each weight remain, whatever the multipliers:

- the gain: the size of what the weight gives for random inputs of size one, multipliers included;
- the rate: by which power its first update moves what the weight gives, along the gradient, for inputs and, if the
  update is proportional to the gradient, gradients of size one. For SGD that is lr m^2 |h|^2, for Adam lr m |h|, with
  multiplier m and |h|^2 = n where the inputs of the weight grow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Update = Literal["proportional", "normalized"]
"""Whether twice the loss makes twice the update (SGD, momentum), or the same (Adam and most others)."""
Kind = Literal["input", "hidden", "output", "vector", "finite"]
"""Which of inputs and outputs of a weight grow with the width: the outputs, both, the inputs; or it is a vector that
grows (bias, gain of a norm), or nothing of it grows."""


MATRICES = ("input", "hidden", "output")
"""Kinds that decide the scheme."""


@dataclass(frozen=True)
class ScalingScheme:
    """One parametrization under one kind of update."""

    name: str
    readout_gain: float
    """power of the output at the start; all other gains are 0"""
    rates: dict[str, float]
    """by kind"""
    shifts: tuple[float, ...] = (0.0,)
    """common powers of all rates that belong to the scheme"""
    readout_weight: float | None = None
    """power of the spectral norm of the readout as it is stored; 1/2 for entries of order one"""
    hidden_weight: float | None = None
    """the same for hidden weights"""


def _scheme(name: str, gain: float, rates: Sequence[float], **more: Any) -> ScalingScheme:
    kinds = ("input", "hidden", "output", "vector", "finite")
    return ScalingScheme(name, gain, dict(zip(kinds, rates, strict=True)), **more)


TABLES: dict[Update, tuple[ScalingScheme, ...]] = {
    # rates in the order input, hidden, output, vector, finite
    "proportional": (
        _scheme("standard", 0.0, (0, 1, 1, 0, 0), shifts=(0.0, -1.0), readout_weight=0.0, hidden_weight=0.0),
        _scheme("ntk", 0.0, (0, 0, 0, 0, 0), readout_weight=0.5, hidden_weight=0.5),
        _scheme("mean_field", -0.5, (1, 1, 0, 1, 0), readout_weight=0.5),
        _scheme("mup", -0.5, (1, 1, 0, 1, 0)),
    ),
    "normalized": (
        _scheme("standard", 0.0, (0, 1, 1, 0, 0), shifts=(0.0, -0.5, -1.0), readout_weight=0.0, hidden_weight=0.0),
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

TOLERANCE = 0.25
"""Powers that differ by less are equal; schemes differ by 1/2."""


@dataclass(frozen=True)
class WeightPowers:
    """What decides the scheme, of one weight."""

    parameter: str
    kind: str
    gain: float
    """nan where it is not known, as of weights that start at zero"""
    gain_error: float
    rate: float
    rate_error: float
    weight: float
    """power of its spectral norm as it is stored"""
    tied: bool = False


@dataclass(frozen=True)
class Match:
    """A scheme, and how well a network follows it."""

    scheme: ScalingScheme
    shift: float
    """power by which all rates differ from the table"""
    cost: float
    deviating: int
    """weights of which gain or rate is another"""


def off(value: float, expected: float, error: float) -> float:
    """By which power a value is off; 0 where it is not, or is not known."""
    if math.isnan(value) or math.isnan(expected):
        return 0.0
    margin = max(TOLERANCE, 0.0 if math.isnan(error) else 3 * error)
    return value - expected if abs(value - expected) > margin else 0.0


def expected_gain(scheme: ScalingScheme, weight: WeightPowers) -> float:
    """The gain of a weight; a tied one without a multiplier behind the readout fits one of its two uses only."""
    if weight.tied and scheme.name in ("standard", "ntk"):
        return math.nan
    return scheme.readout_gain if weight.kind == "output" else 0.0


def nearest(weights: Sequence[WeightPowers], update: Update) -> Match:
    """The scheme with the fewest deviations among weights that are matrices."""
    judged = [one for one in weights if one.kind in MATRICES]
    options = [
        _match(judged, scheme, shift) for scheme in TABLES[update] for shift in (0.0, -0.5, -1.0, 0.5, 1.0, -1.5, 1.5)
    ]
    return min(options, key=lambda one: one.cost)


def _match(weights: Sequence[WeightPowers], scheme: ScalingScheme, shift: float) -> Match:
    cost, deviating, total = 0.0, 0, 0.0
    for one in weights:
        gain = off(one.gain, expected_gain(scheme, one), one.gain_error)
        rate = off(one.rate, scheme.rates[one.kind] + shift, one.rate_error)
        # a wrong multiplier changes both: one cause
        cost += 1.2 if gain and rate else 1.0 if gain else 0.9 if rate else 0.0
        deviating += bool(gain or rate)
        total += abs(one.rate - scheme.rates[one.kind] - shift) if one.rate == one.rate else 0.0
    cost += 0.0 if shift in scheme.shifts else 1.5
    cost += 0.05 * scheme.shifts.index(shift) if shift in scheme.shifts else 0.0
    cost += 0.4 * _stored_otherwise(weights, scheme, "output", scheme.readout_weight)
    cost += 1.0 * _stored_otherwise(weights, scheme, "hidden", scheme.hidden_weight)
    return Match(scheme, shift, cost + 0.01 * total / max(len(weights), 1), deviating)


def _stored_otherwise(
    weights: Sequence[WeightPowers], scheme: ScalingScheme, kind: str, expected: float | None
) -> bool:
    """Whether most weights of a kind are stored at another scale than the scheme's; tied ones serve two purposes."""
    found = [one for one in weights if one.kind == kind and one.weight == one.weight and not one.tied]
    if expected is None:
        return False
    if not found:
        return scheme.name == "mean_field" and kind == "output"  # a readout of zero, or a tied one: muP
    return sum(abs(one.weight - expected) > 0.25 for one in found) * 2 > len(found)
