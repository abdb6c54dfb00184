"""Two processes train one network: rank 0 decides and measures, and no rank goes another way."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from featlearn.errors import FeatlearnError
from featlearn.record import open_run
from featlearn.watch import watch
from featlearn.watch.ranks import Ranks

STEPS = 30


def train(rank: int, path: Path, watched: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    torch.manual_seed(rank + 1)
    losses = []

    def loop(step: Any = None) -> None:
        for _ in range(STEPS):
            inputs, targets = torch.randn(5, 4), torch.randint(2, (5,))
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            if step is not None:
                step(loss=loss)

    if watched == "both" or (watched == "rank 0" and rank == 0):
        # A budget, so that clocks decide: those of other ranks say something else.
        with watch(model, probe=(x, y), out=path / watched, every=1, budget=0.5 if rank == 0 else 1e-6) as seen:
            loop(seen.step)
    else:
        loop()
    state = {"losses": losses, "weights": inner.state_dict(), "random": torch.get_rng_state()}
    torch.save(state | {"optimizer": optimizer.state_dict()}, path / f"{watched} {rank}.pt")


def refused(rank: int, path: Path) -> None:
    model = nn.Embedding(3, 2, max_norm=1.0) if rank == 0 else nn.Embedding(3, 2)
    try:
        watch(model, probe=(torch.zeros(4, dtype=torch.long), None), out=path / "refused").__enter__()
    except FeatlearnError as error:
        (path / f"refusal {rank}").write_text(str(error))


def both_ranks(rank: int, path: Path) -> None:
    dist.init_process_group(
        "gloo", f"file://{path}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    try:
        for watched in ("nobody", "both", "rank 0"):
            train(rank, path, watched)
        refused(rank, path)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left, who trained unwatched, watched, and watched by rank 0 alone."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(both_ranks, (folder,), nprocs=2, start_method="spawn")
    return folder


@pytest.mark.parametrize("watched", ["both", "rank 0"])
def test_two_ranks_train_as_they_do_unwatched(watched: str, path: Path):
    for rank in range(2):
        expected, found = (torch.load(path / f"{name} {rank}.pt") for name in ("nobody", watched))
        assert found["losses"] == expected["losses"]
        assert torch.equal(found["random"], expected["random"])
        assert all(torch.equal(found["weights"][key], value) for key, value in expected["weights"].items())
        moments, others = (state["optimizer"]["state"] for state in (expected, found))
        assert moments
        assert all(torch.equal(moments[p][key], others[p][key]) for p in moments for key in moments[p])


@pytest.mark.parametrize("watched", ["both", "rank 0"])
def test_the_run_is_that_of_rank_0(watched: str, path: Path):
    run = open_run(path / watched)
    assert run.config["finished"]
    assert {"ntk/norm", "ntk/layers/3/share", "loss"} <= set(run.names), "names without module."
    losses = torch.load(path / "nobody 0.pt")["losses"]
    assert run.scalar("loss")[1].tolist() == pytest.approx(losses, rel=1e-6)


def test_what_rank_0_cannot_measure_stops_all(path: Path):
    assert "max_norm" in (path / "refusal 0").read_text()
    assert "rank 0 could not begin" in (path / "refusal 1").read_text()
    assert not (path / "refused").exists()


def test_one_process_decides_for_itself(tmp_path: Path):
    ranks = Ranks(tmp_path)
    assert (ranks.first, ranks.size, ranks.agreed(lambda: "3")) == (True, 1, "3")
