"""How much measuring may cost, when it is done, and under which names."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.monitoring import StepView
from featlearn.monitoring import budget as budget_module
from featlearn.monitoring import observer as observer_module
from featlearn.monitoring import records as records_module
from featlearn.monitoring import watch as watch_module
from featlearn.monitoring.budget import INITIAL_CREDIT, Budget, Cost
from featlearn.monitoring.budget_allocation import BudgetAllocation
from featlearn.monitoring.entry import watch
from featlearn.monitoring.names import Names, safe
from featlearn.monitoring.records import Record
from featlearn.monitoring.schedule import Schedule
from featlearn.monitoring.scheduled_quantities import ScheduledQuantity
from featlearn.record.layout import checked_scalar_name


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_what_is_earned_is_a_share_of_training():
    clock = Clock()
    budget = Budget(0.05, clock)
    budget.begin()
    clock.now += 40.0
    assert budget.earned(1000) == pytest.approx(2.0)
    clock.now += 3.0
    budget.spent(3.0, counted=True)
    assert budget.earned(1000) == pytest.approx(2.0), "measuring is no training"
    assert budget.cost.overhead == pytest.approx(3.0 / 40.0)
    clock.now += 4.0
    budget.spent(4.0, counted=False)
    assert (budget.training, budget.counted, budget.measuring) == (pytest.approx(40.0), 3.0, 7.0)
    assert Budget(None, clock).earned(1) == float("inf")


def test_short_runs_may_measure_as_if_they_had_trained_for_a_while():
    """Evenly in the logarithm of the step: a tenth of 10,000 steps has had three quarters of it."""
    clock = Clock()
    budget = Budget(0.05, clock)
    budget.begin()
    earned = []
    for steps in (1, 10, 100, 1000, 9999):
        clock.now = 5.0 + steps * INITIAL_CREDIT / 9999
        earned.append(budget.earned(steps))
    assert earned[-1] == pytest.approx(0.05 * INITIAL_CREDIT)
    assert earned == pytest.approx(
        [0.05 * INITIAL_CREDIT * math.log(1 + n) / math.log(1e4) for n in (1, 10, 100, 1000, 9999)]
    )


def test_a_run_that_goes_on_earns_as_a_new_one_does_and_costs_what_both_parts_did():
    clocks = Clock(), Clock()
    new, old = (Budget(0.05, clock) for clock in clocks)
    old.resume(5000, Cost(training=100.0, counted=4.0, measuring=6.0))
    for budget in (new, old):
        budget.begin(2.0)
    for clock in clocks:
        clock.now += 10.0
    assert old.earned(5200) == new.earned(200) > 0.5
    assert old.seconds_per_step(5200) == new.seconds_per_step(200) == pytest.approx(0.05)
    for budget, clock in zip((new, old), clocks, strict=True):
        clock.now += 0.5
        budget.spent(0.5, counted=True)
    assert new.cost == pytest.approx((10.0, 0.5, 2.5)), "with the first"
    assert old.cost == pytest.approx((110.0, 4.5, 8.5))


@pytest.mark.parametrize(
    ("cost", "share", "words"),
    [
        (Cost(20.9, 0.857, 3.1), 0.05,
         "3.1 s of 24.0 s, 13 % of the wall time (first and last 2.2 s; between them 4.1 % of training, within the "
         "budget of 5 %)"),
        (Cost(0.8, 0.856, 1.0), 0.05,
         "1.0 s of 1.8 s, 56 % of the wall time (first and last 0.1 s; between them 0.86 s, within the 1 s that a "
         "budget of 5 % leaves a short run)"),
        (Cost(0.01, 0.5, 1.0), None,
         "1.0 s of 1.0 s, 99 % of the wall time (first and last 0.5 s; between them 0.5 s, no budget)"),
        (Cost(100.0, 12.0, 13.0), 0.1,
         "13.0 s of 113.0 s, 12 % of the wall time (first and last 1.0 s; between them 12 % of training, over the "
         "budget of 10 %)"),
        (Cost(), 0.05,
         "0.0 s of 0.0 s, 0 % of the wall time (first and last 0.0 s; between them 0 % of training, within the budget "
         "of 5 %)"),
    ],
)  # fmt: skip
def test_the_cost_in_words(cost: Cost, share: float | None, words: str):
    assert cost.summary(share) == words


def instrument(name: str, cost: float) -> ScheduledQuantity:
    return ScheduledQuantity(name, lambda view, context: Record(), None, False, True, cost)


def test_expensive_quantities_share_the_budget_and_cheap_ones_come_along():
    clock = Clock()
    budget = Budget(0.1, clock)
    budget.begin()
    kernel, features, weights = instrument("kernel", 1.0), instrument("features", 4.0), instrument("weights", 0.1)
    ration, made = BudgetAllocation(budget, [kernel, features, weights]), {"kernel": 0, "features": 0, "weights": 0}
    for steps in range(1, 2001):
        clock.now += 0.5
        for one in (kernel, features, weights):
            one.pending = True
        chosen = ration.affordable(steps)
        spent = sum(one.cost for one in chosen)
        clock.now += spent
        budget.spent(spent, counted=True)
        ration.note({one.name: one.cost for one in chosen}, 0.0, counted=True)
        for one in chosen:
            made[one.name] += 1
        assert budget.counted <= 0.1 * max(budget.training, INITIAL_CREDIT) + 1e-9
    assert budget.counted > 0.095 * budget.training, "the budget is used"
    assert 0.8 < made["kernel"] / (4 * made["features"]) < 1.25, "half of it for each"
    assert made["weights"] >= made["kernel"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The only clock that the watch sees: what a busy machine does is not in it."""
    found = Clock()
    for part in (budget_module, observer_module, records_module, watch_module):
        monkeypatch.setattr(part, "time", SimpleNamespace(perf_counter=found))
    return found


