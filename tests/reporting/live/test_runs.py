"""The progress of runs that are being written, and the report on them."""

import json
import re
from pathlib import Path

import pytest

import featlearn as fl
from featlearn.errors import RunError
from featlearn.record import RunWriter, open_run
from featlearn.reporting.live.live_runs import MOST_RUNS, TAIL, LiveRuns, last_measurements
from tests.reporting.runs import HOSTILE, watched


def test_the_last_measurements_are_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = RunWriter(tmp_path / "a", {})
    assert last_measurements(tmp_path / "a") == []
    for step in range(12):
        writer.scalars(step, {"loss": 1.0 / (3 + step)})
    with (tmp_path / "a" / "scalars.jsonl").open("a") as file:
        file.write('{"step": 99, "va')
    monkeypatch.setattr("featlearn.reporting.live.live_runs.SPARKS", 5)
    lines = last_measurements(tmp_path / "a")
    assert [line["step"] for line in lines] == [2, 5, 8, 11]
    assert lines == open_run(tmp_path / "a").lines[2::3]


def test_the_start_of_a_long_file_is_skipped(tmp_path: Path):
    writer = RunWriter(tmp_path / "a", {})
    for step in range(3):
        writer.scalars(step, {f"name-{i}": 1.0 for i in range(TAIL // 40)})
    writer.scalars(7, {"loss": 1.0})
    assert (tmp_path / "a" / "scalars.jsonl").stat().st_size > TAIL
    assert last_measurements(tmp_path / "a")[-1]["step"] == 7


def test_the_progress_is_that_of_the_last_measurement(tmp_path: Path):
    config = {"name": "a", "created": 1000.0, "budget": 0.05, "settings": {"steps": 400}}
    writer = RunWriter(tmp_path / "a", config)
    runs = LiveRuns(tmp_path / "a")
    begun = {"name": "a", "finished": False, "share": None, "losses": []}
    assert runs.progress()["runs"] == [begun | {"facts": "no measurement yet"}]
    writer.scalars(0, {"probe/loss": 0.75, "loss": 0.5}, seconds=0.0)
    writer.scalars(100, {"loss": 0.25}, seconds=20.0)
    facts = "step 100 of 400, loss 0.25, 20 s of training, about 60 s left"
    half = begun | {"share": 0.25, "losses": [0.5, 0.25]}
    assert runs.progress()["runs"] == [half | {"facts": facts}]
    assert not runs.finished
    writer.describe(finished=True, overhead=0.04)
    facts = "step 100 of 400, loss 0.25, 20 s of training, measuring took 4.0% of it, target 5.0%, finished"
    assert runs.progress()["runs"] == [half | {"facts": facts, "finished": True}]
    assert runs.finished


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("featlearn.reporting.live.live_runs.SEARCH_PERIOD", 0.0)
    runs = LiveRuns(tmp_path / "later")
    assert runs.progress() == {"runs": [], "errors": [], "left_out": 0}
    assert not runs.finished
    RunWriter(tmp_path / "later", {"name": "a"}).scalars(3, {"loss": 1.0})
    assert [run["facts"] for run in runs.progress()["runs"]] == ["step 3, loss 1"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="expected the folder of a run"):
        LiveRuns(tmp_path / "file")


def test_the_end_brings_the_whole_report(tmp_path: Path):
    run = watched(tmp_path / "a", steps=8)
    runs = LiveRuns(run.path)
    runs.progress()
    content = runs.report()
    assert content is not None
    assert content["page"] == fl.report(open_run(run.path), tmp_path / "page.html").read_text()
    assert not runs.end_unreported


def test_the_report_is_that_of_the_run(tmp_path: Path):
    run = watched(tmp_path / "runs" / "a", steps=30)
    runs = LiveRuns(tmp_path / "runs")
    assert runs.report() is None
    runs.progress()
    content = runs.report()
    assert content is not None
    assert runs.report() is None  # nothing has come since
    page = fl.report(run, tmp_path / "page.html").read_text()
    blocks = json.loads(page.partition('id="blocks">')[2].partition("</script>")[0])
    assert content["blocks"] == blocks
    assert re.findall(r'id="figure-(\w[\w-]*)"', content["html"])[:3] == ["gap", "loss", "training-loss"]
    assert len(set(re.findall(r' id="([^"]+)"', content["html"]))) == len(re.findall(r' id="([^"]+)"', content["html"]))
    assert "kernels" in {block["key"] for block in blocks}
    plain = re.sub("<[^>]+>", "", content["html"])
    assert fl.diagnose(open_run(run.path)).headline[1:40] in plain
    assert not content["several"]
    RunWriter(tmp_path / "runs" / "b", {}).scalars(0, {"loss": 1.0})
    later = LiveRuns(tmp_path / "runs")
    later.progress()
    content = later.report()
    assert content is not None
    assert content["several"]


def test_a_large_run_is_not_reported_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = watched(tmp_path / "a", steps=8)
    monkeypatch.setattr("featlearn.reporting.live.live_runs.LARGEST_RUN", 100)
    runs = LiveRuns(run.path)
    runs.progress()
    assert runs.report() is None
    assert "reported while a run is written" in runs.progress()["errors"][0]


def test_names_of_strangers_are_escaped_in_the_report(tmp_path: Path):
    run = watched(tmp_path / "a", steps=8)
    config = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**config, "name": HOSTILE}))
    runs = LiveRuns(run.path)
    runs.progress()
    content = runs.report()
    assert content is not None
    assert "<script" not in content["html"]
    assert "&lt;script" in content["html"]


def test_runs_of_a_folder_are_found_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("featlearn.reporting.live.live_runs.SEARCH_PERIOD", 0.0)
    runs = LiveRuns(tmp_path)
    assert runs.progress() == {"runs": [], "errors": [], "left_out": 0}
    RunWriter(tmp_path / "b", {}).scalars(0, {"loss": 1.0})
    RunWriter(tmp_path / "a" / "seed-0", {}).scalars(0, {"loss": 1.0})
    assert [run["name"] for run in runs.progress()["runs"]] == ["seed-0", "b"]
    for i in range(MOST_RUNS):
        RunWriter(tmp_path / f"0{i}", {})
    progress = runs.progress()
    assert len(progress["runs"]) == MOST_RUNS
    assert progress["left_out"] == 2
