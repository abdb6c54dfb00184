"""Write a run so that a killed process loses at most the measurement in progress.

A line is written in a single system call, and files are replaced atomically, so content survives a killed process.
After a power loss, the last seconds may be missing or unreadable. `run.json` is synchronized to disk, so that the rest
can be opened.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat

from featlearn.errors import InputTypeError, InputValueError, RunError
from featlearn.record.arrays import encoded
from featlearn.record.atomic import PART, put
from featlearn.record.layout import (
    ARRAYS,
    EVENTS,
    LARGEST_TEXT,
    RUN,
    SCALARS,
    SCHEMA,
    array_path,
    checked_scalar_name,
    checked_step,
)
from featlearn.record.reader import Run
from featlearn.record.text import json_of


class RunWriter:
    """Writer of a run, for a single process.

    A directory that contains a run raises an error, unless `resume` continues the run: its configuration is kept,
    incomplete lines are removed, and `last_step` is the last recorded step (-1 if none).
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any], *, resume: bool = False) -> None:
        self.path = Path(path)
        self.last_step = -1
        self._config: dict[str, Any] = {}
        if self.path.suffix == ".zip":
            raise InputValueError(f"a run is written as a directory, expected a path without .zip; got {self.path}")
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in self.path.iterdir()}
        if RUN in names:
            self._config = self._resumed(resume)
        elif names - {RUN + PART}:  # a run that was killed at its start has only this file
            raise RunError(f"{self.path} contains other files ({min(names)[:80]!r}), expected a new or empty directory")
        else:
            self._describe({"created": time.time(), **config})

    def scalars(self, step: int, values: Mapping[str, SupportsFloat], *, seconds: float | None = None) -> None:
        """Append a line of numbers by name; nan and infinity are allowed."""
        numbers = {checked_scalar_name(name): _number(name, value) for name, value in values.items()}
        elapsed = None if seconds is None else _number("seconds", seconds)
        self._append(SCALARS, {"step": checked_step(step), "seconds": elapsed, "values": numbers})

    def event(self, kind: str, step: int | None = None, **details: Any) -> None:
        """Append an event."""
        place = None if step is None else checked_step(step)
        self._append(EVENTS, {"at": time.time(), **details, "kind": str(kind), "step": place})

    def array(self, name: str, step: int, /, **arrays: Any) -> None:
        """Write arrays under a name at a step, replacing earlier arrays of the same name and step."""
        self._put(array_path(name, step), encoded(arrays))

    def describe(self, /, **entries: Any) -> None:
        """Add or replace entries of run.json."""
        self._describe(entries)

    def close(self) -> None:
        """Flush all lines to disk."""
        with self._writing():
            for name in (SCALARS, EVENTS):
                with suppress(FileNotFoundError), (self.path / name).open("rb+") as file:
                    os.fsync(file.fileno())

    def _resumed(self, resume: bool) -> dict[str, Any]:
        """Return the configuration of the run to resume, and remove incomplete files."""
        if not resume:
            raise RunError(
                f"{self.path} already holds a run; pass resume=True to continue it, overwrite=True (fl.watch) to "
                "replace it, or another path (out=) for a new run"
            )
        run = Run(self.path)
        self.last_step = max((line["step"] for line in run.lines), default=-1)
        with self._writing():
            for part in (self.path / ARRAYS).rglob(f"*.npz{PART}"):
                if part.is_file():
                    part.unlink()
        return run.config

    def _describe(self, entries: Mapping[str, Any]) -> None:
        if "schema" in entries:
            raise InputValueError("a configuration cannot have an entry named schema, which is reserved; rename it")
        config = {**self._config, **entries, "schema": SCHEMA}
        self._put(RUN, json_of(config), synchronize=True)
        self._config = config

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        line = json_of(entry) + b"\n"
        # Open the file each time (0.01 ms), so that a removed directory raises an error.
        with self._writing(), (self.path / name).open("ab+", buffering=0) as file:
            if _mend(file) + len(line) > LARGEST_TEXT:
                raise OSError(errno.EFBIG, f"{name} would be larger than {LARGEST_TEXT} bytes")
            if file.write(line) != len(line):  # the next write, or a resume, removes the incomplete line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _put(self, place: str, content: bytes, *, synchronize: bool = False) -> None:
        target = self.path / place
        with self._writing():
            if not self.path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "its directory was removed")
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
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: tensors of several numbers
        raise InputTypeError(f"{name} is {str(value)[:80]}, expected a number: {error}") from error


def _mend(file: Any) -> int:
    """Remove an incomplete line from the end of a file; return the length of the file."""
    end: int = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            end = file.truncate(file.read().rfind(b"\n") + 1)
    return end
