"""A sweep: every point once, also where processes are killed, and errors kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

import featlearn as fl
from featlearn import sweeps
from featlearn.errors import FeatlearnError, InputTypeError, InputValueError, RunError
from featlearn.sweeps.folder import SweepFolder
from featlearn.sweeps.grid import Point, points_of, seeds_of
from featlearn.sweeps.results import Sweep
from tests.sweeps import functions

SERIAL = sweeps.Serial()
TOP = Path(__file__).parents[2]


# ---- grids


def test_a_grid_is_all_combinations_or_a_list_of_points():
    grid = {"a": numpy.array([1, 2]), "b": (0.5, torch.tensor(0.25)), "c": "word", "d": [[1, 2]]}
    assert [point.settings for point in points_of(grid)] == [
        {"a": a, "b": b, "c": "word", "d": [1, 2]} for a in (1, 2) for b in (0.5, 0.25)
    ]
    assert all(type(point.settings["a"]) is int for point in points_of(grid))
    listed = [{"a": 1, "b": 2}, {"a": 3}, {"b": 2, "a": 1}]
    assert [point.settings for point in points_of(listed)] == [{"a": 1, "b": 2}, {"a": 3}]


def test_the_name_of_a_point_depends_on_its_settings_alone():
    assert Point({"a": 1, "b": 0.1}).id == Point({"b": 0.1, "a": 1}).id
    ids = {Point({"a": value}).id for value in (1, 1.0, True, "1", None, [1])}
    assert len(ids) == 6
    # written down: a change of it would run every sweep again
    assert Point({"width": 64, "gamma": 0.1, "loss": "mse"}).id == "a900143ac6e872b4"


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({}, None),
        ([], "no points"),
        ({"a": []}, "no values of 'a'"),
        ({"a": [float("nan")]}, "finite numbers"),
        ({"a": [Path("x")]}, r"pass str\(path\)"),
        ({"seed": [1]}, "seeds= says which seeds"),
        ({"out": ["x"]}, "which the sweep itself sets"),
        ({1: [1]}, "expected a word"),
        ("a", "expected a mapping"),
        ([3], "a point of the grid is int"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: object, said: str | None):
    if said is None:
        assert [point.settings for point in points_of(grid)] == [{}]  # type: ignore[arg-type]
        return
    with pytest.raises(FeatlearnError, match=said):
        points_of(grid)  # type: ignore[arg-type]


def test_seeds_are_a_number_or_a_list():
    assert seeds_of(3) == [0, 1, 2]
    assert seeds_of(range(101, 104)) == [101, 102, 103]
    for wrong in (0, [1, 1], [-1], [0.5], None):
        with pytest.raises((InputValueError, InputTypeError), match="seeds="):
            seeds_of(wrong)  # type: ignore[arg-type]


# ---- functions


@pytest.mark.parametrize(
    ("function", "grid", "said"),
    [
        (functions.product, {"aa": [1]}, "did you mean 'a'"),
        (functions.product, {"b": [1]}, "missing a required argument: 'a'"),
        (functions.alone, [{"x": 1}, {"y": 1}], "does not take the point y=1"),
        (lambda x: x, {"x": [1]}, r"<lambda> cannot be imported by worker processes.*sweeps.Serial\(\)"),
        (functions.product.__call__, {"a": [1]}, "expected a function"),
        (math_sqrt := __import__("math").sqrt, {"x": [1]}, "expected a function"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_anything_is_written(function, grid, said, tmp_path):
    with pytest.raises(FeatlearnError, match=said):
        fl.sweep(function, grid, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_function_of_a_session_or_a_wrapped_one_is_refused(tmp_path):
    namespace = {"__name__": "nowhere_imported"}
    exec("def f(x):\n    return x", namespace)
    with pytest.raises(InputValueError, match=r"write it to a file experiment.py and use experiment.f, or pass"):
        fl.sweep(namespace["f"], {"x": [1]}, out=tmp_path / "s")  # type: ignore[arg-type]
    found = fl.sweep(namespace["f"], {"x": [3]}, out=tmp_path / "s", executor=SERIAL, quiet=True)  # type: ignore[arg-type]
    assert found.rows[0]["value"] == 3

    def product(a):
        return a

    product.__module__, product.__qualname__ = functions.__name__, "product"
    with pytest.raises(InputValueError, match="product is not this function"):
        fl.sweep(product, {"a": [1]}, out=tmp_path / "t")


def test_several_seeds_need_a_function_that_takes_one(tmp_path):
    with pytest.raises(InputValueError, match="takes no argument seed"):
        fl.sweep(functions.alone, {"x": [1]}, out=tmp_path, seeds=2, executor=SERIAL)
    assert fl.sweep(functions.alone, {"x": [3]}, out=tmp_path, executor=SERIAL, quiet=True).rows[0]["value"] == 9


# ---- what is kept


def test_rows_hold_settings_seed_numbers_and_path(tmp_path):
    found = fl.sweep(functions.product, {"a": [2, 3], "b": [3, 5]}, out=tmp_path / "s", seeds=2, quiet=True)
    assert [(r["a"], r["b"], r["seed"], r["product"], r["word"]) for r in found.rows] == [
        (a, b, seed, a * b + 0.1 * seed, "large" if a * b > 6 else "small")
        for a in (2, 3)
        for b in (3, 5)
        for seed in (0, 1)
    ]
    assert {row["status"] for row in found.rows} == {"done"}
    assert {row["error"] for row in found.rows} == {None}
    assert all(row["seconds"] >= 0 and Path(row["path"]).is_dir() for row in found.rows)
    names = {one.name for one in (tmp_path / "s").iterdir()}
    assert names == {".sweep.lock", "sweep.json", *(point.id for point, _ in found.points)}
    assert fl.open_sweep(tmp_path / "s").rows == found.rows
    assert list(found.axes) == ["a", "b"]
    assert repr(found).endswith("4 points, 8 done>")


def test_results_under_the_name_of_a_setting_or_a_column_are_renamed(tmp_path):
    def f(a, seed):
        return {"a": 2 * a, "seed": "word", "b": None}

    row = fl.sweep(f, {"a": [4]}, out=tmp_path / "s", executor=SERIAL, quiet=True).rows[0]
    assert (row["a"], row["result/a"], row["seed"], row["result/seed"], row["b"]) == (4, 8, 0, "word", None)


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        (3, {"value": 3}),
        (torch.tensor(0.25), {"value": 0.25}),
        (torch.tensor([0.25], requires_grad=True), {"value": 0.25}),
        (numpy.float32(0.5), {"value": 0.5}),
        (fl.Estimate(0.5, 0.1, 3), {"value": 0.5}),
        ({"a": numpy.int64(3), "b": "x", "c": True, "d": None}, {"a": 3, "b": "x", "c": True, "d": None}),
        (None, "NoneType as the result"),
        ([1, 2], "list as the result"),
        (torch.ones(2), "Tensor as the result"),
        ({"a": [1]}, "list as a"),
        ({}, "an empty mapping"),
        ({1: 2}, "expected a word"),
        ("nowhere", "'nowhere'"),
    ],
)
def test_numbers_are_taken_in_many_forms_and_others_named(returned, values, tmp_path):
    row = fl.sweep(lambda: returned, {}, out=tmp_path, executor=SERIAL, quiet=True).rows[0]
    if isinstance(values, dict):
        assert {name: row[name] for name in values} == values
        return
    assert row["status"] == "failed"
    assert values in row["error"]
    assert "expected" in row["error"]


def test_runs_give_their_verdict_and_last_numbers(tmp_path):
    grid = {"gamma": [0.01, 10.0], "width": [8]}
    found = fl.sweep(functions.recorded, grid, out=tmp_path / "s", seeds=2, executor=SERIAL, quiet=True)
    assert [row["regime"] for row in found.rows] == ["lazy", "lazy", "rich", "rich"]
    for row in found.rows:
        own = fl.diagnose(row["path"])
        assert (
            row["gap"] == pytest.approx(float(own.numbers["gap"])) == pytest.approx(row["gamma"] / (1 + row["gamma"]))
        )
        assert row["probe/loss"] == row["loss"] == 0.01
        assert row["diverged"] is False
        assert "weights/0/norm" not in row
        assert Path(row["path"]).name == f"seed-{row['seed']}"
    assert found.values("weights/0/norm") == [8.0, 9.0, 8.0, 9.0]
    assert found.values(lambda run: len(run.lines)) == [4] * 4
    assert len(found.runs({"gamma": 10.0})) == 2
    (tmp_path / "s").rename(tmp_path / "moved")
    assert Path(fl.open_sweep(tmp_path / "moved").rows[0]["path"]).is_relative_to(tmp_path / "moved")
    with pytest.raises(InputValueError, match="did you mean 'regime'"):
        fl.open_sweep(tmp_path / "moved").values("regim")
    with pytest.raises(InputValueError, match="did you mean 'gamma'"):
        found.runs({"gama": 1})


def test_only_what_is_new_runs(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()

    def asked(a, seeds):
        grid = {"a": a, "b": [0, 10], "notes": str(notes)}
        return fl.sweep(functions.counted, grid, out=tmp_path / "s", seeds=seeds, executor=SERIAL, quiet=True)

    assert len(asked([1, 2], 1).rows) == 4
    assert len(asked([2, 3], 1).rows) == 4
    assert len(asked([3], 2).rows) == 4
    assert {one.name: one.read_text().count("begun") for one in notes.iterdir()} == {
        f"{a}-{b}-{seed}": 1 for a, b, seed in [(a, b, 0) for a in (1, 2, 3) for b in (0, 10)] + [(3, 0, 1), (3, 10, 1)]
    }
    every = fl.open_sweep(tmp_path / "s").rows
    assert [(row["a"], row["b"], row["seed"]) for row in every] == [
        (1, 0, 0),
        (1, 10, 0),
        (2, 0, 0),
        (2, 10, 0),
        (3, 0, 0),
        (3, 0, 1),
        (3, 10, 0),
        (3, 10, 1),
    ]
    assert all(row["value"] == row["a"] + row["b"] + row["seed"] for row in every)


# ---- errors


def test_what_fails_is_kept_and_the_rest_goes_on(tmp_path, capsys):
    grid = {"a": [1, 2, 3, 6, 7, 8]}
    found = fl.sweep(functions.picky, grid, out=tmp_path / "s")
    assert [(row["a"], row["status"], row["value"]) for row in found.rows] == [
        (1, "done", 1.0),
        (2, "done", 2.0),
        (3, "failed", None),
        (6, "failed", None),
        (7, "failed", None),
        (8, "done", 8.0),
    ]
    assert found.rows[2]["error"] == "ZeroDivisionError: 3 is a multiple of three"
    assert found.rows[4]["error"] == "SystemExit: 3"
    kept = (Path(found.rows[2]["path"]) / "seed-0.error.txt").read_text()
    assert kept.startswith("Traceback")
    assert "functions.py" in kept
    assert "and this is not the first line" in kept
    assert [row["a"] for row in found.failed] == [3, 6, 7]
    said = capsys.readouterr().err
    assert "featlearn: a=3, seed 0 failed: ZeroDivisionError: 3 is a multiple of three\n" in said
    last = [line for line in said.splitlines() if line.startswith("sweep=s")][-1]
    assert last.startswith("sweep=s done=6/6 failed=3 seconds=")
    assert last.endswith(" left=0.0")


def test_what_failed_is_run_again_only_when_asked(tmp_path):
    calls = []

    def f(a):
        calls.append(a)
        if len(calls) < 3:
            raise ValueError("not yet")
        return a

    def asked(**options):
        return [r["status"] for r in fl.sweep(f, {"a": [5]}, out=tmp_path, executor=SERIAL, quiet=True, **options).rows]

    assert [asked(), asked(), asked(retry=True), asked(), asked(retry=True)] == [
        ["failed"],
        ["failed"],
        ["failed"],
        ["failed"],
        ["done"],
    ]
    assert calls == [5, 5, 5]
    assert not list(tmp_path.glob("*/seed-0.error.txt"))


def test_on_error_raise_stops_at_the_first(tmp_path):
    calls = []

    def f(a):
        calls.append(a)
        return 1 / a

    with pytest.raises(FeatlearnError, match=r"a=0, seed 0 failed: ZeroDivisionError: division by zero \(.*error.txt"):
        fl.sweep(f, {"a": [1, 0, 2]}, out=tmp_path / "s", executor=SERIAL, on_error="raise", quiet=True)
    assert calls == [1, 0]
    assert [row["status"] for row in fl.open_sweep(tmp_path / "s").rows] == ["done", "failed", "missing"]
    with pytest.raises(FeatlearnError, match="a=0"):
        fl.sweep(f, {"a": [1, 0, 2]}, out=tmp_path / "s", executor=SERIAL, on_error="raise", quiet=True)
    assert calls == [1, 0, 0]


def test_on_error_raise_drops_what_has_not_begun(tmp_path):
    grid = {"a": [3, *range(10, 200, 3)]}
    with sweeps.ProcessPool(1) as pool, pytest.raises(FeatlearnError, match="a=3"):  # in the order of the grid
        fl.sweep(functions.slowly_picky, grid, out=tmp_path, executor=pool, on_error="raise", quiet=True)
    status = [row["status"] for row in fl.open_sweep(tmp_path).rows]
    assert status[0] == "failed"
    assert status.count("missing") > 30


def test_wrong_arguments_are_named(tmp_path):
    for options, said in (
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"executor": 3}, r"expected an object with submit\(function"),
        ({"resume": True, "overwrite": True}, "expected at most one of them"),
    ):
        with pytest.raises(FeatlearnError, match=said):
            fl.sweep(functions.alone, {"x": [1]}, out=tmp_path / "s", **options)
    with pytest.raises(RunError, match="holds no sweep"):
        fl.open_sweep(tmp_path)


# ---- one folder, one function


def test_another_function_or_source_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "s"
    fl.sweep(functions.alone, {"x": [1]}, out=out, executor=SERIAL, quiet=True)
    with pytest.raises(RunError, match=r"holds a sweep of tests.sweeps.functions:alone, expected one of .*:product"):
        fl.sweep(functions.product, {"a": [1]}, out=out, executor=SERIAL)
    monkeypatch.setattr("featlearn.sweeps.function.reachable_source", lambda function: "another")
    with pytest.raises(RunError, match="whose source has changed since; pass overwrite=True"):
        fl.sweep(functions.alone, {"x": [1]}, out=out, executor=SERIAL)
    before = (out / Point({"x": 1}).id / "seed-0.json").stat().st_mtime_ns
    found = fl.sweep(functions.alone, {"x": [1, 2]}, out=out, executor=SERIAL, resume=True, quiet=True)
    assert [row["value"] for row in found.rows] == [1, 4]
    assert (out / Point({"x": 1}).id / "seed-0.json").stat().st_mtime_ns == before
    fl.sweep(functions.alone, {"x": [1, 2]}, out=out, executor=SERIAL, quiet=True)  # the new source is known now


def test_comments_do_not_change_the_source_and_code_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    from featlearn.sweeps.function import source_digest

    for number, text in enumerate(
        (
            "def g(x):\n    return x\ndef f(x):\n    return g(x)\n",
            '# more\ndef g(x):\n    return x\n\n\ndef f(x):\n    "words"\n    return g(x)  # and\n',
            "def g(x):\n    return 2 * x\ndef f(x):\n    return g(x)\n",
        )
    ):
        (tmp_path / f"own_{number}.py").write_text(text)
        digests.append(source_digest(__import__(f"own_{number}").f))
    assert digests[0] == digests[1] != digests[2]


def test_overwrite_removes_a_sweep_and_nothing_else(tmp_path):
    out = tmp_path / "s"
    fl.sweep(functions.alone, {"x": [1, 2]}, out=out, executor=SERIAL, quiet=True)
    found = fl.sweep(functions.product, {"a": [5]}, out=out, executor=SERIAL, overwrite=True, quiet=True)
    assert [row["product"] for row in fl.open_sweep(out).rows] == [row["product"] for row in found.rows] == [5]
    (out / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"1 other files \('thesis.tex'\)"):
        fl.sweep(functions.alone, {"x": [1]}, out=out, executor=SERIAL, overwrite=True)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "notes.txt").touch()
    for options, said in (({"overwrite": True}, "would remove"), ({}, "contains other files")):
        with pytest.raises(RunError, match=said):
            fl.sweep(functions.alone, {"x": [1]}, out=tmp_path / "plain", executor=SERIAL, **options)
    assert (tmp_path / "plain" / "notes.txt").exists()
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("sweep.json", "{}", "has schema"),
        ("sweep.json", "[", "is damaged"),
        ("{id}/point.json", '{"settings": {"x": 2}, "seeds": [0]}', "whose hash is the name of the folder"),
        ("{id}/point.json", '{"settings": {"x": 1}, "seeds": ["../x"]}', "expected seeds"),
        ("{id}/seed-0.json", '{"status": "dine"}', "remove it to run the seed again"),
    ],
)
def test_damaged_files_are_named(file, content, said, tmp_path):
    fl.sweep(functions.alone, {"x": [1]}, out=tmp_path, executor=SERIAL, quiet=True)
    (tmp_path / file.format(id=Point({"x": 1}).id)).write_text(content)
    with pytest.raises(RunError, match=said):
        fl.open_sweep(tmp_path)


# ---- executors


class Recording:
    """An engine with jobs that cannot say whether they are done."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    def submit(self, function, *args):
        self.asked.append(args)
        return SERIAL.submit(function, *args)


