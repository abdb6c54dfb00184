"""Sections with curves over training: gap, loss and its predictions, events, alignment and norm of the kernel."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy

from featlearn.diagnosis.events import alignment_curve
from featlearn.diagnosis.evidence import GAP
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.rates import Unknown
from featlearn.diagnosis.run_data import Curve
from featlearn.reporting.content_blocks import Chart, ChartLine, Grid, Level, Mark, Section, Window, in_full
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.overlay import Overlay
from featlearn.reporting.predicted_loss import PredictedLoss, predicted_loss

Points = tuple[Sequence[float], Sequence[float]]
LARGEST_GAP = 1.5
"""Where the axis of the gap ends: one means that the linearization says nothing, more that it overshoots."""


def present(lines: Iterable[ChartLine | None]) -> list[ChartLine]:
    """The lines that are not None."""
    return [line for line in lines if line is not None]


def points(curve: Curve | None) -> Points | None:
    """(steps, values) as lists."""
    return None if curve is None else (curve.steps.tolist(), curve.values.tolist())


def overview(groups: Sequence[RunGroup], theory: Overlay) -> Section:
    """The curves that say most: linearization gap, loss, accuracy, alignment and norm of the kernel."""
    shown, missing = _loss(groups, theory)
    lines = _gap_lines(groups)
    if lines:
        levels = [Level(GAP.low, f"lazy below {GAP.low:g}"), Level(GAP.high, f"rich above {GAP.high:g}")]
        shown = [
            Chart("gap", "Linearization gap", lines, "share missed", levels=levels, least=(0.0, 1.0), most=LARGEST_GAP),
            *shown,
        ]
    missing += [
        f"{group.label}: {group.findings[0].gap.reason or 'there is no linearization gap'}"
        for group in groups
        if not any(one.gap.known for one in group.findings)
    ]
    charts, absent = _kernel_charts(groups, theory)
    return Section("curves", "Over training", "", [*shown, *charts], list(dict.fromkeys([*missing, *absent])))


def _gap_lines(groups: Sequence[RunGroup]) -> list[ChartLine]:
    kinds = {"probe": "on the probe", "test": "on test points", "unshrunk": "on the probe, without common shrinking"}
    lines = [
        group.line(lambda one, p=place: points(getattr(one.gap, p)), label, dash=dash)  # type: ignore[misc]
        for group in groups
        for dash, (place, label) in enumerate(kinds.items())
    ]
    return _apart(groups, present(lines))


def _loss(groups: Sequence[RunGroup], theory: Overlay) -> tuple[list[Chart], list[str]]:
    """The loss on the probe, with or beside the losses that kernels predict; accuracy; and what is missing."""
    label = "measured" if groups[0].alone else ""
    lines = present(group.line(lambda one: points(one.run_data.loss), label) for group in groups)
    alone, missing = groups[0].alone, [reason for group in groups for reason in group.left_out]
    predicted, absent, source = _predictions(groups)
    note = f"{_FROZEN} {source}".strip() if predicted else ""
    missing += absent
    if alone:
        lines = _apart(groups, [*lines, *predicted])
    lines += theory.lines("loss", _samples(groups))
    charts = []
    if lines:
        charts.append(
            Chart("loss", "Loss on the probe", lines, _unit(groups), y_axis="log", note=note if alone else "")
        )
    else:
        missing.append("no loss on the probe was recorded")
    if predicted and not alone:
        charts.append(
            Chart("loss-predicted", "Loss that kernels predict", predicted, _unit(groups), y_axis="log", note=note)
        )
    own = present(group.scalar("loss") for group in groups)
    if own:
        charts.append(Chart("training-loss", "Training loss", own, "as passed to watch.step", y_axis="log"))
    return [*charts, *_accuracy(groups)], missing


def _predictions(groups: Sequence[RunGroup]) -> tuple[list[ChartLine], list[str], str]:
    """The losses that kernels predict, the reasons where there are none, and the source of the rate."""
    lines, missing, sources = list[ChartLine](), [], set()
    for group in groups:
        found = {id(one): predicted_loss(one) for one in group.findings}
        for dash, (place, label) in enumerate(_PREDICTED.items(), 1):
            lines += present([group.line(lambda one, f=found, p=place: _prediction(f[id(one)], p), label, dash=dash)])  # type: ignore[misc]
        missing += [f"{group.label}: no prediction, as {f.reason}" for f in found.values() if isinstance(f, Unknown)]
        sources |= {f.source for f in found.values() if isinstance(f, PredictedLoss)}
    return lines, missing, f"Rate of the predictions: {'; '.join(sorted(sources))}." if sources else ""


def _unit(groups: Sequence[RunGroup]) -> str:
    kinds = {one.run_data.loss_kind for group in groups for one in group.findings}
    return f"mean {' or '.join(sorted({kind.name if kind.logistic else '|f − y|²' for kind in kinds}))}"


_PREDICTED = {
    "frozen": "first kernel, frozen",
    "rescaled": "first kernel at its later size",
    "evolving": "kernels as they came",
}


def _prediction(found: PredictedLoss | Unknown, place: str) -> Points | None:
    return None if isinstance(found, Unknown) else points(getattr(found, place))


def _samples(groups: Sequence[RunGroup]) -> int | None:
    """Number of probe samples if all runs have the same, else None."""
    known = [one.run_data.targets for group in groups for one in group.findings]
    sizes = {len(y) for y in known if y is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _accuracy(groups: Sequence[RunGroup]) -> list[Chart]:
    kinds = {"probe/accuracy": "probe", "test/accuracy": "test"}
    lines = [
        group.scalar(name, label, dash=dash) for group in groups for dash, (name, label) in enumerate(kinds.items())
    ]
    shown = _apart(groups, present(lines))
    return [Chart("accuracy", "Accuracy", shown, "accuracy")] if shown else []


def timeline(groups: Sequence[RunGroup], theory: Overlay) -> Section:
    """The times at which alignment, kernel norm and loss moved, on one axis; the trace of the kernel."""
    lines = present(
        line
        for group in groups
        for line in (
            group.line(_loss_share, "loss, share of the first"),
            group.line(lambda one: points(alignment_curve(one.run_data)), "kernel-task alignment, centered", dash=1),
            group.line(_norm_share, "kernel norm, share of the last", dash=2),
        )
    )
    blocks: list[Chart | Grid] = []
    if lines:
        windows, marks = _event_marks(groups) if groups[0].alone else ([], [])
        blocks.append(
            Chart(
                "timeline",
                "Order of events",
                _apart(groups, lines),
                "share",
                marks=marks,
                windows=windows,
                note=_silence(groups),
            )
        )
    if lines and not groups[0].alone:
        blocks.append(_event_table(groups))
    trace = [*present(group.scalar("ntk/trace") for group in groups), *theory.lines("ntk/trace")]
    if trace:
        blocks.append(Chart("ntk-trace", "Trace of the kernel", trace, "trace of the kernel", y_axis="log"))
    return Section("timeline", "Order of events", _TIMELINE, blocks, [] if blocks else ["nothing of it was recorded"])


def _event_table(groups: Sequence[RunGroup]) -> Grid:
    """Times of events by run: marks of several runs in one chart cannot be told apart."""
    rows = [
        [group.label, *(in_full(group.diagnosis.times.get(name, math.nan)) for name in _EVENTS)] for group in groups
    ]
    return Grid(
        "events-by-run",
        "Steps of events",
        ["run", *_EVENTS.values()],
        rows,
        "–: it did not happen, or lies between measurements that are far apart.",
        [group.color for group in groups],
    )


def _kernel_charts(groups: Sequence[RunGroup], theory: Overlay) -> tuple[list[Chart], list[str]]:
    """Alignment and norm of the kernel, and what is missing."""
    missing = [
        f"{group.label}: {what} not recorded"
        for group in groups
        for what, names in (
            ("kernel-task alignment was", ("ntk/centered_alignment", "ntk/alignment")),
            ("the kernel norm was", ("ntk/norm",)),
        )
        if not group.names.intersection(names)
    ]
    charts = []
    kinds = list(_ALIGNMENTS.items())
    alignment = [group.scalar(name, label, dash=dash) for group in groups for dash, (name, label) in enumerate(kinds)]
    chosen = [*_apart(groups, present(alignment)), *theory.lines("ntk/alignment")]
    if chosen:
        charts.append(Chart("alignment", "Kernel-task alignment", chosen, "alignment"))
    norm = [*present(group.scalar("ntk/norm") for group in groups), *theory.lines("ntk/norm")]
    if norm:
        charts.append(Chart("ntk-norm", "Kernel norm", norm, "kernel norm", y_axis="log"))
    kinds = [("ntk/centered_distance", "centered"), ("ntk/distance", "not centered")]
    moved = [group.scalar(name, label, dash=dash) for group in groups for dash, (name, label) in enumerate(kinds)]
    if present(moved):
        charts.append(Chart("distance", "How far the kernel turned", _apart(groups, present(moved)), "1 − cosine"))
    return charts, missing


_ALIGNMENTS = {
    "ntk/centered_alignment": "probe, centered",
    "ntk/alignment": "probe",
    "ntk/test/centered_alignment": "test, centered",
    "ntk/test/alignment": "test",
}


def _apart(groups: Sequence[RunGroup], lines: list[ChartLine]) -> list[ChartLine]:
    """For a single group, one color per quantity instead of one per run."""
    return [replace(line, color=color) for color, line in enumerate(lines)] if groups[0].alone else lines


def _loss_share(one: Findings) -> Points | None:
    loss = one.run_data.loss
    return None if loss is None or loss.first <= 0 else (loss.steps.tolist(), (loss.values / loss.first).tolist())


def _norm_share(one: Findings) -> Points | None:
    norm = one.run_data.curve("ntk/norm")
    return None if norm is None or norm.last <= 0 else (norm.steps.tolist(), (norm.values / norm.last).tolist())


def _event_marks(groups: Sequence[RunGroup]) -> tuple[list[Window], list[Mark]]:
    """The window of silent alignment, if there is one, and marks of all events."""
    windows, marks = [], []
    for group in groups:
        times = group.diagnosis.times
        for name, label in _EVENTS.items():
            at = times.get(name, math.nan)
            if math.isfinite(at):
                marks.append(Mark(at, group.named(label), group.color))
        begin = times.get("alignment_90", math.nan)
        ends = [times[name] for name in ("norm_10", "loss_half") if math.isfinite(times.get(name, math.nan))]
        if group.diagnosis.silent and math.isfinite(begin) and ends and min(ends) > begin:
            windows.append(Window(begin, min(ends), group.named("silent alignment")))
    return windows, sorted(marks, key=lambda mark: mark.at)


_EVENTS = {
    "alignment_90": "90 % of the rise of alignment",
    "norm_10": "10 % of the last kernel norm",
    "loss_half": "half of the loss",
    "kernel_settled": "the kernel settled",
    "rich_from": "the gap became rich",
}


def _silence(groups: Sequence[RunGroup]) -> str:
    said = {True: "silent", False: "not silent", None: "cannot tell whether silent"}
    told = "; ".join(group.named(said[group.diagnosis.silent]) for group in groups)
    return f"Alignment was silent if it was done before kernel norm and loss moved: {told}."


def overlaid(groups: Sequence[RunGroup], theory: Overlay) -> Section | None:
    """Predictions of theories that no other section shows; None without a theory."""
    if not theory:
        return None
    charts, missing = [], []
    for name in theory.names():
        if name in ("loss", "ntk/alignment", "ntk/norm", "ntk/trace"):
            continue
        measured = present(group.scalar(name) for group in groups)
        if not measured:
            missing.append(f"{name}: predicted, but the runs have no such number")
        charts.append(Chart(f"theory-{name.replace('/', '-')}", name, [*measured, *theory.lines(name)], name))
    return Section("theory", "Theory", _THEORY, charts, missing)


def shares(values: Sequence[float]) -> list[float]:
    """Values divided by the first; nan if that is zero."""
    numbers = numpy.asarray(values, dtype=float)
    return (numbers / numbers[0]).tolist() if numbers[0] else [math.nan] * len(numbers)


def named_layers(groups: Sequence[RunGroup]) -> Mapping[str, str]:
    """Recorded name of a layer -> its name in the model, if a run has it."""
    found: dict[str, str] = {}
    for group in groups:
        known: Any = group.first.run.config.get("layer_names")
        if isinstance(known, Mapping):
            found |= {str(safe): str(real) or "root" for real, safe in known.items()}
    return found


_FROZEN = (
    "Kernels predict what the loss would be if features stayed as they were; what the network gains is due to features."
)

_TIMELINE = """<p>Kernel-task alignment is
<math><mi>A</mi><mo>=</mo><mfrac><mrow><msup><mi>y</mi><mi>T</mi></msup><mi>K</mi><mi>y</mi></mrow>
<mrow><mo>|</mo><mi>K</mi><mo>|</mo><msup><mrow><mo>|</mo><mi>y</mi><mo>|</mo></mrow><mn>2</mn></msup></mrow></mfrac>
</math>, one if the kernel holds the task and nothing else; centered, without the constant of kernel and targets.</p>"""

_THEORY = """<p>Curves of the theories laid over the run that no other section shows.</p>"""
