"""What is measured follows from counted work: of training by a hook, of measuring from shapes."""

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel
from featlearn.errors import InputTypeError, InputValueError
from featlearn.monitoring import work
from featlearn.monitoring.entry import watch
from featlearn.monitoring.probe_data import Sizes
from featlearn.monitoring.records import Record
from featlearn.monitoring.schedule import Schedule, ScheduledQuantity
from featlearn.monitoring.work import Budget, NetworkWork, TrainingPasses, forward_work, quantity_work
from featlearn.record import Run, open_run

from .children import PROGRAMS


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def counted(model: nn.Module, network: Any, *passes: Any) -> tuple[int, int]:
    counter = TrainingPasses()
    counter.attach(model)
    for inputs in passes:
        network(inputs)
    counter.detach(model)
    return counter.count, counter.samples


def test_forward_passes_in_training_mode_are_counted():
    model, x = mlp(), torch.randn(7, 6)
    assert counted(model, model, x, x[:3]) == (2, 10)
    assert counted(model.eval(), model, x) == (0, 0)
    model.train()
    with torch.no_grad():
        assert counted(model, model, x) == (0, 0), "an evaluation"
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: dict[str, Tensor] | None = None, *, x: Tensor | None = None) -> Tensor:
        return self.inner(x if batch is None else batch["x"])


def test_samples_are_counted_in_keywords_and_mappings():
    model, counter = Keywords(), TrainingPasses()
    counter.attach(model)
    model(x=torch.randn(5, 6))
    model({"x": torch.randn(4, 6)})
    assert (counter.count, counter.samples) == (2, 9)


def test_a_compiled_model_is_counted_where_its_frame_is_not_compiled():
    model = Keywords()
    compiled = torch.compile(model, backend="eager")
    inputs = {"x": torch.randn(5, 6)}
    before = compiled(inputs)
    assert counted(model, compiled, inputs, inputs) in ((2, 10), (0, 0)), "all passes, or none"
    assert torch.equal(compiled(inputs), before)


def test_copies_made_while_watched_do_not_count_and_need_no_featlearn():
    model, counter = mlp(), TrainingPasses()
    counter.attach(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(5, 6))
        (hook,) = twin._forward_pre_hooks.values()
        assert hook.__module__ == "contextlib"
    assert counter.count == 0
    counter.detach(model)


def test_the_work_of_passes_is_that_of_their_multiplications():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    with AuditedModel(model).measuring([torch.randn(9, 2, 6, 6)]) as measurement:
        network = forward_work(measurement)
    assert network.sample == 16 * 3 * 18 + 48 * 5 + 3 + 5, "the last two are biases"
    assert network.passes(3, 7) == 3 * (7 * network.sample + network.launch)


def test_an_embedding_is_looked_up_and_not_multiplied():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(1000, 8), nn.Linear(8, 3, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids).mean(1))

    with AuditedModel(Tokens()).measuring([torch.randint(1000, (9, 5))]) as measurement:
        assert forward_work(measurement).sample == 5 * 8 + 8 * 3


def quantity(name: str) -> ScheduledQuantity:
    return ScheduledQuantity(name, lambda view, context: Record(), None, False)


def chosen_steps(training: float | None, kernel: float, steps: int, share: float | None = 0.05) -> dict[str, list[int]]:
    """Measured steps for so much work of each step; the gap is a twentieth of the kernel."""
    budget, schedule = Budget(share, logarithmic=True), Schedule("log")
    budget.begin({"gap": kernel / 20, "kernel": kernel}, 2 * kernel, NetworkWork(1.0, 0.0, False), "cpu")
    due = [quantity("gap"), quantity("kernel")]
    chosen: dict[str, list[int]] = {"gap": [], "kernel": []}
    schedule.due(0)
    for step in range(1, steps + 1):
        if schedule.due(step):
            for one in budget.chosen(step, due, None if training is None else training * step):
                chosen[one.name].append(step)
    return chosen


def test_the_budget_is_a_share_of_the_work_of_training():
    expensive = chosen_steps(1e9, 1e11, 100_000)
    assert len(expensive["kernel"]) * 1e11 <= 0.7 * 0.05 * 1e9 * 100_000 + work.EARLY["cpu"]
    assert len(expensive["gap"]) * 5e9 <= 0.05 * 1e9 * 100_000 + work.EARLY["cpu"]
    assert len(expensive["kernel"]) > 5
    assert set(expensive["kernel"]) < set(expensive["gap"]), "gaps first, kernels last"


def test_small_networks_are_measured_from_the_first_steps_on():
    assert chosen_steps(1e6, 1e8, 3000)["kernel"][:8] == [1, 2, 3, 5, 8, 12, 18, 27]


def test_without_a_budget_every_scheduled_step_is_measured():
    schedule = Schedule("log")
    every = [step for step in range(1001) if schedule.due(step)][1:]
    assert chosen_steps(1.0, 1e20, 1000, share=None) == {"gap": every, "kernel": every}


