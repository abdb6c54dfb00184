"""The look of the figures, what they share, and the numbers that were drawn."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy

from featlearn_papers.frame.legends import arrange_legends, check_text

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GRAY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#999999",
    "#000000",
)
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GRAY, BLACK)
"""Okabe and Ito's, told apart by all eyes."""

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "savefig.dpi": 150,
    "pdf.fonttype": 42,
    "svg.hashsalt": "featlearn",
}
WIDTH = 6.75
"""inches: two columns"""
LARGEST = 100_000
"""bytes of a picture that is kept in the repository"""


def panels(rows: int, columns: int, *, height: float = 2.0, titles: Sequence[str] = ()) -> tuple[Any, list[Any]]:
    """A figure of full width with its axes, row by row; titles "A", "B" ... are the panels of the paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title, loc="left", fontweight="bold")
    return figure, axes


Spread = Literal["range", "standard error", "standard deviation"]
"""What the band around a mean shows: lowest to highest seed, or one deviation to each side."""


def curve(
    ax: Any,
    x: Any,
    values: Any,
    label: str,
    *,
    color: str = BLUE,
    style: str = "-",
    spread: Spread = "range",
    **options: Any,
) -> None:
    """Mean over seeds of `values` (S, T) against `x` (T,), with a band that shows their spread.

    Values (T,) are drawn as they are: a theory, the numbers of the paper.
    """
    x, values = numpy.asarray(x), numpy.asarray(values)
    if values.ndim == 1:
        ax.plot(x, values, style, color=color, label=label, **options)
        return
    ax.plot(x, values.mean(0), style, color=color, label=label, **options)
    if len(values) > 1:
        bounds = _bounds(values, spread)
        for name, bound in bounds.items():
            ax.plot(x, bound, color=color, alpha=0.4, linewidth=0.5, label=f"_{label.removeprefix('_')}: {name}")
        band = ax.fill_between(x, *bounds.values(), color=color, alpha=0.15, linewidth=0)
        band.set_gid(f"{spread} of {len(values)} seeds")


def _bounds(values: Any, spread: Spread) -> dict[str, Any]:
    if spread == "range":
        return {"lowest seed": values.min(0), "highest seed": values.max(0)}
    deviation = values.std(0, ddof=1) / (len(values) ** 0.5 if spread == "standard error" else 1)
    return {f"less one {spread}": values.mean(0) - deviation, f"plus one {spread}": values.mean(0) + deviation}


def seed_curves(ax: Any, x: Any, values: Any, label: str, *, color: str = BLUE, style: str = "-") -> None:
    """Every seed of `values` (S, T) as a thin line of its own, where a mean would hide that they differ."""
    for seed, row in enumerate(numpy.asarray(values)):
        name = label if seed == 0 else f"_{label.removeprefix('_')}: seed {seed}"
        ax.plot(x, row, style, color=color, linewidth=0.9, alpha=0.8, label=name)


def paper_value(ax: Any, value: float, label: str = "paper", *, axis: str = "y") -> None:
    """A dotted line at a number that the paper gives."""
    draw = ax.axhline if axis == "y" else ax.axvline
    draw(value, color=BLACK, linestyle=":", linewidth=1, label=label)


class Plotted(NamedTuple):
    """One number of a picture."""

    panel: str
    curve: str
    x: Any
    y: Any
    value: Any
    """of a cell in an image or a table at column x and row y; empty for curves"""


def plotted(figure: Any) -> Iterator[Plotted]:
    """The numbers in a figure: lines, points, images and tables, as they were drawn."""
    for position, ax in enumerate(figure.axes):
        if ax.get_label() == "<colorbar>":  # as matplotlib names it
            continue
        panel = ax.get_title("left") or ax.get_title() or ax.get_label() or str(position)
        for line in ax.lines:
            # an edge of the panel, not of the data: axhline runs over 0 to 1
            across, along = (
                line.get_transform() == ax.get_yaxis_transform(),
                line.get_transform() == ax.get_xaxis_transform(),
            )
            name = str(line.get_label()).removeprefix("_")
            for x, y in line.get_xydata()[: 1 if across or along else None]:
                yield Plotted(panel, name, "" if across else _short(x), "" if along else _short(y), "")
        for points in ax.collections:
            for x, y in points.get_offsets() if type(points).__name__ == "PathCollection" else ():
                yield Plotted(panel, str(points.get_label()).removeprefix("_"), _short(x), _short(y), "")
        for image in [*ax.images, *(mesh for mesh in ax.collections if type(mesh).__name__ == "QuadMesh")]:
            array = numpy.asarray(image.get_array())
            for (row, column), value in numpy.ndenumerate(array if array.ndim == 2 else numpy.zeros((0, 0))):
                yield Plotted(panel, str(image.get_label()).removeprefix("_"), column, row, _short(value))
        for table in ax.tables:
            for (row, column), cell in sorted(table.get_celld().items()):
                yield Plotted(panel, "table", column, row, cell.get_text().get_text().replace("\n", " "))


def _short(value: Any) -> str:
    return f"{float(value):.6g}"


def as_csv(rows: Iterator[Plotted]) -> str:
    """A table with the names of `Plotted` as its head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Plotted._fields)
    writer.writerows(rows)
    return text.getvalue()


def save(figure: Any, folder: Path) -> None:
    """figure.png, below `LARGEST` bytes, figure.pdf and numbers.csv."""
    check_text(figure)
    arrange_legends(figure)
    picture = folder / "figure.png"
    for dpi in (150, 120, 100, 80, 60):
        figure.savefig(picture, dpi=dpi, metadata={"Software": None})
        if picture.stat().st_size >= LARGEST:
            _fewer_colors(picture)
        if picture.stat().st_size < LARGEST:
            break
    figure.savefig(folder / "figure.pdf", metadata={"CreationDate": None})
    (folder / "numbers.csv").write_text(as_csv(plotted(figure)), encoding="utf-8")


def _fewer_colors(picture: Path) -> None:
    """A palette in place of full color: lines and bands need no more, and it takes a third of the bytes.

    Colors are chosen far from each other, not by how many pixels they have: a thin line keeps its own.
    """
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
    small.save(picture, optimize=True)
