"""Watching a run of several ranks: all of them measure, rank 0 writes, and training does not see it."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from featlearn.errors import RankError
from featlearn.monitoring import ranks as run_ranks
from featlearn.monitoring import shared_measurement
from featlearn.monitoring.entry import watch
from featlearn.monitoring.shared_measurement import SharedMeasurement
from featlearn.quantities.ntk import ntk
from featlearn.record import Run, open_run

from .networks import inputs
from .ranks import on_ranks
from .sharded import plain, sharded

STEPS = 6


@contextmanager
def sharing(ranks: bool, patience: float = 10.0) -> Iterator[Counter[str]]:
    """All ranks measure together from the second measurement on, or never; gives what this one was asked for."""
    asked: Counter[str] = Counter()
    perform = SharedMeasurement._perform

    def counted(self: SharedMeasurement, act: str, arguments: tuple[Any, ...]) -> Any:
        asked[act] += 1
        return perform(self, act, arguments)

    before = shared_measurement.LEAST_SHARE, shared_measurement.WORTHWHILE, run_ranks.PATIENCE
    if ranks:
        shared_measurement.LEAST_SHARE, shared_measurement.WORTHWHILE = 1, 0.0
    SharedMeasurement._perform, run_ranks.PATIENCE = counted, patience  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        SharedMeasurement._perform = perform  # type: ignore[method-assign]
        shared_measurement.LEAST_SHARE, shared_measurement.WORTHWHILE, run_ranks.PATIENCE = before


def same_folder() -> Path:
    """A new folder, the same on every rank."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    return Path(path[0])


def normalized() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()


def run(model: nn.Module, folder: Path | None, **options: Any) -> list[Any]:
    """Losses, weights, moments and buffers of a short training, and the state of random numbers after it."""
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    x, y = inputs(7, 5), inputs(7, 3, seed=4)

    def loop(step: Any = None) -> list[float]:
        losses = []
        for number in range(STEPS):
            own = inputs(8, 5, seed=10 * number + dist.get_rank())
            loss = (model(own) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if step is not None:
                step(loss=loss)
        return losses

    if folder is None:
        losses = loop()
    else:
        test = (inputs(6, 5, seed=2), inputs(6, 3, seed=3))
        with watch(
            model, probe=(x, y), out=folder, budget=None, test=test, optimizer=optimizer, **{"every": 2, **options}
        ) as seen:
            losses = loop(seen.step)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *moments, *model.buffers(), torch.get_rng_state()]
    return [losses, *(t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for t in tensors)]


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def assert_same_numbers(found: Run, expected: Run, relative: float = 1e-12) -> None:
    """All numbers to this share of the largest of their name; arrays, which are stored in float32, to its rounding."""
    assert set(found.names) == set(expected.names)
    for name in set(found.names) - {"overhead"}:
        (steps, a), (others, b) = found.scalar(name), expected.scalar(name)
        assert steps.tolist() == others.tolist()
        largest = numpy.nanmax(numpy.abs(b), initial=0.0)
        assert numpy.allclose(a, b, rtol=0, atol=relative * largest, equal_nan=True), (name, a, b)
    assert {k: list(v) for k, v in found.arrays.items()} == {k: list(v) for k, v in expected.arrays.items()}
    for name, numbers in found.arrays.items():
        for step in numbers:
            first, second = found.array(name, step), expected.array(name, step)
            assert first.keys() == second.keys()
            for key, b in second.items():
                assert numpy.allclose(first[key], b, rtol=0, atol=2e-7 * numpy.abs(b).max(initial=0.0)), (name, key)


def events(folder: Path, *kinds: str) -> list[Any]:
    return [event for event in open_run(folder).events if event["kind"] in kinds]


