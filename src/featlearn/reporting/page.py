"""One run or several as one self-contained HTML file: no network, fonts or server needed."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from featlearn.diagnosis import Advice, Change, Diagnosis, advise
from featlearn.diagnosis.findings import Findings
from featlearn.record import Run
from featlearn.reporting import curve_sections, layer_sections, matrix_sections
from featlearn.reporting.comparison import comparison
from featlearn.reporting.content_blocks import POINTS, Section
from featlearn.reporting.document import html_page, static, write_page
from featlearn.reporting.groups import RunGroup, findings_of, groups
from featlearn.reporting.markup import Html, data, tag, text
from featlearn.reporting.overlay import Overlay
from featlearn.reporting.provenance import citations, overhead, provenance
from featlearn.reporting.rendering import numbers, section, swatch, titled
from featlearn.reporting.step_slider import drawing_scripts, has_moving_blocks, step_slider
from featlearn.reporting.verdict import chip, headline, opinions, statements
from featlearn.reporting.verdict import numbers as gauges_of
from featlearn.signatures import name_keywords


def steering(found: Diagnosis, lost: bool, heading: Literal["h3", "h5"]) -> Html:
    """Return both directions under their headings: one way each, the others folded.

    `lost`: training broke down before anything was learned.
    """
    if lost:
        return tag(
            "p", "Training broke down before anything can be told: lower the learning rate first.", class_="note"
        )
    return tag("div", *(_direction(advise(found, toward), heading) for toward in _DIRECTIONS), class_="ways")


_DIRECTIONS: tuple[Literal["rich", "lazy"], ...] = ("rich", "lazy")


def _direction(advice: Advice, heading: str) -> Html:
    title = tag(heading, "Richer" if advice.toward == "rich" else "Lazier")
    if not advice.changes:
        already = f"It is {advice.toward} already: " if advice.regime == advice.toward else ""
        return tag("div", title, tag("p", text(f"{already}{advice.note}")), class_="way")
    first, *others = advice.changes
    guess = "" if advice.regime != "cannot tell" else " This is a guess: it is not known where the run stands."
    ways = [tag("li", text(f"{change.text} "), tag("code", text(change.command)), _why(change)) for change in others]
    return tag(
        "div",
        title,
        tag("p", text(first.text + guess)),
        tag("pre", tag("code", text(first.command))),
        tag(
            "details",
            tag("summary", text(f"What to expect, and {_count(len(others))}")),
            _why(first),
            tag("p", tag("strong", "Or, instead of it:")) if others else "",
            tag("ul", *ways) if others else "",
        ),
        class_="way",
    )


def _count(others: int) -> str:
    return "why" if not others else "another way" if others == 1 else f"{others} other ways"


def _why(change: Change) -> Html:
    tried = str(change.tried) if change.tried is not None else f"not tried: {change.not_tried}"
    tried = tried[:1].upper() + tried[1:]
    return tag("p", text(f"{tried}. Expect: {change.expect}. Because: {change.because}."), class_="note")


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
    points, findings = POINTS, findings_of(runs)
    while True:
        run_groups = groups(findings, bands=bands, points=points)
        shown = sections(run_groups, overlay, kernels)
        content = _page(run_groups, shown, title)
        if len(content.encode()) - _kernel_bytes(shown) <= LARGEST or points <= FEWEST:
            break
        points //= 2
    return write_page(content, Path(path))


def report_content(runs: Runs | Sequence[Findings]) -> dict[str, Any]:
    """Return what the live page shows: HTML of all sections, data of the charts, and whether there are several runs."""
    run_groups = groups(runs, points=POINTS)
    shown = sections(run_groups, Overlay(None))
    html = "".join(html for _, _, html in _parts(run_groups, shown))
    return {"html": html, "blocks": _blocks(shown), "several": len(run_groups) > 1}


def sections(run_groups: Sequence[RunGroup], overlay: Overlay, kernels: bool = True) -> list[Section]:
    """Return all sections except verdict, provenance and citations, in the order of the page."""
    extra = curve_sections.overlaid(run_groups, overlay)
    return [
        curve_sections.overview(run_groups, overlay),
        curve_sections.frozen(run_groups),
        curve_sections.timeline(run_groups, overlay),
        *([extra] if extra is not None else []),
        matrix_sections.spectra(run_groups),
        matrix_sections.specialization(run_groups),
        layer_sections.features(run_groups),
        layer_sections.layers(run_groups),
        matrix_sections.kernels(run_groups, kernels),
        overhead(run_groups),
    ]


def _kernel_bytes(shown: Sequence[Section]) -> int:
    """Return the size of the kernel pictures in bytes."""
    blocks = [block for section in shown for block in section.blocks if section.key == "kernels"]
    return sum(len(data(numbers(block))) for block in blocks)


def _blocks(shown: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the data of all charts and matrices."""
    return [entry for section in shown for block in section.blocks if (entry := numbers(block)) is not None]


