"""A sweep as a single HTML page: maps with links to reports, failures, and the table."""

import base64
import io
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from featlearn.reporting.document import html_page, static, write_page
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import titled
from featlearn.sweeps.cells import Cells, short
from featlearn.sweeps.folder import SweepFolder, read_traceback
from featlearn.sweeps.map_table import color_rules, colors_used, key, map_table, palette
from featlearn.sweeps.outcome_values import is_number
from featlearn.sweeps.point_reports import report_links
from featlearn.sweeps.progress import duration

if TYPE_CHECKING:
    from featlearn.sweeps.results import Sweep

VALUES = ("regime", "gap", "turning", "growth", "loss_left", "test/accuracy")
"""Default values of runs to map."""
MOST_VALUES = 8
"""Largest number of other values to map."""
MOST_MAPS = 12
"""Largest number of maps per value, if points differ in more than two settings."""
MOST_FAILURES = 50
LONGEST = 4000
"""Number of characters shown from the end of a traceback."""
LEAST_CHANGE = 0.1
"""Smallest change of the gap along an axis that is stated."""


def page(
    sweep: "Sweep",
    path: Path,
    *,
    x: str | None,
    y: str | None,
    value: str | Sequence[str] | None,
    boundary: Any,
    title: str | None,
) -> Path:
    """Write the page; return its path."""
    axes = list(sweep.axes)
    x = x or next((name for name in axes if name != y), None)
    y = y or next((name for name in axes if name != x), None)
    names = [value] if isinstance(value, str) else list(value or default_values(sweep))
    links = report_links(sweep, path.parent)
    maps = [] if x is None else [_maps(sweep, x, y, name, links, boundary) for name in names]
    colors = {color for value_maps in maps for color in value_maps.colors}
    shown = "".join(
        f".maps-of:has(#quantity-{i}:checked) .quantity:not(.of-{i}) {{ display: none }}\n" for i in range(len(maps))
    )
    styles = [static("report.css"), static("sweep.css", "featlearn.sweeps") + color_rules(colors) + shown]
    heading = title if title is not None else sweep.path.resolve().name
    failures = _failures(sweep)
    parts = [
        ("maps", "Maps", _map_sections(maps)),
        *([("failures", "What failed", titled("failures", "What failed", failures))] if failures else []),
        ("points", "All points", titled("points", "All points", _table(sweep, names, links))),
        ("about", "About", titled("about", "About this sweep", _about(sweep), folded=True)),
    ]
    content = html_page(
        "sweep",
        heading,
        tag("main", *(part for _, _, part in parts)),
        skip=("Skip to the maps", "maps"),
        header=[tag("p", text(" ".join([*findings(sweep), _summary(sweep)])), class_="said")],
        sections=[(key, name) for key, name, _ in parts],
        styles=styles,
        body_class="sweep",
        footer="Written by featlearn.",
    )
    return write_page(content, path)


class Maps(NamedTuple):
    """Maps of a value."""

    name: str
    html: Html
    colors: set[str]


def default_values(sweep: "Sweep") -> list[str]:
    """Return the names of values to map by default."""
    of_runs = [name for name in VALUES if name in sweep.columns]
    return of_runs if any(sweep.recorded) else sweep.columns[:MOST_VALUES] or ["status"]


def _summary(sweep: "Sweep") -> str:
    count = {status: sum(row["status"] == status for row in sweep.rows) for status in ("done", "failed", "missing")}
    seeds = max((len(point_seeds) for _, point_seeds in sweep.points), default=0)
    parts = [
        f"{count['done']} of {len(sweep.rows)} done",
        *(f"{count[s]} {s}" for s in ("failed", "missing") if count[s]),
    ]
    seeds_text = f" with {seeds} seeds" if seeds > 1 else ""
    return f"{len(sweep.points)} points{seeds_text}: {', '.join(parts)}."


def findings(sweep: "Sweep") -> list[str]:
    """Return sentences on what the table knows: along which settings runs are lazier, and which point tests best."""
    sentences = [
        f"Runs are {word} as {axis} grows (gap {low:.2f} at {short(first)}, {high:.2f} at {short(last)})."
        for axis, (word, first, low, last, high) in laziness(sweep).items()
    ]
    for name in sweep.columns:
        best = best_point(sweep, name) if name.startswith("test") else None
        if best is not None:
            point, value = best
            sentences.append(f"Best {name.replace('/', ' ')}: {value:.3g} at {point}.")
    return sentences


