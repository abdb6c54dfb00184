"""Writing a run so that a killed process loses at most the measurement in progress.

A line goes to the system in one call, and a file is put in place whole: what was written survives the death of the
process, at any time. Loss of power is another matter: what the system had not yet put on disk, usually the last
seconds, may be missing or unreadable; `run.json` is synchronized, so that the rest can be opened.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat

from featlearn.errors import InputTypeError, InputValueError, RunError
from featlearn.record import schema
from featlearn.record.arrays import encoded
from featlearn.record.atomic import PART, put
from featlearn.record.layout import (
    ARRAYS,
    EVENTS,
    LARGEST_TEXT,
    RUN,
    SCALARS,
    array_path,
    checked_scalar_name,
    checked_step,
)
from featlearn.record.reader import Run
from featlearn.record.text import json_of


class RunWriter:
    """A run being written, by one process at a time.

    A directory that already holds a run is refused, unless `resume` goes on with it: its configuration stays, what
    a crash cut off does not count, and `last_step` says where it stood (-1: nowhere).
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any], *, resume: bool = False) -> None:
        self.path = Path(path)
        self.last_step = -1
        self._config: dict[str, Any] = {}
        if self.path.suffix == ".zip":
            raise InputValueError(f"a run is written as a directory, expected a path without .zip; got {self.path}")
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            there = {entry.name for entry in self.path.iterdir()}
        if RUN in there:
            self._config = self._resumed(resume)
        elif there - {RUN + PART}:  # this alone is a run that was killed as it began
            raise RunError(
                f"{self.path} is a directory with other files in it ({min(there)[:80]!r}), expected a new or an empty "
                "one; choose another"
            )
        else:
            self._describe({"created": time.time(), **config})

    def scalars(self, step: int, values: Mapping[str, SupportsFloat], *, seconds: float | None = None) -> None:
        """One line: numbers by name. nan and infinity are kept as they are."""
        numbers = {checked_scalar_name(name): _number(name, value) for name, value in values.items()}
        elapsed = None if seconds is None else _number("seconds", seconds)
        self._append(SCALARS, {"step": checked_step(step), "seconds": elapsed, "values": numbers})

    def event(self, kind: str, step: int | None = None, **details: Any) -> None:
        """Something that happened."""
        place = None if step is None else checked_step(step)
        self._append(EVENTS, {"at": time.time(), **details, "kind": str(kind), "step": place})

    def array(self, name: str, step: int, /, **arrays: Any) -> None:
        """Arrays under one name at one step; again at the same step, they take the place of the first."""
        self._put(array_path(name, step), encoded(arrays))

    def describe(self, /, **entries: Any) -> None:
        """Add to run.json, or change what it says."""
        self._describe(entries)

    def close(self) -> None:
        """No more will be written: lines are put on disk."""
        with self._writing():
            for name in (SCALARS, EVENTS):
                with suppress(FileNotFoundError), (self.path / name).open("rb+") as file:
                    os.fsync(file.fileno())

    def _resumed(self, resume: bool) -> dict[str, Any]:
        """The configuration; removes files that a crash cut off, the next line removes a line."""
        if not resume:
            raise RunError(
                f"{self.path} already holds a run; pass resume=True to go on with it, overwrite=True (fl.watch) to "
                "replace it, or another path (out=) for a new run beside it"
            )
        run = Run(self.path)
        if run.schema != schema.SCHEMA:
            raise RunError(f"{self.path} has schema {run.schema}, expected {schema.SCHEMA} to go on; start a new run")
        self.last_step = max((line["step"] for line in run.lines), default=-1)
        with self._writing():
            for part in (self.path / ARRAYS).rglob(f"*.npz{PART}"):
                if part.is_file():
                    part.unlink()
        return run.config

    def _describe(self, entries: Mapping[str, Any]) -> None:
        if "schema" in entries:
            raise InputValueError("a configuration cannot have an entry named schema, the run has one; rename it")
        config = {**self._config, **entries, "schema": schema.SCHEMA}
        self._put(RUN, json_of(config), synchronize=True)
        self._config = config

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        line = json_of(entry) + b"\n"
        # Opened each time (0.01 ms): a run whose directory has gone is an error, not a file nobody sees.
        with self._writing(), (self.path / name).open("ab+", buffering=0) as file:
            if _mend(file) + len(line) > LARGEST_TEXT:
                raise OSError(errno.EFBIG, f"{name} would be larger than {LARGEST_TEXT} bytes")
            if file.write(line) != len(line):  # the next line, or a resume, removes what was written
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _put(self, place: str, content: bytes, *, synchronize: bool = False) -> None:
        target = self.path / place
        with self._writing():
            if not self.path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "its directory has gone")
            target.parent.mkdir(parents=True, exist_ok=True)
            put(target, content, synchronize=synchronize)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"the run cannot be written to {self.path}: {error}") from error


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last from tensors of several numbers
        raise InputTypeError(f"{name} is {str(value)[:80]}, expected one number: {error}") from error


def _mend(file: Any) -> int:
    """Remove a line that was cut off from the end of a file; returns its length."""
    end: int = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            end = file.truncate(file.read().rfind(b"\n") + 1)
    return end
