"""Seeds run once, wherever they run."""

import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch

from featlearn.errors import FeatlearnError, InputValueError, WorkerKilledError
from featlearn.sweeps.process_pool import Serial
from featlearn_papers.frame import execution
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.execution import cache_folder, execute, finished
from featlearn_papers.frame.registry import load
from featlearn_papers.frame.runs import saved
from featlearn_papers.frame.scale import Scale
from papers.tests import made_up


@pytest.fixture
def context(tmp_path):
    return Context(seed=0, folder=tmp_path)


def test_finished_seeds_are_not_run_again(tmp_path, context):
    made_up.calls.clear()
    experiment = made_up.experiment()
    first = execute(experiment, made_up.Setup(), context, seeds=[0, 1], jobs=1, cache=tmp_path)
    more = execute(experiment, made_up.Setup(), context, seeds=[0, 1, 2], jobs=1, cache=tmp_path)
    assert made_up.calls == [0, 1, 2]
    assert (more["drawn"][:2] == first["drawn"]).all()
    assert len(numpy.unique(more["drawn"])) == 15
    execute(experiment, made_up.Setup(count=2), context, seeds=[0], jobs=1, cache=tmp_path)
    assert made_up.calls == [0, 1, 2, 0]


def test_experiments_of_another_name_or_source_have_seeds_of_their_own(tmp_path, context):
    def measure(setup, context):
        return {"drawn": 0.0}

    names = {
        cache_folder(one, made_up.Setup(), context, tmp_path).relative_to(tmp_path)
        for one in (made_up.experiment(), made_up.experiment(id="009/other"), made_up.experiment(measure=measure))
    }
    assert len(names) == 3
    assert {str(name.parent) for name in names} == {made_up.ID, "009/other"}


def test_a_seed_that_breaks_leaves_the_others(tmp_path, context):
    experiment, setup = made_up.experiment(), made_up.Setup(fails_at=1)
    with pytest.raises(RuntimeError, match="broken seed"):
        execute(experiment, setup, context, seeds=[0, 1, 2], jobs=1, cache=tmp_path)
    assert finished(cache_folder(experiment, setup, context, tmp_path), range(3)) == [0]


def test_a_seed_has_one_thread_and_gives_the_others_back(tmp_path, context):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = execute(made_up.experiment(), made_up.Setup(), context, seeds=[0], jobs=1, cache=tmp_path)
        assert runs["threads"].tolist() == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_folders_that_a_seed_does_not_use_are_removed(tmp_path, context):
    experiment = made_up.experiment()
    execute(experiment, made_up.Setup(), context, seeds=[0], jobs=1, cache=tmp_path)
    assert [path.name for path in cache_folder(experiment, made_up.Setup(), context, tmp_path).iterdir()] == [
        "seed-0.npz"
    ]


def test_what_a_killed_attempt_left_is_removed(tmp_path, context):
    """Temporary folders only: a run in the folder of the seed is there to be resumed."""
    found = []

    def measure(setup, context):
        found.extend(path.name for path in context.folder.iterdir())
        return {"drawn": 0.0}

    experiment = made_up.experiment(measure=measure)
    place = cache_folder(experiment, made_up.Setup(), context, tmp_path) / "seed-0"
    (place / "run").mkdir(parents=True)
    (Path(tempfile.mkdtemp(dir=place)) / "kernel.npz").touch()
    execute(experiment, made_up.Setup(), context, seeds=[0], jobs=1, cache=tmp_path)
    assert found == ["run"]


def sleep_long(*_):
    time.sleep(60)


def test_an_interrupt_does_not_wait_for_seeds_under_way(monkeypatch, tmp_path, context):
    @contextmanager
    def interrupted(calls, executor):
        jobs = {key: executor.submit(*call) for key, call in calls.items()}
        until = time.monotonic() + 30
        while not any(job.running() for job in jobs.values()) and time.monotonic() < until:
            time.sleep(0.05)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(execution, "_run", sleep_long)
    monkeypatch.setattr(execution, "submit_all", interrupted)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute(made_up.experiment(), made_up.Setup(), context, seeds=[0, 1, 2], jobs=2, cache=tmp_path)
    assert time.monotonic() - begun < 40


def test_seeds_that_fail_apart_are_listed_and_the_others_kept(tmp_path, context):
    experiment, setup = made_up.experiment(), made_up.Setup(fails_at=1)
    tasks = execution.missing_seeds(experiment, setup, context, seeds=[0, 1, 2], cache=tmp_path)
    failures = execution.run_apart(tasks, Serial())
    with pytest.raises(
        FeatlearnError,
        match=r"1 of 3 seeds failed: seed 1: RuntimeError: broken seed; finished seeds are kept: run the same again$",
    ):
        execution.refuse_failures(failures, len(tasks))
    assert finished(cache_folder(experiment, setup, context, tmp_path), range(3)) == [0, 2]


def test_an_error_that_all_seeds_share_is_raised_as_it_is():
    places = [Path("seed-0.npz"), Path("seed-1.npz")]
    with pytest.raises(InputValueError, match=r"^root is None and"):
        execution.refuse_failures({one: InputValueError("root is None and so on") for one in places}, 3)
    with pytest.raises(FeatlearnError, match="2 of 3 seeds failed: seed 0: a; seed 1: b; finished"):
        execution.refuse_failures(dict(zip(places, map(InputValueError, "ab"), strict=True)), 3)
    with pytest.raises(FeatlearnError, match="run the same again, with fewer --jobs"):
        execution.refuse_failures({places[0]: WorkerKilledError("killed")}, 3)


@pytest.mark.slow
def test_processes_give_the_same_numbers(tmp_path, context):
    experiment = load("004/table1").experiment
    setup = experiment.size(Scale.SMOKE).setup
    apart = execute(experiment, setup, context, seeds=[0, 1], jobs=2, cache=tmp_path / "apart")
    here = execute(experiment, setup, context, seeds=[0, 1], jobs=1, cache=tmp_path / "here")
    assert (apart["ntk/stable"] == here["ntk/stable"]).all()
    assert saved(next((tmp_path / "apart").glob("*/*/*/seed-1.npz"))) is not None


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """The command is killed once its first seed is there; that seed is not run again."""
    words = [sys.executable, "-m", "featlearn", "reproduce", "002/figC2", "--seeds", "3", "--jobs", "1"]
    words += ["--out", str(tmp_path), "--quiet"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob("experiments/*/*/*/seed-0.npz")):
        time.sleep(0.01)
    process.kill()
    process.wait()
    (first,) = tmp_path.glob("experiments/*/*/*/seed-0.npz")
    assert not (tmp_path / "claims.json").exists()
    written = first.stat().st_mtime_ns
    assert subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert first.stat().st_mtime_ns == written
    assert {path.name for path in first.parent.iterdir()} == {"seed-0.npz", "seed-1.npz", "seed-2.npz"}