def laziness(sweep: "Sweep") -> dict[str, tuple[str, Any, float, Any, float]]:
    """Return axis -> ("lazier" or "richer", lowest setting, mean gap there, highest setting, mean gap there)."""
    directions: dict[str, tuple[str, Any, float, Any, float]] = {}
    if "gap" not in sweep.columns:
        return directions
    gaps = sweep.values("gap")
    for axis, values in sweep.axes.items():
        ends = sorted(value for value in values if is_number(value))
        if len(ends) < 2:
            continue
        means = []
        for end in (ends[0], ends[-1]):
            known = [
                float(gap)
                for (point, _), gap in zip(sweep.tasks, gaps, strict=True)
                if point.settings.get(axis) == end and is_number(gap)
            ]
            means.append(math.fsum(known) / len(known) if known else math.nan)
        if abs(means[1] - means[0]) >= LEAST_CHANGE:
            word = "lazier" if means[1] < means[0] else "richer"
            directions[axis] = (word, ends[0], means[0], ends[-1], means[1])
    return directions


def best_point(sweep: "Sweep", name: str) -> tuple[Any, float] | None:
    """Return the point with the best mean over seeds, and that mean; None for what has no best, or for a tie."""
    choose = max if "accuracy" in name else min if re.search("loss|error", name) else None
    sums: dict[str, list[float]] = {}
    for (point, _), value in zip(sweep.tasks, sweep.values(name), strict=True):
        if is_number(value):
            sums.setdefault(point.id, []).append(float(value))
    means = {key: math.fsum(values) / len(values) for key, values in sums.items()}
    if choose is None or len(means) < 2 or list(means.values()).count(choose(means.values())) > 1:
        return None
    best = choose(means, key=means.__getitem__)
    return next(point for point, _ in sweep.points if point.id == best), means[best]


# ---- maps


def _maps(sweep: "Sweep", x: str, y: str | None, name: str, links: Mapping[str, str], boundary: Any) -> Maps:
    """Build a map for every combination of the settings that are not axes."""
    others = {axis: values for axis, values in sweep.axes.items() if axis not in (x, y)}
    choices = [dict(zip(others, values, strict=True)) for values in itertools.product(*others.values())]
    existing = [choice for choice in choices if any(sweep.row_mask(choice))]
    maps = [(choice, sweep.cells(x, y, name, choice)) for choice in existing[:MOST_MAPS]]
    cells_of_maps = [cells for _, cells in maps]
    colors = palette(cells_of_maps)
    best = best_point(sweep, name)
    ringed, directions = None if best is None else best[0].id, laziness(sweep)
    hints = {
        axis: f"{axis}: {'lazier' if axis in directions and directions[axis][0] == 'lazier' else 'richer'}"
        for axis in (x, y)
        if axis in directions
    }
    tables = [
        tag(
            "div",
            tag("h3", text(", ".join(f"{key} = {short(setting)}" for key, setting in choice.items())))
            if choice
            else "",
            map_table(cells, links, colors, ringed, hints),
        )
        for choice, cells in maps
    ]
    omitted = len(existing) - len(maps)
    more = tag("p", text(f"{omitted} more maps are left out: sweep.map(where=...) draws them."), class_="note")
    drawn = "" if boundary is None else _drawing(sweep, x, y, name, maps, boundary)
    html = Html(key(cells_of_maps, colors) + tag("div", *tables, class_="maps") + drawn + (more if omitted > 0 else ""))
    return Maps(name, html, colors_used(cells_of_maps, colors))


def _map_sections(maps: Sequence[Maps]) -> Html:
    if not maps:
        return tag("section", tag("h2", "Maps"), tag("p", "The points differ in no setting."), id="maps")
    choices = [
        tag(
            "label",
            tag("input", type="radio", name="quantity", id=f"quantity-{i}", checked=True if not i else None),
            text(item.name),
        )
        for i, item in enumerate(maps)
    ]
    buttons = tag("fieldset", tag("legend", "Color shows"), *choices, class_="quantities") if len(maps) > 1 else ""
    drawn = [
        tag("div", tag("h3", text(f"Map of {item.name}")), item.html, class_=f"quantity of-{i}")
        for i, item in enumerate(maps)
    ]
    return titled("maps", "Map", tag("p", text(_HOW), class_="note"), tag("div", buttons, *drawn, class_="maps-of"))


