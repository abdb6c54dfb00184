"""A sweep as one HTML page: maps whose cells open the reports of their points, failures, and the table."""

import base64
import io
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from featlearn.errors import FeatlearnError
from featlearn.reporting.document import html_page, static, write_page
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.page import report as report_on_runs
from featlearn.reporting.rendering import titled
from featlearn.sweeps.cells import Cells, short
from featlearn.sweeps.folder import REPORT, SweepFolder, traceback_of
from featlearn.sweeps.grid import Point
from featlearn.sweeps.map_table import color_rules, colors_used, key, map_table, palette
from featlearn.sweeps.outcome_values import is_number
from featlearn.sweeps.progress import duration

if TYPE_CHECKING:
    from featlearn.sweeps.results import Sweep

VALUES = ("regime", "gap", "turning", "growth", "loss_left", "test/accuracy")
"""Shown of runs."""
MOST_VALUES = 8
"""Shown of other results."""
MOST_MAPS = 12
"""of one value, where points differ in more than two settings"""
MOST_FAILURES = 50
LONGEST = 4000
"""Characters of a traceback that are shown, its end."""


def page(
    sweep: "Sweep",
    path: Path,
    *,
    x: str | None,
    y: str | None,
    value: str | Sequence[str] | None,
    boundary: Any,
    title: str | None,
    executor: Any,
) -> Path:
    """Write the page; returns its path."""
    axes = list(sweep.axes)
    x = x or next((name for name in axes if name != y), None)
    y = y or next((name for name in axes if name != x), None)
    names = [value] if isinstance(value, str) else list(value or default_values(sweep))
    links, unwritten = _reports(sweep, path, executor)
    maps = [] if x is None else [_maps(sweep, x, y, name, links, boundary) for name in names]
    used = {color for one in maps for color in one.colors}
    styles = [static("report.css"), static("sweep.css", "featlearn.sweeps") + color_rules(used)]
    heading = title if title is not None else sweep.path.resolve().name
    failures = _failures(sweep, unwritten)
    parts = [
        ("maps", "Maps", _map_sections(maps)),
        *([("failures", "What failed", titled("failures", "What failed", failures, folded=False))] if failures else []),
        ("points", "All points", titled("points", "All points", _table(sweep, names, links), folded=False)),
        ("about", "About", titled("about", "About this sweep", _about(sweep))),
    ]
    content = html_page(
        "sweep",
        heading,
        tag("main", *(part for _, _, part in parts)),
        skip=("Skip to the maps", "maps"),
        header=[tag("p", text(_summary(sweep)), class_="said")],
        sections=[(key, name) for key, name, _ in parts],
        styles=styles,
        body_class="sweep",
        footer="Written by featlearn.",
    )
    return write_page(content, path)


class Maps(NamedTuple):
    """The maps of one value."""

    name: str
    html: Html
    colors: set[str]


def default_values(sweep: "Sweep") -> list[str]:
    """What is mapped where nothing is asked for."""
    of_runs = [name for name in VALUES if name in sweep.columns]
    return of_runs if any(sweep.recorded) else sweep.columns[:MOST_VALUES] or ["status"]


def _summary(sweep: "Sweep") -> str:
    count = {status: sum(row["status"] == status for row in sweep.rows) for status in ("done", "failed", "missing")}
    seeds = max((len(own) for _, own in sweep.points), default=0)
    told = [
        f"{count['done']} of {len(sweep.rows)} done",
        *(f"{count[s]} {s}" for s in ("failed", "missing") if count[s]),
    ]
    many = f" with {seeds} seeds" if seeds > 1 else ""
    return f"{len(sweep.points)} points{many}: {', '.join(told)}."


# ---- reports


