"""Progress on stderr: a bar on a terminal, elsewhere one line at log-spaced steps."""

import sys
import time
from typing import Any


class ProgressDisplay:
    """Shows the progress of a run."""

    def __init__(self, name: str, steps: int, *, quiet: bool = False) -> None:
        self.name, self.steps, self.quiet = name, steps, quiet
        self._begun = time.perf_counter()
        self._next = 1
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("loss {task.fields[loss]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(name, total=steps, loss="")

    def step(self, step: int, loss: Any) -> None:
        """Show that this many steps are done."""
        if self.quiet or (step < self._next and step != self.steps):
            return
        if self._bar is None:
            elapsed = time.perf_counter() - self._begun
            print(f"run={self.name} step={step} loss={float(loss):.4g} seconds={elapsed:.1f}", file=sys.stderr)
            self._next = 4 * step
        else:
            self._bar.update(self._task, completed=step, loss=f"{float(loss):.4g}")
            self._next = step + max(1, self.steps // 200)

    def __enter__(self) -> "ProgressDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
