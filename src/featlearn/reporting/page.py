"""One run or several as one self-contained HTML file: no network, fonts or server needed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from featlearn.diagnosis import Diagnosis
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.verdict import findings_of
from featlearn.record import Run
from featlearn.reporting import curve_sections, layer_sections, matrix_sections
from featlearn.reporting.comparison import comparison, comparison_headline, scatter
from featlearn.reporting.content_blocks import POINTS, ContentBlock, Section
from featlearn.reporting.document import html_page, static, write_page
from featlearn.reporting.first_screen import answer, banner, chips, next_box, pictures, time_strip
from featlearn.reporting.groups import RunGroup, groups
from featlearn.reporting.markup import Html, data, tag, text
from featlearn.reporting.overlay import Overlay
from featlearn.reporting.provenance import citations, overhead, provenance
from featlearn.reporting.rendering import block, numbers, section, swatch, titled
from featlearn.reporting.step_slider import drawing_scripts, has_moving_blocks, step_slider
from featlearn.reporting.verdict import chip, opinions, sentence, statements
from featlearn.reporting.verdict import numbers as gauges_of
from featlearn.signatures import name_keywords

LARGEST = 1_000_000
"""Largest size of a page without kernels in bytes; lines are thinned until it fits."""
FEWEST = 25
"""Smallest number of points to which lines are thinned."""

Runs = Run | str | os.PathLike[str] | Diagnosis | Findings | Sequence[Run | str | os.PathLike[str] | Findings]


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
    """Write a report on runs as one self-contained HTML file: verdict, pictures, one next step, curves, and evidence.

    Several runs begin with a table of what differs between them.

    Args:
        runs: a run, its path (a directory or a `.zip`), or several of them, which are drawn in the same charts. A
            diagnosis keeps the numbers that it has computed.
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
    points, findings = POINTS, findings_of(runs)
    while True:
        run_groups = groups(findings, bands=bands, points=points)
        shown = sections(run_groups, overlay, kernels)
        content = _page(run_groups, shown, title)
        if len(content.encode()) - _kernel_bytes(shown) <= LARGEST or points <= FEWEST:
            break
        points //= 2
    return write_page(content, Path(path))


def live_content(findings: Sequence[Findings], *, ended: bool = False) -> dict[str, Any]:
    """Return HTML and charts of the live page, whether runs are several, and at the end the whole report."""
    run_groups = groups(findings, points=POINTS)
    shown = sections(run_groups, Overlay(None))
    several = len(run_groups) > 1
    curves, *others = shown
    beside = [] if several else [chart for chart in curves.blocks if chart.key in LIVE_CHARTS]
    below = [replace(curves, blocks=[chart for chart in curves.blocks if chart not in beside]), *others]
    first = _first(run_groups, shown, "h2", charts=beside)
    html = "".join([first, _next(run_groups), _tabs(run_groups, below)])
    content = {"html": html, "blocks": _blocks(shown), "several": several}
    return content | ({"page": _page(run_groups, shown, None)} if ended else {})


LIVE_CHARTS = ("gap", "training-loss", "loss", "accuracy")
"""Charts that the live page shows first."""


def sections(run_groups: Sequence[RunGroup], overlay: Overlay, kernels: bool = True) -> list[Section]:
    """Return all sections that are drawn from the numbers of runs."""
    extra = curve_sections.overlaid(run_groups, overlay)
    return [
        curve_sections.overview(run_groups, overlay),
        curve_sections.timeline(run_groups, overlay),
        *([extra] if extra is not None else []),
        layer_sections.layers(run_groups),
        layer_sections.features(run_groups),
        matrix_sections.specialization(run_groups),
        matrix_sections.spectra(run_groups),
        matrix_sections.kernels(run_groups, kernels),
        overhead(run_groups),
    ]


TABS = {
    "Curves": ("curves", "timeline", "theory"),
    "Layers": ("layers", "features", "specialization"),
    "Evidence": (),
    "Details": ("spectra", "overhead"),
}
"""Tab -> keys of its sections. Evidence has the gauges and statements of each run."""


def _kernel_bytes(shown: Sequence[Section]) -> int:
    """Return the size of the kernel pictures in bytes."""
    blocks = [block for section in shown for block in section.blocks if section.key == "kernels"]
    return sum(len(data(numbers(block))) for block in blocks)


