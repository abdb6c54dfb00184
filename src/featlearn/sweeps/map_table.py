"""A map as an HTML table with colored, linked cells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from featlearn.reporting.markup import Html, tag, text, written
from featlearn.sweeps.cells import Cells
from featlearn.sweeps.map_picture import WIDE, colors_of, ink_on
from featlearn.sweeps.outcome_values import is_number

LEVELS = 32
"""Number of distinct colors for numbers."""


@dataclass(frozen=True)
class Palette:
    """Colors of a value, shared by all its maps."""

    words: Mapping[str, str]
    low: float
    high: float

    def color(self, value: Any) -> str:
        """Return the color as #rrggbb."""
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        if isinstance(value, str):
            return self.words[value]
        return to_hex(colormaps["viridis"].resampled(LEVELS)(min(int(self.place(value) * LEVELS), LEVELS - 1)))

    @property
    def logarithmic(self) -> bool:
        """Whether colors are logarithmic."""
        return self.low > 0 and self.high / self.low >= WIDE

    def place(self, value: float) -> float:
        """Return the position between the lowest (0) and the largest value (1)."""
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        at = math.log(value) if self.logarithmic else value
        return (at - low) / (high - low) if high > low else 0.5


def palette(maps: Sequence[Cells]) -> Palette:
    """Return the colors of several maps of the same value."""
    numbers = [float(number) for cells in maps if cells.numeric for number in cells.values.flat if is_number(number)]
    words = dict.fromkeys(word for cells in maps if not cells.numeric for word in cells.words)
    return Palette(colors_of(list(words)), min(numbers, default=0.0), max(numbers, default=0.0))


def color_rules(colors: set[str]) -> str:
    """Return a CSS class per color; the content security policy forbids inline styles."""
    from matplotlib.colors import to_rgb

    return "".join(
        f".map .{_class(color)}, .key .{_class(color)} {{ background: {color}; color: {ink_on(to_rgb(color))}; }}\n"
        for color in sorted(colors)
    )


def colors_used(maps: Sequence[Cells], palette: Palette) -> set[str]:
    """Return the colors of the cells and the legend of these maps."""
    values = [entry for cells in maps for entry in cells.values.flat if isinstance(entry, str) or is_number(entry)]
    return {palette.color(entry) for entry in values} | set(palette.words.values())


def map_table(
    cells: Cells,
    links: Mapping[str, str],
    colors: Palette,
    best: str | None = None,
    hints: Mapping[Any, str] | None = None,
) -> Html:
    """Build the table, with larger y further up.

    Args:
        cells: The values.
        links: Point -> address that its cell opens.
        colors: Colors of the values.
        best: Id of the point that is ringed.
        hints: Axis -> what happens as it grows.
    """
    order = list(range(cells.values.shape[0]))
    if cells.y is not None and cells.y.scale != "words":
        order.reverse()
    rows = [
        tag(
            "tr",
            tag("th", text("" if cells.y is None else cells.y.labels[row]), scope="row"),
            *(_cell(cells, (row, column), links, colors, best) for column in range(len(cells.x.values))),
        )
        for row in order
    ]
    axes = cells.x.name if cells.y is None else f"{cells.x.name} (across) and {cells.y.name} (up)"
    caption = f"{cells.name} over {axes}"
    known = hints or {}
    parts = [
        f"{known[axis.name]} {arrow}" for axis, arrow in ((cells.x, "→"), (cells.y, "↑")) if axis and axis.name in known
    ]
    corner = tag("th", *(tag("div", text(part)) for part in parts), scope="col")
    labels = tag("tr", corner, *(tag("th", text(label), scope="col") for label in cells.x.labels))
    table = tag("table", tag("caption", text(caption)), tag("thead", labels), tag("tbody", *rows), class_="map")
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def key(maps: Sequence[Cells], colors: Palette) -> Html:
    """Build the legend."""
    parts = [
        tag("li", tag("span", class_=f"patch {_class(color)}"), text(word)) for word, color in colors.words.items()
    ]
    if not colors.words and colors.high > colors.low:
        scale = " (logarithmic)" if colors.logarithmic else ""
        parts.append(
            tag("li", text(written(colors.low)), tag("span", class_="bar one"), text(written(colors.high) + scale))
        )
    if any(numpy.any(cells.failed) for cells in maps):
        parts.append(tag("li", tag("span", class_="patch failed"), text("failed")))
    return tag("ul", *parts, class_="key") if parts else Html("")


def _cell(cells: Cells, index: tuple[int, int], links: Mapping[str, str], colors: Palette, best: str | None) -> Html:
    ids, value, count = cells.points[index], cells.values[index], int(cells.count[index])
    if not ids:
        return tag("td", class_="missing")
    target = links.get(ids[0], f"#p-{ids[0]}")
    has_value = isinstance(value, str) or is_number(value)
    setting = f"{cells.x.name} {cells.x.labels[index[1]]}"
    setting += "" if cells.y is None else f", {cells.y.name} {cells.y.labels[index[0]]}"
    if has_value:
        shown, spread = (value, "") if isinstance(value, str) else (f"{value:.3g}", _spread(cells, index))
        if isinstance(value, str) and cells.spread[index] > 0:
            spread = f"{round(count * (1 - cells.spread[index]))} of {count}"
        style = _class(colors.color(value))
    else:
        failed = bool(cells.failed[index])
        shown, spread, style = ("failed", "", "failed") if failed else ("–", "", "missing")
    label = f"{setting}: {cells.name} {shown} {spread}".strip() + (", the best" if best in ids else "")
    return tag(
        "td",
        tag("a", text(shown), tag("small", text(spread)) if spread else "", href=target, title=label),
        class_=f"{style} best" if best in ids else style,
    )


def _spread(cells: Cells, place: tuple[int, int]) -> str:
    return f"± {cells.spread[place]:.2g}" if math.isfinite(cells.spread[place]) else ""


def _class(color: str) -> str:
    return f"k{color.removeprefix('#').lower()}"
