"""Provenance of the numbers: cost of measuring, events, versions, configuration; and what to cite."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from featlearn.citations import citation
from featlearn.record import Run
from featlearn.reporting.content_blocks import Cell, Grid, Number, Section
from featlearn.reporting.groups import RunGroup
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import table, titled

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
    rows = [[label, *(read(run) for run in runs)] for label, read in _FACTS.items()]
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


def _entry(*path: str) -> Callable[[Run], str]:
    def read(run: Run) -> str:
        found: Any = run.config
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return "–" if found is None else str(found)[:200]

    return read


def _optimizer(run: Run) -> str:
    config = run.config
    groups = (config.get("optimizer") or {}).get("groups") if isinstance(config.get("optimizer"), Mapping) else None
    first = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], Mapping) else {}
    known = [f"{key} {first[key]}" for key in ("lr", "momentum", "weight_decay") if first.get(key)]
    return ", ".join([_entry("optimizer", "class")(run), *known])


def _samples(run: Run) -> str:
    """Return the number of samples of the probe, and how many of them were measured."""
    given, measured = run.probe_samples or (0, 0)
    if not given:
        return "–"
    return str(given) if measured == given else f"{measured} of {given}"


_FACTS: Mapping[str, Callable[[Run], str]] = {
    "model": _entry("model", "class"),
    "trainable parameters": _entry("model", "trainable"),
    "optimizer": _optimizer,
    "loss": _entry("loss_convention"),
    "seed": _entry("seed"),
    "device": _entry("device"),
    "precision": _entry("dtype"),
    "probe samples": _samples,
    "probe, SHA-256": lambda run: _entry("probe", "sha256")(run)[:16],
    "outputs": _entry("probe", "outputs"),
    "measured": _entry("every"),
    "budget": _entry("budget"),
    "finished": _entry("finished"),
    "featlearn": _entry("versions", "featlearn"),
    "torch": _entry("versions", "torch"),
    "numpy": _entry("versions", "numpy"),
    "Python": _entry("versions", "python"),
}


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
