"""Which steps are measured, what measuring costs, and under which names."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.errors import InputTypeError, InputValueError
from featlearn.monitoring import StepView
from featlearn.monitoring import observer as observer_module
from featlearn.monitoring import watch as watch_module
from featlearn.monitoring.allocation import CHEAP, Allocation, CostClass, rounded
from featlearn.monitoring.entry import watch
from featlearn.monitoring.names import Names, safe
from featlearn.monitoring.records import Record
from featlearn.monitoring.schedule import Schedule
from featlearn.monitoring.scheduled_quantities import ScheduledQuantity
from featlearn.monitoring.stopwatch import Cost, Stopwatch, checked_budget
from featlearn.record.layout import checked_scalar_name


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_measuring_is_no_training():
    clock = Clock()
    stopwatch = Stopwatch(clock)
    clock.now += 2.0
    stopwatch.begin(2.0)
    clock.now += 40.0
    clock.now += 3.0
    stopwatch.spent(3.0)
    assert stopwatch.training == pytest.approx(40.0)
    assert stopwatch.cost == pytest.approx((40.0, 5.0)), "the first measurement counts"
    assert stopwatch.cost.overhead == pytest.approx(5.0 / 40.0)
    assert stopwatch.cost.wall_share == pytest.approx(5.0 / 45.0)


def test_a_run_that_goes_on_costs_what_both_parts_did():
    clock = Clock()
    stopwatch = Stopwatch(clock)
    stopwatch.resume(Cost(training=100.0, measuring=6.0))
    stopwatch.begin(2.0)
    clock.now += 10.5
    stopwatch.spent(0.5)
    assert stopwatch.cost == pytest.approx((110.0, 8.5))


@pytest.mark.parametrize(
    ("cost", "share", "words"),
    [
        (
            Cost(20.0, 0.9),
            0.05,
            "0.9 s of 20.9 s for measuring, first and last included: 4.5 % of training, within the budget of 5 %",
        ),
        (
            Cost(0.8, 1.0),
            0.05,
            "1.0 s of 1.8 s for measuring, first and last included: training took 0.8 s, above "
            "the budget of 5 %, which short runs may exceed",
        ),
        (
            Cost(0.01, 1.0),
            None,
            "1.0 s of 1.0 s for measuring, first and last included: training took 0.01 s, no budget",
        ),
        (
            Cost(),
            0.05,
            "0.0 s of 0.0 s for measuring, first and last included: 0 % of training, within the budget of 5 %",
        ),
    ],
)
def test_the_cost_in_words(cost: Cost, share: float | None, words: str):
    assert cost.summary(share) == words


@pytest.mark.parametrize("share", [0.0, 1.5, -0.1, float("nan")])
def test_a_budget_that_is_no_share_is_refused(share: float):
    with pytest.raises(InputValueError, match="between 0 and 1"):
        checked_budget(share)


def test_a_budget_that_is_no_number_is_refused():
    with pytest.raises(InputTypeError, match="between 0 and 1"):
        checked_budget(True)


def test_costs_are_rounded_up_to_factors_of_four():
    assert [rounded(cost, 0.25) for cost in (0.0, 0.2, 0.25, 0.26, 1.0, 1.1, 4.0, 17.0)] == [
        0.25,
        0.25,
        0.25,
        1.0,
        1.0,
        4.0,
        4.0,
        64.0,
    ]


def quantity(name: str) -> ScheduledQuantity:
    return ScheduledQuantity(name, lambda view, context: Record(), None, False)


def measured(cost: float, step_seconds: float, steps: int, share: float | None = 0.05) -> dict[str, list[int]]:
    """The steps that are measured for a kernel of so many seconds; a cheap quantity takes a hundredth."""
    allocation, schedule = Allocation(share, logarithmic=True), Schedule("log")
    kernel, gap = quantity("kernel"), quantity("gap")
    assert gap.name in CHEAP
    schedule.due(0)
    allocation.note(0, {"kernel": cost, "gap": 0.0}, 0.0)
    found: dict[str, list[int]] = {"kernel": [], "gap": []}
    for step in range(1, steps + 1):
        if not schedule.due(step):
            continue
        if step >= 16:
            allocation.time(step_seconds)
        chosen = allocation.chosen(step, [kernel, gap])
        allocation.note(step, {one.name: cost if one is kernel else cost / 100 for one in chosen}, 0.0)
        for one in chosen:
            found[one.name].append(step)
    return found


def test_a_small_network_is_measured_at_the_same_steps_whatever_the_clock_says():
    """Costs are at most a quarter of a second, twenty times apart: the busy machine records what the idle one does."""
    idle, busy = measured(0.01, 0.0002, 3000), measured(0.2, 0.004, 3000)
    assert idle == busy
    assert idle["kernel"] == [1, 2, 3, 5, 8, 12, 18, 27, 40, 58, 84, 122, 177, 256, 370, 533, 768, 1107, 1595, 2297]


@pytest.mark.parametrize("cost", [0.5, 3.0, 20.0])
def test_one_measurement_in_every_doubling_of_the_step_is_promised(cost: float):
    found = measured(cost, 0.05, 100_000)["kernel"]
    later = [step for step in found if step >= 16]
    assert max(b / a for a, b in itertools.pairwise(later)) < 2 * 1.2 + 0.1
    seconds = 0.05 * 100_000
    assert cost * len(found) < 0.05 * (seconds + 150), "and the budget is kept in the end"


def test_an_expensive_kernel_waits_until_the_duration_of_a_step_is_known():
    assert min(measured(5.0, 0.05, 1000)["kernel"]) >= 16
    assert measured(0.1, 0.05, 1000)["kernel"][0] == 1


def test_cheap_quantities_are_measured_with_the_kernel_and_between():
    found = measured(20.0, 0.05, 100_000)
    assert set(found["kernel"]) < set(found["gap"])


def test_first_and_last_measurements_are_in_the_budget():
    """4 % of 150 s are 6 s: of measurements of a second, six, of which four lie between the first and the last."""
    one = CostClass(0.04, 150.0, cost=1.0, last=1, spacing=1e9)
    allowed = 0
    while one.allows(2, 0.0):
        one.count, allowed = one.count + 1, allowed + 1
    assert allowed == 4


def test_without_a_budget_every_scheduled_step_is_measured():
    schedule = Schedule("log")
    every = [step for step in range(0, 1001) if schedule.due(step)][1:]
    assert measured(1e6, 1e-9, 1000, share=None)["kernel"] == every


def test_the_probe_is_thinned_until_the_promised_kernels_are_affordable():
    """About ten kernels in 1000 steps: 4 % of 150 s and of 1000 steps of a tenth are 10 s."""
    one = CostClass(0.04, 150.0, cost=1.0)
    assert one.stride(128, 0.1) == 1
    one.cost = 4.0
    assert one.stride(128, 0.1) == 4
    assert one.stride(100, 0.1) == 2, "at least 32 samples are left"
    one.thin(2, 0.1)
    assert one.cost == 2.0
    assert one.spacing == 4.0, "then half as many are promised"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The only clock that the watch sees: what a busy machine does is not in it."""
    found = Clock()
    fake = SimpleNamespace(perf_counter=found, thread_time=found)
    for part in (observer_module, watch_module):
        monkeypatch.setattr(part, "time", fake)
    monkeypatch.setattr(watch_module, "Stopwatch", lambda: Stopwatch(found))
    return found


