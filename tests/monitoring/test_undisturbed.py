"""Measuring changes nothing: a watched run is, bit for bit, the run that is not watched."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from featlearn.monitoring.entry import watch

STEPS = 7


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class WithState(nn.Module):
    """Draws random numbers and counts its calls in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(x)
        torch.rand(2), random.random(), numpy.random.rand()
        return self.body(x)


@dataclass
class Loop:
    """A training loop with everything that it leaves behind."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: bool = False
    accumulate: int = 1
    scheduler: Any = None
    losses: list[Tensor] = field(default_factory=list)

    def run(self, step: Callable[[Tensor], None] | None = None, network: nn.Module | None = None) -> "Loop":
        network = self.model if network is None else network
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            for _ in range(self.accumulate):
                x, y = torch.randn(6, 5), torch.randint(3, (6,))
                with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
                    loss = nn.functional.cross_entropy(network(x), y) / self.accumulate
                loss.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.losses.append(loss.detach().clone())
            if step is not None:
                step(loss)
        return self

    def left(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "weights": self.model.state_dict(),
            "gradients": [p.grad for p in self.model.parameters()],
            "flags": [part.training for part in self.model.modules()],
            "hooks": [len(part._forward_hooks) + len(part._backward_hooks) for part in self.model.modules()],
            "optimizer": self.optimizer.state_dict(),
            "random": [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()],
            "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        }


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, through everything nested."""
    if isinstance(a, Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


def seeded() -> None:
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)


def both(
    build: Callable[[], Loop], path: Path, *, wrapped: Callable[[nn.Module], nn.Module] | None = None, **options: Any
):
    """What an unwatched and a watched run leave behind."""
    seeded()
    plain = build()
    plain.run(network=None if wrapped is None else wrapped(plain.model))
    expected = copy.deepcopy(plain.left())
    x, y = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    seeded()
    loop = build()
    network = loop.model if wrapped is None else wrapped(loop.model)
    given = {"every": 2, "budget": None, "test": (x[:4], y[:4]), **options}
    with watch(network, probe=(x, y), out=path, optimizer=loop.optimizer, **given) as seen:
        loop.run(lambda loss: seen.step(loss=loss, own=1.0), network)
    return expected, loop.left(), seen


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def loop(model: Callable[[], nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: Any):
    def build() -> Loop:
        network = model()
        return Loop(network, optimizer(network), **options)

    return build


CASES = {
    "SGD": loop(mlp, sgd),
    "Adam": loop(mlp, adam),
    "dropout": loop(with_dropout, adam),
    "batch norm": loop(with_batch_norm, sgd),
    "own state": loop(WithState, sgd),
    "bfloat16 autocast": loop(with_dropout, adam, autocast=True),
    "gradient accumulation": loop(with_dropout, sgd, accumulate=3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_watched_run_is_the_run_itself(case: str, tmp_path: Path):
    expected, found, seen = both(CASES[case], tmp_path / "run", quantities={"optimizer": True})
    assert expected.keys() == found.keys()
    assert [key for key in expected if not same(expected[key], found[key])] == []
    steps = [line["step"] for line in seen.run.lines if "ntk/norm" in line["values"]]
    assert steps == [0, 2, 4, 6, 7]
    assert {"ntk/optimizer/norm", "ntk/test/alignment", "own"} <= set(seen.run.names)


def test_the_comparison_finds_a_disturbance(tmp_path: Path):
    def disturbing(view: Any) -> float:
        next(view.model.parameters()).data += 1e-6
        return 0.0

    # what a quantity of the user's own does to the weights is put back as well: disturb the loop itself
    expected, found, _ = both(CASES["SGD"], tmp_path / "a", quantities=[disturbing])
    assert same(expected["weights"], found["weights"])
    found["weights"]["0.weight"][0, 0] = torch.nextafter(found["weights"]["0.weight"][0, 0], torch.tensor(9.0))
    assert not same(expected["weights"], found["weights"])


def test_a_learning_rate_schedule_is_recorded_and_kept(tmp_path: Path):
    def build() -> Loop:
        model = mlp()
        optimizer = sgd(model)
        return Loop(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    expected, found, seen = both(build, tmp_path / "run", every=1)
    assert same(expected, found)
    assert seen.run.scalar("lr")[1].tolist() == pytest.approx([0.1 * 0.5**n for n in range(STEPS + 1)])


def test_failing_measurements_disturb_nothing(tmp_path: Path):
    def failing(view: Any) -> float:
        torch.rand(3)
        view.features  # noqa: B018 (measured, then abandoned)
        if view.step:
            raise RuntimeError("no")
        return 1.0

    with pytest.warns(UserWarning, match="failing could not be measured: no"):
        expected, found, seen = both(CASES["dropout"], tmp_path / "run", quantities=["kernel", failing])
    assert same(expected, found)
    assert [event["step"] for event in seen.run.events if event["kind"] == "failed"] == [2]
    assert [event["count"] for event in seen.run.events if event["kind"] == "repeated"] == [3], "at 4, 6 and 7"


def test_watching_inside_other_modes_changes_nothing(tmp_path: Path):
    """Under autocast, and in a no_grad block."""
    model = mlp()
    x, y = torch.randn(9, 5), torch.arange(9) % 3
    with watch(model, probe=(x, y), out=tmp_path / "run", every=1, budget=None) as seen:
        seen.step()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            seen.step()
            assert torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
        with torch.inference_mode():
            seen.step()
            assert torch.is_inference_mode_enabled()
    for name in seen.run.names:
        if name not in ("ntk/velocity",):
            values = seen.run.scalar(name)[1]
            assert numpy.array_equal(values[1:], numpy.repeat(values[1], len(values) - 1), equal_nan=True), name


def test_a_compiled_network(tmp_path: Path):
    torch.compiler.reset()
    compiled, runs = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)

        def run(*arguments: Any) -> Any:
            runs.append(1)
            return graph(*arguments)

        return run

    def wrapped(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=backend)

    expected, found, seen = both(CASES["SGD"], tmp_path / "run", wrapped=wrapped)
    assert same(expected, found)
    assert len(runs) == 2 * STEPS, "training runs compiled, measuring does not"
    assert len(compiled) == 1, "nothing is compiled anew"
    assert "ntk/layers/0/share" in seen.run.names


@pytest.mark.slow
def test_a_network_compiled_by_inductor(tmp_path: Path):
    torch.compiler.reset()
    expected, found, _ = both(CASES["Adam"], tmp_path / "run", wrapped=torch.compile)
    assert same(expected, found)
