"""Scheduled steps, recorded names, and seconds."""

from typing import Any

import pytest

from featlearn.monitoring.numbers import Names, safe
from featlearn.monitoring.schedule import Schedule
from featlearn.monitoring.work import Cost, Stopwatch
from featlearn.record.layout import checked_scalar_name


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_measuring_is_no_training():
    clock = Clock()
    stopwatch = Stopwatch(clock)
    with stopwatch.measuring():
        clock.now += 2.0
    clock.now += 40.0
    with stopwatch.measuring():
        clock.now += 1.0
        with stopwatch.measuring():
            clock.now += 2.0
            assert stopwatch.trained == pytest.approx(40.0), "seconds of training stand still"
    assert stopwatch.training == pytest.approx(40.0)
    assert stopwatch.cost == pytest.approx((40.0, 5.0)), "the first measurement counts, and inner blocks once"
    assert stopwatch.cost.overhead == pytest.approx(5.0 / 40.0)
    assert stopwatch.cost.wall_share == pytest.approx(5.0 / 45.0)


def test_a_resumed_run_costs_what_both_parts_did():
    clock = Clock()
    stopwatch = Stopwatch(clock)
    stopwatch.resume(Cost(training=100.0, measuring=6.0), 100.0)
    with stopwatch.measuring():
        clock.now += 2.5
    clock.now += 10.0
    assert stopwatch.cost == pytest.approx((110.0, 8.5))
    assert stopwatch.trained == pytest.approx(110.0)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (Cost(20.0, 0.9), "0.9 s of 20.9 s for measuring, first and last included: 4.5 % of training"),
        (Cost(0.8, 1.0), "1.0 s of 1.8 s for measuring, first and last included: training took 0.8 s"),
        (Cost(), "0.0 s of 0.0 s for measuring, first and last included: 0 % of training"),
    ],
)
def test_the_cost_in_words(cost: Cost, words: str):
    assert str(cost) == words


def steps_of(every: Any, steps: range) -> list[int]:
    """Those that are due; asked at every step, and only where something may be."""
    always, sometimes = Schedule(every), Schedule(every)
    found = [step for step in steps if always.due(step)]
    assert [step for step in steps if step >= sometimes.following and sometimes.due(step)] == found
    return found


def test_schedules():
    assert steps_of("log", range(40)) == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33]
    assert steps_of("log", range(1000, 1500)) == [1000, 1200, 1440]
    assert steps_of(4, range(10)) == [0, 4, 8]
    assert steps_of(lambda step: step in (2, 3), range(10)) == [2, 3]


@pytest.mark.parametrize(
    "name", ["", "a.b", ".hidden", "-x", "ends.", "a/b c", "[0]", "ä", "y" * 300, "h.0[1]", "..", "-"]
)
def test_safe_names_can_be_recorded(name: str):
    assert checked_scalar_name(f"layers/{safe(name)}--{safe(name)}/alignment")


def test_names_are_never_shared():
    names = Names()
    given = ["a b", "a_b", "a/b", "y" * 200 + "1", "y" * 200 + "2", "", "root"]
    found: list[Any] = [names[name] for name in given]
    assert len(set(found)) == len(given)
    assert found == [names[name] for name in given]
    assert names[""] == "root"