@pytest.mark.parametrize("share", [0.1, 0.02])
def test_the_budget_is_kept(share: float, clock: Clock, tmp_path: Path):
    """Measurements of 30 ms, steps of 2 ms: what is counted stays below the share of what has been saved up."""

    def slow(view: StepView) -> float:
        clock.now += 0.03
        return 0.0

    model = nn.Linear(3, 1)
    with watch(model, probe=(torch.randn(5, 3), None), out=tmp_path / "run", every=1, budget=share,
               quantities=[slow]) as seen:  # fmt: skip
        for _ in range(400):
            clock.now += 0.002
            seen.step(loss=1.0)
    run = seen.run
    measured = run.scalar("slow")[0]
    spent = 0.03 * (len(measured) - 2)
    assert run.config["overhead"] == pytest.approx(spent / 0.8)
    assert run.config["measuring"] == pytest.approx(spent + 0.06), "the first and the last, too"
    seconds = [line["seconds"] for line in run.lines]
    assert seconds == pytest.approx([0.002 * step for step in range(401)]), "of training"
    assert len(run.scalar("loss")[0]) == 400, "losses are recorded when they are due, measured or not"
    assert (measured[0], measured[-1]) == (0, 400)
    earned = share * INITIAL_CREDIT * math.log(401) / math.log1p(INITIAL_CREDIT / 0.002)
    assert earned - 0.03 < spent <= earned
    skipped = sum(event.get("count", 0) for event in run.events if event["kind"] == "skipped")
    assert skipped + len(measured) == pytest.approx(401, abs=2)


def test_the_probe_is_thinned_where_a_second_measurement_never_fits(clock: Clock, tmp_path: Path):
    """Of 0.2 s, 93 ms are handed out by step 100: 74 ms for 32 samples fit, 147 ms for 64 do not."""

    def slow(view: StepView) -> float:
        clock.now += 0.0023 * len(view.outputs)
        return len(view.outputs)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = torch.randn(128, 3), torch.arange(128) % 2
    test = (x[:10], y[:10])
    quantities = {"slow": slow}
    with watch(model, probe=(x, y), out=tmp_path / "run", every=50, budget=0.01, quantities=quantities,
               test=test) as seen:  # fmt: skip
        for _ in range(120):
            with torch.no_grad():
                model[0].weight += 0.01
            clock.now += 0.001
            seen.step()
    run = seen.run
    (thinned,) = [event for event in run.events if event["kind"] == "thinned"]
    assert (thinned["samples"], thinned["stride"]) == (32, 4)
    assert 100 <= thinned["step"] < 110
    assert run.scalar("slow")[0][[0, -1]].tolist() == [0, 120]
    assert set(run.scalar("slow")[1]) == {32}, "the first is made again with the samples of the others"
    now, model = fl.ntk(model, x[::4]), model
    model.load_state_dict(start)
    first = fl.ntk(model, x[::4])
    assert numpy.allclose(run.array("kernel", 0)["mean"], first, rtol=1e-5)
    assert numpy.allclose(run.array("kernel", 120)["mean"], now, rtol=1e-5)
    assert run.scalar("ntk/norm")[1][0] == pytest.approx(float(first.norm()), rel=1e-5)
    distance = float(fl.metrics.kernel_distance(first, now))
    assert run.scalar("ntk/distance")[1].tolist()[0] == 0.0
    assert run.scalar("ntk/distance")[1][-1] == pytest.approx(distance, rel=1e-4)
    assert run.config["thinned"] == 4
    assert run.config["probe"]["samples"] == 128
    assert run.probe_samples == (128, 32)


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
