"""What a sweep found: a table, and what is made of it."""

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
    """An `xarray.Dataset` over axes and seed, or over point and seed where the points are no full grid."""
    seeds = sorted({row["seed"] for row in sweep.rows})
    axes = sweep.axes
    full = math.prod(map(len, axes.values())) == len(sweep.points)
    if full:
        coordinates: dict[str, Any] = {name: (name, _array(values)) for name, values in axes.items()}
        places = [tuple(_index(axes[name], row[name]) for name in axes) for row in sweep.rows]
        names, shape = list(axes), [len(values) for values in axes.values()]
    else:
        coordinates = {
            name: ("point", _array([point.settings.get(name) for point, _ in sweep.points])) for name in axes
        }
        places = [(number,) for number, (_, own) in enumerate(sweep.points) for _ in own]
        names, shape = ["point"], [len(sweep.points)]
    coordinates["seed"] = ("seed", numpy.array(seeds, dtype=int))
    variables = {}
    for column in [*sweep.columns, "status", "seconds"]:
        cells = numpy.full([*shape, len(seeds)], None, dtype=object)
        for place, row in zip(places, sweep.rows, strict=True):
            cells[(*place, seeds.index(row["seed"]))] = row[column]
        if column == "status":
            cells[cells == None] = "missing"  # noqa: E711 # elementwise
        variables[column] = ([*names, "seed"], _numbers(cells))
    same = {name: values[0] for name, values in sweep.settings.items() if name not in axes}
    told = {name: value if isinstance(value, int | float | str) else json.dumps(value) for name, value in same.items()}
    return xarray.Dataset(variables, coordinates, {"function": sweep.function, **told})


def _index(values: Sequence[Any], value: Any) -> int:
    """By type too: 1, 1.0 and True are different settings."""
    return next(i for i, one in enumerate(values) if type(one) is type(value) and one == value)


def _array(values: Sequence[Any]) -> numpy.ndarray:
    """Numbers as numbers, all else as words."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return numpy.array(values)
    words = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return numpy.array(words, dtype=object)


def _numbers(cells: numpy.ndarray) -> numpy.ndarray:
    """Floats, nan for None, if there is no word among them."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in cells.flat):
        return numpy.array([math.nan if v is None else float(v) for v in cells.flat]).reshape(cells.shape)
    return cells


Value = str | Callable[[Run], Any]
"""A column of the table, a scalar of the runs (its last value), or a function of a run."""


