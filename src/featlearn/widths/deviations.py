"""From sizes at several widths to powers, scheme, phase and problems."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.theory.phases import Phase
from featlearn.widths.fits import UNKNOWN, power, product_power
from featlearn.widths.scaling import LayerScaling, Problem
from featlearn.widths.schemes import MATRICES, TOLERANCE, Match, Update, WeightPowers, expected_gain, off
from featlearn.widths.size_runs import WidthSizes

GROWS = 1.5
"""Ratio of two sizes, at the largest and smallest width, above which a size grows."""
VECTOR_TOLERANCE = 0.4
"""Biases and gains have few numbers, and noisy powers."""
STABLE = 0.25
"""Powers below are those of a size that stays."""
Runs = Sequence[Sequence[WidthSizes]]
"""by width, by seed"""


@dataclass(frozen=True)
class Weight:
    """The powers of one parameter."""

    powers: WeightPowers
    layer: str
    inside: bool
    """whether its layer has parts with parameters of their own, so that its place in it is not known"""
    outside_grows: bool
    """whether the output of that layer grows with the width"""
    gain: Estimate
    rate: Estimate
    effect: Estimate
    """power of what its first update moves, multipliers behind the layer included, for errors of size one"""
    descent: Estimate
    """power of what its first update takes off the loss, for errors of size one"""


def weights_of(runs: Runs, widths: Sequence[int], update: Update) -> dict[str, Weight]:
    """The powers of every parameter that had a gradient."""
    first, last = runs[0][0], runs[-1][0]
    found = {}
    for name, layer in last.owners.items():
        if not any("effect" in run.parameters.get(name, {}) for some in runs for run in some):
            continue
        kind, inside = _kind(name, first, last)

        def size(quantity: str, name: str = name) -> Tensor:
            return torch.tensor([[run.parameters[name].get(quantity, math.nan) for run in some] for some in runs])

        # multipliers come in powers of 1/2: what is nearer to none is noise
        behind = (float(abs(float(power(size("multiplier"), widths))) > STABLE), size("multiplier"))
        entry = -float(kind in MATRICES), size("entry")
        gain = product_power([(1.0, size("gain")), behind], widths)
        error = (-1.0, size("output_gradient"))
        response, gradient = (1.0, size("response")), (1.0, size("gradient"))
        if update == "proportional":  # to the gradient, and to the error
            rate = product_power([response, behind, behind, entry, entry], widths)
            effect = product_power([response, gradient, behind, error], widths)
            descent = product_power([response, gradient, gradient, (1.0, size("count")), error, error], widths)
        else:
            rate = product_power([response, behind, entry], widths)
            effect = product_power([(1.0, size("effect")), behind], widths)
            descent = product_power([(1.0, size("descent")), error], widths)
        tied = name in last.tied
        powers = WeightPowers(
            name,
            kind,
            float(gain),
            float(gain.stderr),
            float(rate),
            float(rate.stderr),
            float(power(size("weight"), widths)),
            tied,
        )
        grows = _grows(first.layers[layer]["size"], last.layers[layer]["size"])
        found[name] = Weight(powers, layer, inside, grows, gain, rate, effect, descent)
    return found


def _grows(first: float, last: float) -> bool:
    return last > GROWS * first


def _kind(name: str, first: WidthSizes, last: WidthSizes) -> tuple[str, bool]:
    """The kind of a parameter, and whether its layer is composed of others."""
    layer = last.owners[name]
    growing = sum(_grows(a, b) for a, b in zip(first.shapes[name], last.shapes[name], strict=True))
    matrix = len(last.shapes[name]) > 1
    inside = layer != name.rpartition(".")[0] or any(
        other != layer and (not layer or other.startswith(f"{layer}.")) for other in last.owners.values()
    )
    if not growing:
        return "finite", inside
    if inside:
        return "hidden" if growing > 1 else "vector", inside
    into, out = (_grows(first.layers[layer][key], last.layers[layer][key]) for key in ("entry_size", "size"))
    if not matrix or (into and out and growing < 2):
        return "vector", inside
    return ("hidden" if out else "output") if into else "input", inside


def layers_of(
    runs: Runs, widths: Sequence[int], weights: Mapping[str, Weight], match: Match
) -> dict[str, LayerScaling]:
    """Powers by layer: those of its largest weight, and rates of its other parameters."""
    last = runs[-1][0]
    found = {}
    for layer in dict.fromkeys(last.owners.values()):
        names = [name for name, owner in last.owners.items() if owner == layer]
        main = max(names, key=lambda name: (len(last.shapes[name]) > 1, math.prod(last.shapes[name])))
        sizes = {
            key: torch.tensor([[run.layers[layer].get(key, math.nan) for run in some] for some in runs])
            for key in ("activation", "change", "kernel_motion")
        }
        sizes |= {
            key: torch.tensor([[run.parameters[main].get(key, math.nan) for run in some] for some in runs])
            for key in ("weight", "update", "effect")
        }
        exponents = {key: power(values, widths) for key, values in sizes.items()}
        weight = weights.get(main)
        exponents["gain"] = UNKNOWN if weight is None else weight.gain
        exponents["rate"] = UNKNOWN if weight is None else weight.rate
        kind = _kind(main, runs[0][0], last)[0]
        expected = {"rate": match.scheme.rates[kind] + match.shift}
        if weight is not None and kind in MATRICES:
            expected["gain"] = expected_gain(match.scheme, weight.powers)
        others = {name: weights[name].rate for name in names if name != main and name in weights}
        found[layer] = LayerScaling(layer, kind, main, exponents, expected, sizes, others, main in last.tied)
    return found


def attention_of(runs: Runs, widths: Sequence[int]) -> dict[str, dict[str, Estimate]]:
    """Powers of attention, by module."""
    places = [place for place in runs[-1][0].attention if all(place in run.attention for some in runs for run in some)]
    return {
        place: {
            key: power(
                torch.tensor([[run.attention[place].get(key, math.nan) for run in some] for some in runs]), widths
            )
            for key in ("scale", "logits", "change", "head")
        }
        for place in places
    }


def phase_of(weights: Mapping[str, Weight], update: Update, known: bool) -> Phase:
    """The phase, from what updates do to outputs and features (Yang & Hu 2021; Xu & Ziyin 2024, Sec. 4).

    Where the scheme is `known`, the powers are multiples of 1/2 and follow from the gain and rate of each weight; else
    they are those that were measured.
    """
    matrices = [one for one in weights.values() if one.powers.kind in MATRICES]
    readouts = [one for one in matrices if one.powers.kind == "output"]
    others = [one for one in matrices if one.powers.kind != "output"]
    if known and readouts:
        # entries of the readout, at the start and after a step; gradients behind it are of that size
        entries = [_snapped(one.powers.gain) - 0.5 for one in readouts] + [
            _snapped(one.powers.rate) - 1 for one in readouts
        ]
        back = max(value for value in entries if not math.isnan(value))
        effects = [_snapped(one.powers.rate) + (back if update == "proportional" else 0.0) for one in others]
        moved = [_snapped(one.powers.rate) for one in readouts] + [value + back + 1 for value in effects]
    else:
        effects = [float(one.effect) for one in others]
        moved = [float(one.descent) for one in matrices]
    features = max((value for value in effects if not math.isnan(value)), default=-math.inf)
    outputs = max((value for value in moved if not math.isnan(value)), default=-math.inf)
    if max(outputs, features) > STABLE:
        return Phase.UNSTABLE
    if outputs < -STABLE:
        return Phase.FROZEN
    return Phase.LEARNING if features > -STABLE else Phase.KERNEL


def _snapped(value: float) -> float:
    """The nearest multiple of 1/2, if it is near."""
    rounded = round(2 * value) / 2 if math.isfinite(value) else value
    return rounded if abs(rounded - value) < STABLE else value


def problems_of(
    weights: Mapping[str, Weight], match: Match, attention: Mapping[str, Mapping[str, Estimate]], update: Update
) -> list[Problem]:
    """Parameters that do not follow the scheme, by more than the tolerance and three standard errors."""
    found: list[Problem | None] = []
    if match.shift not in match.scheme.shifts:
        remedy = f"multiply all learning rates by {_power_of_width(-match.shift)}"
        found.append(Problem("all", "all", "all learning rates", Estimate(match.shift, 0.0, 1), remedy))
    for name, weight in weights.items():
        if weight.powers.kind in MATRICES:
            found.append(_matrix_problem(name, weight, match, update))
        else:
            found.append(_vector_problem(name, weight, match))
    found += [_attention_problem(place, powers, match) for place, powers in attention.items()]
    return [one for one in found if one is not None]


def _matrix_problem(name: str, weight: Weight, match: Match, update: Update) -> Problem | None:
    own = weight.powers
    gain = off(own.gain, expected_gain(match.scheme, own), own.gain_error)
    rate = off(own.rate, match.scheme.rates[own.kind] + match.shift, own.rate_error)
    twice = 2 if update == "proportional" else 1
    if not gain and not rate:
        return None
    if gain and rate and abs(rate - twice * gain) < 2 * TOLERANCE:
        where = "behind the readout" if own.tied or own.kind == "output" else "on what it gives"
        return Problem(
            name,
            weight.layer,
            "multiplier",
            Estimate(gain, own.gain_error, weight.gain.samples),
            f"put a factor {_power_of_width(-gain)} {where}",
        )
    if gain and not (rate and abs(rate) > abs(gain)):
        return Problem(
            name,
            weight.layer,
            "initial scale",
            Estimate(gain, own.gain_error, weight.gain.samples),
            f"multiply its standard deviation at the start by {_power_of_width(-gain)}",
        )
    also = f", and its standard deviation at the start by {_power_of_width(-gain)}" if gain else ""
    return Problem(
        name,
        weight.layer,
        "learning rate",
        Estimate(rate, own.rate_error, weight.rate.samples),
        f"multiply its learning rate by {_power_of_width(-rate)}{also}",
    )


def _vector_problem(name: str, weight: Weight, match: Match) -> Problem | None:
    """Biases and gains that are too fast; too slow, they stay as they are, and nothing depends on them."""
    own, scheme = weight.powers, match.scheme
    expected = scheme.rates[own.kind] + match.shift
    if weight.inside and not weight.outside_grows:  # seen at the output of the network
        if scheme.name not in ("mean_field", "mup"):
            return None
        expected = 0.0
    rate = off(own.rate, expected, own.rate_error)
    if rate < VECTOR_TOLERANCE:
        return None
    return Problem(
        name,
        weight.layer,
        "learning rate",
        Estimate(rate, own.rate_error, weight.rate.samples),
        f"multiply its learning rate by {_power_of_width(-rate)}",
    )


def _attention_problem(place: str, powers: Mapping[str, Estimate], match: Match) -> Problem | None:
    """1 / d where features are learned and heads grow; else 1 / sqrt(d), or 1 / d as well."""
    scale, head = powers["scale"], float(powers["head"])
    accepted = [0.0] if head < 0.5 else [-head] if match.scheme.name == "mup" else [-head / 2, -head]
    nearest = min(accepted, key=lambda one: abs(float(scale) - one))
    wrong = off(float(scale), nearest, float(scale.stderr))
    if not wrong:
        return None
    return Problem(
        place,
        place,
        "attention scale",
        Estimate(wrong, float(scale.stderr), scale.samples),
        f"multiply the products of queries and keys by {_power_of_width(-wrong)}",
    )


def _power_of_width(value: float) -> str:
    rounded = round(2 * value) / 2
    return f"width^{rounded:g}" if rounded else f"width^{value:.2f}"
