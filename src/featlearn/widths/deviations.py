"""Derive powers, scheme, phase, and problems from sizes at several widths."""

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
"""Tolerance for biases and gains, which have few entries and noisy powers."""
STABLE = 0.25
"""Powers below this value count as constant."""
Runs = Sequence[Sequence[WidthSizes]]
"""by width, by seed"""


@dataclass(frozen=True)
class Weight:
    """Powers of a parameter."""

    powers: WeightPowers
    layer: str
    inside: bool
    """whether its layer has submodules with parameters, so that its position is unknown"""
    outside_grows: bool
    """whether the output of that layer grows with the width"""
    gain: Estimate
    rate: Estimate
    effect: Estimate
    """power of the effect of its first update, including multipliers after the layer, for errors of size one"""
    descent: Estimate
    """power of the loss decrease by its first update, for errors of size one"""


def fit_weights(runs: Runs, widths: Sequence[int], update: Update) -> dict[str, Weight]:
    """Fit the powers of all parameters with a gradient."""
    first, last = runs[0][0], runs[-1][0]
    weights = {}
    for name, layer in last.owners.items():
        if not any("effect" in run.parameters.get(name, {}) for seed_runs in runs for run in seed_runs):
            continue
        kind, is_composed = _kind(name, first, last)

        def size(quantity: str, name: str = name) -> Tensor:
            return torch.tensor(
                [[run.parameters[name].get(quantity, math.nan) for run in seed_runs] for seed_runs in runs]
            )

        # multipliers come in powers of 1/2: what is nearer to none is noise
        multiplier = (float(abs(float(power(size("multiplier"), widths))) > STABLE), size("multiplier"))
        entry = -float(kind in MATRICES), size("entry")
        gain = product_power([(1.0, size("gain")), multiplier], widths)
        error = (-1.0, size("output_gradient"))
        response, gradient = (1.0, size("response")), (1.0, size("gradient"))
        if update == "proportional":  # to the gradient, and to the error
            rate = product_power([response, multiplier, multiplier, entry, entry], widths)
            effect = product_power([response, gradient, multiplier, error], widths)
            descent = product_power([response, gradient, gradient, (1.0, size("count")), error, error], widths)
        else:
            rate = product_power([response, multiplier, entry], widths)
            effect = product_power([(1.0, size("effect")), multiplier], widths)
            descent = product_power([(1.0, size("descent")), error], widths)
        is_tied = name in last.tied
        powers = WeightPowers(
            name,
            kind,
            float(gain),
            float(gain.stderr),
            float(rate),
            float(rate.stderr),
            float(power(size("weight"), widths)),
            is_tied,
        )
        grows = _grows(first.layers[layer]["size"], last.layers[layer]["size"])
        weights[name] = Weight(powers, layer, is_composed, grows, gain, rate, effect, descent)
    return weights


def _grows(first: float, last: float) -> bool:
    return last > GROWS * first


def _kind(name: str, first: WidthSizes, last: WidthSizes) -> tuple[str, bool]:
    """Return the kind of a parameter, and whether its layer contains other layers."""
    layer = last.owners[name]
    growing = sum(_grows(a, b) for a, b in zip(first.shapes[name], last.shapes[name], strict=True))
    matrix = len(last.shapes[name]) > 1
    is_composed = layer != name.rpartition(".")[0] or any(
        other != layer and (not layer or other.startswith(f"{layer}.")) for other in last.owners.values()
    )
    if not growing:
        return "finite", is_composed
    if is_composed:
        return "hidden" if growing > 1 else "vector", is_composed
    input_grows, output_grows = (
        _grows(first.layers[layer][key], last.layers[layer][key]) for key in ("entry_size", "size")
    )
    if not matrix or (input_grows and output_grows and growing < 2):
        return "vector", is_composed
    return ("hidden" if output_grows else "output") if input_grows else "input", is_composed


