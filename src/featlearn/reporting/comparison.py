"""Several runs side by side: the settings in which they differ, regime and key numbers."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from featlearn.diagnosis import Diagnosis
from featlearn.reporting.content_blocks import Cell, Number
from featlearn.reporting.gauges import estimate_cell, with_error
from featlearn.reporting.groups import RunGroup, finite
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import data_cell, swatch
from featlearn.reporting.verdict import chip

LONGEST = 40
"""Largest number of characters of a setting."""
MOST_SETTINGS = 6
"""Largest number of settings in the table; all are under Provenance."""


def comparison(groups: Sequence[RunGroup]) -> Html:
    """A sentence that counts regimes, and the table."""
    caption = "Runs: settings that differ, regime, key numbers"
    settings = settings_that_differ(groups)
    columns = {name: [read(group, group.diagnosis) for group in groups] for name, read in _NUMBERS.items()}
    columns = {name: cells for name, cells in columns.items() if set(cells) != {"–"}}
    head = ["run", *settings, "regime", *columns]
    rows = [
        _row(
            group,
            {name: values[i] for name, values in settings.items()},
            {name: cells[i] for name, cells in columns.items()},
        )
        for i, group in enumerate(groups)
    ]
    names = tag("tr", *(tag("th", text(cell), scope="col") for cell in head))
    table = tag("table", tag("caption", text(caption)), tag("thead", names), tag("tbody", *rows))
    return Html(
        tag("p", text(counted_regimes(groups)), class_="said")
        + tag("div", table, class_="scroll compared", tabindex=0, role="region", aria_label=caption)
        + tag("p", text(_NOTE), class_="note")
    )


def counted_regimes(groups: Sequence[RunGroup]) -> str:
    """How many runs there are of each regime, and which."""
    found: dict[str, list[str]] = {}
    for group in groups:
        found.setdefault(group.diagnosis.regime, []).append(group.label)
    told = "; ".join(f"{len(names)} {regime} ({', '.join(names)})" for regime, names in found.items())
    broken = [group.label for group in groups if any(one.run_data.diverged is not None for one in group.findings)]
    return f"{told}." + (f" Training broke down in {', '.join(broken)}." if broken else "")


def _row(group: RunGroup, settings: Mapping[str, str], numbers: Mapping[str, Cell]) -> Html:
    """A row; cells carry their column's name, which a narrow screen shows in place of the head."""
    name = group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} seeds)"
    return tag(
        "tr",
        tag("th", swatch(group.color), text(name), scope="row"),
        *(tag("td", text(value), data_name=name) for name, value in settings.items()),
        tag("td", chip(group.diagnosis.regime), data_name="regime"),
        *(data_cell(value, *_two_lines(value), data_name=name) for name, value in numbers.items()),
    )


def _two_lines(cell: Cell) -> list[Html]:
    """A number, and its error below it."""
    number, sign, error = (cell.shown if isinstance(cell, Number) else cell).partition(" ± ")
    return [text(f"{number} "), tag("small", text(f"± {error}"))] if sign else [text(number)]


def _kernels(_: RunGroup, found: Diagnosis) -> Cell:
    useful = found.useful
    if not math.isfinite(useful.first + useful.later):
        return "–"
    shown = f"{useful.first:.3g} → {with_error(useful.later, useful.error)}"
    return Number(shown, f"{float(useful.first)!r} → {float(useful.later)!r}", useful.error)


def _accuracy(group: RunGroup, _: Diagnosis) -> Cell:
    last = [curve[1][-1] for run in group.runs if (curve := finite(run, "test/accuracy")) is not None]
    return Number(f"{sum(last) / len(last):.3g}", sum(last) / len(last)) if last else "–"


def _loss(_: RunGroup, found: Diagnosis) -> Cell:
    return estimate_cell(found.numbers["loss_left"])


def _broken(group: RunGroup, _: Diagnosis) -> str:
    steps = [one.run_data.diverged for one in group.findings if one.run_data.diverged is not None]
    return "–" if not steps else f"step {min(steps)}"


_NUMBERS: Mapping[str, Callable[[RunGroup, Diagnosis], Cell]] = {
    "linearization gap": lambda _, found: estimate_cell(found.numbers["gap"]),
    "departure": lambda _, found: estimate_cell(found.numbers["departure"]),
    "kernel turned": lambda _, found: estimate_cell(found.turning),
    "kernel grew": lambda _, found: estimate_cell(found.growth),
    "test error, first → last kernel": _kernels,
    "test accuracy": _accuracy,
    "loss left": _loss,
    "broke down": _broken,
}
_NOTE = (
    "± is one standard error. Departure: from training with the frozen first kernel. Test error: of regression with "
    "the first and with the last kernel. Loss left: the lowest, as a share of the first. A color is a run, in "
    "every chart."
)


# ---- settings


def settings_that_differ(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Name -> its value in every group, of what is not the same in all; at most MOST_SETTINGS, the user's own first."""
    flat = [_flat(group.first.run.config) for group in groups]
    names = dict.fromkeys(name for one in flat for name in one)
    found = {name: [one.get(name, "–") for one in flat] for name in names}
    return dict([(name, values) for name, values in found.items() if len(set(values)) > 1][:MOST_SETTINGS])


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings of one run: the user's own, then what the run knows of optimizer, model and probe."""
    own = config.get("settings")
    found = {str(key): _short(value) for key, value in own.items() if key != "seed"} if isinstance(own, Mapping) else {}
    optimizer, model, probe = (config.get(key) for key in ("optimizer", "model", "probe"))
    if isinstance(optimizer, Mapping):
        groups = optimizer.get("groups")
        first = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], Mapping) else {}
        found |= {"optimizer": _short(optimizer.get("class", "–"))}
        found |= {
            name.replace("_", " "): _short(first[name])
            for name in ("lr", "momentum", "weight_decay")
            if name in first and name not in found
        }
    if isinstance(model, Mapping):
        found |= {"model": _short(model.get("class", "–")), "parameters": _short(model.get("trainable", "–"))}
    if isinstance(probe, Mapping):
        found |= {"probe samples": _short(probe.get("samples", "–"))}
    return found | {"loss": _short(config.get("loss_convention", "–")), "precision": _short(config.get("dtype", "–"))}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    plain = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"
