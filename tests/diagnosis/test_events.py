"""Silent alignment, on linear networks where it is known to happen."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.events import events
from featlearn.diagnosis.reading import Reading
from featlearn.steer import scale_init, whiten
from tests.diagnosis.recording import record, written


def linear_run(path: Path, sigma: float, steps: int, lr: float):
    """Two linear layers on whitened inputs with a teacher of norm one (002 Sec. 3)."""
    generator = torch.Generator().manual_seed(0)
    x = whiten(torch.randn(60, 12, dtype=torch.float64, generator=generator), mean_eigenvalue=1.0).x
    teacher = torch.randn(12, 1, dtype=torch.float64, generator=generator)
    y = x @ (teacher / teacher.norm())
    model = nn.Sequential(nn.Linear(12, 30, bias=False), nn.Linear(30, 1, bias=False)).double()
    scale_init(model, sigma, redraw=True, generator=generator)
    return record(path, model, x, y, lr=lr, steps=steps, loss="mean-half", until=1e-3)


def test_small_weights_align_in_silence(tmp_path: Path):
    found = diagnose(linear_run(tmp_path / "run", 1e-2, 1200, 0.02))
    assert found.silent is True
    assert found.regime == "rich"
    assert found.times["alignment_90"] <= found.times["norm_10"] < found.times["loss_half"]
    assert "silent: " in next(item.says for item in found.evidence if item.topic == "silent alignment")


def test_large_weights_do_not(tmp_path: Path):
    found = diagnose(linear_run(tmp_path / "run", 2.0, 600, 0.005))
    assert found.silent is False
    assert math.isnan(found.times["norm_10"])


def test_event_times_are_those_of_the_curves(tmp_path: Path):
    steps = list(range(0, 101, 10))
    y = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    share = torch.tensor(steps, dtype=torch.float64) / 100
    f = share[:, None, None] * y
    alignment, norm = (0.2 + 0.6 * (3 * share).clamp(max=1)).tolist(), (0.01 + share**2).tolist()
    kernels = torch.eye(3, dtype=torch.float64).expand(len(steps), 3, 3)
    run = written(tmp_path / "run", steps, kernels, f, y,
                  scalars={"ntk/centered_alignment": alignment, "ntk/norm": norm})  # fmt: skip
    found = events(Reading(run))
    assert found.loss_half == pytest.approx(100 * (1 - math.sqrt(0.5)), abs=0.5)  # linear between points
    assert found.alignment_90 == pytest.approx(30.0, abs=0.1)
    assert found.norm_10 == pytest.approx(100 * math.sqrt(0.091), abs=1.0)
    assert found.growth == pytest.approx(101)
    # 90 % of alignment at 30, 10 % of the norm at 30.2, half of the loss at 29.3: it was not silent
    assert found.silent is False