def fit_layers(
    runs: Runs, widths: Sequence[int], weights: Mapping[str, Weight], match: Match
) -> dict[str, LayerScaling]:
    """Fit powers by layer: those of its largest weight, and rates of other parameters."""
    last = runs[-1][0]
    layers = {}
    for layer in dict.fromkeys(last.owners.values()):
        names = [name for name, owner in last.owners.items() if owner == layer]
        main = max(names, key=lambda name: (len(last.shapes[name]) > 1, math.prod(last.shapes[name])))
        sizes = {
            key: torch.tensor([[run.layers[layer].get(key, math.nan) for run in seed_runs] for seed_runs in runs])
            for key in ("activation", "change", "kernel_motion")
        }
        sizes |= {
            key: torch.tensor([[run.parameters[main].get(key, math.nan) for run in seed_runs] for seed_runs in runs])
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
        layers[layer] = LayerScaling(layer, kind, main, exponents, expected, sizes, others, main in last.tied)
    return layers


def fit_attention(runs: Runs, widths: Sequence[int]) -> dict[str, dict[str, Estimate]]:
    """Fit powers of attention, by module."""
    modules = [
        module
        for module in runs[-1][0].attention
        if all(module in run.attention for seed_runs in runs for run in seed_runs)
    ]
    return {
        module: {
            key: power(
                torch.tensor([[run.attention[module].get(key, math.nan) for run in seed_runs] for seed_runs in runs]),
                widths,
            )
            for key in ("scale", "logits", "change", "head")
        }
        for module in modules
    }


def infer_phase(weights: Mapping[str, Weight], update: Update, is_known: bool) -> Phase:
    """Infer the phase from effects of updates on outputs and features (Yang & Hu 2021; Xu & Ziyin 2024, Sec. 4).

    If the scheme is known, powers are multiples of 1/2 that follow from gains and rates; otherwise they are measured.
    """
    matrices = [weight for weight in weights.values() if weight.powers.kind in MATRICES]
    readouts = [weight for weight in matrices if weight.powers.kind == "output"]
    others = [weight for weight in matrices if weight.powers.kind != "output"]
    if is_known and readouts:
        # entries of the readout, at the start and after a step; gradients behind it are of that size
        entries = [entry for w in readouts for entry in (_snap(w.powers.gain) - 0.5, _snap(w.powers.rate) - 1)]
        readout_power = max(value for value in entries if not math.isnan(value))
        effects = [
            _snap(weight.powers.rate) + (readout_power if update == "proportional" else 0.0) for weight in others
        ]
        output_powers = [_snap(weight.powers.rate) for weight in readouts] + [
            value + readout_power + 1 for value in effects
        ]
    else:
        effects = [float(weight.effect) for weight in others]
        output_powers = [float(weight.descent) for weight in matrices]
    features = max((value for value in effects if not math.isnan(value)), default=-math.inf)
    outputs = max((value for value in output_powers if not math.isnan(value)), default=-math.inf)
    if max(outputs, features) > STABLE:
        return Phase.UNSTABLE
    if outputs < -STABLE:
        return Phase.FROZEN
    return Phase.LEARNING if features > -STABLE else Phase.KERNEL


def _snap(value: float) -> float:
    """Round to the nearest multiple of 1/2, if it is close."""
    rounded = round(2 * value) / 2 if math.isfinite(value) else value
    return rounded if abs(rounded - value) < STABLE else value


def find_problems(
    weights: Mapping[str, Weight], match: Match, attention: Mapping[str, Mapping[str, Estimate]], update: Update
) -> list[Problem]:
    """Return parameters that deviate from the scheme by more than the tolerance and three standard errors."""
    problems: list[Problem | None] = []
    if match.shift not in match.scheme.shifts:
        remedy = f"multiply all learning rates by {_power_of_width(-match.shift)}"
        problems.append(Problem("all", "all", "all learning rates", Estimate(match.shift, 0.0, 1), remedy))
    for name, weight in weights.items():
        if weight.powers.kind in MATRICES:
            problems.append(_matrix_problem(name, weight, match, update))
        else:
            problems.append(_vector_problem(name, weight, match))
    problems += [_attention_problem(module, powers, match) for module, powers in attention.items()]
    return [problem for problem in problems if problem is not None]


def _matrix_problem(name: str, weight: Weight, match: Match, update: Update) -> Problem | None:
    powers = weight.powers
    gain = off(powers.gain, expected_gain(match.scheme, powers), powers.gain_error)
    rate = off(powers.rate, match.scheme.rates[powers.kind] + match.shift, powers.rate_error)
    gain_factor = 2 if update == "proportional" else 1
    if not gain and not rate:
        return None
    power_of_width = _power_of_width(-gain)
    initial = Estimate(gain, powers.gain_error, weight.gain.samples)
    if gain and rate and abs(rate - gain_factor * gain) < 2 * TOLERANCE:
        position = "behind the readout" if powers.tied or powers.kind == "output" else "on what it gives"
        return Problem(name, weight.layer, "multiplier", initial, f"put a factor {power_of_width} {position}")
    if gain and not (rate and abs(rate) > abs(gain)):
        advice = f"multiply its standard deviation at the start by {power_of_width}"
        return Problem(name, weight.layer, "initial scale", initial, advice)
    more = f", and its standard deviation at the start by {power_of_width}" if gain else ""
    return _rate_problem(name, weight, rate, more)


def _rate_problem(name: str, weight: Weight, rate: float, more: str = "") -> Problem:
    power = Estimate(rate, weight.powers.rate_error, weight.rate.samples)
    advice = f"multiply its learning rate by {_power_of_width(-rate)}{more}"
    return Problem(name, weight.layer, "learning rate", power, advice)


def _vector_problem(name: str, weight: Weight, match: Match) -> Problem | None:
    """Return a problem for biases and gains that are too fast; slow ones do no harm."""
    powers, scheme = weight.powers, match.scheme
    expected = scheme.rates[powers.kind] + match.shift
    if weight.inside and not weight.outside_grows:  # seen at the output of the network
        if scheme.name not in ("mean_field", "mup"):
            return None
        expected = 0.0
    rate = off(powers.rate, expected, powers.rate_error)
    if rate < VECTOR_TOLERANCE:
        return None
    return _rate_problem(name, weight, rate)


def _attention_problem(module: str, powers: Mapping[str, Estimate], match: Match) -> Problem | None:
    """Check that attention scales as 1 / d for muP with growing heads, and otherwise as 1 / sqrt(d) or 1 / d."""
    scale, head = powers["scale"], float(powers["head"])
    accepted = [0.0] if head < 0.5 else [-head] if match.scheme.name == "mup" else [-head / 2, -head]
    nearest = min(accepted, key=lambda power: abs(float(scale) - power))
    deviation = off(float(scale), nearest, float(scale.stderr))
    if not deviation:
        return None
    return Problem(
        module,
        module,
        "attention scale",
        Estimate(deviation, float(scale.stderr), scale.samples),
        f"multiply the products of queries and keys by {_power_of_width(-deviation)}",
    )


def _power_of_width(value: float) -> str:
    rounded = round(2 * value) / 2
    return f"width^{rounded:g}" if rounded else f"width^{value:.2f}"
