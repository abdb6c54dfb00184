"""Sections about matrices: spectra, specialisation, the kernel over time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy

from featlearn.diagnosis.findings import Findings
from featlearn.reporting.content_blocks import Chart, ChartLine, MatrixSequence, Picture, Section, thinned
from featlearn.reporting.groups import RunGroup

SIDE = 64
"""Largest number of rows and columns of a picture."""
FRAMES = 96
"""Largest number of kernel pictures in a report, over all runs."""


def spectra(groups: Sequence[RunGroup]) -> Section:
    """Eigenvalues and task power, before and after training."""
    values, powers, missing = [], [], []
    for group in groups:
        one = group.first
        steps = [s for s in one.run_data.array_steps("spectrum") if _vector(one, s, "eigenvalues") is not None]
        if not steps:
            missing.append(f'{group.label}: no spectrum was recorded; ask fl.watch for quantities=["kernel", ...]')
            continue
        ends = [steps[0]] if len(steps) == 1 else [steps[0], steps[-1]]
        for dash, step in enumerate(reversed(ends)):  # solid: the last step
            color = dash if group.alone else group.color
            kind = f"step {step}" if group.alone else "last step" if step == steps[-1] else "first step"
            style = ChartLine(group.named(kind), (), (), color, dash, group=group.color, kind=kind)
            values.append(_ranked(style, _vector(one, step, "eigenvalues"), group.points))
            power = _vector(one, step, "task_power")
            if power is not None and power.sum() > 0:
                powers.append(_ranked(style, numpy.cumsum(power) / power.sum(), group.points))
    charts = []
    if values:
        charts.append(Chart("spectrum", "Eigenvalues of the kernel", [v for v in values if v is not None], "eigenvalue",
                            "place", "log", "log", note=_of_one(groups)))  # fmt: skip
    if powers:
        charts.append(Chart("power", "Task in the first directions", [p for p in powers if p is not None],
                            "share of |y|² up to there", "place", "log", note=_of_one(groups)))  # fmt: skip
    return Section("spectra", "Spectra and task power, before and after", _SPECTRA, charts, missing)


def _vector(one: Findings, step: int, key: str) -> numpy.ndarray | None:
    found = one.run_data.array("spectrum", step, key)
    return None if found is None or found.dim() != 1 else found.double().numpy()


def _ranked(style: ChartLine, values: numpy.ndarray | None, points: int) -> ChartLine | None:
    """A line over the place in the order, in the style of an empty one."""
    if values is None:
        return None
    places, shown = thinned(range(1, len(values) + 1), values.tolist(), points)
    return replace(style, x=[float(p) for p in places], y=shown)


def _of_one(groups: Sequence[RunGroup]) -> str:
    many = [f"{group.label}: of the first of {len(group.findings)} runs" for group in groups if len(group.findings) > 1]
    return "; ".join(many) + "." if many else ""


def _colors(groups: Sequence[RunGroup], colors: Sequence[int]) -> Sequence[int]:
    """The colours of the runs; none for a single one, whose colours mean quantities."""
    return () if groups[0].alone else colors


def specialization(groups: Sequence[RunGroup]) -> Section:
    """The specialisation matrix, first and last."""
    sequences, colors, missing = [], [], []
    for group in groups:
        found = [p for p in _pictures(group.first, "specialization", "ksm", None) if len(p.values) > 1]
        if found:
            sequences.append((group.label, [found[0]] if len(found) == 1 else [found[0], found[-1]]))
            colors.append(group.color)
        else:
            outputs = group.first.run_data.targets
            single = outputs is not None and outputs.shape[1] == 1
            reason = "the network has one output" if single else "it was not recorded"
            missing.append(f"{group.label}: no specialisation matrix, as {reason}")
    title = "Specialisation matrix, before and after"
    block = MatrixSequence("specialization", title, sequences, "kernel of output", "target of output", middle=1.0,
                           slider=False, note=_of_one(groups), colors=_colors(groups, colors))  # fmt: skip
    return Section("specialization", "Specialisation", _SPECIALIZATION, [block] if sequences else [], missing)


def kernels(groups: Sequence[RunGroup], shown: bool) -> Section:
    """The kernel itself, with samples sorted by their target."""
    if not shown:
        return Section("kernels", "The kernel over time", "", (), ["left out, as was asked for"])
    sequences, colors, missing = [], [], []
    for group in groups:
        frames = max(2, FRAMES // len(groups))
        pictures = _pictures(group.first, "kernel", "mean", min(frames, 32))
        if pictures:
            sequences.append((group.label, pictures))
            colors.append(group.color)
        else:
            missing.append(f"{group.label}: no kernel was recorded")
    title = "Tangent kernel on the probe"
    block = MatrixSequence("kernels", title, sequences, "sample, by target", "sample, by target", note=_of_one(groups),
                           colors=_colors(groups, colors))  # fmt: skip
    return Section("kernels", "The kernel over time", _KERNELS, [block] if sequences else [], missing)


def _pictures(one: Findings, name: str, key: str, frames: int | None) -> list[Picture]:
    """Square matrices of one name; kernels are sorted by target."""
    run_data, found = one.run_data, []
    steps = run_data.array_steps(name)
    if frames is not None and len(steps) > frames:
        steps = [steps[round(i * (len(steps) - 1) / (frames - 1))] for i in range(frames)]
    for step in steps:
        matrix = run_data.array(name, step, key)
        if matrix is not None and matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]:
            values = matrix.double().numpy()
            facts: dict[str, float] = {}
            if key == "mean":
                order = sample_order(one, len(values))
                facts = _facts(one, values)
                values = values[numpy.ix_(order, order)]
            found.append(Picture(f"step {step}", smaller(values), float(step), facts))
    return found


def _facts(one: Findings, kernel: numpy.ndarray) -> dict[str, float]:
    """Means of the kernel over its diagonal, over pairs of one class and over the others."""
    samples, y = len(kernel), one.run_data.targets
    apart = ~numpy.eye(samples, dtype=bool)
    found = {"diagonal": float(kernel.diagonal().mean())}
    if y is None or len(y) != samples or y.shape[1] < 2:
        return found | ({"off the diagonal": float(kernel[apart].mean())} if samples > 1 else {})
    labels = y.numpy().argmax(1)
    same = labels[:, None] == labels
    for name, pairs in (("same class", same & apart), ("other class", ~same)):
        if pairs.any():
            found[name] = float(kernel[pairs].mean())
    return found


def sample_order(one: Findings, samples: int) -> numpy.ndarray:
    """Order of samples by class, or by target for a single output."""
    y = one.run_data.targets
    if y is None or len(y) != samples:
        return numpy.arange(samples)
    rows = y.numpy()
    return numpy.argsort(rows[:, 0] if rows.shape[1] == 1 else rows.argmax(1), kind="stable")


def smaller(matrix: numpy.ndarray, side: int = SIDE) -> numpy.ndarray:
    """The matrix averaged over blocks to at most `side` rows and columns."""
    size = len(matrix)
    if size <= side:
        return matrix
    edges = numpy.linspace(0, size, side + 1).round().astype(int)
    sums = numpy.add.reduceat(numpy.add.reduceat(matrix, edges[:-1], 0), edges[:-1], 1)
    counts = numpy.diff(edges)
    means: numpy.ndarray = sums / numpy.outer(counts, counts)
    return means


_SPECTRA = """<p>Directions in which the kernel is large are learned first. Where features are learned, few large
eigenvalues stand out and the targets lie in them.</p>"""

_SPECIALIZATION = """<p>Row c, column c′: how well the kernel of output c fits the target of output c′, against the mean
over kernels. Above one on the diagonal, each output has grown a kernel for its own task.</p>"""

_KERNELS = """<p>How similar two samples are to the network, samples sorted by their target: blocks on the diagonal are
classes. The slider moves through training; arrow keys work.</p>"""
