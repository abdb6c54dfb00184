"""The sections of a report as matplotlib figures for print: one column (3.25 in), 8 pt, colors of Okabe and Ito."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy

from featlearn import palette
from featlearn.errors import InputValueError, RunError, did_you_mean
from featlearn.record.csv_table import write_csv
from featlearn.reporting import curve_sections, layer_sections, matrix_sections
from featlearn.reporting.content_blocks import NEUTRAL, POINTS, Chart, MatrixSequence, Section, shade
from featlearn.reporting.groups import RunGroup, groups
from featlearn.reporting.overlay import Overlay

__all__ = ["FIGURES", "draw", "figures", "save_figures", "style"]

COLORS = (*palette.COLORS, palette.DARK_GRAY)
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.")
_WIDE = (6.75, 2.4)


def style() -> str:
    """The packaged style, for `matplotlib.style.use` or `matplotlib.style.context`."""
    return str(files("featlearn.reporting") / "static" / "figures.mplstyle")


def draw(
    runs: Any, name: str, *, ax: Any = None, theory: Mapping[str, Any] | None = None, time_scale: float = 1.0
) -> Any:
    """Draw one figure of a run, its path, or several, and return the axes.

    Raise an error that gives the reason if the runs do not hold what the figure needs.

    Args:
        runs: As for `fl.report`.
        name: Name of the figure, one of `FIGURES`.
        ax: Axes to draw into; a new figure by default.
        theory: As for `fl.report`, for "loss", "alignment" and "kernel_norm".
        time_scale: As for `fl.report`.
    """
    if name not in FIGURES:
        raise InputValueError(f"name={name!r}, expected one of {', '.join(FIGURES)}{did_you_mean(name, FIGURES)}")
    build, key = FIGURES[name]
    section = build(groups(runs, points=POINTS), Overlay(theory, time_scale))
    assert section is not None
    block = next((each for each in section.blocks if each.key == key), None)
    if block is None:
        reasons = "; ".join(section.missing) or "it was not recorded"
        raise InputValueError(f"the runs have nothing to draw for {name!r}: {reasons}")
    import matplotlib.style

    with matplotlib.style.context(style()):
        if isinstance(block, Chart):
            return _chart(block, ax)
        assert isinstance(block, MatrixSequence)
        return _picture(block, 0, -1, _axes(ax))


def figures(
    runs: Any, *, bands: bool = True, theory: Mapping[str, Any] | None = None, time_scale: float = 1.0
) -> dict[str, Any]:
    """Return all figures of the runs by name, as matplotlib figures; arguments are those of `fl.report`."""
    return {name: figure for name, _, figure in _drawn(runs, bands, Overlay(theory, time_scale))}


def save_figures(
    runs: Any,
    folder: str | os.PathLike[str],
    *,
    bands: bool = True,
    theory: Mapping[str, Any] | None = None,
    time_scale: float = 1.0,
) -> list[Path]:
    """Save all figures of the runs as PDF and PNG, with the plotted numbers as CSV; returns the paths.

    Arguments are those of `fl.report`. Existing files of the same names are replaced.
    """
    target, paths = Path(folder), []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for _, block, figure in _drawn(runs, bands, Overlay(theory, time_scale)):
            stem = target / re.sub(r"[^A-Za-z0-9_-]", "-", block.key)
            for kind in ("pdf", "png"):
                figure.savefig(stem.with_suffix(f".{kind}"))
                paths.append(stem.with_suffix(f".{kind}"))
            paths.append(_to_csv(block, stem.with_suffix(".csv")))
    except OSError as error:
        raise RunError(f"the figures cannot be written to {target}: {error}") from error
    return paths


def _drawn(runs: Any, bands: bool, overlay: Overlay) -> Iterator[tuple[str, Chart | MatrixSequence, Any]]:
    """Yield name, content, and figure of every chart and matrix, in the packaged style and unknown to pyplot."""
    import matplotlib.pyplot as plt
    import matplotlib.style

    run_groups = groups(runs, bands=bands, points=POINTS)
    names = {key: name for name, (_, key) in FIGURES.items()}
    for build in _SECTIONS:
        section = build(run_groups, overlay)
        for block in () if section is None else section.blocks:
            if isinstance(block, Chart | MatrixSequence):
                with matplotlib.style.context(style()):
                    axes = _chart(block, None) if isinstance(block, Chart) else _first_and_last(block)
                    plt.close(axes.get_figure())
                    yield names.get(block.key, block.key), block, axes.get_figure()


Build = Callable[[Sequence[RunGroup], Overlay], Section | None]


def _without_theory(build: Callable[[Sequence[RunGroup]], Section]) -> Build:
    return lambda found, _: build(found)


def _kernels(found: Sequence[RunGroup], _: Overlay) -> Section:
    return matrix_sections.kernels(found, True)


_SECTIONS: tuple[Build, ...] = (
    curve_sections.overview,
    curve_sections.timeline,
    curve_sections.overlaid,
    _without_theory(matrix_sections.spectra),
    _without_theory(matrix_sections.specialization),
    _without_theory(layer_sections.features),
    _without_theory(layer_sections.layers),
    _kernels,
)


FIGURES: dict[str, tuple[Build, str]] = {
    "gap": (curve_sections.overview, "gap"),
    "loss": (curve_sections.overview, "loss"),
    "accuracy": (curve_sections.overview, "accuracy"),
    "timeline": (curve_sections.timeline, "timeline"),
    "alignment": (curve_sections.overview, "alignment"),
    "kernel_norm": (curve_sections.overview, "ntk-norm"),
    "kernel_distance": (curve_sections.overview, "distance"),
    "spectrum": (_without_theory(matrix_sections.spectra), "spectrum"),
    "task_power": (_without_theory(matrix_sections.spectra), "power"),
    "specialization": (_without_theory(matrix_sections.specialization), "specialization"),
    "features": (_without_theory(layer_sections.features), "features-uncentered"),
    "features_centered": (_without_theory(layer_sections.features), "features-centered"),
    "layer_alignment": (_without_theory(layer_sections.layers), "layers"),
    "weight_norms": (_without_theory(layer_sections.layers), "norms"),
    "weight_distance": (_without_theory(layer_sections.layers), "weights"),
    "kernel": (_kernels, "kernels"),
}
"""Section and key of each figure. Matrices show the last one of the first run."""


def _axes(ax: Any, size: tuple[float, float] | None = None) -> Any:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size)[1]


def _chart(one: Chart, ax: Any) -> Any:
    ax = _axes(ax, _WIDE if _is_crowded(one) else None)
    for line in one.lines:
        color = COLORS[shade(line.color)]
        # a label that begins with _ is not shown
        label = line.label if not line.label.startswith("_") else f" {line.label}"
        few = one.x_axis == "steps" and sum(map(math.isfinite, line.y)) <= 60  # measurements may lie far apart
        marker = "o" if few else None
        ax.plot(line.x, line.y, _DASHES[line.dash % 4], color=color, label=_plain(label), marker=marker, markersize=2)
        if line.low is not None and line.high is not None:
            ax.fill_between(line.x, line.low, line.high, color=color, alpha=0.2, linewidth=0)
    for window in one.windows:
        ax.axvspan(window.begin, window.end, color=palette.GREEN, alpha=0.15, linewidth=0, label=_plain(window.label))
    for mark in one.marks:
        ax.axvline(mark.at, color=palette.GRAY, linestyle=":", linewidth=0.8)
    for level in one.levels:
        ax.axhline(level.at, color=COLORS[shade(NEUTRAL)], linestyle=(0, (1, 2)), linewidth=0.8)
        ax.annotate(
            _plain(level.label),
            (1, level.at),
            xycoords=("axes fraction", "data"),
            fontsize=6,
            ha="right",
            va="bottom",
            color=COLORS[shade(NEUTRAL)],
        )
    if one.least is not None:
        ax.update_datalim([(one.lines[0].x[0], end) for end in one.least])
        ax.autoscale_view(scalex=False)
    if one.x_axis == "steps":
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xlim(left=0)
    elif one.x_axis == "log":
        ax.set_xscale("log")
    if one.logarithmic:
        ax.set_yscale("log")
    if one.limits is not None:
        ax.set_ylim(one.limits)
    ax.set_xlabel(one.x)
    ax.set_ylabel(one.y)
    ax.set_title(one.title)
    outside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if _is_crowded(one) else {}
    ax.legend(**outside)
    return ax


def _is_crowded(one: Chart) -> bool:
    """Whether the legend is placed outside of the axes."""
    return len(one.lines) > 4 or bool(one.marks)


def _plain(label: str) -> str:
    """Escape $, which matplotlib would take for a formula."""
    return label.replace("$", r"\$")


def _picture(one: MatrixSequence, sequence: int, at: int, ax: Any) -> Any:
    label, pictures = one.sequences[sequence]
    picture = pictures[at]
    low, high = one.levels(picture.values)
    colors = "viridis" if one.middle is None else "RdBu_r"
    image = ax.imshow(picture.values, cmap=colors, interpolation="nearest", vmin=low, vmax=high)
    ax.get_figure().colorbar(image, ax=ax, shrink=0.8)
    ax.set_title(_plain(f"{label}, {picture.label}"))
    ax.set_xlabel(one.columns)
    ax.set_ylabel(one.rows)
    if not one.first_beside:  # indices mean nothing after sorting and thinning
        ax.set_xticks([])
        ax.set_yticks([])
    return ax


def _first_and_last(one: MatrixSequence) -> Any:
    """The first and the last matrix of every run; returns the last axes."""
    import matplotlib.pyplot as plt

    count = len(one.sequences)
    figure, axes = plt.subplots(count, 2, figsize=(6.75, 2.6 * count), squeeze=False)
    del figure
    for sequence in range(count):
        for column, at in enumerate((0, -1)):
            _picture(one, sequence, at, axes[sequence][column])
    return axes[-1][-1]


def _to_csv(block: Chart | MatrixSequence, path: Path) -> Path:
    if isinstance(block, MatrixSequence):
        cells = (
            [label, picture.step, row, column, value]
            for label, pictures in block.sequences
            for picture in {id(p): p for p in (pictures[0], pictures[-1])}.values()
            for (row, column), value in numpy.ndenumerate(picture.values)
        )
        return write_csv(path, ["run", "step", "row", "column", "value"], cells)
    parts = [("", ", lowest", ", highest") if line.low is not None else ("",) for line in block.lines]
    head = [f"{line.label}{part}" for line, each in zip(block.lines, parts, strict=True) for part in each]
    rows = (
        [x, *(None if math.isnan(v) else v for cell, each in zip(cells, parts, strict=True) for v in cell[: len(each)])]
        for x, cells in block.rows()
    )
    return write_csv(path, [block.x, *head], rows)
