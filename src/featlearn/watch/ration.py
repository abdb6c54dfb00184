"""What is measured next: quantities that cost much share the budget, so that a cheap one is measured more often."""

import math
from collections.abc import Mapping, Sequence

from featlearn.watch.budget import Budget
from featlearn.watch.instruments import Instrument

EXPENSIVE = 0.2
"""Relative to the most expensive quantity; what costs less comes with the others, whenever it is due."""


class Ration:
    """The budget, divided among the quantities of a run."""

    def __init__(self, budget: Budget, instruments: Sequence[Instrument]) -> None:
        self.budget, self._instruments = budget, instruments
        self._common = 0.0
        """Seconds that every measurement takes, whatever is read."""

    def note(self, costs: Mapping[str, float], common: float, *, counted: bool) -> None:
        """What the parts of a measurement have cost."""
        self._common = common
        for one in self._instruments:
            if one.name in costs:
                one.cost = costs[one.name]
                one.spent += costs[one.name] if counted else 0.0

    def affordable(self, steps: int) -> list[Instrument]:
        """What is due and fits into the budget now."""
        pending = [one for one in self._instruments if one.pending]
        earned, rivals = self.budget.earned(steps), self._rivals()
        if math.isinf(earned):
            return pending
        chosen: list[Instrument] = []
        left, aside = earned - self.budget.counted - self._common, self._aside(rivals)
        for one in sorted(pending, key=lambda one: one.spent):
            own = one not in rivals or aside + (one.spent + one.cost) * len(rivals) <= earned
            if own and one.cost <= left:
                chosen.append(one)
                left -= one.cost
        # What costs little waits for the others, and is then measured at the same step.
        alone = any(one in rivals for one in pending) and not any(one in rivals for one in chosen)
        return [] if alone else chosen

    def missing(self, steps: int, fewer: int = 1) -> float:
        """Seconds still to be earned for anything that is due to fit, with so many times fewer samples."""
        rivals = self._rivals()
        aside = self._aside(rivals)
        needs = [
            max(
                aside + (one.spent + one.cost / fewer) * len(rivals),
                self.budget.counted + (self._common + one.cost) / fewer,
            )
            for one in self._instruments
            if one.pending and (one in rivals or not any(other.pending for other in rivals))
        ]
        return min(needs, default=0.0) - self.budget.earned(steps)

    def _aside(self, rivals: Sequence[Instrument]) -> float:
        """Seconds that went to what is not shared out: cheap quantities, lines of numbers, steps."""
        return self.budget.counted - sum(one.spent for one in rivals)

    def _rivals(self) -> list[Instrument]:
        largest = max((one.cost for one in self._instruments), default=0.0)
        return [one for one in self._instruments if one.cost >= EXPENSIVE * largest]
