"""A value over two axes of a sweep: mean over seeds, spread and number in each cell."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy

from featlearn.errors import InputValueError
from featlearn.sweeps.outcome_values import is_number

if TYPE_CHECKING:
    from featlearn.sweeps.results import Sweep, Value

Scale = Literal["log", "linear", "words"]


@dataclass(frozen=True)
class Axis:
    """One axis of a map: its values in the order in which they are drawn."""

    name: str
    values: Sequence[Any]
    scale: Scale

    @property
    def labels(self) -> list[str]:
        """Its values in words; numbers with as few digits as tell them apart, three at least."""
        for digits in (3, 4, 6):
            found = [f"{value:.{digits}g}" if isinstance(value, float) else short(value) for value in self.values]
            if len(set(found)) == len(found):
                return found
        return [str(value) for value in self.values]


@dataclass(frozen=True, eq=False)
class Cells:
    """A value over two axes; arrays are (y, x)."""

    x: Axis
    y: Axis | None
    name: str
    """of the value"""
    numeric: bool
    values: numpy.ndarray
    """means over seeds, nan where nothing is done; of words the most frequent (several, divided by
    " / ", where they are equally so), None where nothing is done"""
    spread: numpy.ndarray
    """standard deviations over seeds (n - 1), nan for one seed; of words, the share that differs from the most
    frequent"""
    count: numpy.ndarray
    """how many seeds are done"""
    failed: numpy.ndarray
    """how many failed"""
    points: numpy.ndarray
    """ids of the points, tuples"""

    @property
    def words(self) -> list[str]:
        """The words that occur, regimes first."""
        return sort_words(value for value in self.values.flat if value is not None)


REGIMES = ("lazy", "mixed", "lazy then rich", "rich", "cannot tell")
TIE = " / "
"""Between words that are equally frequent."""


def sort_words(words: Iterable[str]) -> list[str]:
    """Each once: regimes from lazy to rich, then other words by the alphabet."""
    found = set(words)
    return [*(word for word in REGIMES if word in found), *sorted(found - set(REGIMES))]


def cells(sweep: "Sweep", x: str, y: str | None, value: "Value", where: Mapping[str, Any]) -> Cells:
    """The cells of a map; settings other than x and y must be the same in all points, or given by `where`."""
    for name in (x, *([] if y is None else [y])):
        sweep.check_axis(name)
        if name in where:
            raise InputValueError(f"where= fixes {name!r}, which is an axis of the map, expected other settings")
    if x == y:
        raise InputValueError(f"x and y are both {x!r}, expected two settings; pass y=None for one row")
    chosen = sweep.chosen(where)
    rows = [row for row, fits in zip(sweep.rows, chosen, strict=True) if fits]
    values = [one for one, fits in zip(sweep.values(value), chosen, strict=True) if fits]
    ids = [point.id for (point, _), fits in zip(sweep.tasks, chosen, strict=True) if fits]
    if not rows:
        raise InputValueError(f"no point has {dict(where)}, expected settings of the sweep")
    _refuse_hidden_axes(sweep, rows, (x, y), where)
    across = axis(x, [row[x] for row in rows])
    along = None if y is None else axis(y, [row[y] for row in rows])
    shape = (1 if along is None else len(along.values), len(across.values))
    found: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        place = (0 if along is None else _index(along, row[along.name]), _index(across, row[x]))
        found.setdefault(place, []).append(number)
    numeric = all(one is None or (isinstance(one, int | float) and not isinstance(one, bool)) for one in values)
    made = Cells(
        across,
        along,
        value if isinstance(value, str) else getattr(value, "__name__", "value"),
        numeric,
        numpy.full(shape, math.nan if numeric else None, dtype=float if numeric else object),
        numpy.full(shape, math.nan),
        numpy.zeros(shape, int),
        numpy.zeros(shape, int),
        numpy.full(shape, None, dtype=object),
    )
    for place, numbers in found.items():
        _fill(made, place, [values[n] for n in numbers], [rows[n]["status"] for n in numbers])
        made.points[place] = tuple(dict.fromkeys(ids[n] for n in numbers))
    return made


def _fill(made: Cells, place: tuple[int, int], values: Sequence[Any], status: Sequence[str]) -> None:
    made.failed[place] = status.count("failed")
    if made.numeric:
        known = [float(value) for value in values if is_number(value)]
        made.count[place] = len(known)
        if known:
            made.values[place] = numpy.mean(known)
        if len(known) > 1:
            made.spread[place] = numpy.std(known, ddof=1)
        return
    words = [short(value) for value in values if value is not None]
    made.count[place] = len(words)
    if words:
        counts = Counter(words)
        most = max(counts.values())
        made.values[place] = TIE.join(sort_words([word for word, count in counts.items() if count == most]))
        made.spread[place] = 1 - most / len(words)


def _refuse_hidden_axes(
    sweep: "Sweep", rows: Sequence[Mapping[str, Any]], shown: Sequence[str | None], where: Mapping[str, Any]
) -> None:
    """A mean over settings that nobody named would mix what does not belong together; seeds are meant to be mixed."""
    for name in sweep.settings:
        found = {json.dumps(row[name]): row[name] for row in rows}
        if name not in shown and name not in where and len(found) > 1:
            first = next(iter(found.values()))
            raise InputValueError(
                f"the points also differ in {name!r} ({', '.join(map(short, found.values()))}), expected one of them: "
                f"where={{{name!r}: {first!r}}}"
            )


def axis(name: str, values: Sequence[Any]) -> Axis:
    """An axis with these values, each once; numbers are sorted."""
    once = list({(type(value).__name__, json.dumps(value)): value for value in values}.values())
    if all(is_number(value) for value in once):
        return Axis(name, sorted(once), _scale(sorted(once)))
    return Axis(name, once, "words")


def _scale(values: Sequence[float]) -> Scale:
    """Logarithmic where the logarithms of values are spaced at least twice as evenly as the values."""
    if len(values) < 2 or values[0] <= 0:
        return "linear"
    if len(values) == 2:
        return "log" if values[1] >= 3 * values[0] else "linear"
    steps, ratios = numpy.diff(values), numpy.diff(numpy.log(values))
    return "log" if ratios.std() / ratios.mean() < steps.std() / steps.mean() / 2 else "linear"


def _index(axis: Axis, value: Any) -> int:
    return next(i for i, one in enumerate(axis.values) if type(one) is type(value) and one == value)


def short(value: Any) -> str:
    """A value in a few letters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
