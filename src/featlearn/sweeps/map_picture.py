"""A map of a sweep as a matplotlib picture: colors over two axes, with a theory's boundary."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from featlearn.errors import InputTypeError, InputValueError
from featlearn.palette import COLORS, DARK_GRAY, LIGHT_GRAY, REGIMES
from featlearn.reporting.figures import style
from featlearn.sweeps.cells import TIE, Axis, Cells, short

MOST_WRITTEN = 150
"""Largest number of cells with values written into them."""
WIDE = 100.0
"""Smallest ratio of the largest to the smallest value for logarithmic colors."""
POINTS = 400
"""Number of points at which a boundary function is evaluated."""


def draw(cells: Cells, *, spread: bool = False, boundary: Any = None, ax: Any = None) -> Any:
    """Draw cells into `ax`, or a new figure; return the axes."""
    import matplotlib.pyplot as plt
    import matplotlib.style

    numeric = cells.numeric or spread
    values = cells.spread if spread else cells.values
    with matplotlib.style.context(style()):
        if ax is None:
            width, height = (
                1.6 + 0.42 * len(cells.x.values),
                1.3 + 0.32 * (1 if cells.y is None else len(cells.y.values)),
            )
            size = (min(max(width, 3.25), 6.75), min(max(height, 1.6), 5.0))
            ax = plt.subplots(figsize=size)[1]
        color, key = _numbers(cells, values, ax, spread) if numeric else _words(cells, ax)
        _write(cells, values, color, ax, numeric)
        key += _cross(cells, ax)
        _set_axis(ax.xaxis, ax.set_xlim, cells.x)
        if cells.y is None:
            ax.set_yticks([])
        else:
            _set_axis(ax.yaxis, ax.set_ylim, cells.y)
        if boundary is not None:
            key += _draw_boundary(cells, boundary, ax)
        if key:
            beside_axes, above_axes = ("center left", (1.0, 0.5), 1), ("lower left", (0.0, 1.08), 3)
            where, anchor, columns = above_axes if numeric else beside_axes
            ax.legend(handles=key, loc=where, bbox_to_anchor=anchor, ncols=columns)
        ax.set_xlabel(_label(cells.x.name))
        ax.set_ylabel("" if cells.y is None else _label(cells.y.name))
        ax.set_title(_title(cells, spread), loc="left")
    return ax


def places(axis: Axis | None) -> numpy.ndarray:
    """Return the positions of the values of an axis."""
    if axis is None or axis.scale == "words":
        return numpy.arange(1 if axis is None else len(axis.values), dtype=float)
    return numpy.array(axis.values, dtype=float)


def edges(axis: Axis | None) -> numpy.ndarray:
    """Return the edges of the cells: midpoints of values, or of their logarithms on a logarithmic axis."""
    centers, log = places(axis), axis is not None and axis.scale == "log"
    centers = numpy.log(centers) if log else centers
    if len(centers) == 1:
        bounds = numpy.array([centers[0] - 0.5, centers[0] + 0.5])
    else:
        middle = (centers[1:] + centers[:-1]) / 2
        bounds = numpy.array([2 * centers[0] - middle[0], *middle, 2 * centers[-1] - middle[-1]])
    return numpy.exp(bounds) if log else bounds


def colors_of(words: Sequence[str]) -> dict[str, str]:
    """Assign colors: fixed colors for regimes, a common color for ties, and the next free color for other words."""
    free = itertools.cycle(COLORS[4:] + COLORS[:4])
    return {word: REGIMES.get(word) or (LIGHT_GRAY if TIE in word else next(free)) for word in words}


def ink_on(color: Sequence[float]) -> str:
    """Return black or white, whichever has more contrast to a color (red, green, blue from 0 to 1)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


Drawn = tuple[Callable[[tuple[int, int]], Sequence[float]], list[Any]]
"""Color of a cell by its index, and legend entries."""


