"""Which of the scheduled steps are measured: decided from step numbers, and from costs that are taken once and rounded.

The clock of the machine enters by two or three numbers only, rounded to factors of four, so that a run records the same
steps on an idle and on a busy machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featlearn.monitoring.scheduled_quantities import ScheduledQuantity

CHEAP = ("gap", "moved", "richness", "weights")
"""Quantities of a few forward passes; they have a part of the budget of their own."""
CHEAP_PART = 0.2
CREDIT, CHEAP_CREDIT = 150.0, 20.0
"""Seconds of training that are credited in advance, so that the first steps, where most happens, can be measured."""
FACTOR = 4.0
"""Costs are rounded up to powers of this."""
SMALLEST, SMALLEST_CHEAP, SMALLEST_STEP = 2.0**-2, 2.0**-4, 2.0**-10
"""Seconds; costs below are rounded up to these. For a small network nothing else of the clock counts: it is measured
24 times in 10,000 steps, first and last included."""
TIMED = 16
"""The duration of a training step is taken at the first scheduled step from this one on."""
HORIZON = 1000
"""Steps within which the promised measurements must be affordable, else the probe is thinned."""
CLOSEST = 1.4
"""Of a logarithmic schedule, steps closer than this factor to the last measured one are left to cheap quantities."""
DOUBLING = 2.0
"""One measurement is promised for every doubling of the step."""
FEWEST = 32
"""Samples that thinning leaves, at least."""


def rounded(seconds: float, smallest: float) -> float:
    """Rounded up to the smallest cost times a power of FACTOR."""
    if not seconds > smallest:
        return smallest
    return smallest * FACTOR ** math.ceil(math.log(seconds / smallest, FACTOR) - 1e-9)


@dataclass
class CostClass:
    """Quantities that are measured at the same steps and share a part of the budget."""

    share: float
    credit: float
    cost: float | None = None
    """Rounded seconds of one measurement; None until known."""
    count: int = 1
    """Measurements that were decided on, the first one included."""
    last: int = 0
    """The latest step of them."""
    spacing: float = DOUBLING
    """A scheduled step this many times the last measured one is measured in any case."""
    closest: float = 1.0
    """One less than this many times the last measured one is not."""

    def allowance(self, steps: float, step_seconds: float) -> float:
        """Seconds that may have been spent after so many steps."""
        return self.share * (self.credit + steps * step_seconds)

    def allows(self, step: int, step_seconds: float | None) -> bool:
        """Whether this scheduled step is measured."""
        if self.cost is None:
            return True
        if step_seconds is None and not self.fits(0, 0.0):
            return False  # the probe may have to be thinned first
        if step >= self.spacing * self.last:
            return True
        # This one, and the last of the run, which is made in any case.
        affordable = (self.count + 2) * self.cost <= self.allowance(step, step_seconds or 0.0)
        return affordable and step >= self.closest * self.last

    def fits(self, steps: float, step_seconds: float, stride: int = 1) -> bool:
        """Whether the measurements that are promised are affordable, with a probe thinned by `stride`."""
        promised = math.log(HORIZON) / math.log(self.spacing)
        return self.cost is None or promised * self.cost / stride <= self.allowance(steps, step_seconds)

    def stride(self, samples: int, step_seconds: float) -> int:
        """The smallest stride over the probe at which the promised measurements are affordable, or the largest."""
        stride = 1
        while samples // (2 * stride) >= FEWEST and not self.fits(HORIZON, step_seconds, stride):
            stride *= 2
        return stride

    def thin(self, stride: int, step_seconds: float) -> None:
        """The probe is thinned by `stride`; where that is not enough, fewer measurements are promised."""
        self.cost = None if self.cost is None else self.cost / stride
        while not self.fits(HORIZON, step_seconds) and self.spacing < HORIZON:
            self.spacing **= 2


class Allocation:
    """The budget of a run, divided between cheap and expensive quantities."""

    def __init__(self, share: float | None, *, logarithmic: bool) -> None:
        self.share = share
        part = share or 0.0
        self.cheap = CostClass(CHEAP_PART * part, CHEAP_CREDIT)
        self.expensive = CostClass((1 - CHEAP_PART) * part, CREDIT, closest=CLOSEST if logarithmic else 1.0)
        self.step_seconds: float | None = None
        """Rounded duration of a training step; None until known."""
        self._first: tuple[int, float] | None = None

    def note(self, step: int, costs: Mapping[str, float], common: float) -> None:
        """Take the costs of a measurement, once for each class: of each quantity, and common to all."""
        cheap = [cost for name, cost in costs.items() if name in CHEAP]
        expensive = [cost for name, cost in costs.items() if name not in CHEAP]
        if self.expensive.cost is None and expensive:
            self.expensive.cost = rounded(common + sum(expensive), SMALLEST)
        # There is no gap at the start, and how its Jacobian-vector product is made is found out at the first step.
        if self.cheap.cost is None and cheap and step > 1:
            self.cheap.cost = rounded(sum(cheap) + common, SMALLEST_CHEAP)

    @property
    def untimed(self) -> bool:
        """Whether the duration of a training step is wanted, and not known yet."""
        return self.share is not None and self.step_seconds is None

    def timed_now(self, step: int, clock: float) -> bool:
        """Whether the duration of a step becomes known: between the first of these calls and one from TIMED on.

        `clock`: seconds, measuring left out.
        """
        if not self.untimed:
            return False
        begun, before = self._first = self._first or (step, clock)
        if step < TIMED or step == begun:
            return False
        self.time((clock - before) / (step - begun))
        return True

    def time(self, seconds: float) -> None:
        """Take the duration of a training step, once."""
        if self.step_seconds is None:
            self.step_seconds = rounded(seconds, SMALLEST_STEP)

    def stride(self, samples: int) -> int:
        """The stride by which the probe has to be thinned; 1 before the duration of a step is known."""
        if self.share is None or self.step_seconds is None:
            return 1
        return self.expensive.stride(samples, self.step_seconds)

    def thin(self, stride: int) -> None:
        """The probe is thinned by `stride`."""
        assert self.step_seconds is not None
        self.expensive.thin(stride, self.step_seconds)

    def chosen(self, step: int, due: Sequence[ScheduledQuantity]) -> list[ScheduledQuantity]:
        """The quantities that are measured at this step."""
        if self.share is None:
            return list(due)
        expensive = [one for one in due if one.name not in CHEAP]
        if expensive and self.expensive.allows(step, self.step_seconds):
            classes, found = [self.cheap, self.expensive], list(due)
        elif len(expensive) < len(due) and self.cheap.allows(step, self.step_seconds):
            classes, found = [self.cheap], [one for one in due if one.name in CHEAP]
        else:
            return []
        for one in classes:
            one.count, one.last = one.count + 1, step
        return found

    @property
    def entry(self) -> dict[str, float | None]:
        """The rounded costs, for run.json."""
        return {
            "cheap": self.cheap.cost,
            "expensive": self.expensive.cost,
            "step": self.step_seconds,
            "spacing": self.expensive.spacing,
        }

    def resume(self, entry: Mapping[str, float | None], measured: Mapping[str, Sequence[int]]) -> None:
        """Take over the costs of an earlier process, and the steps that it measured by class."""
        self.step_seconds = entry.get("step")
        for name, one in (("cheap", self.cheap), ("expensive", self.expensive)):
            one.cost = entry.get(name)
            one.count, one.last = len(measured[name]), max(measured[name], default=0)
        self.expensive.spacing = entry.get("spacing") or DOUBLING
