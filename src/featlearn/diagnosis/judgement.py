"""From numbers to statements: each against its threshold, over one run or several."""

import math
from collections.abc import Sequence
from typing import Literal

from featlearn.diagnosis.evidence import (
    ALIGNMENT_ROSE,
    FALLEN,
    KERNEL_MOVED,
    LAYER_CHANGED,
    LEARNED,
    MACHINE,
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
        "speedup": _mean_of(sample([speed.frozen for speed in speeds], logarithmic=True)),
        "speedup_rescaled": _mean_of(sample([speed.rescaled for speed in speeds], logarithmic=True)),
        "alignment_rise": _mean([one.events.rise for one in findings]),
        "loss_left": _mean([one.loss_left for one in findings]),
    }


def judged_regime(findings: Sequence[Findings]) -> tuple[Regime, list[Evidence]]:
    """Three numbers vote: how far the kernel moved, how much faster the loss fell, how much alignment rose.

    Lazy or rich if two of them say so and none the opposite, else mixed; that alignment did not rise is no objection to
    rich, as features may be learned that the targets do not show. Cannot tell with fewer than two of them, and, unless
    two say rich, for a loss that has hardly fallen.
    """
    judged = [judge(findings) for judge in (_moved, _faster, _aligned)]
    votes = [vote for vote, _ in judged if vote is not None]
    evidence = [*_broken(findings), *(item for _, said in judged for item in said)]
    rich, lazy = votes.count(1), votes.count(-1)
    against = [vote for vote, _ in judged[:2]].count(-1)
    left = sample([one.loss_left for one in findings])
    unfinished = left is None or not left.mean <= FALLEN.high
    if left is not None:
        evidence.append(_evidence(
            "regime", f"the loss on the probe fell to {left.mean:.2g} of its first value at its lowest", left,
            f"at most {FALLEN.high:g} to tell", FALLEN, "thin" if unfinished else "",
        ))  # fmt: skip
    if rich >= 2 and against == 0:
        return "rich", evidence
    if len(votes) < 2 or unfinished:
        return "cannot tell", evidence
    return ("lazy" if lazy >= 2 and rich == 0 else "mixed"), evidence


def _broken(findings: Sequence[Findings]) -> list[Evidence]:
    steps = [(one.run.name, one.reading.diverged, one.reading.steps) for one in findings]
    return [
        Evidence("regime", f"{name} broke down at step {at}; it is read up to step {last}", float(at), "", "")
        for name, at, last in steps if at is not None
    ]  # fmt: skip


def _moved(findings: Sequence[Findings]) -> tuple[int | None, list[Evidence]]:
    moved = sample([one.moved for one in findings])
    if moved is None:
        return None, [_untold("regime", "how far the kernel moved: it was not recorded twice")]
    side = moved.side(KERNEL_MOVED)
    says = f"the kernel, of norm one, moved by {moved.words} (1 - cosine with the first)"
    return side, [_evidence("regime", says, moved, _words(KERNEL_MOVED), KERNEL_MOVED, _SIDES[side])]


def _faster(findings: Sequence[Findings]) -> tuple[int | None, list[Evidence]]:
    speeds = [one.speed for one in findings]
    known = [speed for speed in speeds if isinstance(speed, Speed)]
    frozen = sample([speed.frozen for speed in known], logarithmic=True)
    rescaled = sample([speed.rescaled for speed in known], logarithmic=True)
    if frozen is None or rescaled is None:
        reasons = "; ".join(sorted({speed.reason for speed in speeds if isinstance(speed, Unknown)}))
        return None, [_untold("regime", f"how much faster than its first kernel it learned: {reasons}")]
    side, shape = frozen.side(SPEED), rescaled.side(SHAPE_SPEED)
    least = "at least " if any(speed.bound for speed in known) else ""
    level = sum(speed.level for speed in known) / len(known)
    says = f"to {level:.2g} of the loss, the frozen first kernel takes {least}{frozen.words} times as long"
    grown = f"the first kernel at its later size takes {least}{rescaled.words} times as long: the rest is its growth"
    return side, [
        _evidence("regime", says, frozen, _words(SPEED), SPEED, _SIDES[side]),
        _evidence("regime", grown, rescaled, f"above {SHAPE_SPEED.high:g} its shape made training faster",
                  SHAPE_SPEED, "shape" if shape == 1 else "growth"),
    ]  # fmt: skip


