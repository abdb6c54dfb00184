"""`featlearn widths`: a user's network at several widths."""

import json
from pathlib import Path

import pytest

from featlearn.cli.app import main

SMALL = ["--sizes", "16", "32", "64", "--seeds", "2", "--steps", "2"]
OWN = """
import torch
from torch import nn

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))

def network(width):
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

def by_width(width):
    print("not for stdout")
    return network(width), (X, X[:, :2]), "mse"

def nothing():
    return {"make_model": network, "data": (X, X[:, :2]),
            "optimizer": lambda model: torch.optim.Adam(model.parameters(), 0.001)}

def off(width):
    model = network(width)
    nn.init.normal_(model[2].weight, std=0.1)
    return {"model": model, "data": (X, X[:, :2]), "optimizer": torch.optim.Adam(model.parameters(), 0.001)}

def wrong():
    return {"model": 1, "data": 2}

def broken(width):
    raise ValueError("no such width")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(OWN)
    return path


def test_words_and_a_picture(own: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["widths", f"{own}:by_width", *SMALL, "--plot", "widths.png", "--page", "widths.html"]) == 0
    assert "Sizes over the width" in Path("widths.html").read_text()
    said = capsys.readouterr()
    assert said.out.startswith("scheme: standard")
    assert "picture: widths.png" in said.out
    assert "not for stdout" not in said.out
    assert "networks=6/6 width=64" in said.err
    assert Path("widths.png").read_bytes().startswith(b"\x89PNG")


def test_a_function_without_arguments_brings_its_optimizer(own: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["widths", f"{own}:nothing", *SMALL, "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["scheme"], found["update"], found["sizes"]) == ("standard", "normalized", [16, 32, 64])
    assert said.err == ""


def test_problems_are_status_1(own: Path, capsys: pytest.CaptureFixture[str]):
    wide = ["--sizes", "32", "64", "128", "--seeds", "2", "--steps", "1"]
    assert main(["widths", f"{own}:off", *wide, "--json", "--quiet"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["parameter"], problem["quantity"]) == ("2.weight", "initial scale")
    assert problem["power"] == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["{}:by_width", "--sizes", "16"], 2, "--sizes 16, expected at least two"),
        (["{}:by_width", "--steps", "0"], 2, "--steps 0, expected at least 1"),
        (["{}:by_width", "--lr", "-1"], 2, "--lr -1.0, expected a number > 0"),
        (["{}:by_width", "--plot", "widths"], 2, "ends in .png"),
        (["{}:by_widths"], 2, "did you mean 'by_width'"),
        (["{}:wrong"], 1, "no 'make_model', expected make_model, data, loss, optimizer"),
        (["{}:broken"], 1, "no such width"),
        (["nowhere.py:setup"], 1, "nowhere.py does not exist"),
    ],
)
def test_wrong_usage(own: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str):
    assert main(["widths", *(word.format(own) for word in words), "--quiet"]) == status
    assert message in capsys.readouterr().err


DEEP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.map, self.factor = nn.Linear(6, 6), factor

    def forward(self, x):
        return x + self.factor * self.map(torch.relu(x))

def by_depth(depth):
    model = nn.Sequential(nn.Linear(5, 6), *(Block(2 / depth) for _ in range(depth)), nn.Linear(6, 2))
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    return model, (x, x[:, :2]), "mse"
"""


def test_depth_and_the_drift_of_the_best_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "deep.py"
    path.write_text(DEEP)
    options = ["--along", "depth", "--sizes", "2", "4", "8", "--seeds", "1", "--steps", "1", "--optimizer", "adam"]
    assert main(["widths", f"{path}:by_depth", *options, "--transfer", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["scheme"], found["along"], found["sizes"]) == ("CompleteP", "depth", [2, 4, 8])
    assert "runs of 40 steps" in found["transfer"]["cost"]
    assert "runs of 40 steps" in said.err
    assert "networks=3/3 depth=8" in said.err
