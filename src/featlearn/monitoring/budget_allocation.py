"""What to measure next: expensive quantities share the budget equally, so cheaper ones are measured more often."""

import math
from collections.abc import Mapping, Sequence

from featlearn.monitoring.budget import Budget
from featlearn.monitoring.scheduled_quantities import ScheduledQuantity

EXPENSIVE = 0.2
"""Cost relative to the most expensive quantity; cheaper ones are measured with the others, whenever they are due."""


class BudgetAllocation:
    """The budget, divided among the quantities of a run."""

    def __init__(self, budget: Budget, quantities: Sequence[ScheduledQuantity]) -> None:
        self.budget, self._quantities = budget, quantities
        self._common = 0.0
        """Seconds that every measurement takes, whichever quantities are read."""

    def note(self, costs: Mapping[str, float], common: float, *, counted: bool) -> None:
        """Record the costs of a measurement: of each quantity, and common to all."""
        self._common = common
        for one in self._quantities:
            if one.name in costs:
                one.cost = costs[one.name]
                one.spent += costs[one.name] if counted else 0.0

    def affordable(self, steps: int) -> list[ScheduledQuantity]:
        """Quantities that are due and fit into the budget now."""
        pending = [one for one in self._quantities if one.pending]
        earned, expensive = self.budget.earned(steps), self._expensive()
        if math.isinf(earned):
            return pending
        chosen: list[ScheduledQuantity] = []
        left, other_cost = earned - self.budget.counted - self._common, self._other_cost(expensive)
        for one in sorted(pending, key=lambda one: one.spent):
            own = one not in expensive or other_cost + (one.spent + one.cost) * len(expensive) <= earned
            if own and one.cost <= left:
                chosen.append(one)
                left -= one.cost
        # Cheap quantities wait for expensive ones, to be measured at the same step.
        alone = any(one in expensive for one in pending) and not any(one in expensive for one in chosen)
        return [] if alone else chosen

    def missing(self, steps: int, fewer: int = 1) -> float:
        """Seconds of budget missing until the first due quantity fits; `fewer` divides the number of samples."""
        expensive = self._expensive()
        other_cost = self._other_cost(expensive)
        needs = [
            max(
                other_cost + (one.spent + one.cost / fewer) * len(expensive),
                self.budget.counted + (self._common + one.cost) / fewer,
            )
            for one in self._quantities
            if one.pending and (one in expensive or not any(other.pending for other in expensive))
        ]
        return min(needs, default=0.0) - self.budget.earned(steps)

    def _other_cost(self, expensive: Sequence[ScheduledQuantity]) -> float:
        """Seconds spent on everything but expensive quantities: cheap quantities, lines of numbers, steps."""
        return self.budget.counted - sum(one.spent for one in expensive)

    def _expensive(self) -> list[ScheduledQuantity]:
        largest = max((one.cost for one in self._quantities), default=0.0)
        return [one for one in self._quantities if one.cost >= EXPENSIVE * largest]
