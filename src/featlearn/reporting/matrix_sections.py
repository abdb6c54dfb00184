"""Sections about matrices: spectra, specialization, the kernel over time."""

from collections.abc import Mapping, Sequence

import numpy
import torch

from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.run_data import evenly
from featlearn.reporting.content_blocks import Chart, ChartLine, MatrixSequence, Picture, Section, thin
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.pictures import class_names, class_of, cosines, normalized_kernel

SIDE = 64
"""Largest number of rows and columns of a picture."""
FRAMES = 96
"""Largest number of steps at which kernels or spectra are shown in a report, over all runs."""
FRAMES_OF_ONE = 32
"""Largest number of them of one run."""
SPECIALIZATIONS = 2**14
"""Largest number of entries of all specialization matrices in a report, beyond two of each run."""

MOST_CLASSES = 20
"""Largest number of classes that are named below a kernel."""


def spectra(groups: Sequence[RunGroup]) -> Section:
    """Eigenvalues and task power, before and after training."""
    values, powers, missing = [], [], []
    for group in groups:
        one = group.first
        steps = [s for s in one.run_data.array_steps("spectrum") if _vector(one, s, "eigenvalues") is not None]
        if not steps:
            missing.append(f'{group.label}: no spectrum was recorded; ask fl.watch for quantities=["kernel", ...]')
            continue
        shown = evenly(steps, _frames(groups))
        values += _ranked(group, {step: _vector(one, step, "eigenvalues") for step in shown})
        powers += _ranked(group, {step: _shares(_vector(one, step, "task_power")) for step in shown})
    charts = []
    if values:
        charts.append(
            Chart(
                "spectrum",
                "Eigenvalues of the kernel",
                values,
                "eigenvalue",
                "place",
                "log",
                "log",
                note=_of_one(groups),
            )
        )
    if powers:
        charts.append(
            Chart(
                "power",
                "Task in the first directions",
                powers,
                "share of |y|² up to there",
                "place",
                "log",
                note=_of_one(groups),
            )
        )
    return Section("spectra", "Spectra and task power", _SPECTRA, charts, missing)


