"""Further statements about runs: silent alignment, settling, kernel machine, mechanisms, layers, specialization."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from featlearn.diagnosis.events import CrossingTime
from featlearn.diagnosis.evidence import (
    ALIGNMENT_ROSE,
    LAYER_CHANGED,
    LEARNED,
    MACHINE,
    MOVED,
    NORM_GREW,
    SETTLED,
    Evidence,
    Threshold,
    evidence,
    mean,
    mean_record,
    sample,
    unknown,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism, name_of
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.words import list_layers, percent


def assess_silence(findings: Sequence[Findings]) -> tuple[bool | None, dict[str, float], list[Evidence]]:
    """Return whether alignment was complete before kernel norm and loss moved, and the event times."""
    topic = "silent alignment"
    crossings = {name: [getattr(one.events, name) for one in findings] for name in _EVENTS}
    middles = {name: mean([crossing.at for crossing in of_runs]) for name, of_runs in crossings.items()}
    # no time is given inside a gap
    times = {
        name: math.nan if any(one.wide for one in of_runs) else middles[name] for name, of_runs in crossings.items()
    }
    known = [one.events for one in findings if not one.events.missing]
    order = sorted((name for name in _EVENTS if math.isfinite(middles[name])), key=lambda name: middles[name])
    described = ", ".join(f"{_EVENTS[name]} {_when(crossings[name])}" for name in order)
    growth = sample([one.events.growth for one in findings], logarithmic=True)
    if not known or growth is None:
        reasons = sorted({_unknown_reason(one) for one in findings})
        why = "; ".join(filter(None, (*reasons, described)))
        return None, times, [unknown(topic, f"whether alignment was silent: {why}")]
    count = sum(not one.against for one in known)
    silent = 2 * count > len(known)
    share = f" on {count} of {len(known)} runs" if len(known) > 1 else ""
    against = [] if silent else list(dict.fromkeys(one.against for one in known if one.against))
    says = f"{'silent' if silent else 'not silent'}{share}: {'; '.join(filter(None, [*against, described]))}"
    return silent, times, [evidence(topic, says, growth, _SILENT, NORM_GREW, "yes" if silent else "no")]


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
        statements.append(Evidence("second opinions", says, value, runs=len(known), verdict=verdict))
    return statements


def assess_settling(findings: Sequence[Findings]) -> tuple[float, list[Evidence]]:
    """Return when the kernel settled."""
    topic, step = "the kernel settled", sample([one.events.settled for one in findings])
    if step is None:
        recorded = all(len(one.run_data.kernels) > 2 for one in findings)
        why = "it still moved at the end" if recorded else "fewer than three kernels were recorded"
        return math.nan, [unknown(topic, f"when the kernel settled: {why}")]
    says = f"at step {step.words}: from there on it stays near the last kernel"
    against = f"differs by at most {SETTLED.high:g} of its norm"
    return step.mean, [evidence(topic, says, step, against, SETTLED, "yes")]


def assess_kernel_machine(findings: Sequence[Findings]) -> tuple[KernelMachine, list[Evidence]]:
    """Return whether regression with one of the kernels reproduces the network."""
    topic, machines = "kernel machine", [one.machine for one in findings]
    errors = {
        name: error
        for name in ("final", "initial", "optimizer")
        if (error := sample([machine.errors.get(name, math.nan) for machine in machines])) is not None
    }
    if not errors:
        reason = machines[0].reason
        return machines[0], [unknown(topic, f"whether the network is a kernel machine: {reason}")]
    correlations = {name: mean([machine.correlations.get(name, math.nan) for machine in machines]) for name in errors}
    # one kernel for all outputs is exact only for a single output, for which machine.py sets "all"
    whole = all(machine.outputs == "all" for machine in machines if machine.errors)
    statements = [
        evidence(
            topic,
            f"regression on the probe with the {name} kernel{'' if whole else ', its mean over outputs,'} misses the "
            f"network on test points by {error.words}, correlation {correlations[name]:.3f}",
            error,
            f"at most {MACHINE.high:g}",
            MACHINE,
            "yes" if error.mean <= MACHINE.high else "no",
        )
        for name, error in errors.items()
    ]
    # accurate, yet not accepted because too little was learned
    barred = [m.reason for m in machines if m.of is None and min(m.errors.values(), default=1) <= MACHINE.high]
    accurate = [
        name for name in ("initial", "final", "optimizer") if name in errors and errors[name].mean <= MACHINE.high
    ]
    of = accurate[0] if accurate and not any(barred) else None
    reason = next(filter(None, [*barred, *(m.reason for m in machines if of is None or m.of)]), "")
    if reason:
        says = reason if of else f"this is not conclusive: {reason}"
        statements.append(Evidence(topic, says, verdict="" if of else "thin"))
    means = {name: error.mean for name, error in errors.items()}
    return KernelMachine(of, means, correlations, "all" if whole else "mean", reason), statements


def assess_layers(
    findings: Sequence[Findings],
) -> tuple[dict[str, LayerPairMechanism], dict[str, LayerLearning], list[Evidence]]:
    """Return the mechanism of each layer pair, and how much each layer learned."""
    statements: list[Evidence] = []
    mechanisms = {}
    for pair in findings[0].mechanisms:
        records = [one.mechanisms[pair] for one in findings if pair in one.mechanisms]
        one = mean_record(records)
        mechanisms[pair] = one = replace(one, name=name_of(one.alignment, one.rescaling))
        norms = "" if math.isnan(one.rescaling) else f" and {one.rescaling:+.2g} (norms)"
        random = "" if math.isnan(one.random) else f", random {one.random:.3g}"
        says = f"{pair}: {one.name}; ln |U W| changed by {one.alignment:+.2g} (alignment, {one.start:.3g} to "
        says += f"{one.end:.3g}{random}){norms}"
        against, source = f"none below {LAYER_CHANGED.low:g}", LAYER_CHANGED.source
        statements.append(
            Evidence("mechanism", says, one.alignment, against, source, runs=len(records), verdict=one.name)
        )
    if not mechanisms:
        statements.append(unknown("mechanism", "by which mechanism: no alignment of layers was recorded"))
    layers = {}
    for name in findings[0].layers:
        of_runs = [one.layers[name] for one in findings if name in one.layers]
        layers[name] = mean_record(of_runs, readout=all(layer.readout for layer in of_runs))
    return mechanisms, layers, [*statements, *_where(layers)]


def _where(layers: Mapping[str, LayerLearning]) -> list[Evidence]:
    """Return which weights moved, and in which layers training made the weights agree with the gradients."""
    topic, statements = "where features are learned", list[Evidence]()
    if layers:
        moved = [name for name, one in layers.items() if one.distance > MOVED.high]
        far = "; ".join(f"{name}: {layers[name].distance:.2g}" for name in layers)
        says, against = f"weights moved, relative to their first norm, {far}", "features can be learned there"
        farthest = next(iter(layers.values())).distance
        statements.append(_by_layer(topic, says, farthest, MOVED, against, moved))
    known = {name: one for name, one in layers.items() if math.isfinite(one.centered_share) and not one.readout}
    if known:
        order = sorted(known, key=lambda name: -known[name].centered_share)
        most = known[order[0]].centered_share
        shares = ", ".join(f"layer {name} {percent(known[name].centered_share)}" for name in order)
        unmeasured = [name for name, one in layers.items() if math.isnan(one.centered_share)]
        says = f"share of the agreement of weights and gradients that is due to training: {shares}"
        says += f" (not measured: {list_layers(unmeasured, len(unmeasured))})" if unmeasured else ""
        says += "; above 100%: weights and gradients disagreed at the start" if most > 1 else ""
        statements.append(_by_layer(topic, says, most, LEARNED, "features are learned there", learned_in(layers)))
    return statements


def _by_layer(
    topic: str, says: str, value: float, threshold: Threshold, meaning: str, layers: Sequence[str]
) -> Evidence:
    against = f"above {threshold.high:g} {meaning}"
    return Evidence(topic, says, value, against, threshold.source, verdict=", ".join(layers) or "nowhere")


def learned_in(layers: Mapping[str, LayerLearning]) -> list[str]:
    """Return layers in which training made the weights agree with the gradients, most first; not the readout."""
    names = [name for name, one in layers.items() if one.centered_share > LEARNED.high and not one.readout]
    return sorted(names, key=lambda name: -layers[name].centered_share)
