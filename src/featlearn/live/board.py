"""The runs of a folder, found and read without ever leaving it."""

import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

from featlearn.errors import RunError
from featlearn.live.following import FollowedRun
from featlearn.live.verdict import verdict
from featlearn.record.layout import RUN

RUNS = 16
"""Runs that are followed at once; further ones are counted."""
ENTRIES = 2000
"""Entries of a folder, and folders below it, that are looked at."""
AGAIN = 1.0
"""Seconds between two searches for runs."""


class Board:
    """A run, or the runs in a folder, down to two levels; links are not followed.

    `news` and `whole` are called from one thread; `judge`, which takes long, may be called from another.
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

    @property
    def waits(self) -> bool:
        """Whether a finished run has no verdict on all of it."""
        return any(run.finished and run.lines > run.judged for run in self._runs.copy().values())

    def judge(self) -> dict[str, Any] | None:
        """The verdict on the run whose last one is the most lines behind; None if none is."""
        behind = max(self._runs.copy().values(), key=lambda run: run.lines - run.judged, default=None)
        if behind is None or behind.lines == behind.judged:
            return None
        alone = len(self._runs) == 1
        return {"runs": [behind.judge(lambda run: verdict(run, pictures=alone))], "left_out": self.left_out}

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
