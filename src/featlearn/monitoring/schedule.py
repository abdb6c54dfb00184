"""The schedule of measurements."""

import math
from collections.abc import Callable
from typing import Literal

from featlearn.errors import InputTypeError, InputValueError

Every = Literal["log"] | int | Callable[[int], bool]
"""`"log"`: 0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15 ... each a fifth later than the one before; a number: every so many
steps; or a function of the step."""

GROWTH = 1.2  # thirteen measurements in every factor of ten


class Schedule:
    """Decides for each step whether to measure after it. Step 0 is before training; steps must be asked in order."""

    def __init__(self, every: Every) -> None:
        logarithmic = isinstance(every, str) and every == "log"
        counted = isinstance(every, int) and not isinstance(every, bool)
        if counted and isinstance(every, int) and every < 1:
            raise InputValueError(f"every={every}, expected a number of steps >= 1, 'log', or a function of the step")
        if not (logarithmic or counted or callable(every)):
            raise InputTypeError(f"every={every!r}, expected 'log', a number of steps, or a function of the step")
        self._every, self.logarithmic = every, logarithmic
        self.following = 0
        """No step before this one is due."""

    def due(self, step: int) -> bool:
        """Whether to measure after this step."""
        every = self._every
        if callable(every):
            self.following = step + 1
            return bool(every(step))
        if isinstance(every, int):
            self.following = step - step % every + every
            return step % every == 0
        if step < self.following:
            return False
        self.following = max(step + 1, math.ceil(step * GROWTH))
        return True
