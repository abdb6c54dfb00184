"""The quantities that are measured, and the steps at which they are."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError, did_you_mean
from featlearn.monitoring.numbers import safe_path
from featlearn.monitoring.records import BUILT_IN, Read, Record, RecordContext
from featlearn.monitoring.step_measurement import StepMeasurement
from featlearn.monitoring.step_view import StepView
from featlearn.record.layout import USER

Every = Literal["log"] | int | Callable[[int], bool]
"""`"log"`: 0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15 ... each a fifth later than the one before; a number: every so many
steps; or a function of the step."""

GROWTH = 1.2  # thirteen measurements in every factor of ten


class Schedule:
    """Decides for each step whether to measure after it. Step 0 is before training; steps must be asked in order."""

    def __init__(self, every: Every, *, growth: float = GROWTH) -> None:
        logarithmic = isinstance(every, str) and every == "log"
        counted = isinstance(every, int) and not isinstance(every, bool)
        if counted and isinstance(every, int) and every < 1:
            raise InputValueError(f"every={every}, expected a number of steps >= 1, 'log', or a function of the step")
        if not (logarithmic or counted or callable(every)):
            raise InputTypeError(f"every={every!r}, expected 'log', a number of steps, or a function of the step")
        self._every, self._growth, self.logarithmic = every, growth, logarithmic
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
        self.following = max(step + 1, math.ceil(step * self._growth))
        return True


Quantities = Any
"""Names or functions in a list, or a mapping: see `fl.watch`."""

BY_DEFAULT = ("gap", "richness", "weights", "kernel", "features", "layers", "convergence", "pictures")


@dataclass(eq=False)
class ScheduledQuantity:
    """One quantity with its schedule."""

    name: str
    read: Read
    schedule: Schedule | None
    """Its own schedule; None for that of the run."""
    asked: bool
    """Whether the user named it; then it must work at the first measurement."""


def scheduled_quantities(quantities: Quantities, *, test: bool, optimizer: bool) -> list[ScheduledQuantity]:
    """The quantities to measure, from the argument `quantities` of `fl.watch`."""
    defaults: dict[str, Any] = dict.fromkeys(BY_DEFAULT, True)
    if test:
        defaults["test"] = True
    if quantities is None:
        chosen, asked = defaults, set()
    elif isinstance(quantities, Mapping):
        chosen, asked = {**defaults, **quantities}, set(quantities)
    elif isinstance(quantities, list | tuple | set | frozenset):
        chosen = dict(_entry(one) for one in quantities)
        asked = set(chosen)
    else:
        raise InputTypeError(
            f"quantities={quantities!r}, expected a list of {', '.join(BUILT_IN)} and of functions of a StepView, or a "
            "mapping from such names to True, False, a schedule or a function"
        )
    for name, given in (("test", test), ("optimizer", optimizer)):
        if chosen.get(name) and not given:
            raise InputValueError(f"quantities has {name!r}, but no {name}= was given; pass it, or leave {name!r} out")
    if "gap" in chosen and not callable(chosen["gap"]):  # a gap is judged beside the change of the features
        chosen.setdefault("moved", chosen["gap"])
    chosen = {name: value for name, value in chosen.items() if value is not False}
    found = [_scheduled_quantity(name, value, name in asked) for name, value in chosen.items()]
    order = list(BUILT_IN)
    return sorted(found, key=lambda one: order.index(one.name) if one.name in BUILT_IN else len(order))


def _entry(one: Any) -> tuple[str, Any]:
    if isinstance(one, str):
        return one, True
    if callable(one):
        return getattr(one, "__name__", type(one).__name__), one
    raise InputTypeError(f"quantities has {one!r}, expected the name of a quantity or a function of a StepView")


def _scheduled_quantity(name: str, value: Any, asked: bool) -> ScheduledQuantity:
    if name in BUILT_IN:
        return ScheduledQuantity(name, BUILT_IN[name], None if value is True else Schedule(value), asked)
    function, when = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not callable(function):
        hint = did_you_mean(name, BUILT_IN)
        raise InputValueError(
            f"quantities has {name!r}: {value!r}, expected one of {', '.join(BUILT_IN)}, or a function of a StepView "
            f"for a quantity of your own{hint}"
        )
    read = _user_quantity(str(name), function)
    return ScheduledQuantity(str(name), read, None if when is None else Schedule(when), asked)


def _user_quantity(name: str, function: Callable[[StepView], Any]) -> Read:
    def read(view: StepMeasurement, context: RecordContext) -> Record:
        value = function(StepView(view))
        numbers = value if isinstance(value, Mapping) else {name: value}
        return Record({USER + safe_path(str(key)): _number(number, key) for key, number in numbers.items()})

    return read


def _number(value: Any, name: Any) -> float:
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1) or hasattr(value, "item"):
        return float(value)
    raise InputTypeError(f"the quantity {name!r} is {type(value).__name__}, expected one number, or numbers by name")
