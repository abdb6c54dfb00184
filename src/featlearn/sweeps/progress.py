"""Progress on stderr: a bar on a terminal, elsewhere lines of key=value."""

import sys
import time
from typing import Any, Self

SECONDS_PER_LINE = 30.0
"""Longest time between two lines, in seconds, while seeds end."""
LINES = 20
"""Approximate number of lines that a sweep writes."""


class ProgressBar:
    """A bar on a terminal, removed at the end. Without a terminal, `shown` is False and nothing is drawn."""

    def __init__(self, name: str, total: int, *, done: int = 0, quiet: bool = False) -> None:
        self._bar: Any = None
        if quiet or not sys.stderr.isatty():
            return
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[details]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, details="")

    @property
    def shown(self) -> bool:
        """True if a bar is drawn."""
        return self._bar is not None

    def update(self, done: int, details: str) -> None:
        """Draw the bar with this many units done."""
        self._bar.update(self._task, completed=done, details=details)

    def print(self, line: str) -> None:
        """Write a line to stderr, above the bar if there is one."""
        if self.shown:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self.shown:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.shown:
            self._bar.stop()


class SweepProgress(ProgressBar):
    """Count finished seeds, and estimate the remaining time."""

    def __init__(self, name: str, total: int, done: int, failed: int, *, quiet: bool = False) -> None:
        super().__init__(name, total, done=done, quiet=quiet or total == done)
        self._name, self._total, self._done, self._failed = name, total, done, failed
        self._before, self._begun = done, time.monotonic()
        self._quiet, self._printed, self._printed_at = quiet, done, self._begun

    def finish_seed(self, point: str, error: str | None) -> None:
        """Count a seed that is done or failed."""
        self._done += 1
        self._failed += error is not None
        if self._quiet:
            return
        if error is not None:
            self.print(f"featlearn: {point} failed: {error}")
        now = time.monotonic()
        remaining = (now - self._begun) / (self._done - self._before) * (self._total - self._done)
        due = self._done - self._printed >= self._total / LINES or now - self._printed_at >= SECONDS_PER_LINE
        if self.shown:
            failed = f"{self._failed} failed, " if self._failed else ""
            self.update(self._done, f"{failed}about {duration(remaining)} left")
        elif due or self._done == self._total:
            self._printed, self._printed_at = self._done, now
            self.print(
                f"sweep={self._name} done={self._done}/{self._total} failed={self._failed} "
                f"seconds={now - self._begun:.1f} left={remaining:.1f}"
            )


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