def _page(run_groups: Sequence[RunGroup], shown: Sequence[Section], title: str | None) -> Html:
    parts = _parts(run_groups, shown)
    content = [html for _, _, html in parts]
    if has_moving_blocks(block for section in shown for block in section.blocks):
        first = next(part.key for part in shown if not part.folded)
        content.insert([key for key, _, _ in parts].index(first), step_slider("Last step"))
    scripts = [*drawing_scripts(), static("report.js")]
    return html_page(
        "report",
        title if title is not None else _heading(run_groups),
        tag("main", *content),
        skip=("Skip to the verdict", "verdict"),
        sections=[(key, name) for key, name, _ in parts],
        styles=[static("uPlot.min.css"), static("report.css")],
        scripts=scripts,
        script_tags=[
            f'<script type="application/json" id="blocks">{data(_blocks(shown))}</script>',
            *(f"<script>{script}</script>" for script in scripts),
        ],
        body_class="several" if len(run_groups) > 1 else "single",
        noscript="Charts need JavaScript; every number is in the tables.",
    )


def _parts(run_groups: Sequence[RunGroup], shown: Sequence[Section]) -> list[tuple[str, str, Html]]:
    """Return (key, title, HTML) of all sections, in the order of the page."""
    curves = [(part.key, part.title, section(part)) for part in shown if not part.folded]
    details = [(part.key, part.title, section(part)) for part in shown if part.folded]
    # curves of several runs come before their cards, what would steer a single run before its curves
    middle = [*curves, _cards(run_groups)] if len(run_groups) > 1 else [_advice(run_groups[0]), *curves]
    return [
        ("verdict", "Verdict", _verdict(run_groups)),
        *middle,
        *details,
        ("provenance", "Provenance", provenance(run_groups)),
        ("citations", "To cite", citations()),
    ]


def _heading(run_groups: Sequence[RunGroup]) -> str:
    names = [group.label for group in run_groups]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs: {names[0]} to {names[-1]}"


def _verdict(run_groups: Sequence[RunGroup]) -> Html:
    """Return the first section: the verdict and numbers of one run, or a table of several."""
    content = [comparison(run_groups), _legend(run_groups)] if len(run_groups) > 1 else [_card(run_groups[0])]
    return tag(
        "section",
        tag("h2", "Verdict", id="verdict-title"),
        *content,
        id="verdict",
        aria_labelledby="verdict-title",
        tabindex=-1,
    )


def _advice(group: RunGroup) -> tuple[str, str, Html]:
    """Return what would steer a single run."""
    return "steer", _STEER, titled("steer", _STEER, _steering(group), folded=False)


def _cards(run_groups: Sequence[RunGroup]) -> tuple[str, str, Html]:
    """Return a folded card for each of several runs."""
    cards = [
        tag(
            "details",
            tag("summary", swatch(group.color), tag("h3", text(_run_label(group))), chip(group.diagnosis.regime)),
            _card(group),
            tag("h4", _STEER),
            _steering(group),
            class_=f"run r{group.color % 8}",
        )
        for group in run_groups
    ]
    return "runs", "Run by run", titled("runs", "Run by run", *cards, folded=False)


_STEER = "What would make it richer or lazier"


def _card(group: RunGroup) -> Html:
    diagnosis = group.diagnosis
    runs = f"{len(diagnosis.runs)} runs: {', '.join(diagnosis.runs)}" if len(diagnosis.runs) > 1 else ""
    return tag(
        "div",
        tag("p", text(runs), class_="note") if runs else "",
        headline(diagnosis),
        gauges_of(diagnosis),
        opinions(diagnosis),
        statements(group),
        class_="card",
    )


def _steering(group: RunGroup) -> Html:
    lost = all(one.run_data.lost for one in group.findings)
    return steering(group.diagnosis, lost, "h3" if group.alone else "h5")


def _legend(run_groups: Sequence[RunGroup]) -> Html:
    """Return buttons that show and hide all lines of a run; empty for a single run."""
    if len(run_groups) < 2:
        return Html("")
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
