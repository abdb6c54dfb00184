"""Seconds of training and of measuring. They are printed and recorded, and decide nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

LARGEST_SHARE = 1.0
"""Larger shares of the training time are reported in seconds: 829 % of a run of 40 ms means nothing."""


class Cost(NamedTuple):
    """Wall time in seconds."""

    training: float = 0.0
    measuring: float = 0.0
    """All measurements, first and last included."""

    @property
    def overhead(self) -> float:
        """Measuring relative to training."""
        return self.measuring / self.training if self.training > 0 else 0.0

    @property
    def wall_share(self) -> float:
        """Measuring relative to training and measuring together."""
        whole = self.training + self.measuring
        return self.measuring / whole if whole > 0 else 0.0

    def __str__(self) -> str:
        small = self.overhead <= LARGEST_SHARE
        share = f"{percent(self.overhead)} of training" if small else f"training took {self.training:.2g} s"
        return f"{self.measuring:.1f} s of {sum(self):.1f} s for measuring, first and last included: {share}"


def percent(share: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * share:.2g} %" if share < 0.095 else f"{100 * share:.0f} %"


class Stopwatch:
    """Wall time of training and of measuring."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = clock()
        self._measured = 0.0
        self._open: float | None = None
        self._before, self._trained_before = Cost(), 0.0

    def resume(self, cost: Cost | None, trained: float) -> None:
        """Continue a run: its cost so far, None where that is unknown, and its seconds of training."""
        self._before, self._trained_before = cost or Cost(), trained

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count a block as measuring; blocks inside it count once."""
        if self._open is not None:
            yield
            return
        self._open = self._clock()
        try:
            yield
        finally:
            self._measured += self._clock() - self._open
            self._open = None

    @property
    def training(self) -> float:
        """Seconds of training in this process."""
        now = self._clock() if self._open is None else self._open
        return now - self._begun - self._measured

    @property
    def trained(self) -> float:
        """Seconds of training, with those of earlier processes."""
        return self._trained_before + self.training

    @property
    def cost(self) -> Cost:
        """Cost of the run, with that of earlier processes as far as it is known."""
        return Cost(self._before.training + self.training, self._before.measuring + self._measured)
