"""A value over two axes of a sweep: mean, spread, and number of seeds per cell."""

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
    """An axis of a map: its values in drawing order."""

    name: str
    values: Sequence[Any]
    scale: Scale

    @property
    def labels(self) -> list[str]:
        """Labels of the values. Numbers have as few digits as distinguish them, but at least three."""
        for digits in (3, 4, 6):
            labels = [f"{value:.{digits}g}" if isinstance(value, float) else short(value) for value in self.values]
            if len(set(labels)) == len(labels):
                return labels
        return [str(value) for value in self.values]


@dataclass(frozen=True, eq=False)
class Cells:
    """A value over two axes; arrays have shape (y, x)."""

    x: Axis
    y: Axis | None
    name: str
    """name of the value"""
    numeric: bool
    values: numpy.ndarray
    """means over seeds, nan without results; for words the most frequent (ties joined by " / "), None without
    results"""
    spread: numpy.ndarray
    """standard deviations over seeds (n - 1), nan for a single seed; for words, the share that differs from the most
    frequent"""
    count: numpy.ndarray
    """number of seeds that are done"""
    failed: numpy.ndarray
    """number of seeds that failed"""
    points: numpy.ndarray
    """tuples of point ids"""

    @property
    def words(self) -> list[str]:
        """Distinct words, regimes first."""
        return sort_words(value for value in self.values.flat if value is not None)


REGIMES = ("lazy", "mixed", "lazy then rich", "rich", "cannot tell")
TIE = " / "
"""Separator of equally frequent words."""


def sort_words(words: Iterable[str]) -> list[str]:
    """Return distinct words: regimes from lazy to rich, then other words alphabetically."""
    distinct = set(words)
    return [*(word for word in REGIMES if word in distinct), *sorted(distinct - set(REGIMES))]


def cells(sweep: "Sweep", x: str, y: str | None, value: "Value", where: Mapping[str, Any]) -> Cells:
    """Compute the cells of a map. Settings other than x and y must be equal in all points, or fixed by `where`."""
    for name in (x, *([] if y is None else [y])):
        sweep.check_axis(name)
        if name in where:
            raise InputValueError(f"where= fixes {name!r}, which is an axis of the map, expected other settings")
    if x == y:
        raise InputValueError(f"x and y are both {x!r}, expected two settings; pass y=None for a single row")
    mask = sweep.row_mask(where)
    rows = [row for row, fits in zip(sweep.rows, mask, strict=True) if fits]
    values = [number for number, fits in zip(sweep.values(value), mask, strict=True) if fits]
    ids = [point.id for (point, _), fits in zip(sweep.tasks, mask, strict=True) if fits]
    if not rows:
        raise InputValueError(f"no point has {dict(where)}, expected settings of the sweep")
    _refuse_hidden_axes(sweep, rows, (x, y), where)
    across = axis(x, [row[x] for row in rows])
    along = None if y is None else axis(y, [row[y] for row in rows])
    shape = (1 if along is None else len(along.values), len(across.values))
    numbers_by_cell: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        place = (0 if along is None else _index(along, row[along.name]), _index(across, row[x]))
        numbers_by_cell.setdefault(place, []).append(number)
    numeric = all(
        number is None or (isinstance(number, int | float) and not isinstance(number, bool)) for number in values
    )
    cell_values = Cells(
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
    for place, row_numbers in numbers_by_cell.items():
        _fill(cell_values, place, [values[n] for n in row_numbers], [rows[n]["status"] for n in row_numbers])
        cell_values.points[place] = tuple(dict.fromkeys(ids[n] for n in row_numbers))
    return cell_values


def _fill(cells: Cells, cell: tuple[int, int], values: Sequence[Any], status: Sequence[str]) -> None:
    cells.failed[cell] = status.count("failed")
    if cells.numeric:
        numbers = [float(value) for value in values if is_number(value)]
        cells.count[cell] = len(numbers)
        if numbers:
            cells.values[cell] = numpy.mean(numbers)
        if len(numbers) > 1:
            cells.spread[cell] = numpy.std(numbers, ddof=1)
        return
    words = [short(value) for value in values if value is not None]
    cells.count[cell] = len(words)
    if words:
        counts = Counter(words)
        largest = max(counts.values())
        cells.values[cell] = TIE.join(sort_words([word for word, count in counts.items() if count == largest]))
        cells.spread[cell] = 1 - largest / len(words)


def _refuse_hidden_axes(
    sweep: "Sweep", rows: Sequence[Mapping[str, Any]], shown: Sequence[str | None], where: Mapping[str, Any]
) -> None:
    """Raise if a setting varies that is neither an axis nor fixed. Only seeds are averaged over."""
    for name in sweep.settings:
        distinct = {json.dumps(row[name]): row[name] for row in rows}
        if name not in shown and name not in where and len(distinct) > 1:
            first = next(iter(distinct.values()))
            raise InputValueError(
                f"the points also differ in {name!r} ({', '.join(map(short, distinct.values()))}), expected one: "
                f"where={{{name!r}: {first!r}}}"
            )


def axis(name: str, values: Sequence[Any]) -> Axis:
    """Return an axis with the distinct values; numbers are sorted."""
    distinct = list({(type(value).__name__, json.dumps(value)): value for value in values}.values())
    if all(is_number(value) for value in distinct):
        return Axis(name, sorted(distinct), _scale(sorted(distinct)))
    return Axis(name, distinct, "words")


def _scale(values: Sequence[float]) -> Scale:
    """Return "log" if the logarithms of values are spaced at least twice as evenly as the values."""
    if len(values) < 2 or values[0] <= 0:
        return "linear"
    if len(values) == 2:
        return "log" if values[1] >= 3 * values[0] else "linear"
    steps, ratios = numpy.diff(values), numpy.diff(numpy.log(values))
    return "log" if ratios.std() / ratios.mean() < steps.std() / steps.mean() / 2 else "linear"


def _index(axis: Axis, value: Any) -> int:
    return next(i for i, candidate in enumerate(axis.values) if type(candidate) is type(value) and candidate == value)


def short(value: Any) -> str:
    """Format a value briefly."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
