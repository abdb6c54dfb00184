"""How much of a run measuring may cost."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from featlearn.errors import InputTypeError, InputValueError

SAVED_UP = 20.0
"""Seconds of training that count as done before they are. At 5 % measurements may so take one second in all before they
have to be earned: the early steps, where most happens, are seen, and nobody waits for it."""


LARGEST_SHARE = 1.0
"""A larger share of the training time is said in seconds: 829 % of a run of 40 ms means nothing."""


class Cost(NamedTuple):
    """Seconds."""

    training: float = 0.0
    counted: float = 0.0
    """On measurements that count."""
    measuring: float = 0.0
    """On all measurements."""

    @property
    def overhead(self) -> float:
        """Counted measurements relative to training."""
        return self.counted / self.training if self.training > 0 else 0.0

    def account(self, share: float | None) -> str:
        """In words, under a budget."""
        small = self.overhead <= LARGEST_SHARE
        between = f"{_percent(self.overhead)} of training" if small else f"{self.counted:.2g} s in between"
        if share is None:
            limit = "no budget"
        elif self.overhead <= 1.02 * share:  # what is said is rounded
            limit = f"within the budget of {_percent(share)}"
        elif self.counted <= share * SAVED_UP:
            limit = f"within the {share * SAVED_UP:.2g} s that a budget of {_percent(share)} leaves a short run"
        else:
            limit = f"over the budget of {_percent(share)}"
        apart = max(self.measuring - self.counted, 0.0)
        whole = self.training + self.measuring
        return f"{self.measuring:.1f} s of {whole:.1f} s ({between}, {limit}; first and last {apart:.1f} s)"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


class Budget:
    """A share of the wall time of training; what the first and the last measurement cost is not counted.

    None allows everything.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] | None = None) -> None:
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
            raise InputTypeError(f"budget={share!r}, expected a share of the wall time between 0 and 1, or None")
        if share is not None and not 0 < share <= 1:
            raise InputValueError(f"budget={share}, expected a share of the wall time between 0 and 1, or None")
        self.share, self._clock = share, time.perf_counter if clock is None else clock
        self._begun, self._before, self._from = self._clock(), Cost(), 0
        self.measuring = 0.0
        """Seconds spent on measurements, all of them."""
        self.counted = 0.0
        """Seconds spent on measurements that count."""

    def begin(self, first: float = 0.0) -> None:
        """Training begins now; the first measurement took so many seconds."""
        self._begun, self.measuring = self._clock() - first, first

    def go_on(self, step: int, earlier: "Cost | None") -> None:
        """A run that stood at this step goes on; None where it is not known what it had cost by then.

        What may be spent is earned from here: earlier processes spent what was theirs.
        """
        self._from, self._before = step, earlier or Cost()

    @property
    def cost(self) -> "Cost":
        """What the run has cost, with what is known of earlier processes."""
        before, now = self._before, Cost(self.training, self.counted, self.measuring)
        return Cost(*(a + b for a, b in zip(before, now, strict=True)))

    @property
    def training(self) -> float:
        """Seconds spent on training, by this process."""
        return self._clock() - self._begun - self.measuring

    def earned(self, steps: int) -> float:
        """Seconds of measuring that may have been spent after so many steps of training.

        What is saved up is handed out evenly in the logarithm of the step, or the first three steps would take it all.
        """
        if self.share is None:
            return math.inf
        pace = self.pace(steps)
        handed_out = math.log1p(max(steps - self._from, 0)) / math.log1p(SAVED_UP / pace) if pace > 0 else 0.0
        return self.share * max(self.training, SAVED_UP * handed_out)

    def pace(self, steps: int) -> float:
        """Seconds that a step takes."""
        return self.training / max(steps - self._from, 1)

    def spent(self, seconds: float, *, counted: bool) -> None:
        """So long was not training."""
        self.measuring += seconds
        if counted:
            self.counted += seconds
