"""Progress of a training run on stderr: a bar on a terminal, otherwise lines at log-spaced steps."""

import time
from typing import Any

from featlearn.sweeps.progress import ProgressBar


class ProgressDisplay(ProgressBar):
    """Show steps and loss."""

    def __init__(self, name: str, steps: int, *, quiet: bool = False) -> None:
        super().__init__(name, steps, quiet=quiet)
        self.name, self.steps, self.quiet = name, steps, quiet
        self._begun = time.perf_counter()
        self._next = 1

    def step(self, step: int, loss: Any) -> None:
        """Show that this many steps are done."""
        if self.quiet or (step < self._next and step != self.steps):
            return
        if self.shown:
            self.update(step, f"loss {float(loss):.4g}")
            self._next = step + max(1, self.steps // 200)
        else:
            elapsed = time.perf_counter() - self._begun
            self.print(f"run={self.name} step={step} loss={float(loss):.4g} seconds={elapsed:.1f}")
            self._next = 4 * step