@on_ranks(2, 4)
def a_watched_run_of_sharded_ranks_is_that_of_plain_ones(rank: int, size: int) -> None:
    path, runs = same_folder(), {}
    for name, wrap in (("sharded", sharded), ("ddp", DistributedDataParallel)):
        unwatched = run(wrap(plain()), None)
        for together in (False, True):
            folder = path / f"{name} {together}"
            with sharing(together) as asked:
                assert_same_bits(run(wrap(plain()), folder), unwatched)
            assert set(asked) == ({"probes", "initial", "kernels", "features"} if together else set())
            dist.barrier()
            runs[folder.name] = open_run(folder)
            assert runs[folder.name].config["finished"]
            assert runs[folder.name].config["measurements"] == 4
            assert not events(folder, "failed", "undivided"), runs[folder.name].events
        assert_same_numbers(runs[f"{name} True"], runs[f"{name} False"])
    first = runs["sharded True"].array("kernel", 0)["mean"]
    expected = ntk(plain(), inputs(7, 5))
    assert float((torch.from_numpy(first) - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    for name in ("ntk/alignment", "ntk/norm", "gap/probe", "features/mean/uncentered"):
        values = [torch.from_numpy(one.scalar(name)[1]) for one in runs.values()]
        assert all(torch.allclose(one, values[0], rtol=1e-6, equal_nan=True) for one in values), name


@on_ranks(2)
def ranks_measure_with_the_buffers_of_rank_0_and_keep_their_own(rank: int, size: int) -> None:
    path = same_folder()
    unwatched = run(DistributedDataParallel(normalized()), None)
    for together in (False, True):
        with sharing(together) as asked:
            model, options = DistributedDataParallel(normalized()), {"quantities": {"optimizer": True}}
            assert_same_bits(run(model, path / str(together), **options), unwatched)
        assert bool(asked["kernels"] and asked["features"]) == together
    running = [torch.empty_like(unwatched[-4]) for _ in range(size)]
    dist.all_gather(running, unwatched[-4])
    assert not torch.equal(running[0], running[1]), "else this shows nothing"
    assert not events(path / "True", "failed", "undivided")
    assert_same_numbers(open_run(path / "True"), open_run(path / "False"))


@on_ranks(2)
def a_resumed_run_goes_on_at_the_same_step_on_every_rank(rank: int, size: int) -> None:
    path = same_folder()
    for together in (False, True):
        model = DistributedDataParallel(plain())
        for resume in (False, True):
            with sharing(together) as asked:
                run(model, path / str(together), every="log", resume=resume)
            assert bool(asked["features"]) == together
    found = open_run(path / "True")
    assert found.scalar("ntk/norm")[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12]
    assert not events(path / "True", "failed", "undivided")
    assert_same_numbers(found, open_run(path / "False"))


class Watched:
    """A network that every rank trains for itself, in the same way, so that ranks may do different things."""

    def __init__(self, folder: Path, readout: Callable[[Tensor], Tensor] | None = None) -> None:
        self.model = normalized().eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.watch = watch(self.model, (inputs(9, 5), inputs(9, 3)), out=folder, every=1, budget=None, readout=readout)

    def train(self, step: bool = True) -> None:
        self.optimizer.zero_grad()
        self.model(inputs(4, 5)).square().mean().backward()
        self.optimizer.step()
        if step:
            self.watch.step()


@on_ranks(2)
def ranks_that_cannot_measure_together_leave_it_to_rank_0(rank: int, size: int) -> None:
    path, luck = same_folder(), [True]

    def readout(outputs: Tensor) -> Tensor:
        if not luck[0] and dist.get_rank() == 1:
            raise ZeroDivisionError("rank one is out of luck")
        return outputs

    for trouble, word in (("nothing", ""), ("readout", "out of luck"), ("weights", "of rank 1 differs")):
        luck[0] = True
        with sharing(True) as asked:
            one = Watched(path / trouble, readout)
            with one.watch:
                for _ in range(2):
                    one.train()
                so_far = asked["kernels"]
                assert so_far > 0
                luck[0] = trouble != "readout"
                if trouble == "weights" and rank == 1:
                    with torch.no_grad():
                        one.model[4].bias[2] += 1e-9
                for _ in range(2):
                    one.train()
        assert asked["kernels"] == so_far + (1 if word else 3), "the first of them fails, the last is of both ends"
        dist.barrier()
        told = [event["message"] for event in events(path / trouble, "undivided")]
        assert len(told) == bool(word)
        assert all(word in message for message in told), told
        assert not events(path / trouble, "failed")
        assert open_run(path / trouble).config["measurements"] == 5
        if word:
            assert_same_numbers(open_run(path / trouble), open_run(path / "nothing"))


@on_ranks(2)
def nobody_waits_for_ranks_that_do_not_come(rank: int, size: int) -> None:
    path, begun = same_folder(), time.monotonic()
    with sharing(True) as asked:
        one = Watched(path / "rank 0 alone")  # no other rank has a watch
        if rank == 0:
            with one.watch:
                one.train()
                one.train()
            assert not events(path / "rank 0 alone", "undivided", "failed")
        dist.barrier()
        assert time.monotonic() - begun < 5
    with sharing(True, patience=0.3):
        one = Watched(path / "few steps")
        with one.watch:
            one.train()
            one.train(step=rank == 0)
            one.train(step=rank == 0)
        dist.barrier()
        if rank == 0:
            (event,) = events(path / "few steps", "undivided")
            assert "not all ranks came to this step" in event["message"]
        assert not asked
    with sharing(True, patience=0.3) as asked:
        one = Watched(path / "other ends")
        with one.watch:
            for _ in range(3):
                one.train()
            so_far = asked["kernels"]
            assert so_far > 0
            if rank == 0:
                time.sleep(0.8)  # the others have given up by then
        assert asked["kernels"] == so_far
        dist.barrier()
        assert open_run(path / "other ends").config["finished"]
    try:
        with sharing(True) as asked:
            one = Watched(path / "error")
            with one.watch:
                for _ in range(3):
                    one.train()
                if rank == size - 1:
                    raise RankError("this one alone")
        assert rank < size - 1
    except RankError:
        assert rank == size - 1
    dist.barrier()
    assert open_run(path / "error").config["finished"]
    assert time.monotonic() - begun < 15
