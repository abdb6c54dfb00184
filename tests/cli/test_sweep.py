"""`featlearn sweep`: a grid from a TOML file."""

import contextlib
import csv
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import featlearn as fl
from featlearn.cli.app import main
from featlearn.cli.sweep_file import read_sweep_file
from featlearn.cli.swept_function import points_and_function, train_and_watch
from tests.cli.test_app import GUARDED

DIGITS = """
[fixed]
samples = 24
test = 8
steps = 12
[grid]
output-scale = [0.03, 30]
width = [6, 8]
"""
OWN = """
def train(a, b, seed):
    if a == b == 2:
        raise ValueError("a and b are two")
    print("not for stdout")
    return {"product": a * b + seed}

def curve(a):
    return 4 / a
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A sweep of the embedded digits, and what the command answered."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "digits.toml").write_text(DIGITS)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.chdir(folder):
        assert main(["sweep", "digits.toml", "--quiet", "--json", "--reports"]) == 0
    return folder / "sweeps" / "digits", json.loads(said.getvalue())


def test_options_of_diagnose_are_swept(swept: tuple[Path, dict]):
    out, answer = swept
    assert answer["done"] == 4
    assert answer["failed"] == 0
    found = fl.open_sweep(out)
    assert found.function == "featlearn diagnose"
    assert found.axes == {"output_scale": [0.03, 30.0], "width": [6, 8]}
    assert [(row["output_scale"], row["width"], row["seed"]) for row in found.rows] == [
        (scale, width, 0) for scale in (0.03, 30.0) for width in (6, 8)
    ]
    for row in found.rows:
        settings = fl.open_run(row["path"]).config["settings"]
        assert [settings[name] for name in ("output_scale", "width", "samples", "steps")] == [
            row["output_scale"],
            row["width"],
            24,
            12,
        ]
        assert row["regime"] == fl.diagnose(row["path"]).regime
        assert row["lr"] == pytest.approx(settings["lr"])
    assert {one.name for one in out.iterdir() if one.is_file()} == {
        ".sweep.lock",
        "sweep.json",
        "table.csv",
        "map.png",
        "map.pdf",
        "sweep.html",
    }
    with (out / "table.csv").open() as file:
        assert len(list(csv.reader(file))) == 5
    assert len(list(out.glob("*/report.html"))) == 4


def test_seeds_of_a_point_share_their_learning_rate_and_are_one_experiment(tmp_path: Path):
    small = {"samples": 24, "test": 8, "width": 6, "steps": 3}
    runs = [train_and_watch(None, 5, seed=seed, out=tmp_path / str(seed), **small) for seed in (5, 6)]
    alone = train_and_watch(None, 6, seed=6, out=tmp_path / "alone", **small)
    rates = [run.config["settings"]["lr"] for run in (*runs, alone)]
    assert rates[0] == rates[1] != rates[2]
    assert 'class="single"' in fl.report(runs, tmp_path / "both.html").read_text()  # two runs, one group


def test_a_seed_trains_as_diagnose_does(swept: tuple[Path, dict], capsys: pytest.CaptureFixture[str]):
    out, _ = swept
    row = fl.open_sweep(out).rows[1]
    words = ["--output-scale", "0.03", "--width", "8", "--samples", "24", "--test", "8", "--steps", "12", "--quiet"]
    assert main(["diagnose", *words, "--seed", str(row["seed"]), "--no-report", "--out", "same"]) == 0
    capsys.readouterr()
    assert fl.open_run("same").curves()["probe/loss"] == fl.open_run(row["path"]).curves()["probe/loss"]


def test_the_same_command_again_runs_nothing(swept: tuple[Path, dict], capsys: pytest.CaptureFixture[str]):
    out, _ = swept
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/seed-*.json")}
    Path("digits.toml").write_text(DIGITS)
    assert main(["sweep", "digits.toml", "--out", str(out), "--value", "gap", "--x", "width"]) == 0
    said, err = capsys.readouterr()
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/seed-*.json")} == before
    assert err == ""
    lines = said.splitlines()
    assert lines[0] == f"{out}: 4 points, 4 of 4 done, 0 failed"
    assert lines[2] == "gap over width (across) and output_scale (up)"
    assert lines[3].split() == ["6", "8"]
    assert [line.split()[0] for line in lines[4:6]] == ["30", "0.03"]
    cells = fl.open_sweep(out).cells("width", "output_scale", "gap")
    assert float(lines[5].split()[1]) == pytest.approx(cells.values[0, 0], rel=0.01)


def test_a_function_of_ones_own_with_failures_a_boundary_and_a_retry(capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    Path("own.toml").write_text(
        'function = "own.py:train"\nseeds = [3, 5]\n[grid]\na = [1, 2]\nb = [1, 2, 3]\n'
        '[map]\nx = "b"\nboundary = "own.py:curve"\n'
    )
    assert main(["sweep", "own.toml", "--jobs", "1", "--json"]) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["done"], answer["failed"]) == (10, 2)
    assert [row["product"] for row in answer["rows"] if row["seed"] == 3] == [4, 5, 6, 5, None, 9]
    assert "featlearn: a=2, b=2, seed 3 failed: ValueError: a and b are two" in err
    assert "sweep=own done=12/12 failed=2 seconds=" in err
    assert "data:image/png;base64," in Path(answer["page"]).read_text()
    Path("own.py").write_text(OWN.replace("a == b == 2", "a == b == 7"))
    assert main(["sweep", "own.toml", "--retry"]) == 1
    assert "whose source has changed since" in capsys.readouterr().err
    assert main(["sweep", "own.toml", "--retry", "--resume"]) == 0
    said = capsys.readouterr().out
    assert "6 points, 12 of 12 done, 0 failed" in said
    assert said.splitlines()[2:6] == ["product over b (across) and a (up)", "   1  2   3", "2  6  8  10", "1  5  6   7"]


def test_a_subject_and_points_one_by_one():
    Path("mine.py").write_text(
        "import torch\nfrom torch import nn\ndef setup():\n    x = torch.randn(20, 3)\n"
        "    return nn.Linear(3, 1), (x, x[:, :1]), 'mse'\n"
    )
    Path("mine.toml").write_text(
        'subject = "mine.py:setup"\n[[points]]\nlr = 0.01\nsteps = 5\n[[points]]\nlr = 0.1\nsteps = 6\n'
    )
    assert main(["sweep", "mine.toml", "--quiet", "--jobs", "1"]) == 0
    found = fl.open_sweep("sweeps/mine")
    assert found.function == "featlearn diagnose mine.py:setup"
    assert [(row["lr"], row["steps"], row["result/lr"], row["status"]) for row in found.rows] == [
        (0.01, 5, 0.01, "done"),
        (0.1, 6, 0.1, "done"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither [grid] and [[points]]"),
        ("[grid]\nwidth = [1]\n[[points]]\nwidth = 1", "both [grid] and [[points]]"),
        ("[gird]\nwidth = [1]", "did you mean 'grid'?"),
        ("grid = 3", "expected a table of lists"),
        ("[grid]\nwidht = [1]", "did you mean 'width'?"),
        ("[grid]\nseed = [1]", "expected seeds = 3"),
        ("[grid]\nwidth = [0]", "--width 0, expected at least 1"),
        ("[grid]\nwidth = ['wide']", "--width"),
        ("[grid]\noptimizer = ['adma']", 'Did you mean "adam"?'),
        ("[grid]\nwidth = [[1, 2]]", "expected numbers and words"),
        ("[grid]\nwidth = []", "no values of 'width'"),
        ("[fixed]\nwidth = 3\n[grid]\nwidth = [1]", "in [fixed] and in the grid"),
        ("seeds = 0\n[grid]\nwidth = [1]", "seeds of grid.toml is 0"),
        ("seeds = [1, 1]\n[grid]\nwidth = [1]", "distinct"),
        ("[map]\nz = 'a'\n[grid]\nwidth = [1]", "[map] of grid.toml has 'z'"),
        ("subject = 'a:b'\nfunction = 'a:b'\n[grid]\nwidth = [1]", "has subject and function"),
        ("subject = 'own.py:train'\n[grid]\nwidth = [1]", "has width beside subject"),
        ("function = 'own.py:train'\n[grid]\na = [1]", "missing a required argument: 'b'"),
        ("function = 'own.py:trian'\n[grid]\na = [1]", "did you mean 'train'?"),
        ("points = [1]", "expected [[points]]"),
        ("[grid", "is not a TOML file"),
    ],
)
def test_a_file_that_makes_no_sense_is_wrong_usage(text: str, said: str, capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(OWN)
    Path("grid.toml").write_text(text)
    assert main(["sweep", "grid.toml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("sweeps").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere.toml"], 1, "nowhere.toml does not exist"),
        (["grid.toml", "--jobs", "0"], 2, "--jobs 0"),
        (["grid.toml", "--seeds", "x"], 2, "--seeds is 'x'"),
        (["grid.toml", "--resume", "--overwrite"], 2, "expected at most one of them"),
        (["grid.toml", "--x", "widht"], 2, "did you mean 'width'?"),
        (["grid.toml", "--y", "steps"], 2, "'steps' is not a setting of grid.toml, expected seed, width"),
    ],
)
def test_wrong_words_are_told(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]):
    Path("grid.toml").write_text("[grid]\nwidth = [1]")
    assert main(["sweep", *words]) == code
    assert said in capsys.readouterr().err
    assert not Path("sweeps").exists()


def test_aliases_and_types_are_those_of_diagnose():
    Path("grid.toml").write_text(
        "[fixed]\nwhiten = true\ndata-root = 'somewhere'\n[grid]\ndepth = [1]\nlearning_rate = [1]\nbatch-size = [8]\n"
    )
    points, function = points_and_function(read_sweep_file(Path("grid.toml")), [0])
    assert [point.settings for point in points] == [
        {"whiten": True, "data_root": "somewhere", "hidden_layers": 1, "lr": 1.0, "batch": 8}
    ]
    assert isinstance(points[0].settings["lr"], float)
    assert function.name == "featlearn diagnose"


def test_help_of_sweep_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, "sweep", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "featlearn sweep grid.toml" in done.stdout


def test_a_terminal_gets_a_bar_with_the_time_left():
    Path("own.py").write_text("import time\ndef slow(a):\n    time.sleep(0.4)\n    return a\n")
    Path("own.toml").write_text('function = "own.py:slow"\n[grid]\na = [1, 2, 3, 4]\n')
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "featlearn", "sweep", "own.toml", "--jobs", "1"], stdout=subprocess.DEVNULL, stderr=child
    )
    os.close(child)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 4096):
            said += part
    os.close(terminal)
    assert process.wait() == 0
    assert b"4/4" in said
    assert b"left" in said
    assert b"done=" not in said
