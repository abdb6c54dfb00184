"""When the kernel settled, on runs whose kernel stops at a known step."""

import math
from pathlib import Path

import pytest
import torch

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.rates import LossRates
from featlearn.diagnosis.run_data import Curve, RunData
from featlearn.diagnosis.settling import Settling, above_rounding, settling
from featlearn.dynamics import evolving_kernel_descent
from tests.diagnosis.recording import written

STEPS = [0, *range(1, 20), *range(20, 800, 10)]


def run(path: Path, stop: float, outputs: int = 1, lr: float = 0.01):
    """A kernel that grows and turns until step `stop`, then stays."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 10, 14, dtype=torch.float64, generator=generator)
    ends = root @ root.mT / 14
    y = torch.randn(10, outputs, dtype=torch.float64, generator=generator)
    share = (torch.tensor(STEPS, dtype=torch.float64) / max(stop, 1e-9)).clamp(max=1.0)[:, None, None]
    if stop == 0:
        share = torch.ones_like(share)
    kernels = (1 - share) * 0.05 * ends[0] + share * 1.5 * ends[1]
    path_of_f = evolving_kernel_descent(kernels, lr * torch.tensor(STEPS, dtype=torch.float64), y)
    return written(path, STEPS, kernels, path_of_f.outputs, y, lr=lr)


@pytest.mark.parametrize("stop", [0, 60, 150])
def test_the_kernel_settles_where_it_stops(tmp_path: Path, stop: int):
    found = settling(LossRates(RunData(run(tmp_path / "run", stop))))
    assert isinstance(found, Settling)
    assert not found.fitted
    # shortly before it stops the prediction is good already; steps that are tried are some apart
    assert 0.5 * stop <= found.step <= stop + 40
    assert found.error <= 0.25


def test_with_several_outputs_the_rate_is_fitted(tmp_path: Path):
    found = settling(LossRates(RunData(run(tmp_path / "run", 100, outputs=3))))
    assert isinstance(found, Settling)
    assert found.fitted
    assert 40 <= found.step <= 140


def test_a_kernel_that_never_stops_does_not_settle(tmp_path: Path):
    kernel, y = torch.eye(4, dtype=torch.float64), torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64)
    times = torch.tensor(STEPS, dtype=torch.float64)
    growth = torch.exp(times / 40)
    kernels = 1e-10 * growth[:, None, None] * kernel
    f = y * -torch.expm1(-1e-10 * 40 * (growth - 1))[:, None, None]  # the integral of the kernel
    found = settling(LossRates(RunData(written(tmp_path / "run", STEPS, kernels, f, y, lr=1.0))))
    assert isinstance(found, Settling)
    assert math.isnan(found.step)
    assert found.error > 0.25


def test_a_loss_at_the_floor_of_its_rounding_is_cut_there():
    """Noise at the end is left out: below 1e-13 of the first loss, or where a loss that is tiny falls no more."""
    steps = torch.tensor(STEPS, dtype=torch.float64)
    falling = torch.exp(-steps / 5)
    for noise, end in ((1e-30, 5 * math.log(1e13)), (1e-11, 5 * math.log(1e11))):
        cut = above_rounding(Curve(steps, falling + noise * (1 + 0.5 * torch.cos(steps))))
        assert cut is not None
        assert end - 20 < float(cut.steps[-1]) < end
    plateau = above_rounding(Curve(steps, falling + 1e-3))  # a loss that cannot fall further is none of rounding
    assert plateau is not None
    assert plateau.steps.tolist() == STEPS


def test_a_kernel_that_never_moved_is_settled_from_the_start(tmp_path: Path):
    """Whatever the loss did: here no descent with this kernel predicts it."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(5, 1, dtype=torch.float64, generator=generator)
    steps = list(range(0, 60, 3))
    left = torch.tensor([1 / (1 + step) ** 2 + 0.3 * (step % 2) for step in steps], dtype=torch.float64)
    f = (1 - left[:, None, None]) * y
    kernel = torch.eye(5, dtype=torch.float64) + 0.1
    grown = 1 + 1e-3 * torch.arange(len(steps), dtype=torch.float64)
    still = written(tmp_path / "still", steps, kernel.expand(len(steps), -1, -1), f, y)
    moving = written(tmp_path / "moving", steps, grown[:, None, None] * kernel, f, y)
    found = diagnose(still)
    assert found.times["kernel_settled"] == 0
    said = next(item for item in found.evidence if item.topic == "the kernel settled")
    assert said.says == "from the start: the kernel changed by 0 of its norm"
    assert (said.threshold, said.verdict) == ("at most 1e-06", "yes")
    assert math.isnan(diagnose(moving).times["kernel_settled"])  # growth is no rest
