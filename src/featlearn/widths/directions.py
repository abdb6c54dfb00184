"""Schemes of networks that grow in depth, in the rank of adapters, or in the number of experts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from featlearn.linalg.estimate import Estimate
from featlearn.theory.phases import Phase
from featlearn.widths.deviations import STABLE, VECTOR_TOLERANCE, Judgment, ProblemWriter
from featlearn.widths.scaling import Problem, UseScaling
from featlearn.widths.schemes import Update, off


@dataclass(frozen=True)
class DirectionScheme:
    """Powers of the size that a scheme gives to parts of a network."""

    name: str
    words: str
    gain: float
    """of the weight that closes a branch, or of the adapter's output weight"""
    scales_rates: bool = False
    """whether learning rates follow the size, so that all updates together move the network by a constant"""


DEPTH = (
    DirectionScheme("standard", "every block adds to the residual stream with a factor that is constant", 0.0),
    DirectionScheme("1/sqrt(L)", "branches are divided by sqrt(depth), learning rates are constant", -0.5),
    DirectionScheme("depth-muP", "branches are divided by sqrt(depth), learning rates follow", -0.5, True),
    DirectionScheme("CompleteP", "branches are divided by the depth, and every block learns features", -1.0, True),
    DirectionScheme("1/L", "branches are divided by the depth, learning rates are constant", -1.0),
)
RANK = (
    DirectionScheme("plain", "adapters without a factor", 0.0),
    DirectionScheme("rsLoRA", "adapters divided by sqrt(rank)", -0.5),
    DirectionScheme("1/r", "adapters divided by the rank, as in LoRA", -1.0),
)


def judge_depth(uses: Mapping[str, UseScaling], update: Update, sizes: Sequence[int]) -> Judgment:
    """Compare powers of the depth with those of residual schemes (Yang et al. 2023; Dey et al. 2025).

    The updates of all blocks add up along the residual stream, so together they move it by depth^(1 + effect) for the
    `effect` of one block on the stream.
    """
    blocks = {name: use for name, use in uses.items() if "*" in name}
    closing = {name for name, use in blocks.items() if use.closes_branch}
    times = 2 if update == "proportional" else 1
    options = []
    for scheme in DEPTH:
        expected = {}
        for name, use in uses.items():
            gain = scheme.gain if name in closing else 0.0
            rate = times * scheme.gain if name in closing else 0.0
            if scheme.scales_rates and name in blocks:
                rate = -1.0 if name in closing else -1.0 - times * scheme.gain
            elif use.update_rule not in ("gradient", "signs"):
                rate = scheme.gain if name in closing else 0.0
            part = "branch output" if name in closing else "branch" if name in blocks else "outside"
            kind = "vector" if use.is_vector else part
            expected[name] = replace(use, expected={"gain": gain, "rate": rate}, kind=kind)
        off_count = sum(any(_deviation(use)) for use in expected.values() if not use.is_vector)
        total = sum(
            abs(float(use.exponents["rate"]) - use.expected["rate"]) for use in expected.values() if _rated(use)
        )
        options.append((off_count + 0.1 * total / max(len(uses), 1), scheme, expected))
    # equal ones, as CompleteP and 1/L under Adam: the first
    cost, scheme, expected = min(options, key=lambda option: round(option[0], 3))
    writer = ProblemWriter(update, "depth", sizes[0])
    effects = []
    for name in blocks:
        rate = float(uses[name].exponents["rate"])
        if not math.isnan(rate):
            effects.append(1 + rate + (0.0 if name in closing else times * scheme.gain))
    forward = 0.5 + scheme.gain
    largest = max(effects, default=math.nan)
    phase: Phase | str = Phase.UNSTABLE if max(largest, forward) > STABLE else Phase.LEARNING
    if phase is Phase.LEARNING and (largest < -STABLE or scheme.gain > -1 + STABLE):
        phase = Phase.FROZEN if largest < -STABLE else Phase.KERNEL
    is_known = 2 * cost <= len(uses)
    problems = _problems(expected, writer)
    return Judgment(
        scheme.name if is_known else "other",
        scheme.words if is_known else "none of the known schemes",
        scheme.name,
        phase,
        tuple(problems),
        expected,
    )


