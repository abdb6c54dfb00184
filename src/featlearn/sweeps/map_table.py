"""A map as an HTML table: one cell for each point, colored, and a link."""

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
"""Colors of numbers."""


@dataclass(frozen=True)
class Palette:
    """The colors of a value in all its maps."""

    words: Mapping[str, str]
    low: float
    high: float

    def color(self, value: Any) -> str:
        """As #rrggbb."""
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        if isinstance(value, str):
            return self.words[value]
        return to_hex(colormaps["viridis"].resampled(LEVELS)(min(int(self.place(value) * LEVELS), LEVELS - 1)))

    @property
    def logarithmic(self) -> bool:
        """Whether colors follow the logarithm."""
        return self.low > 0 and self.high / self.low >= WIDE

    def place(self, value: float) -> float:
        """From 0, the lowest, to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        at = math.log(value) if self.logarithmic else value
        return (at - low) / (high - low) if high > low else 0.5


def palette(found: Sequence[Cells]) -> Palette:
    """The colors of several maps of one value."""
    numbers = [float(one) for cells in found if cells.numeric for one in cells.values.flat if is_number(one)]
    words = dict.fromkeys(word for cells in found if not cells.numeric for word in cells.words)
    return Palette(colors_of(list(words)), min(numbers, default=0.0), max(numbers, default=0.0))


def color_rules(used: set[str]) -> str:
    """The style of these colors, by class: the policy of the page allows no style at an element."""
    from matplotlib.colors import to_rgb

    return "".join(
        f".map .{_class(one)}, .key .{_class(one)} {{ background: {one}; color: {ink_on(to_rgb(one))}; }}\n"
        for one in sorted(used)
    )


def colors_used(found: Sequence[Cells], own: Palette) -> set[str]:
    """The colors of the cells of these maps, and of their key."""
    values = [one for cells in found for one in cells.values.flat if isinstance(one, str) or is_number(one)]
    return {own.color(value) for value in values} | set(own.words.values())


def map_table(cells: Cells, links: Mapping[str, str], own: Palette) -> Html:
    """The table; larger y is further up, as in a picture."""
    order = list(range(cells.values.shape[0]))
    if cells.y is not None and cells.y.scale != "words":
        order.reverse()
    rows = [
        tag(
            "tr",
            tag("th", text("" if cells.y is None else cells.y.labels[row]), scope="row"),
            *(_cell(cells, (row, column), links, own) for column in range(len(cells.x.values))),
        )
        for row in order
    ]
    over = cells.x.name if cells.y is None else f"{cells.x.name} (across) and {cells.y.name} (up)"
    caption = f"{cells.name} over {over}"
    labels = tag("tr", tag("th", scope="col"), *(tag("th", text(label), scope="col") for label in cells.x.labels))
    table = tag("table", tag("caption", text(caption)), tag("thead", labels), tag("tbody", *rows), class_="map")
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)


def key(found: Sequence[Cells], own: Palette) -> Html:
    """What the colors mean."""
    parts = [tag("li", tag("span", class_=f"patch {_class(color)}"), text(word)) for word, color in own.words.items()]
    if not own.words and own.high > own.low:
        scale = " (logarithmic)" if own.logarithmic else ""
        parts.append(tag("li", text(written(own.low)), tag("span", class_="bar one"), text(written(own.high) + scale)))
    if any(numpy.any(cells.failed) for cells in found):
        parts.append(tag("li", tag("span", class_="patch failed"), text("failed")))
    return tag("ul", *parts, class_="key") if parts else Html("")


def _cell(cells: Cells, place: tuple[int, int], links: Mapping[str, str], own: Palette) -> Html:
    ids, value, count = cells.points[place], cells.values[place], int(cells.count[place])
    if not ids:
        return tag("td", class_="missing")
    target = links.get(ids[0], f"#p-{ids[0]}")
    known = isinstance(value, str) or is_number(value)
    where = f"{cells.x.name} {cells.x.labels[place[1]]}"
    where += "" if cells.y is None else f", {cells.y.name} {cells.y.labels[place[0]]}"
    if known:
        shown, spread = (value, "") if isinstance(value, str) else (f"{value:.3g}", _spread(cells, place))
        if isinstance(value, str) and cells.spread[place] > 0:
            spread = f"{round(count * (1 - cells.spread[place]))} of {count}"
        style = _class(own.color(value))
    else:
        failed = bool(cells.failed[place])
        shown, spread, style = ("failed", "", "failed") if failed else ("–", "", "missing")
    label = f"{where}: {cells.name} {shown} {spread}".strip()
    return tag(
        "td",
        tag("a", text(shown), tag("small", text(spread)) if spread else "", href=target, title=label),
        class_=style,
    )


def _spread(cells: Cells, place: tuple[int, int]) -> str:
    return f"± {cells.spread[place]:.2g}" if math.isfinite(cells.spread[place]) else ""


def _class(color: str) -> str:
    return f"k{color.removeprefix('#').lower()}"
