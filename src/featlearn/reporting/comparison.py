"""Several runs side by side: the settings in which they differ, regime, and key numbers. For pages and terminals."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from featlearn.diagnosis import Diagnosis
from featlearn.diagnosis.evidence import GAP
from featlearn.reporting.content_blocks import Cell, Number, shade
from featlearn.reporting.gauges import estimate_cell, with_error
from featlearn.reporting.groups import RunGroup, finite
from featlearn.reporting.markup import Html, tag, text
from featlearn.reporting.rendering import data_cell, swatch
from featlearn.reporting.run_facts import UNKNOWN, entry, facts, short
from featlearn.reporting.verdict import chip

LEAST_DIFFERENCE = 0.1
"""Smallest difference of two linearization gaps that makes one run richer."""
MOST_SETTINGS = 6
"""Largest number of settings in the table; all are under Provenance."""


def comparison_headline(groups: Sequence[RunGroup]) -> str:
    """Return whether the richest run tests better than the laziest, beyond twice the standard error."""
    known = sorted(_tested(groups), key=lambda item: -item[1])
    if len(known) < 2:
        return f"{len(groups)} runs side by side."
    (_, gap, score, error), (_, low_gap, low_score, low_error) = known[0], known[-1]
    if gap - low_gap < LEAST_DIFFERENCE:
        return "All runs are about equally rich."
    change, doubt = score - low_score, 2 * math.hypot(error, low_error)
    word = "tests better" if change > doubt else "tests worse" if change < -doubt else "does not test better"
    scores = ", ".join(f"{score:.2f}" for _, _, score, _ in known)
    return f"Richer {word} here ({scores} from the richest on, each ± {max(known, key=lambda item: item[3])[3]:.2f})."


def _tested(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, float, float, float]]:
    """Return (group, gap, test accuracy or share of the variance explained, standard error), as far as known."""
    numbers = [
        (group, float(group.diagnosis.numbers["gap"].value), 1 - useful.network, useful.learned_error)
        for group in groups
        for useful in [group.diagnosis.useful]
    ]
    return [entry for entry in numbers if math.isfinite(entry[1] + entry[2] + entry[3])]


def scatter(groups: Sequence[RunGroup]) -> Html:
    """Return test accuracy over the linearization gap, a point for each run, which opens its card."""
    known = _tested(groups)
    if len(known) < 2:
        return Html("")
    right = max(1.0, *(gap for _, gap, _, _ in known))
    bottom = math.floor(10 * min(score - 0.05 for _, _, score, _ in known)) / 10
    edges, zones = (0.0, GAP.low, GAP.high, right), ("low", "between", "high")
    parts = [
        tag("rect", x=_x(a, right), width=f"{_PLACE * (b - a) / right:.2f}%", y=10, height=180, class_=f"zone-{zone}")
        for a, b, zone in zip(edges[:-1], edges[1:], zones, strict=True)
    ]
    for word, at, anchor in (("lazy", 0.0, "start"), ("rich", right, "end")):
        parts.append(tag("text", text(word), x=_x(at, right), y=206, text_anchor=anchor))
    parts.append(tag("text", "linearization gap", x=_x(right / 2, right), y=206, text_anchor="middle"))
    for at in (1.0, (1 + bottom) / 2, bottom):
        parts.append(tag("text", text(f"{at:.2g}"), x="8%", y=f"{_y(at, bottom) + 4:.0f}", text_anchor="end"))
    for i, (group, gap, score, error) in enumerate(known):
        x, y = _x(gap, right), _y(score, bottom)
        low, high = (_y(score + sign * error, bottom) for sign in (-1, 1))
        anchor = "end" if gap > right / 2 else "start"
        label = f"{group.label}: gap {gap:.2f}, {_score_name(group)} {score:.2f} ± {error:.2f}"
        drawn = [
            tag("line", x1=x, x2=x, y1=f"{low:.1f}", y2=f"{high:.1f}"),
            tag("circle", cx=x, cy=f"{y:.1f}", r=3),
            tag(
                "text",
                text(group.label[:24]),
                x=x,
                y=f"{y + (-12, 22)[i % 2]:.1f}",
                text_anchor="end" if gap > right / 2 else "start",
            ),
        ]
        parts.append(tag("a", *drawn, href=f"#run-{group.color}", class_=f"c{shade(group.color)}", aria_label=label))
    title = tag("h3", text(f"{_score_name(groups[0]).capitalize()} against richness"))
    drawing = tag("svg", *parts, height=212, class_="scatter", role="group", aria_label="A point for each run")
    return tag("figure", title, drawing, tag("p", "A bar is one standard error. A point opens its run.", class_="note"))


def _score_name(group: RunGroup) -> str:
    return "explained variance" if group.diagnosis.useful.unit == "variance" else "test accuracy"


_PLACE = 88
"""Width of the scatter in percent, right of its axis."""


def _x(gap: float, right: float) -> str:
    return f"{10 + _PLACE * max(gap, 0.0) / right:.2f}%"


def _y(score: float, bottom: float) -> float:
    return 190 - 180 * (min(score, 1.0) - bottom) / (1 - bottom)


def comparison(groups: Sequence[RunGroup]) -> Html:
    """Return a sentence that counts regimes, and the table."""
    caption = "Runs: settings that differ, regime, key numbers"
    settings, numbers = settings_that_differ(groups), key_numbers(groups)
    best = {name: _best(cells, _BEST[name]) for name, cells in numbers.items() if name in _BEST}
    rows = [
        _row(
            group,
            {name: values[i] for name, values in settings.items()},
            {name: cells[i] for name, cells in numbers.items()},
            {name for name, place in best.items() if place == i},
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


def _best(cells: Sequence[Cell], choose: Callable[..., float]) -> int | None:
    """Return the place of the best number of a column; None where several share it, or there are fewer than two."""
    numbers = [cell.value for cell in cells if isinstance(cell, Number) and isinstance(cell.value, float)]
    finite_numbers = [number for number in numbers if math.isfinite(number)]
    if len(finite_numbers) < 2 or finite_numbers.count(choose(finite_numbers)) > 1:
        return None
    best = choose(finite_numbers)
    return next(i for i, cell in enumerate(cells) if isinstance(cell, Number) and cell.value == best)


def _row(group: RunGroup, settings: Mapping[str, str], numbers: Mapping[str, Cell], best: Collection[str]) -> Html:
    """Return a row. Cells carry their column's name, which a narrow screen shows in place of the head."""
    name = group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} seeds)"
    return tag(
        "tr",
        tag("th", swatch(group.color), text(name), scope="row"),
        *(tag("td", text(value), data_name=name) for name, value in settings.items()),
        tag("td", chip(group.diagnosis.regime), data_name="regime"),
        *(
            data_cell(value, *_two_lines(value), data_name=name, class_="best" if name in best else None)
            for name, value in numbers.items()
        ),
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
_BEST: Mapping[str, Callable[..., float]] = {"test accuracy": max, "loss left": min}
"""Columns of which the best number is marked."""
_NOTE = (
    "± is one standard error. Test error: of regression with the first and with the last kernel. Loss left: the lowest "
    "loss, as a share of the first. The best of a column is framed. A color is a run, in every chart."
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