def test_a_watch_keeps_to_its_allocation(clock: Clock, tmp_path: Path):
    """Measurements of 0.9 s count as one second, steps of 5 ms as 16."""

    def slow(view: StepView) -> float:
        clock.now += 0.9
        return 0.0

    model = nn.Linear(3, 1)
    with watch(
        model, probe=(torch.randn(5, 3), None), out=tmp_path / "run", every=1, budget=0.05, quantities=[slow]
    ) as seen:
        for _ in range(400):
            clock.now += 0.005
            seen.step(loss=1.0)
    run = seen.run
    steps = run.scalar("slow")[0].tolist()
    assert run.config["measuring"] == pytest.approx(0.9 * len(steps)), "the first and the last, too"
    assert run.config["overhead"] == pytest.approx(0.9 * len(steps) / 2.0)
    seconds = [line["seconds"] for line in run.lines]
    assert seconds == pytest.approx([0.005 * step for step in range(401)]), "of training"
    assert len(run.scalar("loss")[0]) == 400, "losses are recorded when they are due, measured or not"
    assert run.config["costs"] == {"cheap": None, "expensive": 1.0, "step": pytest.approx(2**-10 * 16), "spacing": 4.0}
    # 4 % of 150 s pay for 6 measurements of a second, first and last included, but not for ten: five samples cannot
    # be thinned, so that later steps are promised at factors of four
    assert steps == [0, 16, 17, 18, 19, 76, 304, 400]


def test_the_probe_of_an_expensive_run_is_thinned(clock: Clock, tmp_path: Path):
    """Kernels of 1.28 s for 128 samples, steps of a millisecond."""

    def slow(view: StepView) -> float:
        clock.now += 0.01 * len(view.outputs)
        return len(view.outputs)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    x, y = torch.randn(128, 3), torch.arange(128) % 2
    test = (x[:10], y[:10])
    with watch(model, probe=(x, y), out=tmp_path / "run", every=10, quantities={"slow": slow}, test=test) as seen:
        for _ in range(120):
            with torch.no_grad():
                model[0].weight += 0.01
            clock.now += 0.001
            seen.step()
    run = seen.run
    (thinned,) = [event for event in run.events if event["kind"] == "thinned"]
    assert (thinned["samples"], thinned["stride"], thinned["step"]) == (32, 4, 20)
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
    assert run.config["probe"]["measured"] == 32
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