def judge_rank(uses: Mapping[str, UseScaling], update: Update, sizes: Sequence[int]) -> Judgment:
    """Compare powers of the rank of adapters with LoRA (Hu et al. 2022) and rsLoRA (Kalajdzievski 2023).

    The first update of the adapter's output weight moves the output by rank^rate. Only a rate of 0 keeps the effect.
    """
    up = {name: use for name, use in uses.items() if use.kind == "output"}
    gains = {name: _factor_power(use) for name, use in up.items()}
    typical = sorted(gains.values())[len(gains) // 2] if gains else 0.0
    scheme = min(RANK, key=lambda option: abs(option.gain - typical))
    is_known = abs(scheme.gain - typical) < 0.2
    times = 2 if update == "proportional" else 1
    lr = sorted(float(use.exponents["lr"]) for use in up.values())[len(up) // 2] if up else 0.0
    expected = {}
    for name, use in uses.items():
        rate = times * scheme.gain + 1 + lr if name in up else lr if use.kind in ("input", "hidden") else 0.0
        if use.update_rule not in ("gradient", "signs"):
            rate = float(use.exponents["rate"])
        gain = math.nan if math.isnan(float(use.exponents["gain"])) or name in up else 0.0
        expected[name] = replace(use, expected={"gain": gain, "rate": rate})
    rates = [float(use.exponents["rate"]) for use in up.values() if _rated(use)]
    largest = max(rates, default=0.0)
    phase = Phase.UNSTABLE if largest > STABLE else Phase.FROZEN if largest < -STABLE else Phase.LEARNING
    name = scheme.name if is_known else "other"
    words = scheme.words if is_known else "none of the known schemes"
    problems = _problems(expected, ProblemWriter(update, "rank", sizes[0]))
    return Judgment(name, words, scheme.name, phase, tuple(problems), expected)


def judge_other(
    uses: Mapping[str, UseScaling],
    attention: Mapping[str, Mapping[str, Estimate]],
    update: Update,
    sizes: Sequence[int],
    along: str,
) -> Judgment:
    """Judge sizes for which weights keep their shapes, as the number of experts: all powers should be constant."""
    expected = {name: replace(use, expected={"gain": 0.0, "rate": 0.0}) for name, use in uses.items()}
    writer = ProblemWriter(update, along, sizes[0])
    scales = [writer.attention(module, powers, "constant") for module, powers in attention.items()]
    problems = [*_problems(expected, writer), *(problem for problem in scales if problem is not None)]
    rates = [float(use.exponents["rate"]) for use in uses.values() if _rated(use)]
    phase = Phase.UNSTABLE if max(rates, default=0.0) > 0.2 else Phase.LEARNING
    return Judgment(
        "constant", "scales and rates that do not depend on the size", "constant", phase, tuple(problems), expected
    )


def _factor_power(use: UseScaling) -> float:
    return float(use.exponents["factor"])


def _rated(use: UseScaling) -> bool:
    return not math.isnan(float(use.exponents["rate"]))


def _deviation(use: UseScaling) -> tuple[float, float]:
    gain, rate = (
        off(float(use.exponents[key]), use.expected[key], float(use.exponents[key].stderr)) for key in ("gain", "rate")
    )
    return gain, rate


def _problems(uses: Mapping[str, UseScaling], writer: ProblemWriter) -> list[Problem]:
    problems = []
    for use in uses.values():
        gain, rate = _deviation(use)
        if use.is_vector or use.fan_in[0] == 1 == use.fan_in[-1]:
            gain, rate = 0.0, rate if rate > VECTOR_TOLERANCE else 0.0
        problem = writer.deviation(use, gain, rate)
        if problem is not None:
            problems.append(problem)
    return problems
