"""The runs of a folder: the progress of each, and the report on all of them."""

import math
import os
import stat
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn.errors import FeatlearnError, RunError
from featlearn.record import open_run
from featlearn.record.files import open_files
from featlearn.record.layout import LARGEST_TEXT, RUN, SCALARS
from featlearn.record.reader import measurement
from featlearn.record.text import object_in

if TYPE_CHECKING:
    from featlearn.diagnosis.findings import Findings

MOST_RUNS = 16
"""Runs that are shown. Further ones are counted."""
MOST_ENTRIES = 2000
"""Entries that are read of a folder."""
SEARCH_PERIOD = 1.0
"""Seconds between two searches for runs."""
TAIL = 2**18
"""Bytes at the end of the scalars that hold the latest measurement."""
SPARKS = 48
"""Largest number of losses in the line of a run."""
LARGEST_RUN = 2**30
"""Bytes on disk up to which a run is reported while it is written."""


class LiveRuns:
    """A run, or the runs in a folder, down to two levels. Links are not followed."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is no folder, expected the folder of a run that is written, or one of runs")
        self.path = path.resolve()
        self._keys: list[str] = []
        self._next_search = 0.0
        self._reported: list[tuple[str, int, int]] = []
        self._report_errors: dict[str, str] = {}
        self._finished: set[str] = set()
        self._reported_finished: set[str] = set()

    @property
    def finished(self) -> bool:
        """True if there are runs, and all of them have finished."""
        return bool(self._keys) and set(self._keys) == self._finished

    @property
    def end_unreported(self) -> bool:
        """True if a run has finished since the last report."""
        return bool(self._finished - self._reported_finished)

    def progress(self) -> dict[str, Any]:
        """Return the state of each run, and all errors."""
        if time.monotonic() >= self._next_search:
            # A listed run stays listed while its folder exists, so that a damaged one is shown with its error.
            seen = {key for key in self._keys if (self.path / key).is_dir()}
            self._keys = sorted(seen | set(_keys(self.path)))
            self._next_search = time.monotonic() + SEARCH_PERIOD
        states, errors, finished = [], dict(self._report_errors), set()
        for key in self._keys[:MOST_RUNS]:
            state, error = _attempt(run_state, self.path / key)
            if error:
                errors[key] = error
            else:
                states.append(state)
                finished |= {key} if state["finished"] else set()
        self._finished = finished
        return {"runs": states, "errors": list(errors.values()), "left_out": max(len(self._keys) - MOST_RUNS, 0)}

    def report(self) -> dict[str, Any] | None:
        """Return the report on all runs that can be read; None if nothing was written since the last report."""
        # torch takes seconds to load, which the page need not wait for
        from featlearn.reporting.page import live_content

        keys, finished = self._keys[:MOST_RUNS], self._finished
        written = [(key, *_size_and_time(self.path / key)) for key in keys]
        if written == self._reported or not keys:
            return None
        attempts = {key: _attempt(_open_and_diagnose, self.path / key) for key in keys}
        findings = [one for one, _ in attempts.values() if one is not None]
        ended = set(keys) == finished
        content, error = _attempt(lambda found: live_content(found, ended=ended), findings) if findings else (None, "")
        self._reported, self._reported_finished = written, finished
        self._report_errors = {key: message for key, (_, message) in attempts.items() if message}
        self._report_errors |= {"": error} if error else {}
        return content


def run_state(path: Path) -> dict[str, Any]:
    """Return name, facts in words, losses, and how far a run is, from its latest measurements."""
    run = open_run(path)
    config, lines = run.config, last_measurements(path)
    step, seconds = (lines[-1]["step"], lines[-1]["seconds"]) if lines else (None, None)
    values = [line["values"] for line in lines]
    name = next((name for name in ("loss", "probe/loss") if any(name in each for each in values)), "")
    losses = [each[name] for each in values if name in each]
    settings, finished = config.get("settings"), config.get("finished") is True
    steps = settings.get("steps") if isinstance(settings, dict) else None
    total = steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else None
    facts = [f"step {step}" + (f" of {total}" if total else "") if lines else "no measurement yet"]
    if losses:
        facts.append(f"loss {losses[-1]:.4g}")
    if seconds:
        facts.append(f"{seconds:.3g} s of training")
    overhead, budget = config.get("overhead"), config.get("budget")
    if isinstance(overhead, float):
        facts.append(
            f"measuring took {overhead:.1%} of it" + (f", target {budget:.1%}" if isinstance(budget, float) else "")
        )
    if finished:
        facts.append("finished")
    elif total and seconds and step:
        facts.append(f"about {max(total - step, 0) * seconds / step:.3g} s left")
    return {
        "name": str(run.name),
        "facts": ", ".join(facts),
        "finished": finished,
        "share": min(step / total, 1.0) if total and step is not None else None,
        "losses": [loss for loss in losses if math.isfinite(loss)],
    }


def last_measurements(path: Path) -> list[dict[str, Any]]:
    """Return at most SPARKS measurements from the end of a run, oldest first; without lines still being written."""
    place = path / SCALARS
    if open_files(path).weight(SCALARS) is None:  # rejects links
        return []
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(place, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_TEXT:
                raise RunError(f"{place} is no file of a run, expected one of at most {LARGEST_TEXT} bytes")
            file.seek(max(status.st_size - TAIL, 0))
            lines = file.read(TAIL).split(b"\n")
    except OSError as error:
        raise RunError(f"{place} cannot be read: {error.strerror or error}") from error
    whole = lines[status.st_size > TAIL : -1]  # the first may have been cut
    if not whole and status.st_size > TAIL:
        raise RunError(f"{place} has a line of more than {TAIL} bytes, expected the lines of a run")
    try:
        stride = -(-len(whole) // SPARKS) or 1
        return [measurement(object_in(line, place)) for line in whole[::-stride][::-1]]
    except (FeatlearnError, OverflowError) as error:
        raise RunError(f"{place} has a line that cannot be read: {error}") from error


def _attempt(act: Callable[[Any], Any], argument: Any) -> tuple[Any, str]:
    """Return the result of `act`, and an error message. No run may end the server."""
    try:
        return act(argument), ""
    except FeatlearnError as error:
        return None, str(error)[:600]
    except MemoryError:
        return None, "the report needs more memory than there is"
    except Exception as error:
        return None, f"{argument} cannot be shown: {type(error).__name__}: {error}"[:600]


def _open_and_diagnose(path: Path) -> "Findings | None":
    """Open and diagnose a run, so that errors name it. None if it holds no measurement.

    The findings keep their numbers, so that the report computes none of them again.
    """
    from featlearn.reporting.content_blocks import POINTS
    from featlearn.reporting.groups import groups

    if _size(path) > LARGEST_RUN:
        raise RunError(
            f"{path} takes {_size(path)} bytes, more than the {LARGEST_RUN} that are reported while a run is written; "
            f"featlearn report {path} does it"
        )
    run = open_run(path)
    if not run.lines:
        return None
    (group,) = groups(run, points=POINTS)
    _ = group.diagnosis
    return group.first


def _size_and_time(path: Path) -> tuple[int, int]:
    """Return the size and the modification time of a run, which change when something is written."""
    try:
        return _size(path), (path / RUN).lstat().st_mtime_ns
    except (FeatlearnError, OSError):
        return 0, 0


def _size(path: Path) -> int:
    files = open_files(path)
    return sum(files.weight(place) or 0 for place in files.names())


def _keys(root: Path) -> list[str]:
    """Return the paths of the runs below a folder."""
    if (root / RUN).is_file():
        return ["."]
    folders = (
        name for parent in _folders(root) for name in (parent, *(f"{parent}/{n}" for n in _folders(root / parent)))
    )
    return [name for name in islice(folders, MOST_ENTRIES) if (root / name / RUN).is_file()]


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, without links."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, MOST_ENTRIES) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
