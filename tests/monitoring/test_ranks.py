"""Two processes train one network: rank 0 decides and measures, and no rank goes another way."""

import json
import signal
from pathlib import Path

import pytest
import torch

from featlearn.monitoring.ranks import Ranks
from featlearn.record import open_run

from .children import Child, children, wait_for, wait_for_end


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


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_all_measure_is_missed_by_training_alone(victim: int, tmp_path: Path):
    ranks = [Child("killed_rank.py", rank, victim, tmp_path, log=tmp_path / f"log {rank}") for rank in range(2)]
    with children(*ranks):
        wait_for(lambda: all(one.process.poll() is not None for one in ranks), ranks, 40)
    assert ranks[victim].process.returncode == -signal.SIGKILL
    assert ranks[1 - victim].process.returncode == 0, ranks[1 - victim].said
    survived = json.loads((tmp_path / "survived.json").read_text())
    assert survived["seconds"] < 10
    assert "losed by peer" in survived["error"] or "reset by peer" in survived["error"], "what training says"
    run = open_run(tmp_path / "run")
    measured, _ = run.scalar("ntk/norm")
    kinds = [event["kind"] for event in run.events]
    if victim == 0:  # the run ends where it was
        assert measured.tolist() == [0, 1]
        return
    assert {"undivided", "interrupted"} <= set(kinds)
    assert [event["step"] for event in run.events if event["kind"] == "undivided"] == [2]
    assert measured.tolist() == [0, 1, 2], "rank 0 has measured alone what they could not measure together"


def test_one_process_decides_for_itself(tmp_path: Path):
    ranks = Ranks(tmp_path)
    assert (ranks.first, ranks.size, ranks.agreed(lambda: "3")) == (True, 1, "3")
