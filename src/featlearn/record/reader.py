"""Reading a run, also one that is not trusted: nothing in it is executed, nothing too large is allocated."""

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
from featlearn.record import schema
from featlearn.record.arrays import decoded
from featlearn.record.files import ALWAYS, allowed, opened
from featlearn.record.layout import (
    AXES,
    EVENTS,
    LARGEST_ARRAYS,
    LARGEST_TEXT,
    LONGEST_NAME,
    RUN,
    SCALARS,
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
    """A recorded run: a directory or a packed one, perhaps still being written.

    Scalars, events and the list of arrays are read when first asked for and kept: open a growing run again to see
    more. Names, steps and numbers are checked; `config` and the details of events hold whatever JSON was written.
    What is damaged or not safe to read is a `RunError`, files that do not belong to a run are left alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        files = opened(self.path)
        self.schema = schema.schema_of(files, self.path)
        """The schema that it was written with."""
        self._files = schema.upgraded(files, self.schema)
        self.network: Any = None
        """The watched network with probe, optimizer and first weights, if this process trains it; else None."""
        self.config: dict[str, Any] = object_in(self._content(RUN), f"{self.path}/{RUN}")
        """What run.json says."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied to another process: the network stays in its own."""
        return {**self.__dict__, "network": None}

    @property
    def name(self) -> str:
        """What it is called: its configured name, or that of its file."""
        name = self.config.get("name")
        known = isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME
        if known:
            return str(name)
        path = self.path.resolve()
        return path.stem if path.suffix == ".zip" else path.name

    @property
    def probe_samples(self) -> tuple[int, int] | None:
        """Number of samples of the probe that was passed, and of those that are measured; None if unknown."""
        probe = self.config.get("probe")
        given, measured = (_whole(probe.get(key)) if isinstance(probe, dict) else 0 for key in ("samples", "measured"))
        return (given, measured if 0 < measured <= given else given) if given > 0 else None

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Measurements by step: `step`, `seconds` (or None), `values` by name.

        If a step is repeated after a resume, the last value of each quantity counts. Numbers of the user have the names
        that the user wrote, or `user/` before a name that the run records itself. A run that says that it is finished
        and has lost lines since is refused.
        """
        found: dict[int, dict[str, Any]] = {}
        for line in self._checked(SCALARS, measurement):
            earlier = found.get(line["step"])
            if earlier is not None:
                line["values"] = {**earlier["values"], **line["values"]}
            found[line["step"]] = line
        if self.config.get("finished") is True:
            self._refuse_lost_lines(found)
        measured = AXES.union(*(line["values"] for line in found.values()))
        for line in found.values():
            line["values"] = {shown_name(name, measured): value for name, value in line["values"].items()}
        return [found[step] for step in sorted(found)]

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
        """(steps, values) of one quantity, where it was measured."""
        pairs = [(line["step"], line["values"][name]) for line in self.lines if name in line["values"]]
        if not pairs:
            known = ", ".join(self.names) or "none"
            raise InputValueError(
                f"the run has no scalar {name!r}, expected one of {known}{did_you_mean(name, self.names)}"
            )
        steps, values = zip(*pairs, strict=True)
        return numpy.array(steps), numpy.array(values, dtype=float)

    def curves(self) -> dict[str, tuple[list[float], list[float]]]:
        """Name -> (steps, values): what a theory's `overlay` takes."""
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in self.names}
        for line in self.lines:
            for name, value in line["values"].items():
                found[name][0].append(float(line["step"]))
                found[name][1].append(value)
        return found

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What happened, in the order of writing: `kind`, `step` (or None), `at`, and details."""
        return list(self._checked(EVENTS, _event))

    @cached_property
    def arrays(self) -> dict[str, list[int]]:
        """Name of an array -> the steps it was recorded at."""
        found: dict[str, list[int]] = {}
        for name, step in filter(None, map(named_array, self._files.names())):
            found.setdefault(name, []).append(step)
        return {name: sorted(steps) for name, steps in sorted(found.items())}

    def array(self, name: str, step: int) -> dict[str, numpy.ndarray]:
        """The arrays under one name at one step."""
        if step not in self.arrays.get(checked_name(name), ()):
            known = f"steps {self.arrays[name]}" if name in self.arrays else ", ".join(self.arrays) or "none"
            meant = "" if name in self.arrays else did_you_mean(name, self.arrays)
            raise InputValueError(f"the run has no array {name!r} at step {step}, expected {known}{meant}")
        place = array_path(name, step)
        content, weight = self._content(place), self._files.weight(place) or 0
        return decoded(content, most=allowed(weight, LARGEST_ARRAYS), where=f"{self.path}/{place}")

    def pack(self, path: str | os.PathLike[str] | None = None) -> Path:
        """All of it in one .zip, written whole or not at all; returns its path."""
        if not self.path.is_dir():
            raise RunError(f"{self.path} is packed already, expected a directory")
        folder = self.path.resolve()
        target = folder.with_name(f"{folder.name}.zip") if path is None else Path(path)
        if target.exists():
            raise RunError(f"{target} exists already, expected a new path; remove it or name another")
        part = target.with_name(f"{target.name}.part")
        try:
            with zipfile.ZipFile(part, "w") as archive:
                for place in self._files.names():
                    content = self._content(place)
                    # arrays hardly shrink, and what shrinks a lot (all zero, all nan) would be taken for a bomb
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
        """Write the scalars as a table: a row for each step, a column for each name, empty where not measured."""
        from featlearn.record.csv_table import write_csv

        rows = ([line["step"], line["seconds"], *map(line["values"].get, self.names)] for line in self.lines)
        return write_csv(path, ["step", "seconds", *self.names], rows)

    def to_xarray(self) -> Any:
        """The scalars as an `xarray.Dataset` over step, nan where nothing was measured; needs the extra `xarray`.

        Names keep their /, which netCDF does not take: rename them before `to_netcdf`.
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
        """Write what it did into one HTML file that needs nothing else; options are those of `fl.report`.

        Returns the path.
        """
        write = importlib.import_module("featlearn.reporting.page").report
        return Path(write(self, path, **options))

    def __repr__(self) -> str:
        return f"<Run {self.name!r} in {str(self.path)!r}>"

    def _checked(self, name: str, check: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The lines of a file, each as `check` has it."""
        for line in objects_in(self._content(name), f"{self.path}/{name}"):
            try:
                yield check(line)
            except (FeatlearnError, OverflowError) as error:
                raise RunError(f"{self.path}/{name} has a line {str(line)[:80]}: {error}") from error

    def _refuse_lost_lines(self, steps: Collection[int]) -> None:
        """Of a finished run every line is whole, down to the last that was written.

        A line that was cut off, or is not there yet, is no damage only while a run is written, or where the run itself
        says that something could not be written.
        """
        if any(event["kind"] == "not_written" for event in self.events):
            return
        content, count = self._content(SCALARS), _whole(self.config.get("measurements"))
        ends = [event for event in self.events if event["kind"] == "finished"]
        last = _whole(ends[-1].get("last_line")) if ends else 0  # older runs do not say it
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
        """What a file holds; nothing where no line was written yet."""
        content = self._files.read(place, LARGEST_ARRAYS if named_array(place) else LARGEST_TEXT)
        if content is None and place not in (SCALARS, EVENTS):
            raise RunError(f"{self.path}/{place} has gone since the run was opened; open it again")
        return content or b""


def open_run(path: str | os.PathLike[str]) -> Run:
    """Read a recorded run: a directory or a `.zip`. Safe on untrusted files."""
    return Run(path)


def measurement(line: dict[str, Any]) -> dict[str, Any]:
    """A line of scalars, checked: `step`, `seconds` (or None), `values` by name."""
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
    """A count in a run, 0 where there is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RunError(f"it holds {str(value)[:40]!r}, expected a number")
    return float(value)
