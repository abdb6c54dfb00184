"""Results of a sweep: the table, and maps, files, and pages made from it."""

import importlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from featlearn.errors import FeatlearnError, InputValueError, RunError, did_you_mean
from featlearn.record import Run, open_run
from featlearn.record.csv_table import write_csv
from featlearn.sweeps.folder import Outcome, SweepFolder
from featlearn.sweeps.grid import RESERVED, Point
from featlearn.sweeps.process_pool import Serial

if TYPE_CHECKING:
    from featlearn.sweeps.cells import Cells

from typing import TYPE_CHECKING


def dataset(sweep: "Sweep", xarray: Any) -> Any:
    """Return an `xarray.Dataset` over axes and seed, or over point and seed if the points are not a full grid."""
    seeds = sorted({row["seed"] for row in sweep.rows})
    axes = sweep.axes
    full = math.prod(map(len, axes.values())) == len(sweep.points)
    if full:
        coordinates: dict[str, Any] = {name: (name, _array(values)) for name, values in axes.items()}
        indices = [tuple(_index(axes[name], row[name]) for name in axes) for row in sweep.rows]
        names, shape = list(axes), [len(values) for values in axes.values()]
    else:
        coordinates = {
            name: ("point", _array([point.settings.get(name) for point, _ in sweep.points])) for name in axes
        }
        indices = [(number,) for number, (_, point_seeds) in enumerate(sweep.points) for _ in point_seeds]
        names, shape = ["point"], [len(sweep.points)]
    coordinates["seed"] = ("seed", numpy.array(seeds, dtype=int))
    variables = {}
    for column in [*sweep.columns, "status", "seconds"]:
        cells = numpy.full([*shape, len(seeds)], None, dtype=object)
        for index, row in zip(indices, sweep.rows, strict=True):
            cells[(*index, seeds.index(row["seed"]))] = row[column]
        if column == "status":
            cells[cells == None] = "missing"  # noqa: E711 # elementwise
        variables[column] = ([*names, "seed"], _numbers(cells))
    constants = {name: values[0] for name, values in sweep.settings.items() if name not in axes}
    attributes = {
        name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in constants.items()
    }
    return xarray.Dataset(variables, coordinates, {"function": sweep.function, **attributes})


def _index(values: Sequence[Any], value: Any) -> int:
    """Return the index of a value, compared by type too: 1, 1.0, and True are different settings."""
    return next(i for i, candidate in enumerate(values) if type(candidate) is type(value) and candidate == value)


def _array(values: Sequence[Any]) -> numpy.ndarray:
    """Return an array of numbers, or of words if any value is not a number."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return numpy.array(values)
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return numpy.array(words, dtype=object)


def _numbers(cells: numpy.ndarray) -> numpy.ndarray:
    """Convert to floats, with nan for None, unless a cell has a word."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in cells.flat):
        return numpy.array([math.nan if v is None else float(v) for v in cells.flat]).reshape(cells.shape)
    return cells


Value = str | Callable[[Run], Any]
"""A column of the table, a scalar of the runs (its last value), or a function of a run."""