def test_any_object_with_submit_runs_jobs(tmp_path):
    engine = Recording()
    fl.sweep(lambda x: x, {"x": [1, 2]}, out=tmp_path / "a", executor=engine, quiet=True)
    assert [json.loads(json.dumps(args[1:])) for args in engine.asked] == [
        [str(tmp_path / "a"), {"x": x}, 0] for x in (1, 2)
    ]
    seen = set()

    def f(x):
        seen.add(threading.get_ident())
        time.sleep(0.2)
        return x

    with ThreadPoolExecutor(3) as threads:
        found = fl.sweep(f, {"x": [1, 2, 3]}, out=tmp_path / "b", executor=threads, quiet=True)
    assert sorted(row["value"] for row in found.rows) == [1, 2, 3]
    assert len(seen) == 3


def test_a_job_that_the_engine_lost_is_a_failure(tmp_path):
    class Lossy:
        def submit(self, function, *args):
            return self

        def result(self):
            raise TimeoutError("node 7 went away")

    row = fl.sweep(functions.alone, {"x": [1]}, out=tmp_path, executor=Lossy(), quiet=True).rows[0]
    assert (row["status"], row["error"]) == ("failed", "TimeoutError: node 7 went away")


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_worker_is_replaced_and_its_point_begun_once_more(times, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    grid = {"a": [0, 1, 2, 4], "times": times, "notes": str(notes)}
    found = fl.sweep(functions.killed, grid, out=tmp_path / "s", executor=sweeps.ProcessPool(2), quiet=True)
    begun = {one.name: one.read_text().count("begun") for one in notes.iterdir()}
    assert begun == {"0": 1, "1": 2, "2": 1, "4": 1}
    assert [row["status"] for row in found.rows] == ["done", "done" if times == 1 else "failed", "done", "done"]
    if times == 2:
        assert found.rows[1]["error"].startswith("WorkerKilledError: its worker process was killed 2 times")


@pytest.mark.parametrize(("function", "there"), [(functions.left_over, 0), (functions.gone_on, 1)])
def test_a_folder_is_empty_at_each_start_unless_the_function_resumes(function, there, tmp_path):
    row = fl.sweep(function, {"a": [1]}, out=tmp_path / "s", quiet=True).rows[0]
    assert (row["status"], row["there"]) == ("done", there)


def test_two_sweeps_in_one_folder_share_the_work(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    grid = {"a": [1, 2, 3, 4], "b": [0], "notes": str(notes), "pause": 0.1}
    found: list[Sweep] = []

    def asked() -> None:
        found.append(fl.sweep(functions.slow, grid, out=tmp_path / "s", executor=SERIAL, quiet=True))

    threads = [threading.Thread(target=asked) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row["sum"] for row in found[0].rows] == [1, 2, 3, 4]
    assert [one.rows for one in found] == [found[0].rows] * 3
    assert {one.read_text().count("begun") for one in notes.iterdir()} == {1}


# ---- killed


SCRIPT = """
import sys
import featlearn as fl
from featlearn import sweeps
from tests.sweeps.functions import slow

def own(a, b, seed, notes, pause):
    return slow(a, b, seed, notes, pause)

if __name__ == "__main__":
    grid = {"a": list(range(10)), "b": [0, 100], "notes": sys.argv[2], "pause": 0.1}
    fl.sweep(own, grid, out=sys.argv[1], seeds=2, executor=sweeps.ProcessPool(2))
"""


def counts(notes: Path) -> dict[str, int]:
    return {one.name: one.read_text().count("begun") for one in notes.iterdir()}


def test_a_sweep_of_forty_killed_three_times_loses_and_repeats_nothing(tmp_path):
    """SIGKILL of all its processes: what was done is not begun again; at most the two under way are."""
    out, notes, script = tmp_path / "s", tmp_path / "notes", tmp_path / "script.py"
    notes.mkdir()
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(out), str(notes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), *sys.path])}
    before: list[tuple[set[str], dict[str, int]]] = []
    for done in (6, 17, 28):
        process = subprocess.Popen(words, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
        while len(list(out.glob("*/seed-*.json"))) < done:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(0.2)
        rows = fl.open_sweep(out).rows
        finished = {f"{row['a']}-{row['b']}-{row['seed']}" for row in rows if row["status"] == "done"}
        assert len(rows) == 40
        assert done <= len(finished) < 40
        before.append((finished, counts(notes)))
    assert subprocess.run(words, env=environment, timeout=120, check=False).returncode == 0
    final = counts(notes)
    for finished, begun in before:
        assert {name: final[name] for name in finished} == {name: begun[name] for name in finished}
    assert len(final) == 40
    assert sum(final.values()) <= 40 + 3 * 2
    rows = fl.open_sweep(out).rows
    assert [row["sum"] for row in rows] == [a + b + seed for a in range(10) for b in (0, 100) for seed in (0, 1)]
    assert {row["status"] for row in rows} == {"done"}
    assert fl.open_sweep(out).function == "script:own"
    assert not list(out.rglob("*.part"))


def test_a_parent_that_is_killed_alone_takes_its_workers_along(tmp_path):
    out, notes, script = tmp_path / "s", tmp_path / "notes", tmp_path / "script.py"
    notes.mkdir()
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), str(out), str(notes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), *sys.path])}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
    while len(list(out.glob("*/seed-*.json"))) < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    time.sleep(1.0)
    there = len(list(out.glob("*/seed-*.json")))
    time.sleep(1.0)
    assert len(list(out.glob("*/seed-*.json"))) == there < 40


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import featlearn as fl\ndef f(x):\n    return x\nfl.sweep(f, {'x': [1, 2]}, out='s', quiet=True)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "WorkerStartError: a worker process did not start" in done.stderr
    assert "put the call under `if __name__ == '__main__':`" in done.stderr
    assert [row["status"] for row in fl.open_sweep(tmp_path / "s").rows] == ["missing"] * 2


def test_an_interrupt_keeps_what_is_done(tmp_path):
    def f(x):
        if x == 3:
            raise KeyboardInterrupt
        return x

    with pytest.raises(KeyboardInterrupt):
        fl.sweep(f, {"x": [1, 2, 3, 4]}, out=tmp_path, executor=SERIAL, quiet=True)
    assert [row["status"] for row in fl.open_sweep(tmp_path).rows] == ["done", "done", "missing", "missing"]
    assert SweepFolder(tmp_path).manifest is not None