def _frames(groups: Sequence[RunGroup]) -> int:
    """Largest number of steps that are shown of a run."""
    return min(max(2, FRAMES // len(groups)), FRAMES_OF_ONE)


def _vector(one: Findings, step: int, key: str) -> numpy.ndarray | None:
    found = one.run_data.array("spectrum", step, key)
    return None if found is None or found.dim() != 1 else found.double().numpy()


def _shares(power: numpy.ndarray | None) -> numpy.ndarray | None:
    """Task power up to each place, as a share of all of it."""
    return None if power is None or not power.sum() > 0 else numpy.cumsum(power) / power.sum()


def _ranked(group: RunGroup, found: Mapping[int, numpy.ndarray | None]) -> list[ChartLine]:
    """Lines over the place in the order: the last step, which moves through those before it, and the first."""
    known = {step: values for step, values in found.items() if values is not None}
    if not known:
        return []
    first, last = min(known), max(known)
    lines = []
    for dash, step in enumerate([last] if first == last else [last, first]):  # solid: the last step
        kind = f"step {step}" if group.alone else "last step" if step == last else "first step"
        places, shown = thin(range(1, len(known[step]) + 1), known[step].tolist(), group.points)
        kept = [int(place) - 1 for place in places]
        frames = [
            (float(at), values[kept].tolist())
            for at, values in known.items()
            if first < last == step and len(values) == len(known[last])
        ]
        lines.append(
            ChartLine(
                group.named(kind),
                [float(p) for p in places],
                shown,
                dash if group.alone else group.color,
                dash,
                group=group.color,
                kind=kind,
                frames=frames,
            )
        )
    return lines


def _of_one(groups: Sequence[RunGroup]) -> str:
    many = [f"{group.label}: of the first of {len(group.findings)} runs" for group in groups if len(group.findings) > 1]
    return "; ".join(many) + "." if many else ""


def _colors(groups: Sequence[RunGroup], colors: Sequence[int]) -> Sequence[int]:
    """The colors of the runs; none for a single one, whose colors mean quantities."""
    return () if groups[0].alone else colors


def specialization(groups: Sequence[RunGroup]) -> Section:
    """The specialization matrix over time, beside the first."""
    sequences, colors, missing = [], [], []
    for group in groups:
        found = [p for p in _pictures(group.first, "specialization", "ksm", _frames(groups)) if len(p.values) > 1]
        if found:
            most = max(2, SPECIALIZATIONS // (len(groups) * found[0].values.size))
            sequences.append((group.label, evenly(found, most)))
            colors.append(group.color)
        else:
            outputs = group.first.run_data.targets
            single = outputs is not None and outputs.shape[1] == 1
            reason = "the network has one output" if single else "it was not recorded"
            missing.append(f"{group.label}: no specialization matrix, as {reason}")
    title = "Specialization matrix, first and over time"
    block = MatrixSequence(
        "specialization",
        title,
        sequences,
        "kernel of output",
        "target of output",
        middle=1.0,
        first_beside=True,
        note=_of_one(groups),
        colors=_colors(groups, colors),
    )
    return Section("specialization", "Specialization", _SPECIALIZATION, [block] if sequences else [], missing)


def kernels(groups: Sequence[RunGroup], shown: bool) -> Section:
    """Return the kernel as cosines of centered gradients, samples sorted by their target."""
    if not shown:
        return Section("kernels", "The kernel over time", "", (), ["kernels were left out, as was asked for"])
    sequences, colors, missing = [], [], []
    for group in groups:
        pictures = _pictures(group.first, "kernel", "mean", _frames(groups))
        if pictures:
            sequences.append((group.label, pictures))
            colors.append(group.color)
        else:
            missing.append(f"{group.label}: no kernel was recorded")
    if not sequences:
        return Section("kernels", "The kernel over time", "", (), missing)
    findings, alone = groups[0].first, groups[0].alone
    named = _group_names(findings) if alone else []
    by_target = findings.run_data.targets is not None
    sorted_by = "likeness" if not by_target else "class" if _classes(findings) is not None else "target"
    what = f"Sorted by {sorted_by}. Bright: training on one moves the other (the tangent kernel)."
    block = MatrixSequence(
        "kernels",
        "Tangent kernel, at the start and now",
        sequences,
        f"sample, by {sorted_by}",
        f"sample, by {sorted_by}",
        first_beside=True,
        note=" ".join(filter(None, (what, _contrast(findings) if alone else "", _of_one(groups)))),
        colors=_colors(groups, colors),
        limits=_color_limits([picture for _, pictures in sequences for picture in (pictures[0], pictures[-1])]),
        groups=named,
    )
    return Section("kernels", "The kernel over time", "", [block], missing)


def _color_limits(pictures: Sequence[Picture]) -> tuple[float, float]:
    """Return limits of one color scale for all pictures, without the diagonal."""
    parts = [picture.values[~numpy.eye(len(picture.values), dtype=bool)] for picture in pictures]
    values = numpy.concatenate(parts) if parts else numpy.zeros(0)
    low, high = numpy.percentile(values, (2, 98)).tolist() if values.size else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _classes(findings: Findings) -> numpy.ndarray | None:
    targets = findings.run_data.targets
    return None if targets is None else class_of(findings, len(targets))


def _group_names(findings: Findings) -> list[tuple[float, str]]:
    """Return (center, name) of each class among the sorted samples, or (place, value) of some single targets."""
    y, classes = findings.run_data.targets, _classes(findings)
    if classes is None:
        values = numpy.zeros(0) if y is None or y.shape[1] > 1 else numpy.sort(y.double().numpy()[:, 0])
        return [(at, f"{float(numpy.quantile(values, at)):.2g}") for at in (0.1, 0.5, 0.9)] if len(values) else []
    if len(set(classes.tolist())) > MOST_CLASSES:
        return []
    ordered, names = numpy.sort(classes), class_names(findings)
    return [
        (
            float(numpy.flatnonzero(ordered == label).mean() + 0.5) / len(ordered),
            str(names[label])[:12] if label < len(names) else str(label),
        )
        for label in sorted(set(classes.tolist()))
    ]


def _contrast(findings: Findings) -> str:
    """Return the mean cosine within classes and between them, at the start and now; empty without classes."""
    classes, means = _classes(findings), []
    steps = findings.run_data.array_steps("kernel")
    if classes is None or len(steps) < 2:
        return ""
    same = (classes[:, None] == classes) & ~numpy.eye(len(classes), dtype=bool)
    for step in (steps[0], steps[-1]):
        kernel = normalized_kernel(findings, step)
        if kernel is None or len(kernel) != len(classes) or not same.any():
            return ""
        means.append((float(kernel[same].mean()), float(kernel[classes[:, None] != classes].mean())))
    (same_first, other_first), (same_last, other_last) = means
    said = f"Mean within a class {same_first:.2f} → {same_last:.2f}, between {other_first:.2f} → {other_last:.2f}"
    grew = same_last - other_last > 1.25 * (same_first - other_first) and same_last > other_last
    return f"{said}{': the squares are learned' if grew else ''}."


def _pictures(one: Findings, name: str, key: str, frames: int) -> list[Picture]:
    """Return square matrices of one name, in the precision in which they were recorded; kernels as sorted cosines."""
    run_data, found, order = one.run_data, list[Picture](), None
    for step in evenly(run_data.array_steps(name), frames):
        matrix = run_data.array(name, step, key)
        if matrix is not None and matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]:
            values = matrix.double().numpy()
            facts: dict[str, float] = {}
            if key == "mean":
                order = sample_order(one, len(values)) if order is None else order
                facts = _facts(one, values)
                values = cosines(values)[numpy.ix_(order, order)]
            kind = numpy.float64 if matrix.dtype == torch.float64 else numpy.float32
            found.append(Picture(f"step {step}", smaller(values).astype(kind), float(step), facts))
    return found


def _facts(one: Findings, kernel: numpy.ndarray) -> dict[str, float]:
    """Return means of the kernel over its diagonal, over pairs of one class and over the others."""
    apart, labels = ~numpy.eye(len(kernel), dtype=bool), class_of(one, len(kernel))
    facts = {"diagonal": float(kernel.diagonal().mean())}
    if labels is None:
        return facts | ({"off the diagonal": float(kernel[apart].mean())} if len(kernel) > 1 else {})
    same = labels[:, None] == labels
    for name, pairs in (("same class", same & apart), ("other class", ~same)):
        if pairs.any():
            facts[name] = float(kernel[pairs].mean())
    return facts


def sample_order(one: Findings, samples: int) -> numpy.ndarray:
    """Return the order of samples by class, by the first target, or without targets by likeness in the last kernel."""
    y, classes = one.run_data.targets, class_of(one, samples)
    if y is not None and len(y) == samples:
        return numpy.argsort(y.numpy()[:, 0] if classes is None else classes, kind="stable")
    steps = one.run_data.array_steps("kernel")
    kernel = normalized_kernel(one, steps[-1]) if y is None and steps else None
    if kernel is None or len(kernel) != samples or not numpy.isfinite(kernel).all():
        return numpy.arange(samples)
    return numpy.argsort(numpy.linalg.eigh(kernel)[1][:, -1], kind="stable")


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