def _aligned(findings: Sequence[Findings]) -> tuple[int | None, list[Evidence]]:
    rise = sample([one.events.rise for one in findings])
    if rise is None:
        return None, [_untold("regime", "how much alignment rose: it was not recorded twice")]
    side = rise.side(ALIGNMENT_ROSE)
    if side == -1 and rise.mean < -ALIGNMENT_ROSE.low:
        side = 0  # it fell: the kernel went elsewhere, which is not lazy
    says = f"centred kernel-task alignment changed by {rise.words}"
    return side, [_evidence("regime", says, rise, _words(ALIGNMENT_ROSE), ALIGNMENT_ROSE, _SIDES[side])]


def judged_silence(findings: Sequence[Findings]) -> tuple[bool | None, dict[str, float], list[Evidence]]:
    """Whether alignment was done before kernel norm and loss moved, and when each happened."""
    names = ("loss_half", "alignment_90", "norm_10")
    times = {name: _mean([getattr(one.events, name) for one in findings]) for name in names}
    known = [one.events.silent for one in findings if one.events.silent is not None]
    growth = sample([one.events.growth for one in findings], logarithmic=True)
    if not known or growth is None:
        missing = "alignment, kernel norm or loss were not recorded, or the loss has not halved"
        return None, times, [_untold("silent alignment", f"whether alignment was silent: {missing}")]
    silent = 2 * sum(known) > len(known)
    order = [name for name in sorted(names, key=lambda name: times[name]) if math.isfinite(times[name])]
    described = ", ".join(f"{_EVENTS[name]} at step {times[name]:.3g}" for name in order) or "nothing happened"
    share = f" on {sum(known)} of {len(known)} runs" if len(known) > 1 else ""
    says = f"{'silent' if silent else 'not silent'}{share}: {described}"
    if growth.mean < NORM_GREW.low:
        says += f"; the kernel grew {growth.mean:.3g} times, so that there was no time before it grew"
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
    evidence = [
        _evidence(topic, f"regression with the {name} kernel misses the network on test points by {error.words}, "
                  f"correlation {_mean([m.correlations[name] for m in machines if name in m.correlations]):.3f}",
                  error, f"at most {MACHINE.high:g}", MACHINE, "yes" if error.mean <= MACHINE.high else "no")
        for name, error in errors.items() if error is not None
    ]  # fmt: skip
    of = next((n for n in ("initial", "final", "optimizer") if n in errors and _low(errors[n], MACHINE)), None)
    reason = next((m.reason for m in machines if m.reason), "") if of is None else ""
    if reason:
        evidence.append(_untold(topic, f"more: {reason}"))
    correlations = {n: _mean([m.correlations[n] for m in machines if n in m.correlations]) for n in names}
    means = {name: error.mean for name, error in errors.items() if error is not None}
    return KernelMachine(of, means, correlations, reason), evidence


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
        evidence.append(Evidence("mechanism", says, one.alignment, f"{LAYER_CHANGED.low:g}", LAYER_CHANGED.source,
                                 runs=len(pairs[name]), verdict=one.name))  # fmt: skip
    if not mechanisms:
        evidence.append(_untold("mechanism", "by which mechanism: no alignment of layers was recorded"))
    layers = findings[0].layers if len(findings) == 1 else _mean_layers(findings)
    if layers:
        moved = [name for name, one in layers.items() if one.distance > LEARNED.high]
        far = "; ".join(f"{name} {layers[name].distance:.2g}" for name in [*layers][:6])
        says = f"weights went, relative to their first norm: {far}"
        evidence.append(Evidence(
            "where features are learned", says, next(iter(layers.values())).distance, f"{LEARNED.high:g}",
            LEARNED.source, verdict=", ".join(moved) or "nowhere",
        ))  # fmt: skip
        risen = {name: one.correlation for name, one in layers.items() if math.isfinite(one.correlation)}
        if risen:
            top = sorted(risen, key=lambda name: -risen[name])[:6]
            says = "neural feature correlations rose: " + "; ".join(f"{name} {risen[name]:+.2g}" for name in top)
            evidence.append(Evidence("where features are learned", says, risen[top[0]], "", "", verdict=top[0]))
    return mechanisms, dict(layers), evidence


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
