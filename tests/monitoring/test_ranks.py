"""Two processes train one network: rank 0 decides and measures, and no rank goes another way."""

from pathlib import Path

import pytest
import torch

from featlearn.monitoring.ranks import Ranks
from featlearn.record import open_run

from .children import Child, children, wait_for_end


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left, who trained unwatched, watched, and watched by rank 0 alone."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [Child("two_ranks.py", rank, folder, log=folder / f"log {rank}") for rank in range(2)]
    with children(*ranks):
        wait_for_end(ranks, 120)
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
