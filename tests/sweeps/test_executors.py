"""Many runs on a pool of processes, on dask and on submitit: a worker that is killed costs its own job at most."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import featlearn as fl
from featlearn import sweeps
from featlearn.cli.app import main
from featlearn.errors import FeatlearnError, InputValueError
from featlearn.sweeps.executors import (
    DaskExecutor,
    Executor,
    dask_executor,
    slurm_executor,
    slurm_settings,
    submit_all,
)
from featlearn_papers.frame.request import Request, reproduce
from featlearn_papers.frame.scale import Scale
from papers.tests import made_up
from tests.sweeps import functions

TOP = Path(__file__).parents[2]
ENGINES = ["process pool", "dask", "submitit"]
BEGUN = {"process pool": [2], "dask": [2, 3, 4], "submitit": [1]}
"""How often an engine begins a job whose worker is always killed; dask counts four workers, some before it begins."""
SAID = {
    "process pool": "WorkerKilledError: its worker process was killed 2 times",
    "dask": "KilledWorker: Attempted",
    "submitit": "UncompletedJobError: Job",
}


@pytest.fixture(scope="module")
def scheduler() -> Iterator[DaskExecutor]:
    pytest.importorskip("distributed")
    with dask_executor("local") as found:
        yield found


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOP), *sys.path]))  # for processes of submitit
    if request.param == "process pool":
        with sweeps.ProcessPool(2) as pool:
            yield pool
    elif request.param == "dask":
        yield request.getfixturevalue("scheduler")
    else:
        pytest.importorskip("submitit")
        monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 1)  # files appear at once here
        yield slurm_executor("cluster=local,timeout_min=5", tmp_path / "jobs")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["engine"]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def counts(notes: Path) -> dict[str, int]:
    return {one.name: one.read_text().count("begun") for one in notes.iterdir()}


def test_a_killed_worker_costs_its_own_point_and_the_next_call_runs_that_alone(engine, name, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    grid = {"a": [0, 1, 2], "times": max(BEGUN[name]), "notes": str(notes)}

    def asked() -> list[dict]:
        return fl.sweep(functions.killed, grid, out=tmp_path / "s", executor=engine, quiet=True).rows

    rows = asked()
    assert [row["status"] for row in rows] == ["done", "failed", "done"]
    assert rows[1]["error"].startswith(SAID[name])
    found = counts(notes)
    assert found.pop("1") in BEGUN[name]
    assert found == {"0": 1, "2": 1}
    rows = asked()
    assert [row["value"] for row in rows] == [0, 1, 2]
    assert counts(notes) == {"0": 1, "1": max(BEGUN[name]) + 1, "2": 1}


@pytest.mark.parametrize("engine", ["process pool", "dask"], indirect=True)
def test_engines_that_retry_begin_a_killed_job_again(engine, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    grid = {"a": [0, 1], "times": 1, "notes": str(notes)}
    rows = fl.sweep(functions.killed, grid, out=tmp_path / "s", executor=engine, quiet=True).rows
    assert [row["value"] for row in rows] == [0, 1]
    assert counts(notes) == {"0": 1, "1": 2}


def test_a_failure_of_the_function_itself_is_kept(engine, tmp_path):
    rows = fl.sweep(functions.picky, {"a": [2, 3]}, out=tmp_path / "s", executor=engine, quiet=True).rows
    assert [(row["status"], row["error"]) for row in rows] == [
        ("done", None),
        ("failed", "ZeroDivisionError: 3 is a multiple of three"),
    ]
    again = fl.sweep(functions.picky, {"a": [2, 3]}, out=tmp_path / "s", executor=engine, quiet=True).rows
    assert again == rows  # nothing ran: the times are the same


@pytest.mark.slow  # each worker loads torch
def test_a_figure_whose_worker_is_killed_names_the_seed_and_the_next_call_runs_that_alone(
    engine, name, tmp_path, monkeypatch
):
    notes = tmp_path / "notes"
    notes.mkdir()
    setup = made_up.Setup(notes=str(notes), kills=max(BEGUN[name]))
    made_up.install(monkeypatch, measure=made_up.fragile, sizes=made_up.sizes(setup))
    request = Request(id=made_up.ID, scale=Scale.SMOKE, out=tmp_path / "out")
    error = SAID[name].removeprefix("WorkerKilledError: ")
    with pytest.raises(FeatlearnError, match=f"1 of 3 seeds failed: seed 1: {error}") as raised:
        reproduce(request, engine)
    assert "finished seeds are kept: run the same again" in str(raised.value)
    found = counts(notes)
    assert found.pop("1") in BEGUN[name]
    assert found == {"0": 1, "2": 1}
    assert not (tmp_path / "out" / "claims.json").exists()
    result = reproduce(request, engine)
    assert counts(notes) == {"0": 1, "1": max(BEGUN[name]) + 1, "2": 1}
    assert {claim["id"] for claim in result.claims} >= {"centered", "drawn"}
    alone = reproduce(Request(id=made_up.ID, scale=Scale.SMOKE, out=tmp_path / "alone", jobs=1))
    assert alone.claims == result.claims  # the same numbers wherever they were made


# ---- the command line


OWN = "def train(a, seed):\n    if a == 3:\n        raise ValueError('three')\n    return {'double': 2 * a}\n"
GRID = 'function = "own.py:train"\n[grid]\na = [1, 2, 3]\n'


@pytest.mark.parametrize(
    "words", [["--slurm", "cluster=local,timeout_min=5"], pytest.param(["--dask", "local"], marks=pytest.mark.slow)]
)
def test_sweep_runs_elsewhere_lists_failures_and_again_runs_nothing(words, tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit" if words[0] == "--slurm" else "distributed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOP), *sys.path]))
    Path("own.py").write_text(OWN)
    Path("grid.toml").write_text(GRID)
    assert main(["sweep", "grid.toml", *words, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert [row.get("double") for row in said["rows"]] == [2, 4, None]
    assert said["rows"][2]["error"] == "ValueError: three"
    before = {path: path.stat().st_mtime_ns for path in Path("sweeps/grid").glob("*/seed-*.json")}
    assert main(["sweep", "grid.toml", "--jobs", "1"]) == 1
    assert {path: path.stat().st_mtime_ns for path in Path("sweeps/grid").glob("*/seed-*.json")} == before
    assert Path("sweeps/grid.jobs").is_dir() == (words[0] == "--slurm")


def test_a_detached_sweep_is_collected_later(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOP), *sys.path]))
    Path("own.py").write_text(OWN)
    Path("grid.toml").write_text(GRID)
    assert main(["sweep", "grid.toml", "--slurm", "cluster=local,timeout_min=5", "--detach", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["submitted"] == 3
    wait_for(lambda: all(row["status"] != "missing" for row in fl.open_sweep("sweeps/grid").rows))
    assert main(["sweep", "grid.toml", "--collect", "--json"]) == 1  # a = 3 fails
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row.get("double"), row["error"]) for row in rows] == [(2, None), (4, None), (None, "ValueError: three")]
    assert main(["sweep", "grid.toml", "--detach"]) == 2
    with pytest.raises(InputValueError, match="wait=False, expected an executor whose jobs outlive this process"):
        fl.sweep(functions.alone, {"x": [1]}, out="sweeps/b", wait=False)


def test_jobs_of_a_sweep_are_submitted_together():
    events = []

    class Together:
        @contextmanager
        def batch(self):
            events.append("open")
            yield
            events.append("close")

        def submit(self, function, *args):
            events.append(args[0])
            return sweeps.Serial().submit(function, *args)

    with submit_all({0: (str, 1), 1: (str, 2)}, Together()) as results:
        assert [error for _, error in results] == [None, None]
    assert events == ["open", 1, 2, "close"]


def test_a_preempted_job_is_submitted_again_and_not_recorded_as_failed(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOP), *sys.path]))
    notes, out = tmp_path / "notes", tmp_path / "s"
    notes.mkdir()
    executor = slurm_executor("cluster=local,timeout_min=5", tmp_path / "jobs")
    fl.sweep(functions.waits_once, {"a": [4], "notes": str(notes)}, out=out, executor=executor, wait=False, quiet=True)
    wait_for(lambda: (notes / "pid").exists() and (notes / "pid").read_text())
    os.kill(int((notes / "pid").read_text()), signal.SIGUSR2)  # submitit's signal for a job that is preempted
    wait_for(lambda: fl.open_sweep(out).rows[0]["status"] != "missing")
    (row,) = fl.open_sweep(out).rows
    assert (row["value"], row["error"]) == (4, None)
    assert (notes / "4").read_text().count("begun") == 2


def test_reproduce_runs_elsewhere(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOP), *sys.path]))
    made_up.install(monkeypatch, sizes=made_up.sizes(made_up.Setup(fails_at=2)))
    words = ["reproduce", made_up.ID, "--slurm", "cluster=local,timeout_min=5", "--quiet"]
    assert main(words) == 1
    assert "1 of 3 seeds failed: seed 2: FailedJobError: Job" in capsys.readouterr().err
    assert sorted(one.name for one in Path("reproductions/experiments").glob("*/*/*/seed-*.npz")) == [
        "seed-0.npz",
        "seed-1.npz",
    ]
    assert main([*words, "--seeds", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--jobs", "2", "--dask", "local"], "--jobs and --dask are passed, expected only one of them"),
        (["--dask", "local", "--slurm", "a=1"], "--dask and --slurm are passed"),
        (["--slurm", "partition"], "--slurm has 'partition', expected comma-separated key=value"),
        (["--slurm", "a=1,a=2"], "distinct keys"),
    ],
)
@pytest.mark.parametrize("command", [["sweep", "grid.toml"], ["reproduce", "002/figC2"]])
def test_wrong_words_are_wrong_usage(command, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text("[grid]\nwidth = [1]\n")
    assert main([*command, *words]) == 2
    assert said in capsys.readouterr().err


def test_engines_that_are_not_there_are_named(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    pytest.importorskip("distributed")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputValueError, match=r"--slurm partition=gpu cannot be used: .*expected a machine with sbatch"
    ):
        slurm_executor("partition=gpu", tmp_path)
    with pytest.raises(InputValueError, match=r"--slurm cluster=local,partitoin=gpu cannot be used: .*partitoin"):
        slurm_executor("cluster=local,partitoin=gpu", tmp_path)
    with pytest.raises(FeatlearnError, match="no dask scheduler answers at 'nowhere'"), dask_executor("nowhere"):
        pass


def test_packages_that_are_missing_are_named_with_their_extra(tmp_path, monkeypatch):
    for module in ("distributed", "submitit"):
        monkeypatch.setitem(sys.modules, module, None)
    said = r"{} cannot be imported .*pip install 'featlearn\[{}\]'"
    with pytest.raises(FeatlearnError, match=said.format("submitit", "slurm")):
        slurm_executor("cluster=local", tmp_path)
    with pytest.raises(FeatlearnError, match=said.format("distributed", "dask")), dask_executor("local"):
        pass


def test_settings_of_slurm_are_words_and_numbers():
    assert slurm_settings("partition=gpu, timeout_min=60,mem=16GB") == {
        "partition": "gpu",
        "timeout_min": 60,
        "mem": "16GB",
    }


def test_settings_reach_submitit_under_its_names(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    given = []

    class Recorded:
        def __init__(self, folder: Path, cluster: str) -> None:
            given.append((folder, cluster))

        def update_parameters(self, **settings: object) -> None:
            given.append(settings)

    monkeypatch.setattr(submitit, "AutoExecutor", Recorded)
    slurm_executor("partition=gpu,timeout_min=60,gpus_per_node=1", tmp_path)
    assert given == [(tmp_path, "slurm"), {"slurm_partition": "gpu", "timeout_min": 60, "gpus_per_node": 1}]


def test_a_client_of_dask_itself_is_an_executor(scheduler, tmp_path):
    rows = fl.sweep(functions.product, {"a": [2, 5]}, out=tmp_path, executor=scheduler._client, quiet=True).rows
    assert [row["product"] for row in rows] == [2, 5]


def test_jobs_are_given_as_they_end():
    class Job:
        def __init__(self, looks: int, broken: bool) -> None:
            self.looks, self.broken = looks, broken

        def done(self) -> bool:
            self.looks -= 1
            return self.looks < 0

        def result(self) -> None:
            if self.broken:
                raise ValueError("broken")

        def cancel(self) -> None:
            cancelled.append(self)

    class Jobs:
        def submit(self, looks: int, broken: bool) -> Job:
            return Job(looks, broken)

    cancelled: list[Job] = []
    with submit_all({"late": (3, False), "soon": (1, True), "never": (1000, False)}, Jobs()) as results:
        order = [next(results), next(results)]
    assert [key for key, _ in order] == ["soon", "late"]
    assert str(order[0][1]) == "broken"
    assert order[1][1] is None
    assert [job.broken for job in cancelled] == [False]
