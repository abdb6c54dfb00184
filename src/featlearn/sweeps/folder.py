"""A sweep on disk: a folder per point, and a file per finished seed.

    sweep.json                name of the function, and the points in order of request
    POINT/point.json          settings and seeds; POINT is a hash of the settings
    POINT/seed-0.json         results or error of a finished seed
    POINT/seed-0.error.txt    its traceback, if it failed
    POINT/seed-0/             files of the function, for example a run
    POINT/report.html         the report on the runs of all seeds

Files are written atomically. A seed is done if and only if its file exists.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from featlearn.errors import RunError
from featlearn.record.atomic import PART, put
from featlearn.record.layout import LARGEST_TEXT
from featlearn.record.text import json_of, object_in
from featlearn.sweeps.grid import DIGITS, Point

SCHEMA = 1
MANIFEST, POINT, REPORT = "sweep.json", "point.json", "report.html"
LOCK = ".sweep.lock"
OUTPUTS = ("sweep.html", "table.csv", "map.png", "map.pdf")
"""Files that `featlearn sweep` writes next to the points."""
_ID = re.compile(rf"[0-9a-f]{{{DIGITS}}}")

Status = Literal["done", "failed", "missing"]


@dataclass(frozen=True)
class Outcome:
    """Result of a seed of a point."""

    status: Status
    values: Mapping[str, Any]
    """numbers and words by name"""
    run: str | None = None
    """path of the run, relative to the sweep if it is inside"""
    seconds: float | None = None
    error: str | None = None
    lost: bool = False
    """whether the seed left no result, for example because its process was killed; the next call runs it again"""


MISSING = Outcome("missing", {})


@dataclass(frozen=True)
class SweepFolder:
    """The files of a sweep."""

    path: Path

    @property
    def manifest(self) -> dict[str, Any] | None:
        """Content of sweep.json; None if it does not exist."""
        content = _read(self.path / MANIFEST)
        if content is not None and content.get("schema") != SCHEMA:
            raise RunError(
                f"{self.path} has schema {str(content.get('schema'))[:40]!r}, expected {SCHEMA}; update featlearn"
            )
        return content

    def write_manifest(self, **entries: Any) -> None:
        """Add or replace entries of sweep.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.manifest or {"schema": SCHEMA, "created": time.time()}
        put(self.path / MANIFEST, json_of({**before, **entries}), synchronize=True)

    def add(self, points: Iterable[Point], seeds: Iterable[int]) -> None:
        """Add points and seeds to the sweep."""
        manifest = self.manifest or {}
        listed = manifest.get("points")
        order: list[Any] = listed if isinstance(listed, list) else []
        for point in points:
            folder = self.path / point.id
            entry = self._entry(point.id)
            seeds_before = [] if entry is None else entry[1]
            seeds_after = [*seeds_before, *(seed for seed in seeds if seed not in seeds_before)]
            if seeds_after != seeds_before:
                folder.mkdir(exist_ok=True)
                put(folder / POINT, json_of({"settings": point.settings, "seeds": seeds_after}))
            order.append(point.id)
        self.write_manifest(points=list(dict.fromkeys(order)))

    def points(self) -> list[tuple[Point, list[int]]]:
        """Return all points with their seeds, in order of request."""
        listed = (self.manifest or {}).get("points")
        order = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        existing = sorted(path.name for path in self.path.iterdir() if _ID.fullmatch(path.name))
        names = dict.fromkeys([*(name for name in order if name in existing), *existing])
        return [entry for name in names if (entry := self._entry(name)) is not None]

    def _entry(self, id: str) -> tuple[Point, list[int]] | None:
        """Read the point in a folder; None if it is not written yet."""
        path = self.path / id / POINT
        content = _read(path)
        if content is None:
            return None
        settings, seeds = content.get("settings"), content.get("seeds")
        valid = isinstance(seeds, list) and all(isinstance(seed, int) and seed >= 0 for seed in seeds)
        if not isinstance(settings, dict) or not valid or Point(settings).id != id:
            raise RunError(f"{path} is damaged: expected seeds, and settings whose hash is the name of the folder")
        return Point(settings), list(seeds or ())

    def place(self, point: Point, seed: int) -> Path:
        """Return the folder that the function of a seed writes to."""
        return self.path / point.id / f"seed-{seed}"

    def outcome(self, point: Point, seed: int) -> Outcome:
        """Read the outcome of a seed; `MISSING` if it is not done."""
        return outcome_at(self.place(point, seed))


def outcome_at(place: Path) -> Outcome:
    """Read the outcome of the seed with this folder."""
    path = place.with_name(f"{place.name}.json")
    content = _read(path)
    if content is None:
        return MISSING
    status, values, run = content.get("status"), content.get("values"), content.get("run")
    seconds, error = content.get("seconds"), content.get("error")
    if status not in ("done", "failed") or not isinstance(values, dict):
        raise RunError(f"{path} is damaged: expected a status and values; remove it to run the seed again")
    return Outcome(
        status,
        values,
        run if isinstance(run, str) else None,
        float(seconds) if isinstance(seconds, int | float) else None,
        error if isinstance(error, str) else None,
        content.get("lost") is True,
    )


def write_outcome(place: Path, outcome: Outcome, traceback: str | None = None) -> None:
    """Write the outcome of a seed, which marks it as done."""
    report = place.with_name(f"{place.name}.error.txt")
    if traceback is None:
        report.unlink(missing_ok=True)
    else:
        put(report, traceback.encode("utf-8", "replace"))
    entry = {
        "status": outcome.status,
        "values": dict(outcome.values),
        "run": outcome.run,
        "seconds": outcome.seconds,
        "error": outcome.error,
        "lost": outcome.lost,
        "finished": time.time(),
    }
    put(place.with_name(f"{place.name}.json"), json_of(entry), synchronize=True)


def remove_outcome(place: Path) -> None:
    """Remove the outcome of a seed, so that it runs again."""
    place.with_name(f"{place.name}.json").unlink(missing_ok=True)


def read_traceback(place: Path) -> str | None:
    """Read the traceback of a failed seed."""
    with suppress(OSError):
        return place.with_name(f"{place.name}.error.txt").read_text(encoding="utf-8", errors="replace")
    return None


@contextmanager
def lock(place: Path) -> Iterator[None]:
    """Lock a path against other processes, including other sweeps in the same folder, until exit."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with place.with_name(f".{place.name}.lock").open("wb") as file:
        with suppress(OSError):  # file systems without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_sweep(path: Path) -> None:
    """Remove the sweep at a path, if it exists. Raise if the path holds other files."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or SweepFolder(path).manifest is None:
        raise RunError(f"overwrite=True would remove {path}, expected a sweep or an empty folder; choose another out=")
    names = {MANIFEST, MANIFEST + PART, LOCK, *OUTPUTS}
    other_files = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.is_symlink() or (entry.name not in names and not _ID.fullmatch(entry.name))
    )
    if other_files:
        raise RunError(
            f"{path} holds a sweep and {len(other_files)} other files ({other_files[0]!r}), expected only a sweep: "
            "overwrite=True would remove them too; move them, or choose another out="
        )
    place = path.resolve()
    renamed = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    os.rename(place, renamed)  # rename first: if removal is interrupted, a new sweep does not see remains
    shutil.rmtree(renamed, ignore_errors=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_TEXT + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if len(content) > LARGEST_TEXT:
        raise RunError(f"{path} is larger than {LARGEST_TEXT} bytes, expected a file of a sweep")
    return object_in(content, path)