def _blocks(shown: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the data of all charts and matrices."""
    return [entry for section in shown for block in section.blocks if (entry := numbers(block)) is not None]


def _page(run_groups: Sequence[RunGroup], shown: Sequence[Section], title: str | None) -> Html:
    moving = has_moving_blocks(block for section in shown for block in section.blocks)
    slider = step_slider("Last step") if moving else Html("")
    name = title if title is not None else _heading(run_groups)
    alone = run_groups[0].alone
    scripts = [*drawing_scripts(), static("report.js")]
    return html_page(
        "report",
        name,
        tag("main", _first(run_groups, shown, None), slider, _next(run_groups), _tabs(run_groups, shown)),
        banner=banner(name, run_groups[0]) if alone else None,
        skip=("Skip to the verdict", "verdict"),
        sections=[(f"panel-{tab.lower()}", tab) for tab in TABS],
        styles=[static("uPlot.min.css"), static("report.css")],
        scripts=scripts,
        script_tags=[
            f'<script type="application/json" id="blocks">{data(_blocks(shown))}</script>',
            *(f"<script>{script}</script>" for script in scripts),
        ],
        body_class="single" if alone else "several",
        noscript="Charts need JavaScript; every number is in the tables.",
    )


def _first(
    run_groups: Sequence[RunGroup], shown: Sequence[Section], name: str | None, charts: Sequence[ContentBlock] = ()
) -> Html:
    """Return what comes before the tabs.

    Args:
        run_groups: Groups of runs.
        shown: All sections.
        name: Element of the headline, where the page has another heading.
        charts: Charts of a live page, which stand beside headline and kernels.
    """
    group = run_groups[0]
    kernels = next(part for part in shown if part.key == "kernels")
    if not group.alone:
        beside = [scatter(run_groups), *map(block, kernels.blocks)]
        content = [
            tag("h2", "Runs", class_="unseen"),
            tag("p", text(comparison_headline(run_groups)), class_="headline"),
            tag("div", *(part for part in beside if part), class_="blocks"),
            comparison(run_groups),
            _legend(run_groups),
        ]
        return tag("section", *content, id="verdict", tabindex=-1)
    drawn = [tag("h3", "Which samples does it treat alike?"), *map(block, kernels.blocks)] if kernels.blocks else []
    drawn_kernels = tag("section", *drawn) if drawn else Html("")
    head = [answer(group, name)]
    if charts:
        answer_and_kernels = tag("div", tag("div", *head, class_="answer"), drawn_kernels, class_="pictures")
        head = [tag("div", *map(block, charts), answer_and_kernels, class_="live-first")]
        drawn_kernels = Html("")
    content = [
        tag("h2", "Verdict", class_="unseen"),
        *head,
        pictures(group, drawn_kernels),
        *(tag("p", tag("strong", "Not there: "), text(f"{reason}."), class_="missing") for reason in kernels.missing),
        time_strip(group),
    ]
    return tag("section", *content, id="verdict", tabindex=-1)


def _next(run_groups: Sequence[RunGroup]) -> Html:
    """Return one next step and the numbers of a single run."""
    group = run_groups[0]
    content = [tag("h2", "Next", class_="unseen"), next_box(group), chips(group)]
    return tag("section", *content, id="next") if group.alone else Html("")


def _tabs(run_groups: Sequence[RunGroup], shown: Sequence[Section]) -> Html:
    """Return a bar of tabs, and the panel of each."""
    parts = {part.key: part for part in shown}
    bar = [
        tag(
            "button",
            tab,
            type="button",
            role="tab",
            id=f"tab-{tab.lower()}",
            aria_controls=f"panel-{tab.lower()}",
            aria_selected="false",
        )
        for tab in TABS
    ]
    panels = []
    for tab, keys in TABS.items():
        content = [section(parts[key]) for key in keys if key in parts]
        if tab == "Evidence":
            content = [_evidence(run_groups)]
        if tab == "Details":
            content += [provenance(run_groups), citations()]
        name = tab.lower()
        attributes = {"id": f"panel-{name}", "role": "tabpanel", "aria_labelledby": f"tab-{name}", "tabindex": -1}
        panels.append(tag("div", *content, class_="panel", **attributes))
    return Html(tag("div", *bar, class_="tabs", role="tablist", aria_label="Parts of the report") + "".join(panels))


def _heading(run_groups: Sequence[RunGroup]) -> str:
    names = [group.label for group in run_groups]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs: {names[0]} to {names[-1]}"


def _evidence(run_groups: Sequence[RunGroup]) -> Html:
    """Return gauges, second opinions and statements: of one run, or in a folded card for each of several."""
    if run_groups[0].alone:
        return titled("evidence", "Evidence", _card(run_groups[0]))
    cards = [
        tag(
            "details",
            tag("summary", swatch(group.color), tag("h3", text(_run_label(group))), chip(group.diagnosis.regime)),
            tag("p", text(f"{group.diagnosis.headline} {sentence(group.diagnosis)}".strip()), class_="said"),
            _card(group),
            next_box(group),
            class_=f"run r{group.color % 8}",
            id=f"run-{group.color}",
        )
        for group in run_groups
    ]
    return titled("runs", "Run by run", *cards)


def _card(group: RunGroup) -> Html:
    diagnosis = group.diagnosis
    runs = f"{len(diagnosis.runs)} runs: {', '.join(diagnosis.runs)}" if len(diagnosis.runs) > 1 else ""
    return tag(
        "div",
        tag("p", text(runs), class_="note") if runs else "",
        gauges_of(diagnosis, anchored=group.alone),
        opinions(diagnosis, anchored=group.alone),
        statements(group),
        class_="card",
    )


def _legend(run_groups: Sequence[RunGroup]) -> Html:
    """Return buttons that show and hide all lines of a run."""
    buttons = [
        tag(
            "button",
            swatch(group.color),
            text(_run_label(group)),
            type="button",
            aria_pressed="true",
            data_run=group.color,
        )
        for group in run_groups
    ]
    several = any(len(group.runs) > 1 for group in run_groups)
    bands = "Bands go from the smallest to the largest over runs that differ in their seed only." if several else ""
    return tag(
        "div",
        tag("p", text(f"Runs, to show and hide in all charts. {bands}"), class_="note", id="runs-note"),
        tag("div", *buttons, class_="legend runs", role="group", aria_labelledby="runs-note"),
    )


def _run_label(group: RunGroup) -> str:
    return f"{group.label} ({len(group.runs)} seeds)" if len(group.runs) > 1 else group.label
