"""Progress of a sweep on stderr: a bar on a terminal, elsewhere lines of key=value; both say the time left."""

import sys
import time
from typing import Any

EVERY = 30.0
"""Seconds after which a line is written, however little was done."""
LINES = 20
"""About how many lines a sweep writes."""


class SweepProgress:
    """Counts seeds that are done."""

    def __init__(self, name: str, total: int, done: int, failed: int, *, quiet: bool = False) -> None:
        self._name, self._total, self._done, self._failed = name, total, done, failed
        self._before, self._begun = done, time.monotonic()
        self._quiet, self._said, self._said_at = quiet, done, self._begun
        self._bar: Any = None
        if not quiet and total > done and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[words]}"),
                progress.TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(name, total=total, completed=done, words=self._words(None))

    def finished(self, point: str, error: str | None) -> None:
        """One seed more is done, or failed with an error."""
        self._done += 1
        self._failed += error is not None
        if self._quiet:
            return
        if error is not None:
            self._print(f"featlearn: {point} failed: {error}")
        now = time.monotonic()
        left = (now - self._begun) / (self._done - self._before) * (self._total - self._done)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, words=self._words(left))
        elif (
            self._done == self._total or self._done - self._said >= self._total / LINES or now - self._said_at >= EVERY
        ):
            self._said, self._said_at = self._done, now
            self._print(
                f"sweep={self._name} done={self._done}/{self._total} failed={self._failed} "
                f"seconds={now - self._begun:.1f} left={left:.1f}"
            )

    def __enter__(self) -> "SweepProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _words(self, left: float | None) -> str:
        failed = f"{self._failed} failed, " if self._failed else ""
        return failed + ("" if left is None else f"about {duration(left)} left")

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
