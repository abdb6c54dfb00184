"""Mechanisms by construction: two layers of 004 whose output is too small, too large, or parallel."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.layers import mechanisms
from featlearn.diagnosis.run_data import RunData
from featlearn.theory import latent
from tests.diagnosis.recording import record


def network(u: torch.Tensor, w: torch.Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(w.shape[1], len(u), bias=False), nn.Linear(len(u), 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(w)
        model[1].weight.copy_(u[None])
    return model


@pytest.mark.parametrize(
    ("overlap", "y", "name"), [(0.0, 2.0, "alignment"), (0.97, 2.0, "disalignment"), (1.0, 6.0, "rescaling")]
)
def test_the_mechanism_is_that_of_the_exact_solution(tmp_path: Path, overlap: float, y: float, name: str):
    generator = torch.Generator().manual_seed(0)
    u, other = torch.randn(2, 40, dtype=torch.float64, generator=generator)
    u *= 2 / u.norm()
    other -= (other @ u) / (u @ u) * u
    w = (2 * overlap * u / u.norm() + 2 * math.sqrt(1 - overlap**2) * other / other.norm())[:, None]
    if overlap == 1:
        w = u[:, None].clone()  # parallel to the last digit
    x, targets = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64)
    run = record(tmp_path / "run", network(u, w), x, targets, lr=0.003, steps=1000, loss="mean")
    found = mechanisms(RunData(run))["0--1"]
    assert found.name == name
    theory = latent.solve(u, w, x[0], y, times=torch.tensor([0.0, 3.0], dtype=torch.float64))
    assert theory.mechanism == name
    zeta = theory.layer_alignment
    assert found.start == pytest.approx(abs(float(zeta[0])), rel=1e-5, abs=1e-6)
    assert found.end == pytest.approx(float(zeta[-1]), rel=2e-3)  # steps, not a flow
    if overlap > 0:  # the output keeps its sign, and its change is the sum
        change = math.log(float(theory.output[-1] / theory.output[0]))
        assert found.alignment + found.first_norm + found.second_norm == pytest.approx(change, rel=1e-2)


def test_nothing_happens_in_a_lazy_network_and_layers_are_ranked(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30, bias=False), nn.ReLU(), nn.Linear(30, 30, bias=False), nn.ReLU(),
                          nn.Linear(30, 1, bias=False)).double()  # fmt: skip
    x = torch.randn(9, 4, dtype=torch.float64)
    start = model(x).detach()
    run = record(tmp_path / "run", model, x, start + 1e-3 * torch.randn(9, 1, dtype=torch.float64), lr=0.05, steps=60)
    found = diagnose(run)
    assert {one.name for one in found.mechanism.values()} == {"none"}
    assert set(found.layers) == {"0", "2", "4"}
    distances = [one.distance for one in found.layers.values()]
    assert distances == sorted(distances, reverse=True)