class Sweep:
    """Points of a grid and results of a function, from `fl.sweep` and `fl.open_sweep`.

    Results are read on creation: open the sweep again to see newer ones."""

    def __init__(self, path: str | os.PathLike[str], points: Sequence[tuple[Point, list[int]]] | None = None) -> None:
        self.path = Path(path)
        """The folder."""
        self._folder = SweepFolder(self.path)
        manifest = self._folder.manifest
        if manifest is None:
            raise RunError(f"{self.path} holds no sweep, expected a folder written by fl.sweep")
        self.function = str(manifest.get("function"))
        """Name of the function, module:qualname."""
        self.points = self._folder.points() if points is None else list(points)
        """Points and their seeds, in order of request."""
        self.tasks = [(point, seed) for point, seeds in self.points for seed in seeds]
        """Point and seed of every row."""
        self._outcomes = [self._folder.outcome(point, seed) for point, seed in self.tasks]

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        """Setting -> distinct values; None for points without the setting."""
        names = dict.fromkeys(name for point, _ in self.points for name in point.settings)
        return {name: _distinct(point.settings.get(name) for point, _ in self.points) for name in names}

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Settings that differ between points."""
        return {name: values for name, values in self.settings.items() if len(values) > 1}

    @cached_property
    def columns(self) -> list[str]:
        """Names of the numbers and words that the function returned."""
        names = dict.fromkeys(name for outcome in self._outcomes for name in outcome.values)
        return [self._column(name) for name in names]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table, one per point and seed.

        Columns are the settings, `seed`, the results (None for failed seeds), `status` (done, failed or missing),
        `seconds`, `error` and `path` (of the run, or of the folder of the point). A result with the name of a setting
        or of another column is renamed to `result/NAME`.
        """
        return [
            self._row(point, seed, outcome) for (point, seed), outcome in zip(self.tasks, self._outcomes, strict=True)
        ]

    @property
    def recorded(self) -> list[bool]:
        """Whether the function returned a run, for every row."""
        return [outcome.run is not None for outcome in self._outcomes]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Rows of failed seeds."""
        return [row for row in self.rows if row["status"] == "failed"]

    def runs(self, where: Mapping[str, Any] | None = None) -> list[Run]:
        """Open the recorded runs of rows with these settings."""
        return [open_run(path) for path in self.run_paths(where or {})]

    def run_paths(self, where: Mapping[str, Any]) -> list[Path]:
        """Return the paths of recorded runs."""
        pairs = zip(self._outcomes, self.row_mask(where), strict=True)
        return [self.path / outcome.run for outcome, fits in pairs if fits and outcome.run is not None]

    def row_mask(self, where: Mapping[str, Any]) -> list[bool]:
        """Return whether each row has these settings (or this seed)."""
        for name in where:
            self.check_axis(name)
        return [all(row[name] == value for name, value in where.items()) for row in self.rows]

    def check_axis(self, name: str) -> None:
        """Raise if the name is neither a setting nor "seed"."""
        names = [*self.settings, "seed"]
        if name not in names:
            hint = did_you_mean(name, names)
            raise InputValueError(f"the sweep has no setting {name!r}, expected one of {', '.join(names)}{hint}")

    def values(self, value: Value) -> list[Any]:
        """Return a value per row: a column, the last value of a scalar of the runs, or a function of a run.

        Failed rows give None. Per-layer scalars, such as `weights/0/norm`, are read from the runs.
        """
        if callable(value):
            return [None if run is None else value(run) for run in self._runs]
        if value in self.columns or value in ("status", "seconds"):
            return [row[value] for row in self.rows]
        runs = self._runs
        scalars = dict.fromkeys(name for run in runs if run is not None for name in run.names)
        if value not in scalars:
            names = [*self.columns, *scalars]
            raise InputValueError(
                f"the sweep has no value {value!r}, expected one of {', '.join(names) or 'none: no seed is done'}"
                f"{did_you_mean(value, names)}"
            )
        return [float(run.scalar(value)[1][-1]) if run is not None and value in run.names else None for run in runs]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as CSV, with empty cells for None; return the path."""
        return write_csv(path, list(self.rows[0]) if self.rows else RESERVED, (list(row.values()) for row in self.rows))

    def to_xarray(self) -> Any:
        """Convert the table to an `xarray.Dataset`; needs the extra `xarray`.

        If the points are a full grid, dimensions are the axes and the seed. Otherwise they are points and seeds, with
        settings as coordinates. Missing numbers are nan, missing words None.
        """
        try:
            xarray = importlib.import_module("xarray")
        except ImportError as error:
            raise FeatlearnError(f"xarray cannot be imported ({error}); pip install 'featlearn[xarray]'") from error
        return dataset(self, xarray)

    def cells(self, x: str, y: str | None, value: Value, where: Mapping[str, Any] | None = None) -> "Cells":
        """Return a value over two axes: mean, spread, and number of seeds per cell.

        Args:
            x: Name of a setting, or "seed".
            y: Name of a setting, "seed", or None for a single row.
            value: A column (`rows`), a scalar of the runs, or a function of a run.
            where: Values of the other settings that vary.
        """
        from featlearn.sweeps.cells import cells

        return cells(self, x, y, value, where or {})

    def map(
        self,
        x: str,
        y: str | None,
        value: Value,
        *,
        where: Mapping[str, Any] | None = None,
        spread: bool = False,
        boundary: Any = None,
        ax: Any = None,
    ) -> Any:
        """Draw the mean of a value over seeds against two axes; return the matplotlib axes.

        For words, the most frequent is drawn, with its share if seeds differ. Axes are logarithmic if values are closer
        to a geometric than to an arithmetic sequence. Axes of words are categorical. Failed points are crossed, missing
        points empty.

        Args:
            x, y, value, where: As for `cells`.
            spread: Draw the standard deviation over seeds instead (for words, the share that differs from the most
                frequent).
            boundary: Theoretical boundary: a function from x to y, a curve (x, y), or a mapping of label -> function or
                curve.
            ax: Matplotlib axes; by default a new figure.
        """
        from featlearn.sweeps.map_picture import draw

        return draw(self.cells(x, y, value, where), spread=spread, boundary=boundary, ax=ax)

    def write_reports(self, *, executor: Any = None, quiet: bool = False) -> list[Path]:
        """Write the report of every point with runs, unless it is newer than its runs; return their paths.

        Args:
            executor: Executor of the jobs, as in `fl.sweep`; by default this process.
            quiet: Do not show progress on stderr.
        """
        from featlearn.sweeps.point_reports import write_reports

        return write_reports(self, executor or Serial(), quiet=quiet)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        x: str | None = None,
        y: str | None = None,
        value: str | Sequence[str] | None = None,
        boundary: Any = None,
        title: str | None = None,
    ) -> Path:
        """Write an HTML page with maps, failures, and the table; return its path.

        Cells of maps link to the reports that `write_reports` wrote, else to their row in the table.

        Args:
            path: Path of the page. Links are relative: put it into the folder of the sweep.
            x, y: Axes of the maps; by default the first two settings that differ. Other settings give more maps.
            value: Columns to map; by default the verdict and the numbers that decide it.
            boundary: As for `map`; adds pictures with the boundary.
            title: Title of the page; by default the name of the folder.
        """
        from featlearn.sweeps.sweep_page import page

        return page(self, Path(path), x=x, y=y, value=value, boundary=boundary, title=title)

    def __repr__(self) -> str:
        counts = Counter(outcome.status for outcome in self._outcomes)
        summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        return f"<Sweep of {self.function} in {str(self.path)!r}: {len(self.points)} points, {summary}>"

    def _column(self, name: str) -> str:
        return f"result/{name}" if name in self.settings or name in RESERVED else name

    def _row(self, point: Point, seed: int, outcome: Outcome) -> dict[str, Any]:
        values = {self._column(name): value for name, value in outcome.values.items()}
        return {
            **{name: point.settings.get(name) for name in self.settings},
            "seed": seed,
            **{name: values.get(name) for name in self.columns},
            "status": outcome.status,
            "seconds": outcome.seconds,
            "error": outcome.error,
            "path": str(self.path / (point.id if outcome.run is None else outcome.run)),  # joining keeps absolute paths
        }

    @cached_property
    def _runs(self) -> list[Run | None]:
        return [None if outcome.run is None else open_run(self.path / outcome.run) for outcome in self._outcomes]


def open_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep, finished or not, with every point ever requested in this folder."""
    return Sweep(path)


def _distinct(values: Any) -> list[Any]:
    """Return distinct values in order of first appearance; JSON keys handle lists and mappings."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())
