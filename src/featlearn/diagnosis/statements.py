"""Further statements about runs: silent alignment, settling, kernel machine, mechanisms, layers, specialization."""

import math
from collections.abc import Mapping, Sequence

from featlearn.diagnosis.events import CrossingTime
from featlearn.diagnosis.evidence import (
    ALIGNMENT_ROSE,
    LAYER_CHANGED,
    LEARNED,
    MACHINE,
    MOVED,
    NORM_GREW,
    SETTLED,
    SPECIALIZED,
    Evidence,
    Sample,
    Threshold,
    evidence,
    mean,
    mean_of,
    sample,
    unknown,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism, name_of
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.rates import Unknown
from featlearn.diagnosis.settling import STILL, Settling
from featlearn.diagnosis.words import LISTED, list_layers, percent


def assess_silence(findings: Sequence[Findings]) -> tuple[bool | None, dict[str, float], list[Evidence]]:
    """Whether alignment was complete before kernel norm and loss moved, and the event times."""
    crossings = {name: [getattr(one.events, name) for one in findings] for name in _EVENTS}
    middles = {name: mean([crossing.at for crossing in found]) for name, found in crossings.items()}
    # no time is given inside a gap
    times = {name: math.nan if any(one.wide for one in found) else middles[name] for name, found in crossings.items()}
    known = [one.events for one in findings if not one.events.missing]
    order = sorted((name for name in _EVENTS if math.isfinite(middles[name])), key=lambda name: middles[name])
    described = ", ".join(f"{_EVENTS[name]} {_when(crossings[name])}" for name in order)
    growth = sample([one.events.growth for one in findings], logarithmic=True)
    if not known or growth is None:
        reasons = "; ".join(sorted({_unknown_reason(one) for one in findings}))
        said = "; ".join(filter(None, (reasons, described)))
        return None, times, [unknown("silent alignment", f"whether alignment was silent: {said}")]
    count = sum(not one.against for one in known)
    silent = 2 * count > len(known)
    share = f" on {count} of {len(known)} runs" if len(known) > 1 else ""
    against = [] if silent else list(dict.fromkeys(one.against for one in known if one.against))
    said = "; ".join(filter(None, [*against, described]))
    says = f"{'silent' if silent else 'not silent'}{share}: {said}"
    return silent, times, [evidence("silent alignment", says, growth, _SILENT, NORM_GREW, "yes" if silent else "no")]


_EVENTS = {
    "loss_half": "half of the loss",
    "alignment_90": "90 % of the rise of alignment",
    "norm_10": "10 % of the kernel norm",
}
_SILENT = (
    f"alignment first, risen by at least {ALIGNMENT_ROSE.high:g}, and the kernel grown at least {NORM_GREW.low:g} times"
)


def _when(crossings: Sequence[CrossingTime]) -> str:
    """The step of an event, or the two measurements around it if they are far apart."""
    known = [crossing for crossing in crossings if math.isfinite(crossing.at)]
    if any(crossing.wide for crossing in known):
        return f"between steps {min(one.earliest for one in known):.3g} and {max(one.latest for one in known):.3g}"
    return f"at step {mean([one.at for one in known]):.3g}"


def _unknown_reason(one: Findings) -> str:
    """Why it is unknown whether alignment was silent in a run."""
    return "the target is constant" if math.isnan(one.events.rise) and one.constant_target else one.events.missing


def assess_opinions(findings: Sequence[Findings]) -> list[Evidence]:
    """Return the metrics that need no kernel, each by itself."""
    statements = []
    for name in dict.fromkeys(name for one in findings for name in one.opinions):
        known = [one.opinions[name] for one in findings if name in one.opinions]
        verdicts = sorted({opinion.says for opinion in known})
        value = mean([opinion.value for opinion in known])
        says = f"{name} {value:.3g}: {' and '.join(verdicts)} ({known[0].about})"
        verdict = "/".join(verdicts)
        statements.append(Evidence("second opinions", says, value, "", "", runs=len(known), verdict=verdict))
    return statements


def assess_settling(findings: Sequence[Findings]) -> tuple[float, list[Evidence]]:
    """When the kernel settled."""
    topic = "the kernel settled"
    known = [one.settling for one in findings if isinstance(one.settling, Settling)]
    error = sample([one.error for one in known])
    if not known or error is None:
        reasons = "; ".join(sorted({one.settling.reason for one in findings if isinstance(one.settling, Unknown)}))
        return math.nan, [unknown(topic, f"when the kernel settled: {reasons}")]
    step = mean([one.step for one in known])
    fitted = ", its rate fitted within a factor of two" if any(one.fitted for one in known) else ""
    still = all(one.still for one in known)
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
        if still:
            says = f"from the start{some}: the kernel changed by {error.words} of its norm"
    verdict = "no" if math.isnan(step) else "yes"
    return step, [evidence(topic, says, error, f"at most {STILL if still else SETTLED.high:g}", SETTLED, verdict)]


def assess_kernel_machine(findings: Sequence[Findings]) -> tuple[KernelMachine, list[Evidence]]:
    """Whether regression with one of the kernels reproduces the network."""
    topic = "kernel machine"
    machines = [one.machine for one in findings]
    names = [name for name in ("final", "initial", "optimizer") if any(name in m.errors for m in machines)]
    if not names:
        reason = machines[0].reason
        return machines[0], [unknown(topic, f"whether the network is a kernel machine: {reason}")]
    errors = {name: sample([m.errors[name] for m in machines if name in m.errors]) for name in names}
    # one kernel for all outputs is exact only for a single output, for which machine.py sets "all"
    whole = "" if all(m.outputs == "all" for m in machines if m.errors) else ", its mean over outputs,"
    statements = [
        evidence(
            topic,
            f"regression on the probe with the {name} kernel{whole} misses the network on test points by "
            f"{error.words}, correlation "
            f"{mean([m.correlations[name] for m in machines if name in m.correlations]):.3f}",
            error,
            f"at most {MACHINE.high:g}",
            MACHINE,
            "yes" if error.mean <= MACHINE.high else "no",
        )
        for name, error in errors.items()
        if error is not None
    ]
    # accurate, yet not accepted because too little was learned
    barred = next(
        (m.reason for m in machines if m.of is None and min(m.errors.values(), default=1) <= MACHINE.high), ""
    )
    of = next((n for n in ("initial", "final", "optimizer") if n in errors and _low(errors[n], MACHINE)), None)
    of = None if barred else of
    reason = barred or next((m.reason for m in machines if m.reason and (of is None or m.of)), "")
    if reason:
        says = reason if of else f"this is not conclusive: {reason}"
        statements.append(Evidence(topic, says, math.nan, "", "", verdict="" if of else "thin"))
    correlations = {n: mean([m.correlations[n] for m in machines if n in m.correlations]) for n in names}
    means = {name: error.mean for name, error in errors.items() if error is not None}
    return KernelMachine(of, means, correlations, "mean" if whole else "all", reason), statements


def assess_layers(
    findings: Sequence[Findings],
) -> tuple[dict[str, LayerPairMechanism], dict[str, LayerLearning], list[Evidence]]:
    """The mechanism of each layer pair, and the layers in which features were learned."""
    statements: list[Evidence] = []
    pairs = {
        name: [one.mechanisms[name] for one in findings if name in one.mechanisms] for name in findings[0].mechanisms
    }
    mechanisms = {name: _mean_mechanism(found) for name, found in pairs.items()}
    for name, one in mechanisms.items():
        norms = "" if math.isnan(one.rescaling) else f" and {one.rescaling:+.2g} (norms)"
        random = "" if math.isnan(one.random) else f", random {one.random:.3g}"
        says = (
            f"{name}: {one.name}; ln |U W| changed by {one.alignment:+.2g} (alignment, {one.start:.3g} to "
            f"{one.end:.3g}{random}){norms}"
        )
        statements.append(
            Evidence(
                "mechanism",
                says,
                one.alignment,
                f"none below {LAYER_CHANGED.low:g}",
                LAYER_CHANGED.source,
                runs=len(pairs[name]),
                verdict=one.name,
            )
        )
    if not mechanisms:
        statements.append(unknown("mechanism", "by which mechanism: no alignment of layers was recorded"))
    layers = findings[0].layers if len(findings) == 1 else _mean_layers(findings)
    statements += _where(layers)
    return mechanisms, dict(layers), statements


def _where(layers: Mapping[str, LayerLearning]) -> list[Evidence]:
    """Which weights moved, and in which layers training made the weights agree with the gradients."""
    topic, told = "where features are learned", []
    if layers:
        moved = [name for name, one in layers.items() if one.distance > MOVED.high]
        far = "; ".join(f"{name}: {layers[name].distance:.2g}" for name in [*layers][:LISTED])
        told.append(
            Evidence(
                topic,
                f"weights moved, relative to their first norm, {far}",
                next(iter(layers.values())).distance,
                f"above {MOVED.high:g} features can be learned there",
                MOVED.source,
                verdict=", ".join(moved) or "nowhere",
            )
        )
    known = {name: one for name, one in layers.items() if math.isfinite(one.centered_share) and not one.readout}
    if known:
        order = sorted(known, key=lambda name: -known[name].centered_share)
        shares = ", ".join(f"layer {name} {percent(known[name].centered_share)}" for name in order[:LISTED])
        unmeasured = [name for name, one in layers.items() if math.isnan(one.centered_share)]
        left = f" (not measured: {list_layers(unmeasured)})" if unmeasured else ""
        if known[order[0]].centered_share > 1:
            left += "; above 100%: weights and gradients disagreed at the start"
        told.append(
            Evidence(
                topic,
                f"share of the agreement of weights and gradients that is due to training: {shares}{left}",
                known[order[0]].centered_share,
                f"above {LEARNED.high:g} features are learned there",
                LEARNED.source,
                verdict=", ".join(learned_in(layers)) or "nowhere",
            )
        )
    return told


def learned_in(layers: Mapping[str, LayerLearning]) -> list[str]:
    """Layers in which training made the weights agree with the gradients, most first; readouts always agree."""
    found = [name for name, one in layers.items() if one.centered_share > LEARNED.high and not one.readout]
    return sorted(found, key=lambda name: -layers[name].centered_share)


def assess_features(findings: Sequence[Findings]) -> tuple[float, float, list[Evidence]]:
    """Specialization and the effective feature rate."""
    statements = []
    special, rate = (sample([getattr(one, name) for one in findings]) for name in ("specialization", "feature_rate"))
    begun = mean([one.specialization_at_start for one in findings])
    if special is not None:
        size = special._replace(mean=abs(special.mean)).words
        says = f"the kernel of an output fits its own target {_compared(special.mean)} by {size}"
        if math.isnan(begun):
            says, told = f"{says}; at the start it was not recorded", "cannot tell"
        else:
            says += f", at the start {_compared(begun)} by {abs(begun):.2g}"
            told = "yes" if special.mean - begun > SPECIALIZED.high else "no"
        against = f"grown by more than {SPECIALIZED.high:g}"
        statements.append(evidence("specialization", says, special, against, SPECIALIZED, told))
    if rate is not None and rate.mean > 0:  # negative where alignment fell: no features evolved toward the task
        says = f"the effective feature rate is {rate.words}, for kernel and targets of norm one"
        statements.append(Evidence("feature rate", says, rate.mean, "", "", rate.spread, rate.runs))
    return mean_of(special), mean_of(rate), statements


def _compared(fit: float) -> str:
    return "worse" if fit < 0 else "better"


def _mean_mechanism(found: Sequence[LayerPairMechanism]) -> LayerPairMechanism:
    values = {
        name: mean([getattr(one, name) for one in found])
        for name in ("alignment", "first_norm", "second_norm", "start", "end", "random")
    }
    return LayerPairMechanism(name_of(values["alignment"], values["first_norm"] + values["second_norm"]), **values)


def _mean_layers(findings: Sequence[Findings]) -> dict[str, LayerLearning]:
    means = {}
    for layer in findings[0].layers:
        found = [one.layers[layer] for one in findings if layer in one.layers]
        numbers = ("distance", "correlation", "centered_share", "kernel_share", "alignment")
        values = {name: mean([getattr(one, name) for one in found]) for name in numbers}
        means[layer] = LayerLearning(**values, readout=all(one.readout for one in found))
    return means


def _low(error: Sample | None, threshold: Threshold) -> bool:
    return error is not None and error.mean <= threshold.high
