"""One run or several as one self-contained HTML file: no network, fonts or server needed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featlearn.record import Run
from featlearn.reporting import curves, layers, matrices
from featlearn.reporting.comparison import comparison
from featlearn.reporting.content_blocks import POINTS, Section
from featlearn.reporting.document import head, static, written
from featlearn.reporting.groups import RunGroup, groups
from featlearn.reporting.markup import Html, data, joined, tag, text
from featlearn.reporting.overlay import Overlay
from featlearn.reporting.provenance import citations, overhead, provenance
from featlearn.reporting.rendering import numbers, section, swatch, titled
from featlearn.reporting.steering import steering
from featlearn.reporting.step_slider import drawing_scripts, move, step_slider
from featlearn.reporting.verdict import chip, headline, opinions, statements
from featlearn.reporting.verdict import numbers as gauges_of
from featlearn.signatures import name_keywords

LARGEST = 1_000_000
"""Largest size of a page without kernels in bytes; lines are thinned until it fits."""
FEWEST = 25
"""Smallest number of points to which lines are thinned."""

Runs = Run | str | os.PathLike[str] | Sequence[Run | str | os.PathLike[str]]


@name_keywords()
def report(
    runs: Runs,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    kernels: bool = True,
    bands: bool = True,
    theory: Mapping[str, Any] | None = None,
    time_scale: float = 1.0,
) -> Path:
    """Write a report on runs as one self-contained HTML file: verdict, numbers with their errors, advice, and curves.

    Several runs begin with a table of what differs between them.

    Args:
        runs: a run, its path (a directory or a `.zip`), or several of them, which are drawn in the same charts.
        path: the file to write, atomically; an existing one is replaced.
        title: title of the page; by default the names of the runs.
        kernels: whether to show kernels as heat maps; without them a page is smaller than 1 MB.
        bands: whether runs that differ only in their seed become one line, with a band from the smallest to the
            largest value.
        theory: label -> prediction of `fl.theory` (any object with `times` and `curves()`), drawn with the
            measurements. Theories sum the loss over samples; it is divided by the number of probe samples.
        time_scale: theory time per step, for example a learning rate.

    Returns the path. The page says what a run does not contain, and why; a damaged run raises a `RunError`, and nothing
    is written. Curves longer than 200 points are thinned.
    """
    overlay = Overlay(theory, time_scale)
    points = POINTS
    while True:
        found = groups(runs, bands=bands, points=points)
        shown = sections(found, overlay, kernels)
        content = _page(found, shown, title)
        if len(content.encode()) - _weight(shown) <= LARGEST or points <= FEWEST:
            break
        points //= 2
    return written(content, Path(path))


def sections(found: Sequence[RunGroup], overlay: Overlay, kernels: bool = True) -> list[Section]:
    """All sections except verdict, provenance and citations, in the order of the page."""
    extra = curves.overlaid(found, overlay)
    return [
        curves.overview(found, overlay),
        curves.frozen(found),
        curves.timeline(found, overlay),
        *([extra] if extra is not None else []),
        matrices.spectra(found),
        matrices.specialization(found),
        layers.features(found),
        layers.layers(found),
        matrices.kernels(found, kernels),
        overhead(found),
    ]


def _weight(shown: Sequence[Section]) -> int:
    """Size of the kernel pictures in bytes."""
    kernels = [block for one in shown for block in one.blocks if one.key == "kernels"]
    return sum(len(data(numbers(block))) for block in kernels)


def _page(found: Sequence[RunGroup], shown: Sequence[Section], title: str | None) -> Html:
    heading = title if title is not None else _heading(found)
    parts = _parts(found, shown)
    blocks = [given for one in shown for block in one.blocks if (given := numbers(block)) is not None]
    scripts = [*drawing_scripts(), static("report.js")]
    styles = [static("uPlot.min.css"), static("report.css")]
    return joined(
        "<!doctype html>",
        '<html lang="en">',
        head(f"{heading}: featlearn report", scripts, styles),
        f'<body class="{"several" if len(found) > 1 else "single"}">',
        tag("a", "Skip to the verdict", href="#verdict", class_="skip"),
        tag(
            "header",
            tag("p", "featlearn report", class_="kicker"),
            tag("h1", text(heading)),
            tag(
                "nav",
                tag("ul", *(tag("li", tag("a", text(name), href=f"#{key}")) for key, name, _ in parts)),
                aria_label="Sections",
            ),
        ),
        tag("main", *(content for _, _, content in parts)),
        tag("footer", tag("p", "Written by featlearn. Charts are drawn with uPlot (MIT), which is in this file.")),
        tag("noscript", tag("p", "Charts need JavaScript; every number is in the tables.")),
        f'<script type="application/json" id="blocks">{data(blocks)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>\n",
    )


def _parts(found: Sequence[RunGroup], shown: Sequence[Section]) -> list[tuple[str, str, Html]]:
    """(key, title, HTML) of all sections, in the order of the page."""
    curves = [(one.key, one.title, section(one)) for one in shown if not one.folded]
    details = [(one.key, one.title, section(one)) for one in shown if one.folded]
    if curves and move(block for one in shown for block in one.blocks):  # before all that it moves
        curves[0] = (*curves[0][:2], Html(step_slider("Last step") + curves[0][2]))
    # curves of several runs come before their cards, what would steer a single run before its curves
    middle = [*curves, _cards(found)] if len(found) > 1 else [_advice(found[0]), *curves]
    return [
        ("verdict", "Verdict", _verdict(found)),
        *middle,
        *details,
        ("provenance", "Provenance", provenance(found)),
        ("citations", "To cite", citations()),
    ]


def _heading(found: Sequence[RunGroup]) -> str:
    names = [group.label for group in found]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs: {names[0]} to {names[-1]}"


def _verdict(found: Sequence[RunGroup]) -> Html:
    """The first section: for one run its verdict and numbers, for several the table of runs."""
    content = [comparison(found), _legend(found)] if len(found) > 1 else [_card(found[0])]
    return tag(
        "section",
        tag("h2", "Verdict", id="verdict-title"),
        *content,
        id="verdict",
        aria_labelledby="verdict-title",
        tabindex=-1,
    )


def _advice(group: RunGroup) -> tuple[str, str, Html]:
    """What would steer a single run."""
    return "steer", _STEER, titled("steer", _STEER, _steering(group), folded=False)


def _cards(found: Sequence[RunGroup]) -> tuple[str, str, Html]:
    """A folded card for each of several runs."""
    cards = [
        tag(
            "details",
            tag("summary", swatch(group.color), tag("h3", text(_counted(group))), chip(group.diagnosis.regime)),
            _card(group),
            tag("h4", _STEER),
            _steering(group),
            class_=f"run r{group.color % 8}",
        )
        for group in found
    ]
    return "runs", "Run by run", titled("runs", "Run by run", *cards, folded=False)


_STEER = "What would make it richer or lazier"


def _card(group: RunGroup) -> Html:
    found = group.diagnosis
    runs = f"{len(found.runs)} runs: {', '.join(found.runs)}" if len(found.runs) > 1 else ""
    return tag(
        "div",
        tag("p", text(runs), class_="note") if runs else "",
        headline(found),
        gauges_of(found),
        opinions(found),
        statements(group),
        class_="card",
    )


def _steering(group: RunGroup) -> Html:
    lost = all(one.run_data.lost for one in group.findings)
    return steering(group.diagnosis, lost, "h3" if group.alone else "h5")


def _legend(found: Sequence[RunGroup]) -> Html:
    """Buttons that show and hide all lines of a run; empty for a single run."""
    if len(found) < 2:
        return Html("")
    buttons = [
        tag(
            "button",
            swatch(group.color),
            text(_counted(group)),
            type="button",
            aria_pressed="true",
            data_run=group.color,
        )
        for group in found
    ]
    several = any(len(group.runs) > 1 for group in found)
    bands = "Bands go from the smallest to the largest over runs that differ in their seed only." if several else ""
    return tag(
        "div",
        tag("p", text(f"Runs, to show and hide in all charts. {bands}"), class_="note", id="runs-note"),
        tag("div", *buttons, class_="legend runs", role="group", aria_labelledby="runs-note"),
    )


def _counted(group: RunGroup) -> str:
    return f"{group.label} ({len(group.runs)} seeds)" if len(group.runs) > 1 else group.label
