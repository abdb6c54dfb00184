"""A sweep on disk: one folder for each point, one file for each seed that is done.

    sweep.json                which function, and the points in the order in which they were asked for
    POINT/point.json          settings and seeds; POINT is a hash of the settings
    POINT/seed-0.json         numbers, or the error, of a seed that is done
    POINT/seed-0.error.txt    its traceback, if it failed
    POINT/seed-0/             what the function wrote, a run for example
    POINT/report.html         the report on the runs of all seeds

Every file is written whole or not at all. A seed is done once its file is there; nothing else says so.
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
"""Written by `featlearn sweep` beside the points."""
_ID = re.compile(rf"[0-9a-f]{{{DIGITS}}}")

Status = Literal["done", "failed", "missing"]


@dataclass(frozen=True)
class Outcome:
    """What a seed of a point came to."""

    status: Status
    values: Mapping[str, Any]
    """numbers and words by name"""
    run: str | None = None
    """path of the run, relative to the sweep where it lies inside"""
    seconds: float | None = None
    error: str | None = None
    lost: bool = False
    """whether it left nothing, its process being killed say: then it is run again by the next call"""


MISSING = Outcome("missing", {})


@dataclass(frozen=True)
class SweepFolder:
    """The files of a sweep."""

    path: Path

    @property
    def manifest(self) -> dict[str, Any] | None:
        """What sweep.json says; None where there is none."""
        found = _read(self.path / MANIFEST)
        if found is not None and found.get("schema") != SCHEMA:
            raise RunError(
                f"{self.path} has schema {str(found.get('schema'))[:40]!r}, expected {SCHEMA}; update featlearn"
            )
        return found

    def write_manifest(self, **entries: Any) -> None:
        """Add to sweep.json, or change what it says."""
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.manifest or {"schema": SCHEMA, "created": time.time()}
        put(self.path / MANIFEST, json_of({**before, **entries}), synchronize=True)

    def add(self, points: Iterable[Point], seeds: Iterable[int]) -> None:
        """Note that these points and seeds belong to the sweep."""
        manifest = self.manifest or {}
        listed = manifest.get("points")
        order: list[Any] = listed if isinstance(listed, list) else []
        for point in points:
            folder = self.path / point.id
            before = self._entry(point.id)
            known = [] if before is None else before[1]
            asked = [*known, *(seed for seed in seeds if seed not in known)]
            if asked != known:
                folder.mkdir(exist_ok=True)
                put(folder / POINT, json_of({"settings": point.settings, "seeds": asked}))
            order.append(point.id)
        self.write_manifest(points=list(dict.fromkeys(order)))

    def points(self) -> list[tuple[Point, list[int]]]:
        """All points with their seeds, in the order in which they were asked for."""
        listed = (self.manifest or {}).get("points")
        order = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
        there = sorted(one.name for one in self.path.iterdir() if _ID.fullmatch(one.name))
        names = dict.fromkeys([*(one for one in order if one in there), *there])
        return [entry for name in names if (entry := self._entry(name)) is not None]

    def _entry(self, id: str) -> tuple[Point, list[int]] | None:
        """The point in a folder; None where none was written yet."""
        path = self.path / id / POINT
        found = _read(path)
        if found is None:
            return None
        settings, seeds = found.get("settings"), found.get("seeds")
        whole = isinstance(seeds, list) and all(isinstance(seed, int) and seed >= 0 for seed in seeds)
        if not isinstance(settings, dict) or not whole or Point(settings).id != id:
            raise RunError(f"{path} is damaged: expected seeds, and settings whose hash is the name of the folder")
        return Point(settings), list(seeds or ())

    def place(self, point: Point, seed: int) -> Path:
        """The folder of a seed, for its function to write into."""
        return self.path / point.id / f"seed-{seed}"

    def outcome(self, point: Point, seed: int) -> Outcome:
        """What a seed came to; `MISSING` where it is not done."""
        return outcome_at(self.place(point, seed))


def outcome_at(place: Path) -> Outcome:
    """What the seed with this folder came to."""
    path = place.with_name(f"{place.name}.json")
    found = _read(path)
    if found is None:
        return MISSING
    status, values, run = found.get("status"), found.get("values"), found.get("run")
    seconds, error = found.get("seconds"), found.get("error")
    if status not in ("done", "failed") or not isinstance(values, dict):
        raise RunError(f"{path} is damaged: expected a status and values; remove it to run the seed again")
    return Outcome(
        status,
        values,
        run if isinstance(run, str) else None,
        float(seconds) if isinstance(seconds, int | float) else None,
        error if isinstance(error, str) else None,
        found.get("lost") is True,
    )


def write_outcome(place: Path, outcome: Outcome, traceback: str | None = None) -> None:
    """Say what a seed came to; from then on it is done."""
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


def forget(place: Path) -> None:
    """Let a seed be run again."""
    place.with_name(f"{place.name}.json").unlink(missing_ok=True)


def traceback_of(place: Path) -> str | None:
    """The traceback of a seed that failed."""
    with suppress(OSError):
        return place.with_name(f"{place.name}.error.txt").read_text(encoding="utf-8", errors="replace")
    return None


@contextmanager
def alone(place: Path) -> Iterator[None]:
    """Keep a place to one process at a time, also of another sweep in the same folder; lost when the process ends."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with place.with_name(f".{place.name}.lock").open("wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_sweep(path: Path) -> None:
    """Remove the sweep at a path, if there is one; refuse what is not of a sweep."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or SweepFolder(path).manifest is None:
        raise RunError(f"overwrite=True would remove {path}, expected a sweep there, or nothing; choose another out=")
    known = {MANIFEST, MANIFEST + PART, LOCK, *OUTPUTS}
    strange = sorted(
        one.name
        for one in path.iterdir()
        if one.is_symlink() or (one.name not in known and not _ID.fullmatch(one.name))
    )
    if strange:
        raise RunError(
            f"{path} holds a sweep and {len(strange)} other files ({strange[0]!r}), expected a sweep alone: "
            "overwrite=True would remove them too; move them, or choose another out="
        )
    place = path.resolve()
    aside = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    os.rename(place, aside)  # gone at once: killed while it removes, a new sweep does not find the half
    shutil.rmtree(aside, ignore_errors=True)


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
