"""The content of a report as data; page and figures draw the same blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy

from featlearn.reporting.markup import written

NEUTRAL = -1
"""Index of the color that belongs to no run."""
POINTS = 200
"""Largest number of points of a line; longer ones are thinned evenly in the logarithm of the index."""


@dataclass(frozen=True)
class ChartLine:
    """One curve. For a mean over seeds, `low` and `high` are the smallest and the largest value."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    """index of the color"""
    dash: int = 0
    """0 solid, for measurements; 1 dashed, 2 dotted, 3 dash-dotted, for predictions and other quantities"""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    group: int | None = None
    """index of its run; None for lines of all runs or of a theory"""
    kind: str = ""
    """what is drawn of its run, if that is said in the label: "frozen first kernel", a layer"""
    until: float = math.inf
    """the last place before its run diverged; axes need not show what comes after"""
    frames: Sequence[tuple[float, Sequence[float]]] = ()
    """(step, y) at several steps of training, in their order, if the line moves with them; `y` is that of the last"""


@dataclass(frozen=True)
class Mark:
    """An event: a vertical line."""

    at: float
    label: str
    color: int


@dataclass(frozen=True)
class Level:
    """A threshold: a horizontal line."""

    at: float
    label: str


@dataclass(frozen=True)
class Window:
    """A marked interval."""

    begin: float
    end: float
    label: str


MARGIN = 0.05
"""Share of a limited axis that is left empty at both ends."""

Axis = Literal["steps", "log", "linear"]
"""steps are drawn as log(1 + step), so that step 0 is visible"""


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    key: str
    title: str
    lines: Sequence[ChartLine]
    y: str
    """label of the vertical axis"""
    x: str = "step"
    x_axis: Axis = "steps"
    y_axis: Axis = "linear"
    marks: Sequence[Mark] = ()
    windows: Sequence[Window] = ()
    note: str = ""
    """remark below the chart"""
    levels: Sequence[Level] = ()
    least: tuple[float, float] | None = None
    """what the vertical axis shows at least"""
    most: float = math.inf
    """where the vertical axis ends at the latest, if there is a value below it"""

    def rows(self) -> Iterator[tuple[float, list[tuple[float, float, float]]]]:
        """(x, [(y, low, high) for each line]) for every x of any line; nan where a line has no value."""
        known = [_by_place(line) for line in self.lines]
        nothing = (math.nan, math.nan, math.nan)
        for place in sorted({x for line in known for x in line}):
            yield place, [line.get(place, nothing) for line in known]

    @property
    def limits(self) -> tuple[float, float] | None:
        """Limits of the vertical axis, if values after a divergence, or above `most`, would stretch it; else None."""
        places = [(x, line.until, values) for line in self.lines for x, *values in _points(line)]
        found = [(x <= until, v) for x, until, values in places for v in values if math.isfinite(v)]
        if self.logarithmic:
            found = [(sound, v) for sound, v in found if v > 0]
        sound, all_values = [v for kept, v in found if kept], [v for _, v in found]
        if max(all_values, default=0.0) > self.most > min(all_values):
            return min([*all_values, *(self.least or ())]), self.most
        if not sound or (min(sound), max(sound)) == (min(all_values), max(all_values)):
            return None
        return _widened(min(sound), max(sound), self.logarithmic)

    @property
    def limits_of_frames(self) -> tuple[float, float] | None:
        """Limits of the vertical axis that hold at all steps of lines that move; None if none does.

        On a logarithmic axis what is below ROUND_OFF of the largest value of its step is left out.
        """
        found = [v for frame in self._frames() for v in frame if not self.logarithmic or v > ROUND_OFF * max(frame)]
        moving = any(line.frames for line in self.lines)
        return _widened(min(found), max(found), self.logarithmic) if moving and found else None

    def _frames(self) -> list[list[float]]:
        """Finite values of all lines at all steps."""
        found = [y for line in self.lines for y in ([y for _, y in line.frames] or [line.y])]
        return [kept for y in found if (kept := [v for v in y if math.isfinite(v)])]

    @property
    def remark(self) -> str:
        """The note, and what the limits of the axis leave out."""
        cut = "" if self.limits is None else CUT if self.limits[1] != self.most else BEYOND.format(self.most)
        low = (self.limits_of_frames or (-math.inf,))[0]
        small = self.logarithmic and any(v < low for frame in self._frames() for v in frame)
        return " ".join(filter(None, (self.note, cut, SMALL if small and not cut else "")))

    @property
    def logarithmic(self) -> bool:
        """Whether the vertical axis is logarithmic: requested, and possible."""
        return self.y_axis == "log" and any(y > 0 for line in self.lines for y in line.y)


BEYOND = "The axis ends at {:g}; larger values are in the numbers."
ROUND_OFF = 1e-8
"""Share of the largest number below which eigenvalues of kernels in single precision are round-off."""
SMALL = "The axis leaves out what is below 1e-8 of the largest value, which is round-off."
CUT = "The axis ends at the values before a run diverged; those after it are in the numbers."


@dataclass(frozen=True)
class Picture:
    """A matrix as a heat map."""

    label: str
    """for example the step"""
    values: numpy.ndarray
    """(rows, columns)"""
    step: float = math.nan
    facts: Mapping[str, float] = field(default_factory=dict)
    """summary numbers for the table"""


@dataclass(frozen=True)
class MatrixSequence:
    """Matrices at several steps, one sequence per run; the slider of the page moves through them."""

    key: str
    title: str
    sequences: Sequence[tuple[str, Sequence[Picture]]]
    """(label of the run, its pictures)"""
    rows: str
    columns: str
    middle: float | None = None
    """the center of a diverging color scale; None for a sequential one"""
    first_beside: bool = False
    """whether the first picture is shown too, beside the one that moves"""
    note: str = ""
    colors: Sequence[int] = ()
    """color of each run; none for a single one"""
    limits: tuple[float, float] | None = None
    """limits of the color scale of all pictures; None for those of each"""
    groups: Sequence[tuple[float, str]] = ()
    """(place from 0 to 1, name) of groups of columns, written below the pictures"""

    def levels(self, values: numpy.ndarray) -> tuple[float, float]:
        """Limits of the color scale: those of this picture, or symmetric about the middle.

        The latter hold the first and the last picture of every run; those between may lie beyond them.
        """
        if self.limits is not None:
            return self.limits
        if self.middle is None:
            return float(values.min()), float(values.max())
        pictures = [picture for _, sequence in self.sequences for picture in (sequence[0], sequence[-1])]
        away = max(float(numpy.abs(picture.values - self.middle).max()) for picture in pictures) or 1.0
        return self.middle - away, self.middle + away


@dataclass(frozen=True)
class Number:
    """A number of a table: as it is shown, and in full."""

    shown: str
    value: float | str
    """a string for what is not one number"""
    error: float = math.nan
    """its standard error"""


Cell = str | Number


def in_full(value: float) -> Cell:
    """A number for a table; a dash if it is not finite."""
    return Number(written(value), float(value)) if math.isfinite(value) else "–"


@dataclass(frozen=True)
class Grid:
    """A table; `parts` are tables with the same head, folded below it."""

    key: str
    title: str
    head: Sequence[str]
    body: Sequence[Sequence[Cell]]
    note: str = ""
    colors: Sequence[int] = ()
    """color of the run of each row; none if rows are not runs"""
    parts: Sequence[tuple[str, Sequence[Sequence[Cell]]]] = ()
    """(title, rows)"""


ContentBlock = Chart | MatrixSequence | Grid


@dataclass(frozen=True)
class Section:
    """Blocks that answer one question."""

    key: str
    title: str
    intro: str
    """trusted HTML, never from a run"""
    blocks: Sequence[ContentBlock] = ()
    missing: Sequence[str] = field(default=())
    """what is missing, and why"""


def shade(color: int) -> int:
    """The color of the palette that is drawn for an index: the eight of runs and lines repeat."""
    return 8 if color == NEUTRAL else color % 8


def thin(places: Sequence[float], values: Sequence[float], points: int = POINTS) -> tuple[list[float], list[float]]:
    """At most `points` points of a line, including the first and the last."""
    count = len(places)
    if count <= points:
        return list(places), list(values)
    for tried in (8 * points, 4 * points, 2 * points, points):  # places at the beginning coincide
        kept = numpy.unique(numpy.geomspace(1, count, tried).round().astype(int) - 1)
        if len(kept) <= points:
            break
    return [places[i] for i in kept], [values[i] for i in kept]


def _points(line: ChartLine) -> Iterator[tuple[float, ...]]:
    """(x, y), or (x, y, low, high) of a band."""
    bands = () if line.low is None or line.high is None else (line.low, line.high)
    yield from zip(line.x, line.y, *bands, strict=True)


def _widened(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """The limits with a margin, so that lines do not lie on the frame."""
    if logarithmic:
        factor = max((high / low) ** MARGIN, 1 + MARGIN)
        return low / factor, high * factor
    margin = MARGIN * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def _by_place(line: ChartLine) -> dict[float, tuple[float, float, float]]:
    low, high = (line.low or [math.nan] * len(line.y)), (line.high or [math.nan] * len(line.y))
    return {float(x): (float(y), float(a), float(b)) for x, y, a, b in zip(line.x, line.y, low, high, strict=True)}
