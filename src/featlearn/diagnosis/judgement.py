"""From numbers to statements: each against its threshold, over one run or several."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from featlearn.diagnosis.evidence import (
    ALIGNMENT_ROSE,
    FALLEN,
    KERNEL_MOVED,
    LAYER_CHANGED,
    LEARNED,
    MACHINE,
    MOVED,
    NORM_GREW,
    POWER_LAW,
    SETTLED,
    SHAPE_SPEED,
    SPECIALIZED,
    SPEED,
    Evidence,
    Sample,
    Threshold,
    sample,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.layers import LayerLearning, Mechanism, name_of
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.pace import Speed, Unknown
from featlearn.diagnosis.settling import Settling, against_power_law

Regime = Literal["lazy", "rich", "mixed", "cannot tell"]
_SIDES = {-1: "lazy", 0: "between", 1: "rich"}


def numbers(findings: Sequence[Findings]) -> dict[str, float]:
    """What the regime is judged by, as means over runs; nan where it is not known."""
    speeds = [one.speed for one in findings if isinstance(one.speed, Speed)]
    return {
        "kernel_moved": _mean([one.moved for one in findings]),
        "kernel_moved_raw": _mean([one.moved_raw for one in findings]),
        "speedup": _mean_of(sample([speed.frozen for speed in speeds], logarithmic=True)),
        "speedup_rescaled": _mean_of(sample([speed.rescaled for speed in speeds], logarithmic=True)),
        "alignment_rise": _mean([one.events.rise for one in findings]),
        "loss_left": _mean([one.loss_left for one in findings]),
        "kernel_growth": _mean_of(sample([one.events.growth for one in findings], logarithmic=True)),
        "weights_moved": _mean([one.weights_moved for one in findings]),
    }


def regime_of(moved: Sample | None, frozen: Sample | None, rise: Sample | None, left: Sample | None) -> Regime:
    """Three numbers vote: how far the kernel moved, how much faster the loss fell, how much alignment rose.

    How much faster the loss fell has two votes: by it alone all runs can be told on which thresholds were chosen. Lazy
    or rich with two votes for it and none against, else mixed; that alignment did not rise is no vote against rich, as
    features may be learned that the targets do not show. Cannot tell with fewer than two of the numbers, and, unless it
    is rich, for a loss that has hardly fallen.
    """
    speed, others = _side(frozen, SPEED), [_side(moved, KERNEL_MOVED), _side_of_rise(rise)]
    votes = [speed, speed, *others]
    if votes.count(1) >= 2 and -1 not in votes[:3]:
        return "rich"
    if [speed, *others].count(None) > 1 or _unfinished(left):
        return "cannot tell"
    return "lazy" if votes.count(-1) >= 2 and 1 not in votes else "mixed"


def judged_regime(findings: Sequence[Findings]) -> tuple[Regime, list[Evidence]]:
    """The regime, and what speaks for it."""
    moved, left = (sample([getattr(one, name) for one in findings]) for name in ("moved", "loss_left"))
    rise = sample([one.events.rise for one in findings])
    speeds = [one.speed for one in findings]
    frozen = sample([speed.frozen for speed in speeds if isinstance(speed, Speed)], logarithmic=True)
    evidence = [*_warnings(findings), *_moved(moved), *_faster(speeds, frozen), *_aligned(rise)]
    if left is not None:
        evidence.append(_evidence(
            "regime", f"at its lowest the loss on the probe was {left.mean:.2g} of the first", left,
            f"at most {FALLEN.high:g} to tell", FALLEN, "thin" if _unfinished(left) else "",
        ))  # fmt: skip
    return regime_of(moved, frozen, rise, left), evidence


def _side(value: Sample | None, threshold: Threshold) -> int | None:
    return None if value is None else value.side(threshold)


def _side_of_rise(rise: Sample | None) -> int | None:
    if rise is not None and rise.mean < -ALIGNMENT_ROSE.low:
        return 0  # it fell: the kernel went elsewhere, which is not lazy
    return _side(rise, ALIGNMENT_ROSE)


def _unfinished(left: Sample | None) -> bool:
    return left is None or not left.mean <= FALLEN.high


def _warnings(findings: Sequence[Findings]) -> list[Evidence]:
    """What makes the numbers that follow less sure."""
    steps = [(one.run.name, one.reading.diverged, one.reading.steps) for one in findings]
    broken = [
        Evidence("regime", f"{name} broke down at step {at}; it is read up to step {last}", float(at), "", "")
        for name, at, last in steps if at is not None
    ]  # fmt: skip
    kinds = sorted({kind for one in findings if (kind := one.reading.optimizer[0]) not in ("", "SGD")})
    notes = [f"trained with {kind}, whose steps are not those of the tangent kernel: speeds are less sure"
             for kind in kinds]  # fmt: skip
    if any(one.reading.batch_norm for one in findings):
        notes.append("the network has BatchNorm; its kernels are those of eval mode, not of the steps of training")
    return [*broken, *(Evidence("regime", note, math.nan, "", "") for note in notes)]


def _moved(moved: Sample | None) -> list[Evidence]:
    if moved is None:
        return [_untold("regime", "how far the kernel moved: it was not recorded twice")]
    says = f"the kernel, centred and of norm one, moved by {moved.words} (1 - cosine with the first)"
    return [
        _evidence("regime", says, moved, _words(KERNEL_MOVED), KERNEL_MOVED, _SIDES[moved.side(KERNEL_MOVED)]),
    ]


def _faster(speeds: Sequence[Speed | Unknown], frozen: Sample | None) -> list[Evidence]:
    known = [speed for speed in speeds if isinstance(speed, Speed)]
    rescaled = sample([speed.rescaled for speed in known], logarithmic=True)
    if frozen is None or rescaled is None:
        reasons = "; ".join(sorted({speed.reason for speed in speeds if isinstance(speed, Unknown)}))
        return [_untold("regime", f"how much faster than its first kernel it learned: {reasons}")]
    least = "at least " if any(speed.bound for speed in known) else ""
    level = sum(speed.level for speed in known) / len(known)
    says = f"to {level:.2g} of the first loss, the frozen first kernel takes {least}{frozen.words} times as long"
    grown = f"multiplied to its later size, the first kernel takes {least}{rescaled.words} times as long"
    shape = "shape" if rescaled.side(SHAPE_SPEED) == 1 else "cannot tell" if least else "growth"
    return [
        _evidence("regime", says, frozen, _words(SPEED), SPEED, _SIDES[frozen.side(SPEED)]),
        _evidence("regime", grown, rescaled, f"above {SHAPE_SPEED.high:g} its change of shape made training faster",
                  SHAPE_SPEED, shape),
    ]  # fmt: skip


def _aligned(rise: Sample | None) -> list[Evidence]:
    side = _side_of_rise(rise)
    if rise is None or side is None:
        return [_untold("regime", "how much centred alignment rose: the target is constant, or it was not recorded")]
    says = f"centred kernel-task alignment changed by {rise.words}"
    held = f"lazy within ±{ALIGNMENT_ROSE.low:g}, rich above {ALIGNMENT_ROSE.high:g}"
    return [_evidence("regime", says, rise, held, ALIGNMENT_ROSE, _SIDES[side])]


def judged_silence(findings: Sequence[Findings]) -> tuple[bool | None, dict[str, float], list[Evidence]]:
    """Whether alignment was done before kernel norm and loss moved, and when each happened."""
    names = ("loss_half", "alignment_90", "norm_10")
    times = {name: _mean([getattr(one.events, name) for one in findings]) for name in names}
    known = [one.events.silent for one in findings if one.events.silent is not None]
    growth = sample([one.events.growth for one in findings], logarithmic=True)
    if not known or growth is None:
        reasons = "; ".join(sorted({one.events.missing for one in findings}))
        return None, times, [_untold("silent alignment", f"whether alignment was silent: {reasons}")]
    silent = 2 * sum(known) > len(known)
    order = [name for name in sorted(names, key=lambda name: times[name]) if math.isfinite(times[name])]
    described = ", ".join(f"{_EVENTS[name]} at step {times[name]:.3g}" for name in order) or "nothing happened"
    share = f" on {sum(known)} of {len(known)} runs" if len(known) > 1 else ""
    says = f"{'silent' if silent else 'not silent'}{share}: {described}"
    if growth.mean < NORM_GREW.low:
        says += f"; the kernel norm became {growth.mean:.3g} times its first, so that there is no time before it grew"
    return silent, times, [_evidence(
        "silent alignment", says, growth, f"alignment first, and the kernel grown at least {NORM_GREW.low:g} times",
        NORM_GREW, "yes" if silent else "no",
    )]  # fmt: skip


_EVENTS = {"loss_half": "half of the loss", "alignment_90": "90 % of the rise of alignment",
           "norm_10": "10 % of the kernel norm"}  # fmt: skip


def judged_settling(findings: Sequence[Findings]) -> tuple[float, list[Evidence]]:
    """When the kernel settled, and how the loss fell before and after."""
    topic = "the kernel settled"
    known = [one.settling for one in findings if isinstance(one.settling, Settling)]
    error = sample([one.error for one in known])
    if not known or error is None:
        reasons = "; ".join(sorted({one.settling.reason for one in findings if isinstance(one.settling, Unknown)}))
        return math.nan, [_untold(topic, f"when the kernel settled: {reasons}")]
    step = _mean([one.step for one in known])
    fitted = ", its rate fitted within a factor of two" if any(one.fitted for one in known) else ""
    if math.isnan(step):
        says = (
            f"at no step while the loss still fell: the best prediction of the rest is off by {error.words} in ln loss"
        )
    else:
        count = sum(math.isfinite(one.step) for one in known)
        some = f" on {count} of {len(findings)} runs" if len(findings) > 1 else ""
        says = (
            f"at step {step:.3g}{some}: descent frozen there predicts the rest of ln loss within {error.words}{fitted}"
        )
    told = "no" if math.isnan(step) else "yes"
    evidence = [_evidence(topic, says, error, f"at most {SETTLED.high:g}", SETTLED, told)]
    for place, word in (("before", "before"), ("after", "from then on")):
        exponents = next((pair for one in known if (pair := getattr(one, place)) is not None), None)
        way = against_power_law(exponents)
        if exponents is not None and way:
            says = f"{word}, the loss fell {way}: local exponents {exponents[0]:.2g}, then {exponents[1]:.2g}"
            held = f"a power law within {POWER_LAW.low:g} to {POWER_LAW.high:g}"
            change = exponents[1] / exponents[0] if exponents[0] else math.nan
            evidence.append(Evidence(topic, says, change, held, POWER_LAW.source, verdict=way))
    return step, evidence


def judged_machine(findings: Sequence[Findings]) -> tuple[KernelMachine, list[Evidence]]:
    """Whether regression with one of the kernels is the network."""
    topic = "kernel machine"
    machines = [one.machine for one in findings]
    names = [name for name in ("final", "initial", "optimizer") if any(name in m.errors for m in machines)]
    if not names:
        reason = machines[0].reason
        return machines[0], [_untold(topic, f"whether the network is a kernel machine: {reason}")]
    errors = {name: sample([m.errors[name] for m in machines if name in m.errors]) for name in names}
    # one kernel for all outputs is exact only where there is one output; machine.py says so by "all"
    whole = "" if all(m.outputs == "all" for m in machines if m.errors) else ", its mean over outputs,"
    evidence = [
        _evidence(topic, f"regression on the probe with the {name} kernel{whole} misses the network on test points by "
                  f"{error.words}, correlation "
                  f"{_mean([m.correlations[name] for m in machines if name in m.correlations]):.3f}",
                  error, f"at most {MACHINE.high:g}", MACHINE, "yes" if error.mean <= MACHINE.high else "no")
        for name, error in errors.items() if error is not None
    ]  # fmt: skip
    # near enough, and yet not called one: too little was learned to say so
    barred = next(
        (m.reason for m in machines if m.of is None and min(m.errors.values(), default=1) <= MACHINE.high), ""
    )
    of = next((n for n in ("initial", "final", "optimizer") if n in errors and _low(errors[n], MACHINE)), None)
    of = None if barred else of
    reason = barred or (next((m.reason for m in machines if m.reason), "") if of is None else "")
    if reason:
        evidence.append(Evidence(topic, f"this is not the last word: {reason}", math.nan, "", "", verdict="thin"))
    correlations = {n: _mean([m.correlations[n] for m in machines if n in m.correlations]) for n in names}
    means = {name: error.mean for name, error in errors.items() if error is not None}
    return KernelMachine(of, means, correlations, "mean" if whole else "all", reason), evidence


def judged_layers(
    findings: Sequence[Findings],
) -> tuple[dict[str, Mechanism], dict[str, LayerLearning], list[Evidence]]:
    """What happened between layers, and in which features were learned."""
    evidence: list[Evidence] = []
    pairs = {
        name: [one.mechanisms[name] for one in findings if name in one.mechanisms] for name in findings[0].mechanisms
    }
    mechanisms = {name: _mean_mechanism(found) for name, found in pairs.items()}
    for name, one in mechanisms.items():
        says = (
            f"{name}: {one.name}; ln |U W| changed by {one.alignment:+.2g} (alignment, {one.start:.3g} to "
            f"{one.end:.3g}, random {one.random:.3g}) and {one.rescaling:+.2g} (norms)"
        )
        held = f"none below {LAYER_CHANGED.low:g}"
        evidence.append(Evidence("mechanism", says, one.alignment, held, LAYER_CHANGED.source,
                                 runs=len(pairs[name]), verdict=one.name))  # fmt: skip
    if not mechanisms:
        evidence.append(_untold("mechanism", "by which mechanism: no alignment of layers was recorded"))
    layers = findings[0].layers if len(findings) == 1 else _mean_layers(findings)
    evidence += _where(layers)
    return mechanisms, dict(layers), evidence


def _where(layers: Mapping[str, LayerLearning]) -> list[Evidence]:
    """Which weights moved, and in which layers the neural feature correlation rose; six of them in words."""
    topic, told = "where features are learned", []
    if layers:
        moved = [name for name, one in layers.items() if one.distance > MOVED.high]
        far = "; ".join(f"{name}: {layers[name].distance:.2g}" for name in [*layers][:6])
        told.append(Evidence(
            topic, f"weights moved, relative to their first norm, {far}", next(iter(layers.values())).distance,
            f"above {MOVED.high:g} features can be learned there", MOVED.source, verdict=", ".join(moved) or "nowhere",
        ))  # fmt: skip
    changed = {name: one.correlation for name, one in layers.items() if math.isfinite(one.correlation)}
    if changed:
        order = sorted(changed, key=lambda name: -changed[name])
        learned = ", ".join(
            name for name in order if changed[name] > LEARNED.high and layers[name].distance > MOVED.high
        )
        says = "; ".join(f"{name}: {changed[name]:+.2f}" for name in order[:6])
        told.append(Evidence(
            topic, f"neural feature correlations changed, {says}", changed[order[0]],
            f"above {LEARNED.high:g} features are learned there", LEARNED.source, verdict=learned or "nowhere",
        ))  # fmt: skip
    return told


def judged_features(findings: Sequence[Findings]) -> tuple[float, float, list[Evidence]]:
    """Specialisation and the effective feature rate."""
    evidence = []
    special, rate = (sample([getattr(one, name) for one in findings]) for name in ("specialization", "feature_rate"))
    begun = _mean([one.specialization_at_start for one in findings])
    if special is not None:
        yes = special.mean - begun > SPECIALIZED.high
        says = f"the kernel of an output fits its own target better by {special.words}, at the start by {begun:.2g}"
        evidence.append(_evidence("specialisation", says, special, f"grown by more than {SPECIALIZED.high:g}",
                                  SPECIALIZED, "yes" if yes else "no"))  # fmt: skip
    if rate is not None:
        says = f"the effective feature rate is {rate.words}, for kernel and targets of norm one"
        evidence.append(Evidence("feature rate", says, rate.mean, "", "", rate.spread, rate.runs))
    return _mean_of(special), _mean_of(rate), evidence


def _mean_mechanism(found: Sequence[Mechanism]) -> Mechanism:
    values = {
        name: _mean([getattr(one, name) for one in found])
        for name in ("alignment", "first_norm", "second_norm", "start", "end", "random")
    }
    return Mechanism(name_of(values["alignment"], values["first_norm"] + values["second_norm"]), **values)


def _mean_layers(findings: Sequence[Findings]) -> dict[str, LayerLearning]:
    means = {}
    for layer in findings[0].layers:
        found = [one.layers[layer] for one in findings if layer in one.layers]
        means[layer] = LayerLearning(*(
            _mean([getattr(one, name) for one in found])
            for name in ("distance", "correlation", "kernel_share", "alignment")
        ))  # fmt: skip
    return means


def _low(error: Sample | None, threshold: Threshold) -> bool:
    return error is not None and error.mean <= threshold.high


def _mean(values: Sequence[float]) -> float:
    return _mean_of(sample(values))


def _mean_of(found: Sample | None) -> float:
    return math.nan if found is None else found.mean


def _words(threshold: Threshold) -> str:
    return f"lazy below {threshold.low:g}, rich above {threshold.high:g}"


def _evidence(topic: str, says: str, value: Sample, held: str, threshold: Threshold, verdict: str) -> Evidence:
    return Evidence(topic, says, value.mean, held, threshold.source, value.spread, value.runs, verdict)


def _untold(topic: str, what: str) -> Evidence:
    return Evidence(topic, f"cannot tell {what}", math.nan, "", "", runs=0, verdict="cannot tell")
