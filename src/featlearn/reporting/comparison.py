"""Several runs side by side: the settings in which they differ, regime, and key numbers. For pages and terminals."""

import math
from collections.abc import Callable, Mapping, Sequence

from featlearn.diagnosis import Diagnosis
from featlearn.reporting.content_blocks import Cell, Number
from featlearn.reporting.gauges import estimate_cell, with_error
from featlearn.reporting.groups import RunGroup, finite
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import data_cell, swatch
from featlearn.reporting.run_facts import UNKNOWN, entry, facts, short
from featlearn.reporting.verdict import chip

MOST_SETTINGS = 6
"""Largest number of settings in the table; all are under Provenance."""


def comparison(groups: Sequence[RunGroup]) -> Html:
    """Return a sentence that counts regimes, and the table."""
    caption = "Runs: settings that differ, regime, key numbers"
    settings, numbers = settings_that_differ(groups), key_numbers(groups)
    rows = [
        _row(
            group,
            {name: values[i] for name, values in settings.items()},
            {name: cells[i] for name, cells in numbers.items()},
        )
        for i, group in enumerate(groups)
    ]
    names = tag("tr", *(tag("th", text(name), scope="col") for name in ["run", *settings, "regime", *numbers]))
    table = tag("table", tag("caption", text(caption)), tag("thead", names), tag("tbody", *rows))
    return Html(
        tag("p", text(counted_regimes(groups)), class_="said")
        + tag("div", table, class_="scroll compared", tabindex=0, role="region", aria_label=caption)
        + tag("p", text(_NOTE), class_="note")
    )


def key_numbers(groups: Sequence[RunGroup]) -> dict[str, list[Cell]]:
    """Return label -> a cell for each group, of the numbers that any group has."""
    columns = {name: [read(group, group.diagnosis) for group in groups] for name, read in _NUMBERS.items()}
    return {name: cells for name, cells in columns.items() if set(cells) != {UNKNOWN}}


def counted_regimes(groups: Sequence[RunGroup]) -> str:
    """Return how many runs there are of each regime, and which."""
    regimes: dict[str, list[str]] = {}
    for group in groups:
        regimes.setdefault(group.diagnosis.regime, []).append(group.label)
    counts = "; ".join(f"{len(names)} {regime} ({', '.join(names)})" for regime, names in regimes.items())
    broken = [group.label for group in groups if any(f.run_data.diverged is not None for f in group.findings)]
    return f"{counts}." + (f" Training broke down in {', '.join(broken)}." if broken else "")


def _row(group: RunGroup, settings: Mapping[str, str], numbers: Mapping[str, Cell]) -> Html:
    """Return a row. Cells carry their column's name, which a narrow screen shows in place of the head."""
    name = group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} seeds)"
    return tag(
        "tr",
        tag("th", swatch(group.color), text(name), scope="row"),
        *(tag("td", text(value), data_name=name) for name, value in settings.items()),
        tag("td", chip(group.diagnosis.regime), data_name="regime"),
        *(data_cell(value, *_two_lines(value), data_name=name) for name, value in numbers.items()),
    )


def _two_lines(cell: Cell) -> list[Html]:
    """Return a number, and its error below it."""
    number, sign, error = (cell.shown if isinstance(cell, Number) else cell).partition(" ± ")
    return [text(f"{number} "), tag("small", text(f"± {error}"))] if sign else [text(number)]


def _kernel_errors(_: RunGroup, diagnosis: Diagnosis) -> Cell:
    useful = diagnosis.useful
    if not math.isfinite(useful.first + useful.later):
        return UNKNOWN
    shown = f"{useful.first:.3g} → {with_error(useful.later, useful.error)}"
    return Number(shown, f"{float(useful.first)!r} → {float(useful.later)!r}", useful.error)


def _last_mean(scalar: str) -> Callable[[RunGroup, Diagnosis], Cell]:
    """Return a function that gives the mean of the last values of a scalar over seeds."""

    def read(group: RunGroup, _: Diagnosis) -> Cell:
        last = [curve[1][-1] for run in group.runs if (curve := finite(run, scalar)) is not None]
        return Number(f"{sum(last) / len(last):.3g}", sum(last) / len(last)) if last else UNKNOWN

    return read


def _broken(group: RunGroup, _: Diagnosis) -> str:
    steps = [f.run_data.diverged for f in group.findings if f.run_data.diverged is not None]
    return UNKNOWN if not steps else f"step {min(steps)}"


_NUMBERS: Mapping[str, Callable[[RunGroup, Diagnosis], Cell]] = {
    "linearization gap": lambda _, diagnosis: estimate_cell(diagnosis.numbers["gap"]),
    "kernel turned": lambda _, diagnosis: estimate_cell(diagnosis.turning),
    "kernel grew": lambda _, diagnosis: estimate_cell(diagnosis.growth),
    "test error, first → last kernel": _kernel_errors,
    "test accuracy": _last_mean("test/accuracy"),
    "loss left": lambda _, diagnosis: estimate_cell(diagnosis.numbers["loss_left"]),
    "broke down": _broken,
}
_NOTE = (
    "± is one standard error. Departure: from training with the frozen first kernel. Test error: of regression with "
    "the first and with the last kernel. Loss left: the lowest, as a share of the first. A color is a run, in "
    "every chart."
)


# ---- settings


def settings_that_differ(groups: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Return name -> value in every group of the settings that differ: at most MOST_SETTINGS, the user's first."""
    settings = [_flat(group) for group in groups]
    names = dict.fromkeys(name for each in settings for name in each)
    values = {name: [each.get(name, UNKNOWN) for each in settings] for name in names}
    return dict([(name, cells) for name, cells in values.items() if len(set(cells)) > 1][:MOST_SETTINGS])


def _flat(group: RunGroup) -> dict[str, str]:
    """Return the settings of a group: the user's, then what the run states of optimizer, model, and probe."""
    users = entry(group.first.run, "settings")
    settings = {str(key): short(value) for key, value in users.items()} if isinstance(users, Mapping) else {}
    settings.pop("seed", None)
    known = facts(group.first.run)
    hidden = {"device"} if len(group.runs) == 1 else {"device", "seed"}
    rates = {"lr", "momentum", "weight decay"} & settings.keys()
    return settings | {name: value for name, value in known.items() if name not in hidden | rates}
