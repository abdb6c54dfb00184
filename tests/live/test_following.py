"""What the page is told of a run that is being written."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from featlearn.errors import RunError
from featlearn.live.board import RUNS, Board
from featlearn.live.following import FEW, NAMES, POINTS, FollowedRun
from featlearn.record import RunWriter, open_run
from featlearn.record.growth import GrowingLines
from tests.reporting.runs import HOSTILE, watched


def test_lines_are_read_once_and_only_whole_ones(tmp_path: Path):
    file, growing = tmp_path / "scalars.jsonl", GrowingLines(tmp_path, "scalars.jsonl")
    assert growing.read(100) == ([], False)
    file.write_bytes(b"one\ntwo\nthr")
    assert growing.read(100) == ([b"one\n", b"two\n"], False)
    assert growing.read(100) == ([], False)
    with file.open("ab") as end:
        end.write(b"ee\n")
    assert growing.read(100) == ([b"three\n"], False)


def test_a_large_file_is_read_in_parts(tmp_path: Path):
    lines = [b"%d\n" % i for i in range(50)]
    (tmp_path / "scalars.jsonl").write_bytes(b"".join(lines))
    growing, found, calls = GrowingLines(tmp_path, "scalars.jsonl"), list[bytes](), 0
    while not calls or growing.more:
        new, _ = growing.read(16)
        found += new
        calls += 1
    assert found == lines
    assert calls > 5


def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path):
    file, growing = tmp_path / "scalars.jsonl", GrowingLines(tmp_path, "scalars.jsonl")
    file.write_bytes(b"one\ntwo\n")
    growing.read(100)
    file.write_bytes(b"new\n")
    assert growing.read(100) == ([b"new\n"], True)


def test_links_and_endless_lines_are_refused(tmp_path: Path):
    (tmp_path / "there").write_bytes(b"secret\n")
    (tmp_path / "scalars.jsonl").symlink_to(tmp_path / "there")
    with pytest.raises(RunError, match="is a link"):
        GrowingLines(tmp_path, "scalars.jsonl").read(100)
    with pytest.raises(RunError, match="more than 4 bytes"):
        GrowingLines(tmp_path, "there").read(4)


def curves(told: dict[str, Any] | None) -> dict[str, Any]:
    assert told is not None
    return told["curves"]


def test_curves_are_those_of_the_run(tmp_path: Path):
    run = watched(tmp_path / "a", steps=30)
    followed = FollowedRun(run.path, ".")
    followed.news()
    whole = followed.whole()["curves"]
    assert set(whole) == set(run.names)
    for name, (steps, values) in whole.items():
        expected = [(s, v) for s, v in zip(*run.curves()[name], strict=True)]
        assert steps == [s for s, _ in expected]
        assert values == [v if math.isfinite(v) else None for _, v in expected]  # in full
    assert followed.news() is None


def test_new_lines_come_one_by_one_and_many_as_curves(tmp_path: Path):
    writer = RunWriter(tmp_path / "a", {"name": HOSTILE})
    followed = FollowedRun(tmp_path / "a", ".")
    followed.news()
    writer.scalars(3, {"loss": math.nan, "x": 2.0}, seconds=1.5)
    told = followed.news()
    assert told is not None
    assert told["lines"] == [[3, {"loss": None, "x": 2.0}]]
    assert told["facts"]["step"] == 3
    assert told["facts"]["seconds"] == 1.5
    for step in range(4, 5 + FEW):
        writer.scalars(step, {"loss": 1.0})
    assert len(curves(followed.news())["loss"][0]) == FEW + 2
    writer.scalars(3, {"loss": 0.25})  # a line repeated after a resume counts
    followed.news()
    assert followed.curves["loss"][1][0] == 0.25
    assert len(followed.curves["loss"][0]) == FEW + 2
    json.dumps(followed.whole(), allow_nan=False)


def test_long_curves_and_many_names_are_bounded(tmp_path: Path):
    writer = RunWriter(tmp_path / "a", {})
    with (tmp_path / "a" / "scalars.jsonl").open("w") as file:
        for step in range(5 * POINTS):
            file.write(json.dumps({"step": step, "values": {"loss": step}}) + "\n")
    writer.scalars(5 * POINTS, {f"n{i}": 0.0 for i in range(NAMES + 5)})
    followed = FollowedRun(tmp_path / "a", ".")
    followed.news()
    steps, values = followed.curves["loss"]
    assert POINTS // 2 < len(steps) < 2 * POINTS
    assert steps == values == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 5 * POINTS - 1)
    assert len(followed.curves) == NAMES
    assert followed.whole()["facts"]["left_out"] == 6


def test_a_run_that_is_replaced_begins_anew(tmp_path: Path):
    RunWriter(tmp_path / "a", {"created": 1.0}).scalars(9, {"old": 1.0})
    followed = FollowedRun(tmp_path / "a", ".")
    followed.news()
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    RunWriter(tmp_path / "a", {"created": 2.0}).scalars(0, {"new": 1.0})
    assert set(curves(followed.news())) == {"new"}
    assert followed.whole()["facts"]["step"] == 0


def test_facts_of_time_and_budget(tmp_path: Path):
    created = 1000.0
    writer = RunWriter(tmp_path / "a", {"created": created, "budget": 0.05, "settings": {"steps": 400}})
    writer.scalars(100, {"loss": 1.0}, seconds=20.0)
    os.utime(tmp_path / "a" / "scalars.jsonl", (created + 21.0, created + 21.0))
    followed = FollowedRun(tmp_path / "a", ".")
    followed.news()
    facts = followed.whole()["facts"]
    assert (facts["step"], facts["steps"], facts["budget"]) == (100, 400, 0.05)
    assert facts["left"] == pytest.approx(60.0)  # 300 steps, each 0.2 s
    assert facts["spent"] == pytest.approx(1 / 20)
    writer.describe(finished=True, overhead=0.04)
    followed.news()
    facts = followed.whole()["facts"]
    assert (facts["finished"], facts["left"], facts["spent"]) == (True, None, 0.04)


def test_the_verdict_is_that_of_the_diagnosis(tmp_path: Path):
    import featlearn as fl

    run = watched(tmp_path / "runs" / "a", steps=30)
    board = Board(tmp_path / "runs")
    assert board.judge() is None
    board.news()
    told = board.judge()
    assert told is not None
    verdict = told["runs"][0]["verdict"]
    assert fl.diagnose(open_run(run.path)).headline[1:40] in verdict["html"]
    assert verdict["step"] == 30
    assert board.judge() is None  # nothing has come since
    drawn = board.draw()
    assert drawn is not None
    pictures = drawn["runs"][0]["pictures"]
    assert {block["key"] for block in pictures["blocks"]} == {"spectrum", "power", "kernels"}
    assert "<canvas" in pictures["html"]
    assert board.draw() is None
    assert board.whole()["runs"][0]["verdict"] == verdict
    assert board.whole()["runs"][0]["pictures"] == pictures


def test_a_damaged_line_is_told_until_the_run_begins_anew(tmp_path: Path):
    writer = RunWriter(tmp_path / "a", {"created": 1.0})
    (tmp_path / "a" / "scalars.jsonl").write_text("{broken\n")
    writer.scalars(1, {"loss": 1.0})
    followed = FollowedRun(tmp_path / "a", ".")
    followed.news()
    writer.scalars(2, {"loss": 1.0})
    followed.news()
    assert "damaged" in followed.error
    assert followed.curves["loss"][0] == [1.0, 2.0]
    (tmp_path / "a" / "scalars.jsonl").write_text('{"step": 0, "values": {}}\n')
    followed.news()
    assert followed.error == ""


def test_a_large_run_gets_no_verdict_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = watched(tmp_path / "a", steps=8)
    monkeypatch.setattr("featlearn.live.following.LARGEST_VERDICT", 100)
    board = Board(run.path)
    board.news()
    told = board.judge()
    assert told is not None
    assert "diagnosed while it is written" in told["runs"][0]["error"]
    assert "verdict" not in told["runs"][0]


def test_names_of_strangers_are_escaped_in_the_verdict(tmp_path: Path):
    run = watched(tmp_path / "a", steps=8)
    config = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**config, "name": HOSTILE}))
    board = Board(run.path)
    board.news()
    board.judge()
    board.draw()
    (whole,) = board.whole()["runs"]
    assert "<script" not in whole["verdict"]["html"] + whole["pictures"]["html"]
    assert "&lt;script" in whole["pictures"]["html"]


def test_runs_of_a_folder_are_found_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("featlearn.live.board.AGAIN", 0.0)
    board = Board(tmp_path)
    assert board.news() is None
    RunWriter(tmp_path / "b", {}).scalars(0, {"loss": 1.0})
    RunWriter(tmp_path / "a" / "seed-0", {}).scalars(0, {"loss": 1.0})
    board.news()
    assert [run["run"] for run in board.whole()["runs"]] == ["a/seed-0", "b"]
    for i in range(RUNS):
        RunWriter(tmp_path / f"0{i}", {})
    board.news()
    assert len(board.whole()["runs"]) == RUNS
    assert board.whole()["left_out"] == 2
