"""The runs of a folder, found and read without ever leaving it."""

import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from featlearn.errors import RunError
from featlearn.live.following import FollowedRun
from featlearn.live.verdict import pictures, verdict
from featlearn.record import Run
from featlearn.record.layout import RUN

RUNS = 16
"""Runs that are followed at once; further ones are counted."""
ENTRIES = 2000
"""Entries of a folder, and folders below it, that are looked at."""
AGAIN = 1.0
"""Seconds between two searches for runs."""


class Board:
    """A run, or the runs in a folder, down to two levels; links are not followed.

    `news` and `whole` are called from one thread; `judge` and `draw`, which take long, may be called from others.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise RunError(f"{path} is no folder, expected the folder of a run that is written, or one of runs")
        self.path = path.resolve()
        self.left_out = 0
        self._runs: dict[str, FollowedRun] = {}
        self._search_at = 0.0
        self.more = False
        """Whether the last call of `news` left something to read."""

    def news(self) -> dict[str, Any] | None:
        """Read what was added; what the page is to be told, None if nothing."""
        before = self.left_out
        if time.monotonic() >= self._search_at:
            self._search()
            self._search_at = time.monotonic() + AGAIN
        told = [news for run in self._runs.values() if (news := run.news()) is not None]
        self.more = any(run.more for run in self._runs.values())
        return {"runs": told, "left_out": self.left_out} if told or before != self.left_out else None

    def whole(self) -> dict[str, Any]:
        """All that the page shows."""
        return {"runs": [run.whole() for run in self._runs.values()], "left_out": self.left_out, "whole": True}

    def waits(self, what: str) -> bool:
        """Whether a finished run, all of it, has no "verdict"; or, if it is alone, no "pictures"."""
        runs = list(self._runs.copy().values())
        return (what == "verdict" or len(runs) == 1) and any(run.finished and run.behind(what) for run in runs)

    def judge(self) -> dict[str, Any] | None:
        """The verdict on the run whose last one is the most lines behind; None if none is."""
        return self._look("verdict", verdict)

    def draw(self) -> dict[str, Any] | None:
        """Spectra and kernels of a run that is alone; None if nothing has come since the last ones."""
        return self._look("pictures", pictures) if len(self._runs) == 1 else None

    def _look(self, what: str, look: Callable[[Run], dict[str, Any]]) -> dict[str, Any] | None:
        furthest = max(self._runs.copy().values(), key=lambda run: run.behind(what), default=None)
        if furthest is None or not furthest.behind(what):
            return None
        return {"runs": [furthest.view(what, look)], "left_out": self.left_out}

    def _search(self) -> None:
        found = _places(self.path)
        for key in found:
            if key not in self._runs and len(self._runs) < RUNS:
                self._runs[key] = FollowedRun(self.path / key, key)
        self.left_out = len(set(found) - self._runs.keys())


def _places(root: Path) -> list[str]:
    """Runs by their path below `root`, sorted."""
    if (root / RUN).is_file():
        return ["."]
    below = (name for depth in _folders(root) for name in (depth, *(f"{depth}/{n}" for n in _folders(root / depth))))
    return sorted(name for name in islice(below, ENTRIES) if (root / name / RUN).is_file())


def _folders(folder: Path) -> list[str]:
    """Names of the folders in a folder that are no links."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, ENTRIES) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