_HOW = (
    "A cell opens the report of its point if it is written, else its row in the table below. featlearn sweep --reports "
    "or sweep.write_reports() writes all reports, featlearn report that of a single folder."
)


def _drawing(
    sweep: "Sweep", x: str, y: str | None, name: str, maps: Sequence[tuple[Mapping[str, Any], Cells]], boundary: Any
) -> Html:
    """Draw pictures with the theoretical boundary, which a table cannot show."""
    import matplotlib.pyplot as plt

    from featlearn.sweeps.map_picture import draw

    pictures = []
    for choice, cells in maps:
        figure = draw(cells, boundary=boundary).get_figure()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        plt.close(figure)
        source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
        description = f"{name} over {x} and {y}, with the boundary of theory {', '.join(map(str, choice.values()))}"
        pictures.append(tag("div", tag("img", src=source, alt=description), class_="drawing"))
    return Html("".join(pictures))


# ---- failures and table


def _failures(sweep: "Sweep") -> Html:
    """List errors of seeds, each with its folded traceback; empty if there are none."""
    folder = SweepFolder(sweep.path)
    listed: list[Html] = []
    for (point, seed), row in zip(sweep.tasks, sweep.rows, strict=True):
        if row["status"] == "failed" and len(listed) < MOST_FAILURES:
            traceback = read_traceback(folder.place(point, seed)) or ""
            listed.append(
                tag(
                    "details",
                    tag("summary", text(f"{point}, seed {seed}: {row['error']}")),
                    tag("pre", text(traceback[-LONGEST:]), tabindex=0),
                )
            )
    omitted = len(sweep.failed) - MOST_FAILURES
    more = tag("p", text(f"{omitted} more are in the table."), class_="note") if omitted > 0 else ""
    return Html("".join(listed) + more)


def _table(sweep: "Sweep", names: Sequence[str], links: Mapping[str, str]) -> Html:
    """Build the table, with a row per point: varying settings, values with spread, and a link to the report."""
    axes = list(sweep.axes) or list(sweep.settings)
    columns = {name: sweep.values(name) for name in names}
    rows: dict[str, list[int]] = {}
    for number, (point, _) in enumerate(sweep.tasks):
        rows.setdefault(point.id, []).append(number)
    head = tag("tr", *(tag("th", text(name), scope="col") for name in ["point", *axes, *names, "seeds"]))
    lines = []
    for point, _ in sweep.points:
        point_rows = rows.get(point.id, [])
        link = links.get(point.id)
        name = tag("a", text(point.id[:6]), href=link) if link is not None else text(point.id[:6])
        status = [sweep.rows[n]["status"] for n in point_rows]
        done = f"{status.count('done')} of {len(point_rows)}" + (
            f", {status.count('failed')} failed" if "failed" in status else ""
        )
        lines.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                *(tag("td", text(short(point.settings.get(axis)))) for axis in axes),
                *(tag("td", _mean([values[n] for n in point_rows])) for values in columns.values()),
                tag("td", text(done)),
                id=f"p-{point.id}",
            )
        )
    caption = "All points, means over seeds ± standard deviation"
    return tag(
        "div",
        tag("table", tag("caption", text(caption)), tag("thead", head), tag("tbody", *lines), class_="points"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def _mean(values: Sequence[Any]) -> Html:
    """Format a mean with its standard deviation; for words, list distinct values."""
    present = [value for value in values if value is not None]
    numbers = [float(value) for value in present if is_number(value)]
    if len(numbers) < len(present):
        return text(", ".join(dict.fromkeys(short(value) for value in present)))
    if not numbers:
        return text("–")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return text(f"{mean:.4g}")
    deviation = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))
    return Html(text(f"{mean:.4g} ") + tag("small", text(f"± {deviation:.2g}")))


def _about(sweep: "Sweep") -> Html:
    constants = {name: values[0] for name, values in sweep.settings.items() if name not in sweep.axes}
    seconds = math.fsum(row["seconds"] or 0.0 for row in sweep.rows)
    facts = {
        "function": sweep.function,
        "constant settings": json.dumps(constants, ensure_ascii=False) if constants else "nothing",
        "axes": ", ".join(f"{name} ({len(values)})" for name, values in sweep.axes.items()) or "nothing",
        "total time of all seeds": duration(seconds),
    }
    rows = [tag("tr", tag("th", text(name), scope="row"), tag("td", text(value))) for name, value in facts.items()]
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll grid")