def _numbers(cells: Cells, values: numpy.ndarray, ax: Any, spread: bool) -> Drawn:
    from matplotlib.colors import LogNorm, Normalize

    finite = values[numpy.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    log = low > 0 and high / low >= WIDE
    norm = LogNorm(low, high) if log else Normalize(low, high if high > low else low + (abs(low) or 1.0))
    mesh = ax.pcolormesh(
        edges(cells.x), edges(cells.y), numpy.ma.masked_invalid(values), cmap="viridis", norm=norm, **_lines(values)
    )
    mesh.set_label(cells.name)
    ax.get_figure().colorbar(mesh, ax=ax, label=_label(cells.name) if not spread else "standard deviation over seeds")
    return lambda cell: mesh.cmap(norm(values[cell])), []


def _words(cells: Cells, ax: Any) -> Drawn:
    from matplotlib.colors import ListedColormap, to_rgb
    from matplotlib.patches import Patch

    colors = colors_of(cells.words)
    codes = numpy.array(
        [[math.nan if value is None else cells.words.index(value) for value in row] for row in cells.values]
    )
    mesh = ax.pcolormesh(
        edges(cells.x),
        edges(cells.y),
        numpy.ma.masked_invalid(codes),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        cmap=ListedColormap(list(colors.values()) or ["white"]),
        **_lines(codes),
    )
    mesh.set_label(cells.name)
    patches = [Patch(color=color, label=_label(word)) for word, color in colors.items()]
    return lambda cell: to_rgb(colors[cells.values[cell]]), patches


def _lines(values: numpy.ndarray) -> dict[str, Any]:
    """Return options for white lines between cells; none if there are many cells."""
    return {"edgecolors": "white", "linewidth": 0.5} if values.size <= MOST_WRITTEN else {}


def _write(cells: Cells, values: numpy.ndarray, color: Any, ax: Any, numeric: bool) -> None:
    """Write numbers into cells; for words, write the share of agreeing seeds where they disagree."""
    if values.size > MOST_WRITTEN:
        return
    for (row, column), value in numpy.ndenumerate(values):
        label = ""
        if numeric:
            label = f"{value:.2g}" if math.isfinite(value) else ""
        elif value is not None and cells.spread[row, column] > 0:
            count = cells.count[row, column]
            label = f"{round(count * (1 - cells.spread[row, column]))}/{count}"
        if label:
            ax.text(
                places(cells.x)[column],
                places(cells.y)[row],
                label,
                ha="center",
                va="center",
                fontsize=6,
                color=ink_on(color((row, column))),
            )


def _cross(cells: Cells, ax: Any) -> list[Any]:
    """Mark cells in which all seeds failed by a cross."""
    failed_cells = [cell for cell in numpy.ndindex(cells.count.shape) if cells.failed[cell] and not cells.count[cell]]
    if not failed_cells:
        return []
    x, y = places(cells.x), places(cells.y)
    at = [x[column] for _, column in failed_cells], [y[row] for row, _ in failed_cells]
    return list(ax.plot(*at, "x", color=DARK_GRAY, markersize=5, linestyle="none", label="failed"))


def _set_axis(axis: Any, set_limits: Callable[..., Any], map_axis: Axis) -> None:
    """Set a tick per value, except on long axes."""
    from matplotlib.ticker import NullLocator

    ends = edges(map_axis)
    if map_axis.scale == "log":
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    if len(map_axis.values) <= 12 or map_axis.scale == "words":
        axis.set_ticks(places(map_axis), labels=[_label(label) for label in map_axis.labels])
        axis.set_minor_locator(NullLocator())
    set_limits(ends[0], ends[-1])


def _draw_boundary(cells: Cells, boundary: Any, ax: Any) -> list[Any]:
    """Draw curves within the limits of the map; return labeled lines."""
    from matplotlib.patheffects import Normal, Stroke

    if cells.y is None or "words" in (cells.x.scale, cells.y.scale):
        raise InputValueError("boundary= needs two numeric axes, but an axis has words or is missing")
    limits = ax.get_xlim(), ax.get_ylim()
    curves = boundary if isinstance(boundary, Mapping) else {"": boundary}
    outline = [Stroke(linewidth=3, foreground="white"), Normal()]
    lines = []
    for number, (label, curve) in enumerate(curves.items()):
        dashes = ("-", "--", ":", "-.")[number % 4]
        lines += ax.plot(
            *_curve(curve, cells.x),
            dashes,
            color="black",
            linewidth=1.4,
            path_effects=outline,
            label=_label(str(label)) or "_boundary",
        )
    ax.set_xlim(limits[0])
    ax.set_ylim(limits[1])
    return [line for line in lines if not line.get_label().startswith("_")]


def _curve(curve: Any, axis: Axis) -> tuple[numpy.ndarray, numpy.ndarray]:
    if callable(curve):
        first, last = edges(axis)[0], edges(axis)[-1]
        x = numpy.geomspace(first, last, POINTS) if axis.scale == "log" else numpy.linspace(first, last, POINTS)
        return x, numpy.array([float(curve(float(point))) for point in x])
    try:
        x, y = (numpy.asarray(part, dtype=float) for part in curve)
    except (TypeError, ValueError) as error:
        raise InputTypeError(
            f"boundary is {type(curve).__name__}, expected a function of x, a curve (x, y), or a mapping of them"
        ) from error
    if x.shape != y.shape or x.ndim != 1:
        raise InputValueError(
            f"a boundary has x of shape {x.shape} and y of {y.shape}, expected two vectors of equal length"
        )
    return x, y


def _title(cells: Cells, spread: bool) -> str:
    seeds = int(cells.count.max(initial=0))
    name = _label(cells.name)
    return f"{name}, spread over {seeds} seeds" if spread else name if seeds < 2 else f"{name}, {seeds} seeds"


def _label(text: str) -> str:
    """Escape $, which starts a formula in matplotlib."""
    return short(text).replace("$", r"\$")
