"""The network of question 0 against torch: its kernel, its steps, and how far its neurons turn."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.reporting.pictures import cosines

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
SETTINGS = [
    {"samples": 12, "dimension": 3, "width": 5, "seed": 2, "scale": 0.7, "steps": 9},
    {"samples": 40, "dimension": 2, "width": 8, "seed": 1, "scale": 0.1, "steps": 400},
    {"samples": 40, "dimension": 2, "width": 8, "seed": 1, "scale": 30.0, "steps": 400},
]


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    script = Path(__file__).with_name("scaled.mjs")
    done = subprocess.run(
        [str(NODE), str(script)], input=json.dumps(SETTINGS), capture_output=True, text=True, check=True
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def network(weights: dict[str, Any], scale: float) -> tuple[nn.Module, nn.Module]:
    """The network of these weights, and the same times a scale, less its start."""
    w, a = (torch.tensor(weights[name], dtype=torch.float64) for name in "wa")
    model = nn.Sequential(nn.Linear(w.shape[1] - 1, len(w)), nn.ReLU(), nn.Linear(len(w), 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(w[:, :-1]), model[0].bias.copy_(w[:, -1]), model[2].weight.copy_(a[None])
    return model, fl.steer.scale_output(model, scale)


def test_kernels_are_those_of_torch(trained: list[dict[str, Any]]):
    for result, settings in zip(trained, SETTINGS, strict=True):
        model, _ = network(result, settings["scale"])
        expected = settings["scale"] ** 2 * fl.ntk(model, torch.tensor(result["x"], dtype=torch.float64)).numpy()
        assert numpy.array(result["kernel"]) == pytest.approx(expected, rel=1e-9)
        assert numpy.array(result["cosines"]) == pytest.approx(cosines(expected), abs=1e-9)


def test_steps_are_those_of_gradient_descent(trained: list[dict[str, Any]]):
    result, settings = trained[0], SETTINGS[0]
    x, y = (torch.tensor(result[name], dtype=torch.float64) for name in "xy")
    model, scaled = network(result["first"], settings["scale"])
    for rate, loss in zip(result["rates"], result["losses"], strict=True):
        residuals = scaled(x)[:, 0] - y
        assert loss == pytest.approx(float(residuals.detach().square().mean()), rel=1e-9)
        gradients = torch.autograd.grad(residuals.square().sum() / 2, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * gradient
    assert result["outputs"] == pytest.approx(scaled(x)[:, 0].tolist(), rel=1e-8)
    w = numpy.concatenate([model[0].weight.detach().numpy(), model[0].bias.detach().numpy()[:, None]], 1)
    assert numpy.array(result["w"]) == pytest.approx(w, rel=1e-8)
    first = numpy.array(result["first"]["w"])[:, :-1]
    dots = (w[:, :-1] * first).sum(1) / numpy.linalg.norm(w[:, :-1], axis=1) / numpy.linalg.norm(first, axis=1)
    assert result["turned"] == pytest.approx(numpy.degrees(numpy.arccos(dots)).mean(), rel=1e-6)


def test_rates_are_stable(trained: list[dict[str, Any]]):
    for result in trained:
        assert result["rates"][-1] * numpy.linalg.eigvalsh(result["kernel"]).max() < 1
        assert max(result["losses"]) < 1.01


def test_a_small_scale_turns_neurons_and_a_large_one_does_not(trained: list[dict[str, Any]]):
    _, rich, lazy = trained
    assert rich["error"] <= 0.05
    assert lazy["error"] <= 0.05
    assert rich["turned"] > 20
    assert lazy["turned"] < 4
