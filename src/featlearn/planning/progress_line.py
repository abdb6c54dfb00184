"""A line on the terminal for work that takes long; silent when piped."""

import sys
import time


class ProgressLine:
    """Counts steps of known number, and shows them from the third second on, on a terminal alone."""

    def __init__(self, what: str, steps: int) -> None:
        self._what, self._steps, self._done = what, max(steps, 1), 0
        self._begun = self._shown = time.monotonic()
        self._visible = False

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._begun < 3.0 or now - self._shown < 0.5 or not sys.stderr.isatty():
            return
        self._shown, self._visible = now, True
        share = min(self._done / self._steps, 1.0)
        left = (now - self._begun) * (1.0 / share - 1.0)
        print(f"\r{self._what} {share:4.0%}, about {left:.0f} s left ", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the line away."""
        if self._visible:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
