"""Read runs, including untrusted ones: nothing is executed, and allocations are limited."""

import importlib
import math
import os
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

from featlearn.errors import FeatlearnError, InputValueError, RunError, did_you_mean
from featlearn.record.arrays import decoded
from featlearn.record.files import ALWAYS, allowed, open_files
from featlearn.record.layout import (
    AXES,
    EVENTS,
    LARGEST_ARRAYS,
    LARGEST_TEXT,
    LONGEST_NAME,
    RUN,
    SCALARS,
    SCHEMA,
    USER,
    array_path,
    checked_name,
    checked_scalar_name,
    checked_step,
    named_array,
    shown_name,
)
from featlearn.record.text import object_in, objects_in


class Run:
    """A recorded run in a directory or .zip file, finished or still being written.

    Scalars, events, and the list of arrays are read on first access and cached: open a growing run again to see more.
    Names, steps, and numbers are checked; `config` and details of events are arbitrary JSON. Damaged or unsafe files
    raise `RunError`; files that do not belong to a run are ignored.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files = open_files(self.path)
        self.network: Any = None
        """Watched network with probe, optimizer, and initial weights, if this process trains it; otherwise None."""
        content = self._files.read(RUN, LARGEST_TEXT)
        if content is None:
            raise RunError(
                f"{self.path} has no {RUN}, expected the directory of a run, or a .zip with {RUN} at its top"
            )
        self.config: dict[str, Any] = object_in(content, f"{self.path}/{RUN}")
        """Content of run.json."""
        schema = self.config.get("schema")
        if schema is True or not isinstance(schema, int) or schema < 1:
            raise RunError(f"{self.path} has schema {str(schema)[:40]!r}, expected {SCHEMA}")
        if schema > SCHEMA:
            raise RunError(
                f"{self.path} has schema {str(schema)[:40]}, this version of featlearn reads up to {SCHEMA}; update it"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied to another process: the network stays in its own."""
        return {**self.__dict__, "network": None}

    @property
    def name(self) -> str:
        """Name of the run: its configured name, or the name of its file."""
        name = self.config.get("name")
        is_valid = isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME
        if is_valid:
            return str(name)
        path = self.path.resolve()
        return path.stem if path.suffix == ".zip" else path.name

    @property
    def probe_samples(self) -> tuple[int, int] | None:
        """Number of samples in the probe, and number of measured samples; None if unknown."""
        probe = self.config.get("probe")
        total, measured = (_whole(probe.get(key)) if isinstance(probe, dict) else 0 for key in ("samples", "measured"))
        return (total, measured if 0 < measured <= total else total) if total > 0 else None

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Measurements by step: `step`, `seconds` (or None), `values` by name.

        If a step is repeated after a resume, the last value of each quantity counts. Numbers recorded by the user have
        their original names, with the prefix `user/` if the run records the same name. A finished run with missing
        lines raises an error.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for line in self._checked(SCALARS, measurement):
            earlier = by_step.get(line["step"])
            if earlier is not None:
                line["values"] = {**earlier["values"], **line["values"]}
            by_step[line["step"]] = line
        if self.config.get("finished") is True:
            self._refuse_lost_lines(by_step)
        measured = AXES.union(*(line["values"] for line in by_step.values()))
        for line in by_step.values():
            line["values"] = {shown_name(name, measured): value for name, value in line["values"].items()}
        return [by_step[step] for step in sorted(by_step)]

    @cached_property
    def user_names(self) -> set[str]:
        """Names of the scalars that the user recorded."""
        names = {name for line in self._checked(SCALARS, measurement) for name in line["values"]}
        return {shown_name(name, names | AXES) for name in names if name.startswith(USER)}

    @cached_property
    def names(self) -> list[str]:
        """Names of all scalars."""
        return sorted({name for line in self.lines for name in line["values"]})

    def scalar(self, name: str) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return (steps, values) of a quantity, at the steps at which it was measured."""
        pairs = [(line["step"], line["values"][name]) for line in self.lines if name in line["values"]]
        if not pairs:
            names = ", ".join(self.names) or "none"
            raise InputValueError(
                f"the run has no scalar {name!r}, expected one of {names}{did_you_mean(name, self.names)}"
            )
        steps, values = zip(*pairs, strict=True)
        return numpy.array(steps), numpy.array(values, dtype=float)

    def curves(self) -> dict[str, tuple[list[float], list[float]]]:
        """Return name -> (steps, values), as expected by `overlay` of a theory."""
        result: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in self.names}
        for line in self.lines:
            for name, value in line["values"].items():
                result[name][0].append(float(line["step"]))
                result[name][1].append(value)
        return result

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Events in order of writing: `kind`, `step` (or None), `at`, and details."""
        return list(self._checked(EVENTS, _event))

    @cached_property
    def arrays(self) -> dict[str, list[int]]:
        """Name of an array -> steps at which it was recorded."""
        steps_by_name: dict[str, list[int]] = {}
        for name, step in filter(None, map(named_array, self._files.names())):
            steps_by_name.setdefault(name, []).append(step)
        return {name: sorted(steps) for name, steps in sorted(steps_by_name.items())}

    def array(self, name: str, step: int) -> dict[str, numpy.ndarray]:
        """Return the arrays under a name at a step."""
        if step not in self.arrays.get(checked_name(name), ()):
            available = f"steps {self.arrays[name]}" if name in self.arrays else ", ".join(self.arrays) or "none"
            hint = "" if name in self.arrays else did_you_mean(name, self.arrays)
            raise InputValueError(f"the run has no array {name!r} at step {step}, expected {available}{hint}")
        path = array_path(name, step)
        content, weight = self._content(path), self._files.weight(path) or 0
        return decoded(content, most=allowed(weight, LARGEST_ARRAYS), where=f"{self.path}/{path}")

    def pack(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Pack the run into a .zip file, atomically; return its path."""
        if not self.path.is_dir():
            raise RunError(f"{self.path} is packed already, expected a directory")
        folder = self.path.resolve()
        target = folder.with_name(f"{folder.name}.zip") if path is None else Path(path)
        if target.exists():
            raise RunError(f"{target} exists already, expected a new path; remove it or choose another")
        part = target.with_name(f"{target.name}.part")
        try:
            with zipfile.ZipFile(part, "w") as archive:
                for place in self._files.names():
                    content = self._content(place)
                    # arrays compress little, and arrays that compress a lot (zeros, nan) would look like archive bombs
                    small = len(content) <= ALWAYS and not named_array(place)
                    archive.writestr(place, content, zipfile.ZIP_DEFLATED if small else zipfile.ZIP_STORED)
            os.replace(part, target)
        except OSError as error:
            raise RunError(f"the run cannot be packed into {target}: {error}") from error
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        return target

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write scalars as CSV: a row per step and a column per name, with empty cells for missing values."""
        from featlearn.record.csv_table import write_csv

        rows = ([line["step"], line["seconds"], *map(line["values"].get, self.names)] for line in self.lines)
        return write_csv(path, ["step", "seconds", *self.names], rows)

    def to_xarray(self) -> Any:
        """Convert scalars to an `xarray.Dataset` over step, with nan for missing values; needs the extra `xarray`.

        Names contain /, which netCDF does not accept: rename them before `to_netcdf`.
        """
        try:
            xarray = importlib.import_module("xarray")
        except ImportError as error:
            raise FeatlearnError(f"xarray cannot be imported ({error}); pip install 'featlearn[xarray]'") from error
        lines = self.lines
        seconds = [math.nan if line["seconds"] is None else line["seconds"] for line in lines]
        columns = {name: [line["values"].get(name, math.nan) for line in lines] for name in self.names}
        axis = numpy.array([line["step"] for line in lines], dtype=int)
        return xarray.Dataset(
            {name: ("step", numpy.array(values)) for name, values in columns.items()},
            {"step": axis, "seconds": ("step", numpy.array(seconds, dtype=float))},
        )

    def report(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write a self-contained HTML report and return its path; options are those of `fl.report`."""
        write = importlib.import_module("featlearn.reporting.page").report
        return Path(write(self, path, **options))

    def figures(self, **options: Any) -> dict[str, Any]:
        """Return the charts and matrices of the report as matplotlib figures by name: "gap", "loss", "kernel" ..."""
        figures: dict[str, Any] = importlib.import_module("featlearn.reporting.figures").figures(self, **options)
        return figures

    def __repr__(self) -> str:
        return f"<Run {self.name!r} in {str(self.path)!r}>"

    def _checked(self, name: str, check: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the lines of a file, converted by `check`."""
        for line in objects_in(self._content(name), f"{self.path}/{name}"):
            try:
                yield check(line)
            except (FeatlearnError, OverflowError) as error:
                raise RunError(f"{self.path}/{name} has a line {str(line)[:80]}: {error}") from error

    def _refuse_lost_lines(self, steps: Collection[int]) -> None:
        """Raise if a finished run has incomplete or missing lines.

        Incomplete lines are accepted in running runs, and in runs that recorded a failed write.
        """
        if any(event["kind"] == "not_written" for event in self.events):
            return
        content, count = self._content(SCALARS), _whole(self.config.get("measurements"))
        ends = [event for event in self.events if event["kind"] == "finished"]
        last = _whole(ends[-1].get("last_line")) if ends else 0  # older runs do not have it
        lost = ""
        if content and not content.endswith(b"\n"):
            lost = "its last line is cut off"
        elif len(steps) < count:
            lost = f"it has lines of {len(steps)} steps, expected at least the {count} that were measured"
        elif max(steps, default=0) < last:
            lost = f"its lines end at step {max(steps, default=0)}, expected step {last}"
        if lost:
            raise RunError(f"{self.path}/{SCALARS} is damaged: the run is finished, but {lost}; copy the run again")

    def _content(self, place: str) -> bytes:
        """Return the content of a file; empty if no line was written yet."""
        content = self._files.read(place, LARGEST_ARRAYS if named_array(place) else LARGEST_TEXT)
        if content is None and place not in (SCALARS, EVENTS):
            raise RunError(f"{self.path}/{place} was removed since the run was opened; open it again")
        return content or b""


def open_run(path: str | os.PathLike[str]) -> Run:
    """Read a recorded run: a directory or a `.zip`. Safe on untrusted files."""
    return Run(path)


def measurement(line: dict[str, Any]) -> dict[str, Any]:
    """Check a line of scalars: `step`, `seconds` (or None), `values` by name."""
    values, seconds = line.get("values"), line.get("seconds")
    if not isinstance(values, dict):
        raise RunError("it has no values, expected numbers by name")
    numbers = {checked_scalar_name(name): _number(value) for name, value in values.items()}
    elapsed = None if seconds is None else _number(seconds)
    return {"step": checked_step(line.get("step")), "seconds": elapsed, "values": numbers}


def _event(line: dict[str, Any]) -> dict[str, Any]:
    kind, step = line.get("kind"), line.get("step")
    if not isinstance(kind, str):
        raise RunError("it has no kind, expected a word")
    return {**line, "step": None if step is None else checked_step(step)}


def _whole(value: object) -> int:
    """Return a count in a run; 0 if there is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RunError(f"it holds {str(value)[:40]!r}, expected a number")
    return float(value)
