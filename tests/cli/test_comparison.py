"""`featlearn runs compare`: the numbers of the report, one to a row, within the width of a terminal."""

import json
import re
import shutil
from pathlib import Path

import pytest

from featlearn.cli.app import main
from featlearn.reporting.comparison import key_numbers
from featlearn.reporting.groups import groups
from tests.cli.test_runs import fitted


def table(said: str) -> dict[str, list[str]]:
    """Label -> cells; cells of tables below each other follow each other."""
    found: dict[str, list[str]] = {}
    for line in filter(None, said.splitlines()):
        label, *cells = re.split(r" {2,}", line)
        found.setdefault(label, []).extend(cells)
    return found


def test_compare_puts_numbers_and_differing_settings_side_by_side(recorded: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(recorded / "seed-0", "other")
    config = json.loads(Path("other/run.json").read_text())
    config["settings"]["whiten"] = "\033[31m"
    Path("other/run.json").write_text(json.dumps(config | {"name": "other"}))
    assert main(["runs", "compare", str(recorded / "seed-0"), "other"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows[""] == ["seed-0", "other"]
    assert rows["steps"] == ["12", "12"]
    assert rows["loss"][0] == rows["loss"][1]
    assert rows["whiten"] == ["false", "?[31m"]  # nothing that a terminal would obey
    assert "width" not in rows


def test_the_numbers_are_those_of_the_report(recorded: Path, capsys: pytest.CaptureFixture[str]):
    paths = [recorded / "seed-0", recorded / "seed-1"]
    assert main(["runs", "compare", str(recorded)]) == 0, "a folder of seeds stands for them"
    rows = table(capsys.readouterr().out)
    assert rows["seed"] == ["0", "1"]
    assert list(rows)[:4] == ["", "seed", "regime", "steps"]
    runs = groups(paths, bands=False, points=10)
    for label, cells in key_numbers(runs).items():
        assert rows[label] == [getattr(cell, "shown", cell) for cell in cells]
    for run, gap in zip(runs, rows["linearization gap"], strict=True):
        # printed to the digit of its error
        assert float(gap.partition(" ")[0]) == pytest.approx(float(run.diagnosis.numbers["gap"]), abs=0.05)


def test_losses_are_those_that_runs_were_trained_on(capsys: pytest.CaptureFixture[str]):
    runs = [
        fitted("squares", "mean", {"probe/loss": 0.25, "loss": 0.3, "probe/cross_entropy": 0.7}),
        fitted("entropy", "cross-entropy", {"probe/loss": 4.5, "probe/cross_entropy": 0.125}),
        fitted("binary", "bce", {"probe/loss": 4.5, "probe/binary_cross_entropy": 0.5}),
        fitted("alone", None, {"loss": 0.2}),
    ]
    assert main(["runs", "compare", *runs]) == 0
    assert table(capsys.readouterr().out)["loss"] == ["0.25", "0.125 ce", "0.5 bce", "0.2 tr"]


def test_many_runs_stand_below_each_other(capsys: pytest.CaptureFixture[str]):
    names = [fitted(f"a-rather-long-name-{i}", "mean", {"probe/loss": i + 0.5}) for i in range(7)]
    assert main(["runs", "compare", *names]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    rows = table(said)
    assert rows[""] == names
    assert rows["loss"] == [f"{i + 0.5:.3g}" for i in range(7)]
    assert said.count("\n\n") == 1, "four beside each other"


def test_runs_of_one_name_are_told_apart_by_their_paths(recorded: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(recorded / "seed-0", "longer")
    assert main(["runs", "compare", str(recorded / "seed-0"), "longer"]) == 0
    assert table(capsys.readouterr().out)[""] == [str(recorded / "seed-0")[:33], "longer"]