def _reports(sweep: "Sweep", path: Path, executor: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Point -> link to its report, written where it is older than its results; and point -> why there is none."""
    links: dict[str, str] = {}
    jobs: dict[str, Any] = {}
    unwritten: dict[str, str] = {}
    for point, _ in sweep.points:
        runs = sweep.run_paths(where_of(sweep, point))
        if not runs:
            continue
        target = sweep.path / point.id / REPORT
        newest = max(one.stat().st_mtime_ns for one in target.parent.glob("seed-*.json"))
        if not target.exists() or target.stat().st_mtime_ns < newest:
            title = str(point) if point.settings else sweep.path.name
            jobs[point.id] = executor.submit(_write_report, [str(run.resolve()) for run in runs], str(target), title)
        links[point.id] = quote(Path(os.path.relpath(target.resolve(), path.resolve().parent)).as_posix())
    for id, job in jobs.items():
        try:
            job.result()
        except FeatlearnError as error:
            unwritten[id] = str(error)
            del links[id]
    return links, unwritten


def _write_report(runs: Sequence[str], target: str, title: str) -> None:
    report_on_runs(runs, target, title=title)


def where_of(sweep: "Sweep", point: Point) -> dict[str, Any]:
    """The settings of a point, None for those that it does not have."""
    return {name: point.settings.get(name) for name in sweep.settings}


# ---- maps


def _maps(sweep: "Sweep", x: str, y: str | None, name: str, links: Mapping[str, str], boundary: Any) -> Maps:
    """A map for each choice of the settings that are no axis."""
    others = {axis: values for axis, values in sweep.axes.items() if axis not in (x, y)}
    choices = [dict(zip(others, values, strict=True)) for values in itertools.product(*others.values())]
    there = [choice for choice in choices if any(sweep.chosen(choice))]
    found = [(choice, sweep.cells(x, y, name, choice)) for choice in there[:MOST_MAPS]]
    every = [cells for _, cells in found]
    own = palette(every)
    tables = [
        tag(
            "div",
            tag("h3", text(", ".join(f"{key} = {short(one)}" for key, one in choice.items()))) if choice else "",
            map_table(cells, links, own),
        )
        for choice, cells in found
    ]
    left = len(there) - len(found)
    more = tag("p", text(f"{left} more maps are left out: sweep.map(where=...) draws them."), class_="note")
    drawn = "" if boundary is None else _drawing(sweep, x, y, name, found, boundary)
    html = Html(key(every, own) + tag("div", *tables, class_="maps") + drawn + (more if left > 0 else ""))
    return Maps(name, html, colors_used(every, own))


def _map_sections(maps: Sequence[Maps]) -> Html:
    if not maps:
        return tag("section", tag("h2", "Maps"), tag("p", "The points differ in no setting."), id="maps")
    first, *rest = maps
    opened = titled("maps", f"Map of {first.name}", tag("p", text(_HOW), class_="note"), first.html, folded=False)
    return Html(opened + "".join(titled(f"map-{i}", f"Map of {one.name}", one.html) for i, one in enumerate(rest)))


_HOW = "A cell opens the report of its point, or its line in the table below where there is no run."


def _drawing(
    sweep: "Sweep", x: str, y: str | None, name: str, found: Sequence[tuple[Mapping[str, Any], Cells]], boundary: Any
) -> Html:
    """Pictures with a theory's boundary, which a table cannot show."""
    import matplotlib.pyplot as plt

    from featlearn.sweeps.map_picture import draw

    pictures = []
    for choice, cells in found:
        figure = draw(cells, boundary=boundary).get_figure()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        plt.close(figure)
        source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
        told = f"{name} over {x} and {y}, with the boundary of theory {', '.join(map(str, choice.values()))}"
        pictures.append(tag("div", tag("img", src=source, alt=told), class_="drawing"))
    return Html("".join(pictures))


# ---- failures and table


def _failures(sweep: "Sweep", unwritten: Mapping[str, str]) -> Html:
    """Errors of seeds, each with its traceback folded; empty if there are none."""
    folder = SweepFolder(sweep.path)
    listed: list[Html] = []
    for (point, seed), row in zip(sweep.tasks, sweep.rows, strict=True):
        if row["status"] == "failed" and len(listed) < MOST_FAILURES:
            told = traceback_of(folder.place(point, seed)) or ""
            listed.append(
                tag(
                    "details",
                    tag("summary", text(f"{point}, seed {seed}: {row['error']}")),
                    tag("pre", text(told[-LONGEST:]), tabindex=0),
                )
            )
    listed += [tag("p", text(f"{id}: no report: {reason}"), class_="missing") for id, reason in unwritten.items()]
    left = len(sweep.failed) - MOST_FAILURES
    more = tag("p", text(f"{left} more are in the table."), class_="note") if left > 0 else ""
    return Html("".join(listed) + more)


def _table(sweep: "Sweep", names: Sequence[str], links: Mapping[str, str]) -> Html:
    """One line for each point: settings that differ, values with their spread, and its report."""
    axes = list(sweep.axes) or list(sweep.settings)
    columns = {name: sweep.values(name) for name in names}
    rows: dict[str, list[int]] = {}
    for number, (point, _) in enumerate(sweep.tasks):
        rows.setdefault(point.id, []).append(number)
    head = tag("tr", *(tag("th", text(name), scope="col") for name in ["point", *axes, *names, "seeds"]))
    lines = []
    for point, _ in sweep.points:
        own = rows.get(point.id, [])
        link = links.get(point.id)
        name = tag("a", text(point.id[:6]), href=link) if link is not None else text(point.id[:6])
        status = [sweep.rows[n]["status"] for n in own]
        done = f"{status.count('done')} of {len(own)}" + (
            f", {status.count('failed')} failed" if "failed" in status else ""
        )
        lines.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                *(tag("td", text(short(point.settings.get(axis)))) for axis in axes),
                *(tag("td", _mean([values[n] for n in own])) for values in columns.values()),
                tag("td", text(done)),
                id=f"p-{point.id}",
            )
        )
    caption = "All points, means over seeds ± one standard deviation"
    return tag(
        "div",
        tag("table", tag("caption", text(caption)), tag("thead", head), tag("tbody", *lines), class_="points"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def _mean(values: Sequence[Any]) -> Html:
    """A mean with its deviation; of words each once."""
    known = [value for value in values if value is not None]
    numbers = [float(value) for value in known if is_number(value)]
    if len(numbers) < len(known):
        return text(", ".join(dict.fromkeys(short(value) for value in known)))
    if not numbers:
        return text("–")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return text(f"{mean:.4g}")
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in numbers) / (len(numbers) - 1))
    return Html(text(f"{mean:.4g} ") + tag("small", text(f"± {deviation:.2g}")))


def _about(sweep: "Sweep") -> Html:
    same = {name: values[0] for name, values in sweep.settings.items() if name not in sweep.axes}
    seconds = math.fsum(row["seconds"] or 0.0 for row in sweep.rows)
    facts = {
        "function": sweep.function,
        "the same in all points": json.dumps(same, ensure_ascii=False) if same else "nothing",
        "differ": ", ".join(f"{name} ({len(values)})" for name, values in sweep.axes.items()) or "nothing",
        "time of all seeds together": duration(seconds),
    }
    rows = [tag("tr", tag("th", text(name), scope="row"), tag("td", text(value))) for name, value in facts.items()]
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll grid")
