"""`featlearn diagnose` on runs that are recorded already."""

import json
import shutil
from pathlib import Path

import pytest

import featlearn as fl
from featlearn.cli.app import main


def test_a_recorded_run_is_diagnosed_as_it_is(recorded: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    assert main(["diagnose", str(recorded / "seed-1")]) == 0
    said = capsys.readouterr().out
    assert str(fl.diagnose(recorded / "seed-1")) in said
    assert said.endswith(f"run:     {recorded / 'seed-1'}\n")
    packed = fl.open_run(recorded / "seed-1").pack("a.zip")
    assert main(["diagnose", str(packed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["regime"] == fl.diagnose(packed).regime
    assert main(["diagnose", str(recorded), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(run["path"]).name for run in found["runs"]] == ["seed-0", "seed-1"], "the seeds together"
    assert before == {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    assert not Path("runs").exists()


def test_a_recorded_run_is_not_trained_again(recorded: Path, capsys: pytest.CaptureFixture[str]):
    for options in (["--steps", "5"], ["--seeds", "2"], ["--out", "b"]):
        assert main(["diagnose", str(recorded / "seed-0"), *options]) == 2
        assert "seed-0 is a recorded run, expected no options of training" in capsys.readouterr().err


def test_a_name_that_is_no_run_and_no_function_is_refused_with_what_to_call(
    recorded: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["diagnose", "mine"]) == 2
    assert "or a recorded run; featlearn runs ls FOLDER lists runs\n" in capsys.readouterr().err
    shutil.copytree(recorded / "seed-0", "runs/mine")
    assert main(["diagnose", "mine"]) == 2
    assert f"did you mean {Path('runs', 'mine')}?" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_refused_with_what_to_call(recorded: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["runs", "show"], ["runs", "pack"], ["report"]):
        assert main([*words, "mine"]) == 1
        assert "expected the folder or the .zip of a run; featlearn runs ls FOLDER lists" in capsys.readouterr().err
    assert main(["runs", "show", str(recorded)]) == 1
    said = f"is a folder of 2 runs, expected a single run such as {recorded / 'seed-0'}; featlearn diagnose"
    assert said in capsys.readouterr().err


def test_a_folder_of_seeds_is_reported_on_as_a_whole(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(recorded), "--out", "both.html", "--no-kernels"]) == 0
    assert "2 runs: seed-0, seed-1" in Path("both.html").read_text(encoding="utf-8")
