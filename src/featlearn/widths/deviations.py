"""Derive scheme, phase, and problems of networks that grow in width from the powers of their uses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from featlearn.linalg.estimate import Estimate
from featlearn.theory.phases import Phase
from featlearn.widths.rows import relative_descent, relative_effect
from featlearn.widths.scaling import CONTROLLED, Problem, UseScaling
from featlearn.widths.schemes import (
    MATRICES,
    TOLERANCE,
    WORDS,
    Match,
    Update,
    WeightPowers,
    expected_gain,
    expected_rate,
    nearest,
    off,
)

VECTOR_TOLERANCE = 0.4
"""Tolerance for biases and gains, which have few entries and noisy powers."""
STABLE = 0.125
"""Powers below this value count as constant, if they follow from gains and rates; measured ones, twice this value."""


@dataclass(frozen=True)
class Judgment:
    """What a scale check says of powers."""

    scheme: str
    words: str
    nearest: str
    phase: Phase | str
    problems: tuple[Problem, ...]
    uses: dict[str, UseScaling]
    """with the powers that the scheme expects"""


def judge_width(
    uses: Mapping[str, UseScaling],
    attention: Mapping[str, Mapping[str, Estimate]],
    update: Update,
    sizes: Sequence[int],
    bounded: bool,
    along: str,
) -> Judgment:
    """Compare powers of the width with those of the known parametrizations."""
    powers = {name: weight_powers(use) for name, use in uses.items() if not math.isnan(float(use.exponents["rate"]))}
    matrices = [entry for entry in powers.values() if entry.kind in MATRICES]
    match = nearest(matrices, update)
    if match.shift not in match.scheme.shifts and any(
        not off(entry.rate, expected_rate(match.scheme, entry, 0.0), entry.rate_error) for entry in matrices
    ):
        match = replace(match, shift=0.0)  # some rates are right, so the others are off
    is_known = 2 * match.deviating <= len(matrices)
    name = match.scheme.name if is_known else "other"
    expected = {
        key: replace(
            use,
            expected={
                "rate": expected_rate(match.scheme, entry, match.shift),
                **({"gain": expected_gain(match.scheme, entry)} if entry.kind in MATRICES else {}),
            },
        )
        for key, use in uses.items()
        for entry in [powers.get(key, weight_powers(use))]
    }
    writer = ProblemWriter(update, along, sizes[0])
    problems = _width_problems(expected, powers, match, attention, update, writer)
    phase = infer_phase(expected, update, sizes, is_known, bounded)
    return Judgment(name, WORDS[name], match.scheme.name, phase, tuple(problems), expected)


def weight_powers(use: UseScaling) -> WeightPowers:
    """Return the powers that determine the scheme."""
    gain, rate, lr = (use.exponents[key] for key in ("gain", "rate", "lr"))
    return WeightPowers(
        parameter=use.name,
        kind=use.kind,
        gain=float(gain),
        gain_error=float(gain.stderr),
        rate=float(rate),
        rate_error=float(rate.stderr),
        weight=float(use.exponents["weight"]),
        tied=use.tied,
        is_readout=use.is_readout,
        constant_rate=None if use.update_rule in ("gradient", "signs") else float(rate) - float(lr),
    )


def infer_phase(
    uses: Mapping[str, UseScaling], update: Update, sizes: Sequence[int], is_known: bool, bounded: bool
) -> Phase | str:
    """Infer the phase from effects of updates on outputs and features (Yang & Hu 2021; Xu & Ziyin 2024, Sec. 4).

    If the scheme is known, powers are multiples of 1/4 that follow from gains and rates; otherwise they are measured.
    `bounded` losses, as cross-entropy, keep their gradients bounded where outputs grow (Haas et al. 2025).
    """
    matrices = [use for use in uses.values() if use.kind in MATRICES]
    outputs = [use for use in matrices if use.kind == "output"]
    readouts = [use for use in outputs if use.is_readout] or outputs
    others = [use for use in matrices if use not in readouts]
    if is_known and readouts:
        # entries of the readout, at the start and after a step; gradients behind it are of that size
        entries = [v for w in readouts for v in (_snapped(w, "gain") - 0.5, _snapped(w, "rate") - 1)]
        readout_power = max((value for value in entries if not math.isnan(value)), default=math.nan)
        effects = [_snapped(use, "rate") + (readout_power if update == "proportional" else 0.0) for use in others]
        output_powers = [_snapped(use, "rate") for use in readouts] + [value + readout_power + 1 for value in effects]
        # preactivations that grow at the start have no limit either
        stable, growing = STABLE, max((_snapped(use, "gain") for use in others), default=0.0) > STABLE
    else:
        effects = [float(relative_effect(use, sizes, update)) for use in others]
        output_powers = [float(relative_descent(use, sizes, update)) for use in matrices]
        stable, growing = 2 * STABLE, False
    features = max((value for value in effects if not math.isnan(value)), default=-math.inf)
    output = max((value for value in output_powers if not math.isnan(value)), default=-math.inf)
    if features > stable or growing:
        return Phase.UNSTABLE
    if output > stable:
        return (CONTROLLED if features > -stable else Phase.KERNEL) if bounded else Phase.UNSTABLE
    if output < -stable:
        return Phase.FROZEN
    return Phase.LEARNING if features > -stable else Phase.KERNEL


def _snapped(use: UseScaling, quantity: str) -> float:
    """Round to the nearest multiple of 1/4, if it is close."""
    value = float(use.exponents[quantity])
    rounded = round(4 * value) / 4 if math.isfinite(value) else value
    return rounded if abs(rounded - value) < STABLE else value


def _width_problems(
    uses: Mapping[str, UseScaling],
    powers: Mapping[str, WeightPowers],
    match: Match,
    attention: Mapping[str, Mapping[str, Estimate]],
    update: Update,
    writer: "ProblemWriter",
) -> list[Problem]:
    """Return parameters that deviate from the scheme by more than the tolerance and three standard errors."""
    problems: list[Problem | None] = []
    if match.shift not in match.scheme.shifts:
        problems.append(writer.all_rates(match.shift))
    for name, entry in powers.items():
        use = uses[name]
        rate = off(entry.rate, use.expected["rate"], entry.rate_error)
        if entry.kind in MATRICES:
            problems.append(writer.deviation(use, off(entry.gain, use.expected["gain"], entry.gain_error), rate))
        elif rate > VECTOR_TOLERANCE and not (
            entry.kind == "finite" and match.scheme.name not in ("mean_field", "mup")
        ):
            problems.append(writer.deviation(use, 0.0, rate))  # slow ones do no harm
    for module, entries in attention.items():
        problems.append(writer.attention(module, entries, match.scheme.name))
    return [problem for problem in problems if problem is not None]


class ProblemWriter:
    """Describe deviations in words, with text to paste."""

    def __init__(self, update: Update, along: str, base: int) -> None:
        self._update, self._along, self._base = update, along, base

    def deviation(self, use: UseScaling, gain: float, rate: float) -> Problem | None:
        """Return the problem of a weight whose gain and rate are off by these powers; None if neither is."""
        gain_factor = 2 if self._update == "proportional" else 1
        if not gain and not rate:
            return None
        gain_power = Estimate(gain, use.exponents["gain"].stderr, use.exponents["gain"].samples)
        ratio = self._ratio(-gain)
        several = 'for name, {0} in model.named_{0}s() if fnmatch(name, "{1}")'
        if "*" in use.name:
            imports = "from fnmatch import fnmatch\n"
            parameters = f"[parameter {several.format('parameter', use.parameter)}]"
            scaled = f"{imports}[parameter.data.mul_({ratio}) {several.format('parameter', use.parameter)}]"
            hook = f"{imports}[module.register_forward_hook(lambda m, inputs, output: output * {ratio}) "
            hook += f"{several.format('module', use.layer)}]"
        else:
            imports = ""
            parameters = f'[model.get_parameter("{use.parameter}")]'
            scaled = f"{parameters[1:-1]}.data.mul_({ratio})"
            hook = (
                f'model.get_submodule("{use.layer}").register_forward_hook(lambda m, inputs, output: output * {ratio})'
            )
        if gain and rate and abs(rate - gain_factor * gain) < 2 * TOLERANCE:
            position = "behind the readout" if use.tied or use.kind == "output" else "on what it gives"
            advice = f"put a factor {self.power(-gain)} {position}"
            return self._problem(use, "multiplier", gain_power, advice, hook if use.layer else "")
        if gain and not (rate and abs(rate) > abs(gain)):
            advice = f"multiply its standard deviation at the start by {self.power(-gain)}"
            return self._problem(use, "initial scale", gain_power, advice, scaled)
        rate_power = Estimate(rate, use.exponents["rate"].stderr, use.exponents["rate"].samples)
        lr = float(use.exponents["lr"])
        rule = {"gradient": "SGD", "signs": "Adam"}.get(use.update_rule, use.update_rule.partition(",")[0])
        advice = (
            f"multiply its learning rate by {self.power(-rate)}: under {rule} it should "
            f"{self._course(lr - rate, 'stay constant', 'fall', 'grow')}; yours "
            f"{self._course(lr, 'is constant', 'falls', 'grows')}"
        )
        patch = f'{imports}{{"params": {parameters}, "lr": lr * {self._ratio(-rate)}}}'
        if gain:
            advice += f"; and its standard deviation at the start by {self.power(-gain)}"
            patch += f"\n{scaled}"
        return self._problem(use, "learning rate", rate_power, advice, patch)

    def all_rates(self, shift: float) -> Problem:
        """Return the problem that all learning rates are off together."""
        patch = f"for group in optimizer.param_groups: group['lr'] *= {self._ratio(-shift)}"
        advice = f"multiply all learning rates by {self.power(-shift)}"
        power = Estimate(shift, 0.0, 1)
        return Problem("all", "all", "all learning rates", power, advice, patch, along=self._along)

    def attention(self, module: str, powers: Mapping[str, Estimate], scheme: str) -> Problem | None:
        """Check that attention scales as 1 / d for muP with growing heads, and otherwise as 1 / sqrt(d) or 1 / d."""
        scale, head = powers["scale"], float(powers["head"])
        accepted = [0.0] if abs(head) < 0.3 else [-head] if scheme == "mup" else [-head / 2, -head]
        closest = min(accepted, key=lambda power: abs(float(scale) - power))
        deviation = off(float(scale), closest, float(scale.stderr))
        if not deviation:
            return None
        power = Estimate(deviation, float(scale.stderr), scale.samples)
        advice = f"multiply the products of queries and keys by {self.power(-deviation)}"
        patch = "# in place of the scale of the attention: constant / head_size" if scheme == "mup" else ""
        return Problem(module, module, "attention scale", power, advice, patch, along=self._along)

    def _problem(self, use: UseScaling, quantity: str, power: Estimate, advice: str, patch: str) -> Problem:
        return Problem(use.parameter, use.layer, quantity, power, advice, patch, along=self._along)

    def power(self, value: float) -> str:
        """Return a power of the size as text."""
        rounded = round(2 * value) / 2
        return f"{self._along}^{rounded:g}" if rounded else f"{self._along}^{value:.2f}"

    def _ratio(self, value: float) -> str:
        rounded = round(2 * value) / 2 or round(value, 2)
        ratio = f"({self._along} / {self._base})" if rounded > 0 else f"({self._base} / {self._along})"
        return ratio if abs(rounded) == 1 else f"{ratio} ** {abs(rounded):g}"

    def _course(self, power: float, constant: str, falls: str, grows: str) -> str:
        rounded = round(4 * power) / 4
        if not rounded:
            return constant
        size = {0.5: f"sqrt({self._along})", 1.0: self._along}.get(abs(rounded), f"{self._along}^{abs(rounded):g}")
        return f"{falls} as 1/{size}" if rounded < 0 else f"{grows} as {size}"
