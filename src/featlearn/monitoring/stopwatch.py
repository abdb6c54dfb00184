"""How long a run has trained, and how long it was measured."""

import time
from collections.abc import Callable
from typing import NamedTuple

from featlearn.errors import InputTypeError, InputValueError

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

    def summary(self, share: float | None) -> str:
        """One line for the user: time spent, and whether it is within the budget."""
        small = self.overhead <= LARGEST_SHARE
        price = f"{_percent(self.overhead)} of training" if small else f"training took {self.training:.2g} s"
        spent = (
            f"{self.measuring:.1f} s of {self.training + self.measuring:.1f} s for measuring, first and last included"
        )
        if share is None:
            return f"{spent}: {price}, no budget"
        if self.overhead <= 1.02 * share:  # the printed value is rounded
            return f"{spent}: {price}, within the budget of {_percent(share)}"
        return f"{spent}: {price}, above the budget of {_percent(share)}, which short runs may exceed"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.095 else f"{100 * share:.0f} %"


def checked_budget(share: float | None) -> float | None:
    """The argument `budget`: a share of training time, or None for no limit."""
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        raise InputTypeError(f"budget={share!r}, expected a share of the training time between 0 and 1, or None")
    if share is not None and not 0 < share <= 1:
        raise InputValueError(f"budget={share}, expected a share of the training time between 0 and 1, or None")
    return share


class Stopwatch:
    """Wall time of training and of measuring."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun, self._before = clock(), Cost()
        self.measuring = 0.0
        """Seconds that this process has spent on measuring."""

    def begin(self, first: float = 0.0) -> None:
        """Start with training; the first measurement took `first` seconds."""
        self._begun, self.measuring = self._clock() - first, first

    def resume(self, earlier: Cost | None) -> None:
        """Continue a run; `earlier` is its cost so far, None where that is unknown."""
        self._before = earlier or Cost()

    @property
    def training(self) -> float:
        """Seconds that this process has spent on training."""
        return self._clock() - self._begun - self.measuring

    @property
    def cost(self) -> Cost:
        """Cost of the run, including earlier processes as far as it is known."""
        return Cost(self._before.training + self.training, self._before.measuring + self.measuring)

    def spent(self, seconds: float) -> None:
        """Add seconds of measuring."""
        self.measuring += seconds
