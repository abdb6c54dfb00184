"""How much of a run measuring may cost."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from featlearn.errors import InputTypeError, InputValueError

INITIAL_CREDIT = 20.0
"""Seconds of training credited in advance. At a budget of 5 % this allows one second of measurements before any is
earned, so that the early steps, where most happens, are measured."""


LARGEST_SHARE = 1.0
"""Larger shares of the training time are reported in seconds: 829 % of a run of 40 ms means nothing."""


class Cost(NamedTuple):
    """Wall time in seconds."""

    training: float = 0.0
    counted: float = 0.0
    """Measurements that count against the budget."""
    measuring: float = 0.0
    """All measurements."""

    @property
    def overhead(self) -> float:
        """Counted measurements relative to training."""
        return self.counted / self.training if self.training > 0 else 0.0

    @property
    def wall_share(self) -> float:
        """All measurements, first and last included, relative to training and measuring together."""
        whole = self.training + self.measuring
        return self.measuring / whole if whole > 0 else 0.0

    def summary(self, share: float | None) -> str:
        """One line for the user: time spent, and whether it is within the budget."""
        small = self.overhead <= LARGEST_SHARE
        between = f"{_percent(self.overhead)} of training" if small else f"{self.counted:.2g} s"
        if share is None:
            limit = "no budget"
        elif self.overhead <= 1.02 * share:  # the printed value is rounded
            limit = f"within the budget of {_percent(share)}"
        elif self.counted <= share * INITIAL_CREDIT:
            limit = f"within the {share * INITIAL_CREDIT:.2g} s that a budget of {_percent(share)} leaves a short run"
        else:
            limit = f"over the budget of {_percent(share)}"
        apart = max(self.measuring - self.counted, 0.0)
        whole = self.training + self.measuring
        return (
            f"{self.measuring:.1f} s of {whole:.1f} s, {_percent(self.wall_share)} of the wall time "
            f"(first and last {apart:.1f} s; between them {between}, {limit})"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.095 else f"{100 * share:.0f} %"


class Budget:
    """The share of training time that measurements may take; None for no limit.

    The first and the last measurement do not count.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] | None = None) -> None:
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
            raise InputTypeError(f"budget={share!r}, expected a share of the wall time between 0 and 1, or None")
        if share is not None and not 0 < share <= 1:
            raise InputValueError(f"budget={share}, expected a share of the wall time between 0 and 1, or None")
        self.share, self._clock = share, time.perf_counter if clock is None else clock
        self._begun, self._before, self._from = self._clock(), Cost(), 0
        self.measuring = 0.0
        """Seconds spent on all measurements."""
        self.counted = 0.0
        """Seconds spent on measurements that count against the budget."""

    def begin(self, first: float = 0.0) -> None:
        """Start the clock of training; `first` is the duration of the first measurement in seconds."""
        self._begun, self.measuring = self._clock() - first, first

    def resume(self, step: int, earlier: "Cost | None") -> None:
        """Continue a run from this step; `earlier` is its cost so far, None where that is unknown.

        The budget is earned from here on: earlier processes had their own.
        """
        self._from, self._before = step, earlier or Cost()

    @property
    def cost(self) -> "Cost":
        """Cost of the run, including earlier processes as far as it is known."""
        before, now = self._before, Cost(self.training, self.counted, self.measuring)
        return Cost(*(a + b for a, b in zip(before, now, strict=True)))

    @property
    def training(self) -> float:
        """Seconds that this process spent on training."""
        return self._clock() - self._begun - self.measuring

    def earned(self, steps: int) -> float:
        """Seconds of measuring allowed in total after this number of training steps.

        The initial credit is released evenly in the logarithm of the step; otherwise the first three steps use it up.
        """
        if self.share is None:
            return math.inf
        seconds = self.seconds_per_step(steps)
        released = math.log1p(max(steps - self._from, 0)) / math.log1p(INITIAL_CREDIT / seconds) if seconds > 0 else 0.0
        return self.share * max(self.training, INITIAL_CREDIT * released)

    def seconds_per_step(self, steps: int) -> float:
        """Mean duration of a training step in seconds."""
        return self.training / max(steps - self._from, 1)

    def spent(self, seconds: float, *, counted: bool) -> None:
        """Add seconds that were not spent on training."""
        self.measuring += seconds
        if counted:
            self.counted += seconds