class Sweep:
    """Points of a grid and what a function gave there; made by `fl.sweep` and `fl.open_sweep`.

    It shows what was there when it was made: open it again to see more.
    """

    def __init__(self, path: str | os.PathLike[str], points: Sequence[tuple[Point, list[int]]] | None = None) -> None:
        self.path = Path(path)
        """The folder."""
        self._folder = SweepFolder(self.path)
        manifest = self._folder.manifest
        if manifest is None:
            raise RunError(f"{self.path} holds no sweep, expected a folder that fl.sweep wrote")
        self.function = str(manifest.get("function"))
        """What was called at each point: module:qualname."""
        self.points = self._folder.points() if points is None else list(points)
        """Points and their seeds, in the order in which they were asked for."""
        self.tasks = [(point, seed) for point, seeds in self.points for seed in seeds]
        """The point and the seed of each row."""
        self._outcomes = [self._folder.outcome(point, seed) for point, seed in self.tasks]

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        """Name of a setting -> its values, each once; None where a point does not have it."""
        names = dict.fromkeys(name for point, _ in self.points for name in point.settings)
        return {name: _each_once(point.settings.get(name) for point, _ in self.points) for name in names}

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The settings that differ between points."""
        return {name: values for name, values in self.settings.items() if len(values) > 1}

    @cached_property
    def columns(self) -> list[str]:
        """Names of the numbers and words that the function gave."""
        found = dict.fromkeys(name for one in self._outcomes for name in one.values)
        return [self._column(name) for name in found]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One for each point and seed: the settings, `seed`, the numbers (None where it failed), `status` (done,
        failed or missing), `seconds`, `error` and `path` (of the run, or of the folder of the point).

        A number whose name is that of a setting or of such a column stands under `result/NAME`.
        """
        return [self._row(point, seed, found) for (point, seed), found in zip(self.tasks, self._outcomes, strict=True)]

    @property
    def recorded(self) -> list[bool]:
        """Whether the function gave a run, for each row."""
        return [one.run is not None for one in self._outcomes]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The rows of what failed."""
        return [row for row in self.rows if row["status"] == "failed"]

    def runs(self, where: Mapping[str, Any] | None = None) -> list[Run]:
        """The recorded runs, of the rows with these settings."""
        return [open_run(path) for path in self.run_paths(where or {})]

    def run_paths(self, where: Mapping[str, Any]) -> list[Path]:
        """Where the recorded runs are."""
        chosen = zip(self._outcomes, self.chosen(where), strict=True)
        return [self.path / one.run for one, fits in chosen if fits and one.run is not None]

    def chosen(self, where: Mapping[str, Any]) -> list[bool]:
        """Whether each row has these settings (or this seed)."""
        for name in where:
            self.check_axis(name)
        return [all(row[name] == value for name, value in where.items()) for row in self.rows]

    def check_axis(self, name: str) -> None:
        """Refuse what is neither a setting nor the seed."""
        known = [*self.settings, "seed"]
        if name not in known:
            hint = did_you_mean(name, known)
            raise InputValueError(f"the sweep has no setting {name!r}, expected one of {', '.join(known)}{hint}")

    def values(self, value: Value) -> list[Any]:
        """One for each row: a column, the last value of a scalar of the runs, or a function of a run; None if failed.

        A scalar of one layer, `weights/0/norm` say, is no column and read from the runs.
        """
        if callable(value):
            return [None if run is None else value(run) for run in self._runs]
        if value in self.columns or value in ("status", "seconds"):
            return [row[value] for row in self.rows]
        runs = self._runs
        known = dict.fromkeys(name for run in runs if run is not None for name in run.names)
        if value not in known:
            names = [*self.columns, *known]
            raise InputValueError(
                f"the sweep has no value {value!r}, expected one of {', '.join(names) or 'none, as nothing is done'}"
                f"{did_you_mean(value, names)}"
            )
        return [float(run.scalar(value)[1][-1]) if run is not None and value in run.names else None for run in runs]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table, one line for each row, empty cells for None; return the path."""
        return write_csv(path, list(self.rows[0]) if self.rows else RESERVED, (list(row.values()) for row in self.rows))

    def to_xarray(self) -> Any:
        """An `xarray.Dataset`; needs the extra `xarray`.

        Where the points are all combinations of their axes, over these axes and the seed; else over points and seeds,
        with the settings as coordinates. Numbers are nan and words None where nothing is done.
        """
        try:
            xarray = importlib.import_module("xarray")
        except ImportError as error:
            raise FeatlearnError(f"xarray cannot be imported ({error}); pip install 'featlearn[xarray]'") from error
        return dataset(self, xarray)

    def cells(self, x: str, y: str | None, value: Value, where: Mapping[str, Any] | None = None) -> "Cells":
        """The numbers of a picture: a value over two axes, the mean over seeds, their spread and number.

        Args:
            x: name of a setting, or "seed".
            y: the same, or None for one row.
            value: a column (`rows`), a scalar of the runs, or a function of a run.
            where: values of the other settings, where they differ.
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
        """Draw a value over two axes, the mean over seeds; returns the axes.

        Of words the most frequent is drawn, with its share where seeds differ. Axes are logarithmic where values are
        much closer to a geometric than to an arithmetic sequence, and have a place for each value where these are
        words. Points that failed are crossed, points that are missing empty.

        Args:
            x, y, value, where: as for `cells`.
            spread: draw the standard deviation over seeds instead (of words, the share that differs from the most
                frequent).
            boundary: a theory's: a function of x that gives y, or a mapping of label -> such a function or a curve
                (x, y).
            ax: where to draw; by default a new figure.
        """
        from featlearn.sweeps.map_picture import draw

        return draw(self.cells(x, y, value, where), spread=spread, boundary=boundary, ax=ax)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        x: str | None = None,
        y: str | None = None,
        value: str | Sequence[str] | None = None,
        boundary: Any = None,
        title: str | None = None,
        executor: Any = None,
    ) -> Path:
        """Write one HTML page: maps whose cells open the reports of their points, failures, and the table.

        Reports on runs are written into the folders of their points, where the page links them. Returns the path.

        Args:
            path: the page; it links by relative paths, so it is best put into the folder of the sweep.
            x, y: settings to draw over; by default the first two that differ. The others make further maps.
            value: one or several columns; by default the verdict and the numbers that decide it.
            boundary: as for `map`; the page then also has the picture with it.
            title: of the page; by default the name of the folder.
            executor: what writes the reports, as in `fl.sweep`; by default this process.
        """
        from featlearn.sweeps.sweep_page import page

        return page(
            self, Path(path), x=x, y=y, value=value, boundary=boundary, title=title, executor=executor or Serial()
        )

    def __repr__(self) -> str:
        counts = Counter(one.status for one in self._outcomes)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        return f"<Sweep of {self.function} in {str(self.path)!r}: {len(self.points)} points, {told}>"

    def _column(self, name: str) -> str:
        return f"result/{name}" if name in self.settings or name in RESERVED else name

    def _row(self, point: Point, seed: int, found: Outcome) -> dict[str, Any]:
        values = {self._column(name): value for name, value in found.values.items()}
        return {
            **{name: point.settings.get(name) for name in self.settings},
            "seed": seed,
            **{name: values.get(name) for name in self.columns},
            "status": found.status,
            "seconds": found.seconds,
            "error": found.error,
            "path": str(self.path / (point.id if found.run is None else found.run)),  # absolute ones stay
        }

    @cached_property
    def _runs(self) -> list[Run | None]:
        return [None if one.run is None else open_run(self.path / one.run) for one in self._outcomes]


def open_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read a sweep, finished or not: every point that was ever asked for in this folder."""
    return Sweep(path)


def _each_once(values: Any) -> list[Any]:
    """In the order of their first appearance; lists and mappings cannot be keys."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())
