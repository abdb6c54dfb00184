"""Provenance of the numbers: cost of measuring, events, versions, configuration; and what to cite."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from featlearn.citations import citation
from featlearn.record import Run
from featlearn.reporting.content_blocks import Cell, Grid, Number, Section
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import table, titled
from featlearn.reporting.run_facts import UNKNOWN, entry, facts

MOST_EVENTS = 50
LONGEST_CONFIG = 20_000
"""Largest number of characters of a configuration that are shown."""


def overhead(groups: Sequence[RunGroup]) -> Section:
    """Cost of measuring, and recorded events."""
    runs = _runs(groups)
    costs = [[run.name, *_cost(run)] for run in runs]
    events = [
        [run.name, str(event["kind"]), "–" if event["step"] is None else str(event["step"]), _details(event)]
        for run in runs
        for event in run.events
        if event["kind"] not in ("started",)
    ]
    grids = [
        Grid("overhead", "Cost of measuring", ["run", "steps", "measurements", "seconds", "share of training"], costs)
    ]
    if events:
        left = len(events) - MOST_EVENTS
        grids.append(
            Grid(
                "events",
                "Events",
                ["run", "what", "step", "details"],
                events[:MOST_EVENTS],
                f"{left} more are in the runs." if left > 0 else "",
            )
        )
    missing = [f"{run.name}: the overhead was not recorded" for run in runs if _number(run, "overhead") is None]
    return Section("overhead", "Overhead and events", "", grids, missing)


def _runs(groups: Sequence[RunGroup]) -> list[Run]:
    return [run for group in groups for run in group.runs]


def _cost(run: Run) -> list[Cell]:
    steps = run.lines[-1]["step"] if run.lines else 0
    count, seconds, share = (_number(run, key) for key in ("measurements", "measuring", "overhead"))
    return [
        f"{steps}",
        f"{len(run.lines) if count is None else count:g}",
        "–" if seconds is None else Number(f"{seconds:.3g}", seconds),
        "–" if share is None else Number(f"{share:.1%}", share),
    ]


def _number(run: Run, key: str) -> float | None:
    value = run.config.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _details(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ("kind", "step", "at")}
    return ", ".join(
        f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}" for key, value in rest.items()
    )[:400]


def provenance(groups: Sequence[RunGroup]) -> Html:
    """Versions, seed, device and the whole configuration of every run."""
    runs = _runs(groups)
    tables = [facts(run) | _origin(run) for run in runs]
    labels = dict.fromkeys(label for each in tables for label in each)
    rows = [[label, *(each.get(label, UNKNOWN) for each in tables)] for label in labels]
    configs = [
        tag(
            "details",
            tag("summary", text(f"Configuration of {run.name}")),
            tag(
                "pre",
                text(json.dumps(run.config, indent=1, default=str, ensure_ascii=False)[:LONGEST_CONFIG]),
                tabindex=0,
            ),
        )
        for run in runs
    ]
    return titled("provenance", "Provenance", table(["", *(run.name for run in runs)], rows, _CAPTION), *configs)


_CAPTION = "What was run, and with what"


def _origin(run: Run) -> dict[str, str]:
    """Return label -> text, of what was measured, when, and with which versions."""
    values = {
        "probe, SHA-256": str(entry(run, "probe", "sha256") or "")[:16],
        "outputs": entry(run, "probe", "outputs"),
        "measured": entry(run, "every"),
        "budget": entry(run, "budget"),
        "finished": entry(run, "finished"),
        **{name: entry(run, "versions", name.lower()) for name in ("featlearn", "torch", "numpy", "Python")},
    }
    return {label: str(value)[:200] for label, value in values.items() if value not in (None, "")}


def citations() -> Html:
    """What to cite."""
    lines = [
        line
        for name in (None, "ntk", "metrics.centered_alignment", "neural_features")
        for line in citation(name, style="text").splitlines()
    ]
    entries = [
        entry
        for name in (None, "ntk", "metrics.centered_alignment", "neural_features")
        for entry in citation(name).split("\n\n")
    ]
    listed = [tag("li", text(line)) for line in dict.fromkeys(lines)]
    return titled(
        "citations",
        "To cite",
        tag("ul", *listed, class_="citations"),
        tag("details", tag("summary", "BibTeX"), tag("pre", text("\n\n".join(dict.fromkeys(entries))), tabindex=0)),
    )