def test_where_training_is_not_seen_the_steps_are_fixed():
    assert chosen_steps(None, 1e3, 200) == chosen_steps(None, 1e20, 200)
    assert chosen_steps(None, 1.0, 200)["kernel"] == [1, 2, 4, 8, 18, 40, 84, 177]


@pytest.mark.parametrize("share", [0.0, 1.5, -0.1, float("nan")])
def test_a_budget_that_is_no_share_is_refused(share: float, tmp_path: Path):
    with pytest.raises(InputValueError, match="between 0 and 1"):
        watch(mlp(), (torch.randn(9, 6), None), out=tmp_path / "run", budget=share)


def test_a_budget_that_is_no_number_is_refused(tmp_path: Path):
    with pytest.raises(InputTypeError, match="between 0 and 1"):
        watch(mlp(), (torch.randn(9, 6), None), out=tmp_path / "run", budget=True)


def train(model: nn.Module, out: Path, steps: int, samples: int = 128, **options: Any) -> Run:
    x = torch.randn(samples, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, (x, x[:, :3]), out=out, optimizer=optimizer, **options) as seen:
        for _ in range(steps):
            loss = (model(x[:16]) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.step(loss=loss)
    return seen.run


def test_the_probe_is_reduced_before_the_first_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(work.FIRST, "cpu", 1e5)
    test = (torch.randn(100, 6), None)
    run = train(mlp(), tmp_path / "run", 5, test=test)
    assert run.probe_samples == (128, 32)
    assert {key: run.config["probe"][key] for key in ("samples", "measured", "stride")} == {
        "samples": 128,
        "measured": 32,
        "stride": 4,
    }
    assert run.config["test"]["measured"] == 25
    assert run.array("kernel", 0)["mean"].shape == run.array("kernel", 5)["mean"].shape == (32, 32)
    first, *_ = capfd.readouterr().err.splitlines()
    assert first.startswith("featlearn: measuring 32 of the 128 probe samples")
    again = train(mlp(), tmp_path / "run", 3, test=test, resume=True)
    assert again.array("kernel", 8)["mean"].shape == (32, 32)
    assert train(mlp(), tmp_path / "all", 2, budget=None).probe_samples == (128, 128)


def test_the_last_line_says_what_share_of_the_work_was_spent(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    train(mlp(), tmp_path / "short", 3)
    line = capfd.readouterr().err
    assert re.search(r"% of its work; the budget of 5 % holds from \d+ steps on", line)
    model = mlp().eval()
    train(model, tmp_path / "eval", 3)
    assert "no forward pass of the model in training mode was seen" in capfd.readouterr().err


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that do nothing but count."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def trained(out: Path, steps: int, width: int) -> Run:
    """A run of a process with as many threads as torch takes by default."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    command = [sys.executable, str(PROGRAMS / "trained_classifier.py"), str(out), str(steps), str(width)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return open_run(out)


def assert_same_bits(run: Run, other: Run) -> None:
    for line, expected in zip(run.lines, other.lines, strict=True):
        assert line["step"] == expected["step"]
        assert line["values"].keys() == expected["values"].keys()
        pairs = [(value, expected["values"][name]) for name, value in line["values"].items()]
        assert all(a == b or (a != a and b != b) for a, b in pairs)
    assert {name: list(steps) for name, steps in run.arrays.items()} == {
        name: list(steps) for name, steps in other.arrays.items()
    }
    for name, steps in run.arrays.items():
        for step in steps:
            arrays, expected = run.array(name, step), other.array(name, step)
            assert arrays.keys() == expected.keys()
            assert all(numpy.array_equal(arrays[key], expected[key], equal_nan=True) for key in arrays)


def test_a_busy_machine_records_the_same_numbers(tmp_path: Path):
    idle = trained(tmp_path / "idle", 30, 16)
    with busy(2):
        assert_same_bits(trained(tmp_path / "busy", 30, 16), idle)
    assert len(idle.scalar("gap/probe")[0]) > 3


@pytest.mark.slow
def test_ten_runs_of_a_busy_machine_record_the_same_numbers(tmp_path: Path):
    idle = trained(tmp_path / "idle", 300, 128)
    with busy(4):
        for number in range(10):
            assert_same_bits(trained(tmp_path / str(number), 300, 128), idle)


def test_work_grows_with_samples_and_outputs():
    with AuditedModel(mlp()).measuring([torch.randn(9, 6)]) as measurement:
        small, large = (
            quantity_work(
                measurement, Sizes(samples=count, tests=count, kernel="each", features=3, full=True), ends=True
            )
            for count in (32, 320)
        )
    assert all(large[name] > small[name] for name in small if name != "weights")
    assert large["kernel"] > large["gap"] > large["richness"]
