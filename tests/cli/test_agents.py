"""The page for programs: its commands answer its questions about five recorded runs."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import featlearn as fl
from featlearn.cli.app import main
from tests.reporting.runs import by_hand

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "for-agents.md"
QUESTIONS = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
STEPS = [0, 1, 10, 100, 1000]
RUNS = {"lazy": 0.02, "mixed": 0.2, "rich": 0.9, "early": 0.5, "broken": 0.4}
"""Name -> linearization gap at the end; the early run has hardly learned, the loss of the last one exploded."""
LOSSES = {"early": [1.0, 0.99, 0.97, 0.9, 0.8], "broken": [1.0, 2.0, 5.0, 1e9, math.inf]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, gap in RUNS.items():
        loss = LOSSES.get(name, [1.0, 0.9, 0.5, 0.1, 0.01])
        scalars = {
            "loss": loss,
            "probe/loss": loss,
            "gap/probe": [math.nan, gap / 8, gap / 4, gap / 2, gap],
            "gap/probe_error": [0.001] * 5,
            "features/moved": [gap / 10] * 5,
            "features/moved_error": [0.001] * 5,
        }
        groups = [{"lr": 0.1 + gap}]
        by_hand(folder / name, scalars, STEPS, optimizer={"class": "SGD", "groups": groups}, finished=True)
    return folder


def answer(command: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(shlex.split(command)[1:]) in (0, 1)  # 1: a run diverged
    return json.loads(capsys.readouterr().out)


def field(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[key]
    return document


@pytest.mark.parametrize(("question", "command", "path"), QUESTIONS, ids=[question for question, _, _ in QUESTIONS])
def test_the_command_answers_the_question(
    question: str, command: str, path: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    for name in RUNS:
        diagnosis = fl.diagnose(folder / name)
        filled = command.replace("RUN RUN", " ".join(str(folder / other) for other in RUNS))
        value = field(answer(filled.replace("RUN", str(folder / name)), capsys), path)
        expected = {
            "diagnosis.regime": diagnosis.regime,
            "diagnosis.why_helped": diagnosis.why_helped,
            "diagnosis.so_far": diagnosis.so_far,
            "diagnosis.features_moved.by_layer": dict(diagnosis.features_moved.by_layer),
            "diagnosis.diverged": name == "broken",
            "config.optimizer": {"class": "SGD", "groups": [{"lr": 0.1 + RUNS[name]}]},
        }
        if path in expected:
            assert value == expected[path]
        elif path == "diagnosis.numbers.gap":
            assert value["value"] == pytest.approx(float(diagnosis.numbers["gap"]))
        elif path == "diagnosis.times.rich_from":
            assert (value is None) == math.isnan(diagnosis.times["rich_from"])
        elif path == "advice.rich.changes":
            assert [change["text"] for change in value] == [c.text for c in fl.advise(diagnosis, "rich").changes]
        else:
            assert path == "runs"
            losses = {run["name"]: run["numbers"][run["loss"]] for run in value}
            assert losses.keys() == RUNS.keys()
            regimes = {run["name"]: run["regime"] for run in value}
            assert regimes == {"lazy": "lazy", "mixed": "mixed", "rich": "rich"} | dict.fromkeys(
                ("early", "broken"), "cannot tell"
            )


def test_there_are_ten_questions():
    assert len(QUESTIONS) == 10
