"""`featlearn runs compare`: one quantity to a row, labeled, within the width of a terminal."""

import json
import re
import shutil
from pathlib import Path

import pytest

from featlearn.cli.app import main
from tests.cli.test_diagnose import OWN
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
    rows = {re.split(r" {2,}", line)[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows[""] == ["seed-0", "other"]
    assert rows["steps"] == ["steps", "12", "12"]
    assert rows["probe squared error"][3] == rows["probe squared error"][4]
    assert rows["--whiten"] == ["--whiten", "False", "?[31m"]  # nothing that a terminal would obey
    assert "--width" not in rows


def test_compare_has_one_quantity_to_a_row_and_says_which(capsys: pytest.CaptureFixture[str]):
    squares = {"probe/loss": 0.25, "probe/accuracy": 0.75, "test/accuracy": 0.5, "loss": 0.3}
    runs = [
        fitted("squares", "mean", squares | {"probe/cross_entropy": 0.7}),  # labels are known, and not trained on
        fitted("entropy", "cross-entropy", {"probe/loss": 4.5, "probe/cross_entropy": 0.125, "probe/accuracy": 1.0}),
        fitted("alone", None, {"loss": 0.2}),
    ]
    assert main(["runs", "compare", *runs]) == 0
    cells = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["probe squared error"] == ["0.25", "4.5", "-"]
    assert rows["probe cross-entropy"] == ["0.7", "0.125", "-"]
    assert rows["probe accuracy"] == ["0.75", "1", "-"]
    assert rows["test accuracy"] == ["0.5", "-", "-"]
    assert rows["training loss"] == ["0.3", "-", "0.2"]
    assert main(["runs", "compare", *runs[:1], *runs[:1]]) == 0
    said = capsys.readouterr().out
    assert "probe squared error" in said
    assert "cross-entropy" not in said, "nobody was trained on it"
    assert "training loss" not in said


def test_binary_cross_entropy_has_a_row_of_its_own(capsys: pytest.CaptureFixture[str]):
    numbers = {"probe/loss": 0.25, "probe/binary_cross_entropy": 0.5}
    runs = [fitted("a", "bce", numbers), fitted("b", "cross-entropy", {"probe/cross_entropy": 0.75})]
    assert main(["runs", "compare", *runs]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["probe binary cross-entropy"] == ["0.5", "-"]
    assert rows["probe cross-entropy"] == ["-", "0.75"]
    assert "probe squared error" not in rows
    assert main(["runs", "compare", "a", "a"]) == 0
    assert "probe cross-entropy" not in table(capsys.readouterr().out)


def test_settings_that_differ_come_first(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", "compare", str(recorded)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].split() == ["--seed", "0", "1"], "a folder of seeds stands for them"
    assert list(table(said))[2:5] == ["verdict", "steps", "probe squared error"]
    shutil.copytree(recorded / "seed-0", "longer")
    config = json.loads(Path("longer/run.json").read_text())
    config["settings"] |= {"steps": 99, "width": 7}
    Path("longer/run.json").write_text(json.dumps(config))
    assert main(["runs", "compare", str(recorded / "seed-0"), "longer"]) == 0
    rows = table(capsys.readouterr().out)
    assert list(rows)[:2] == ["", "--width"]
    assert "--steps" not in rows, "steps have a row already"
    assert rows[""] == [str(recorded / "seed-0")[:33], "longer"], "paths, where names are the same"


def test_settings_of_built_in_networks_are_not_those_of_a_network_of_ones_own(capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    for name in ("setup", "mapping"):
        assert main(["diagnose", f"own.py:{name}", "--steps", "4", "--quiet", "--no-report", "--out", name]) == 0
    capsys.readouterr()
    settings = json.loads(Path("setup/run.json").read_text())["settings"]
    assert settings["loss"] is settings["width"] is settings["data"] is None
    assert settings["optimizer"] == "sgd"
    assert main(["runs", "compare", "setup", "mapping"]) == 0
    rows = table(capsys.readouterr().out)
    assert rows["function"] == ["own.py:setup", "own.py:mapping"]
    assert "--loss" not in rows


def test_many_runs_stand_below_each_other(capsys: pytest.CaptureFixture[str]):
    names = [fitted(f"a-rather-long-name-{i}", "mean", {"probe/loss": i + 0.5}) for i in range(7)]
    assert main(["runs", "compare", *names]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    rows = table(said)
    assert rows[""] == names
    assert rows["probe squared error"] == [f"{i + 0.5:.3g}" for i in range(7)]
    assert said.count("\n\n") == 2, "three beside each other"


def test_labels_are_words(recorded: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", "compare", str(recorded)]) == 0
    rows = table(capsys.readouterr().out)
    assert {"kernel moved", "centered alignment rose by", "lowest loss, share of the first"} <= {*rows}
    assert not any("_" in label for label in rows)
