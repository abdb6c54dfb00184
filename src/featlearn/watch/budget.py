"""How much of a run measuring may cost."""

import math
import time
from collections.abc import Callable

from featlearn.errors import InputTypeError, InputValueError

SAVED_UP = 20.0
"""Seconds of training that count as done before they are. At 5 % measurements may so take one second in all before they
have to be earned: the early steps, where most happens, are seen, and nobody waits for it."""


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
        self._begun = self._clock()
        self.measuring = 0.0
        """Seconds spent on measurements, all of them."""
        self.counted = 0.0
        """Seconds spent on measurements that count."""

    def begin(self) -> None:
        """Training begins now."""
        self._begun, self.measuring = self._clock(), 0.0

    @property
    def training(self) -> float:
        """Seconds spent on training."""
        return self._clock() - self._begun - self.measuring

    @property
    def overhead(self) -> float:
        """Counted measurements relative to training."""
        training = self.training
        return self.counted / training if training > 0 else 0.0

    def earned(self, steps: int) -> float:
        """Seconds of measuring that may have been spent after so many steps of training.

        What is saved up is handed out evenly in the logarithm of the step, or the first three steps would take it all.
        """
        if self.share is None:
            return math.inf
        training = self.training
        pace = training / max(steps, 1)
        handed_out = math.log1p(steps) / math.log1p(SAVED_UP / pace) if pace > 0 else 0.0
        return self.share * max(training, SAVED_UP * handed_out)

    def spent(self, seconds: float, *, counted: bool) -> None:
        """So long was not training."""
        self.measuring += seconds
        if counted:
            self.counted += seconds
