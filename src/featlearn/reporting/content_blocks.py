"""What a report shows, before it is drawn: the page and the figures are two drawings of the same numbers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy

POINTS = 200
"""Points of a line at most; a longer one is thinned evenly in the logarithm of its place."""


@dataclass(frozen=True)
class ChartLine:
    """One curve. Where it is the mean over seeds, `low` and `high` are the smallest and the largest of them."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    """which of the colours"""
    dash: int = 0
    """0 solid, for what was measured; 1 dashed, 2 dotted, 3 dash-dotted, for what was predicted or for kinds"""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    group: int | None = None
    """which of the runs it belongs to; None for what belongs to all, or to a theory"""


@dataclass(frozen=True)
class Mark:
    """An event: a vertical line."""

    at: float
    label: str
    color: int


@dataclass(frozen=True)
class Window:
    """A marked stretch."""

    begin: float
    end: float
    label: str


Axis = Literal["steps", "log", "linear"]
"""steps are drawn as log(1 + step), for step 0 to have a place"""


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    key: str
    title: str
    lines: Sequence[ChartLine]
    y: str
    """what the vertical axis says"""
    x: str = "step"
    x_axis: Axis = "steps"
    y_axis: Axis = "linear"
    marks: Sequence[Mark] = ()
    windows: Sequence[Window] = ()
    note: str = ""
    """what to know about it, below it"""

    def rows(self) -> Iterator[tuple[float, list[tuple[float, float, float]]]]:
        """(x, one (y, low, high) for each line): all places that any line has, nan where one has none."""
        known = [_by_place(line) for line in self.lines]
        nothing = (math.nan, math.nan, math.nan)
        for place in sorted({x for line in known for x in line}):
            yield place, [line.get(place, nothing) for line in known]

    @property
    def logarithmic(self) -> bool:
        """Whether the vertical axis can be, and is to be, logarithmic."""
        return self.y_axis == "log" and any(y > 0 for line in self.lines for y in line.y)


@dataclass(frozen=True)
class Picture:
    """A matrix as colours."""

    label: str
    """of the step, say"""
    values: numpy.ndarray
    """(rows, columns)"""
    step: float = math.nan
    facts: Mapping[str, float] = field(default_factory=dict)
    """numbers that say in a table what the colours show"""


@dataclass(frozen=True)
class MatrixSequence:
    """Matrices at several steps, one sequence per run; shown side by side, or with a slider."""

    key: str
    title: str
    sequences: Sequence[tuple[str, Sequence[Picture]]]
    """(label of the run, its pictures)"""
    rows: str
    columns: str
    middle: float | None = None
    """the value between two colours; None for a scale of one hue"""
    slider: bool = True
    note: str = ""

    def levels(self, values: numpy.ndarray) -> tuple[float, float]:
        """What the ends of the colours stand for: of this picture, or as far above as below the middle over all."""
        if self.middle is None:
            return float(values.min()), float(values.max())
        pictures = [picture for _, sequence in self.sequences for picture in sequence]
        away = max(float(numpy.abs(picture.values - self.middle).max()) for picture in pictures) or 1.0
        return self.middle - away, self.middle + away


@dataclass(frozen=True)
class Grid:
    """A table of its own."""

    key: str
    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    note: str = ""


ContentBlock = Chart | MatrixSequence | Grid


@dataclass(frozen=True)
class Section:
    """Exhibits that answer one question."""

    key: str
    title: str
    intro: str
    """HTML of our own, never of a run"""
    blocks: Sequence[ContentBlock] = ()
    missing: Sequence[str] = field(default=())
    """what is not there, and why"""


def thinned(places: Sequence[float], values: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most so many points of a line, the first and the last among them."""
    count = len(places)
    if count <= points:
        return list(places), list(values)
    for tried in (8 * points, 4 * points, 2 * points, points):  # places at the beginning coincide
        kept = numpy.unique(numpy.geomspace(1, count, tried).round().astype(int) - 1)
        if len(kept) <= points:
            break
    return [places[i] for i in kept], [values[i] for i in kept]


def _by_place(line: ChartLine) -> dict[float, tuple[float, float, float]]:
    low, high = (line.low or [math.nan] * len(line.y)), (line.high or [math.nan] * len(line.y))
    return {float(x): (float(y), float(a), float(b)) for x, y, a, b in zip(line.x, line.y, low, high, strict=True)}
