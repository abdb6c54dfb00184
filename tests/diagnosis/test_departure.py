"""How far training departs from the frozen first kernel, against paths that are known in closed form."""

import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from featlearn.diagnosis.departure import Departure, departs, departure
from featlearn.diagnosis.run_data import RunData
from featlearn.diagnosis.verdict import diagnose
from featlearn.linalg.estimate import Estimate
from featlearn.record import Run, RunWriter, open_run

VALUES = torch.tensor([2.0, 0.3], dtype=torch.float64)
TIMES = [0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0]


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (P, 2) and (P', 2) of two modes, orthonormal on the probe, and what is wanted along them."""
    generator = torch.Generator().manual_seed(0)
    modes = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64, generator=generator))[0]
    at_test = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    wanted = torch.tensor([[1.5], [-0.8]], dtype=torch.float64)
    return modes, at_test, wanted, 0.2 * torch.randn(6, 1, dtype=torch.float64, generator=generator)


def weights_at(time: float) -> Tensor:
    """Along each mode, 1 - exp(-lambda t) of what is wanted."""
    return (1 - torch.exp(-VALUES * time))[:, None] * problem()[2]


def written(
    path: Path,
    moved: list[Tensor],
    gaps: list[float],
    *,
    test: bool = True,
    kernels: bool = True,
    later: Tensor = VALUES,
) -> Run:
    """Outputs f0 + modes @ w for the weights w of each step, with the kernel of two modes, at last of others."""
    modes, at_test, wanted, f0 = problem()
    y = f0 + modes @ wanted
    writer = RunWriter(path, {"name": path.name, "loss_convention": "sum-half"})
    writer.array("targets", 0, y=y.numpy())
    for step, (w, gap) in enumerate(zip(moved, gaps, strict=True)):
        f = f0 + modes @ w
        values = later if step == len(moved) - 1 else VALUES
        kernel, cross = (rows @ torch.diag(values) @ modes.T for rows in (modes, at_test))
        writer.array("outputs", step, f=f.numpy())
        if kernels or step:
            writer.array("kernel", step, mean=kernel.numpy())
        if test:
            ends = step in (0, len(moved) - 1)
            arrays = {"cross": cross.numpy(), "y": (at_test @ wanted).numpy()} if ends else {}
            writer.array("test", step, f=(at_test @ w).numpy(), **arrays)
        writer.scalars(step, {"probe/loss": float((f - y).square().mean())} | ({"gap/probe": gap} if step else {}))
    writer.close()
    return open_run(path)


def centered(f: numpy.ndarray) -> numpy.ndarray:
    return f - f.mean(0)


def test_training_with_a_frozen_kernel_does_not_depart_from_it(tmp_path: Path):
    run = written(tmp_path / "run", [weights_at(t) for t in TIMES], [0.0] * len(TIMES))
    found = departure(RunData(run))
    assert found.steps == tuple(range(1, len(TIMES)))
    # the path is interpolated between times, outputs are exact
    assert max(found.on_probe) < 2e-3
    assert max(found.on_test) < 2e-3
    assert found.test is not None
    assert float(found) == float(found.value) == found.on_test[-1]
    assert departs(found, 0.3) is False


@pytest.mark.parametrize("test", [True, False])
def test_a_path_that_leaves_it_departs_by_its_distance_from_the_nearest_point(tmp_path: Path, test: bool):
    """After step 3 only the slow mode goes on: the nearest point of the frozen path is found by hand, with numpy."""
    slow = [torch.stack([weights_at(0.5)[0], share * problem()[2][1]]) for share in (0.6, 0.9, 1.0)]
    moved = [weights_at(t) for t in TIMES[:4]] + slow
    stopped = torch.tensor([0.0, 0.3], dtype=torch.float64)
    run = written(tmp_path / "run", moved, [0.0, 0.01, 0.02, 0.05, 0.3, 0.4, 0.5], test=test, later=stopped)
    found = departure(RunData(run))
    modes, at_test, wanted, _ = (part.numpy() for part in problem())
    # where the path of the frozen kernel comes closest on the probe, over a fine grid of times
    mine = moved[-1].numpy()
    times = numpy.linspace(0, 20, 200_001)
    paths = (1 - numpy.exp(-VALUES.numpy() * times[:, None])) * wanted[:, 0]
    apart = (paths - mine[:, 0]) @ centered(modes).T
    frozen = paths[(apart**2).sum(1).argmin()][:, None]
    rows = at_test if test else modes
    by_hand = numpy.linalg.norm(centered(rows @ (frozen - mine))) / numpy.linalg.norm(centered(rows @ mine))
    assert by_hand > 0.1
    assert float(found) == pytest.approx(by_hand, rel=5e-3)
    assert (found.test is not None) == test
    assert departs(found, by_hand / 2) is True
    assert departs(found, 2 * by_hand) is False
    # the kernel of the slow mode alone comes closest where that mode is done, by hand
    alone = numpy.array([[0.0], [1.0]]) * wanted
    apart = numpy.linalg.norm(centered(rows @ (frozen - alone))) / numpy.linalg.norm(centered(rows @ mine))
    assert found.between_kernels == pytest.approx(apart, rel=0.05)
    # while it followed the kernel nothing was off, which is the error of the replay
    assert float(found.value.stderr) == (found.on_test if test else found.on_probe)[0] < 2e-3


@pytest.mark.parametrize("test", [True, False])
def test_a_kernel_that_stayed_makes_no_network_depart(tmp_path: Path, test: bool):
    """A linear model that is trained on more samples than the probe leaves the replay, which knows the probe alone."""
    slow = [torch.stack([weights_at(0.5)[0], share * problem()[2][1]]) for share in (0.4, 0.5, 0.6)]
    run = written(tmp_path / "run", [weights_at(t) for t in TIMES[:4]] + slow, [0.0] * 7, test=test)
    found = departure(RunData(run))
    assert float(found) > 0.3
    assert float(found.value.stderr) < 2e-3
    assert found.between_kernels < 1e-12
    assert departs(found, 0.3) is None
    verdict = diagnose(run)
    assert verdict.regime == "lazy"
    # a departure that counts for nothing is a number, and no statement
    assert float(verdict.numbers["departure"]) == float(found)
    assert not any("training with the frozen first kernel" in item.says for item in verdict.evidence)


def test_what_the_replay_misses_from_the_beginning_is_its_error(tmp_path: Path):
    """A path along the slow mode alone from the first step on, at a small gap: another optimizer, say."""
    moved = [torch.stack([0 * problem()[2][0], share * problem()[2][1]]) for share in (0.0, 0.2, 0.5, 1.0)]
    found = departure(RunData(written(tmp_path / "run", moved, [0.0, 0.01, 0.01, 0.02])))
    assert float(found) > 0.3
    assert float(found.value.stderr) == found.on_test[0] > 0.3
    assert departs(found, 0.3) is None


@pytest.mark.parametrize(
    ("value", "error", "told"),
    [
        (0.5, 0.05, True),
        (0.5, 0.2, None),
        (0.1, 0.05, False),
        (0.1, 0.15, None),
        (0.5, math.nan, None),
        (math.nan, 0.1, None),
    ],
)
def test_it_departs_by_more_than_twice_its_error_or_it_is_not_known(value: float, error: float, told: bool | None):
    assert departs(Departure(Estimate(value, error, 5), None), 0.3) is told


def test_one_comparison_shows_no_error(tmp_path: Path):
    found = departure(RunData(written(tmp_path / "run", [weights_at(0.0), weights_at(1.0)], [0.0, 0.01])))
    assert math.isnan(float(found.value.stderr))
    assert departs(found, 0.3) is None


def test_why_it_is_unknown_is_said(tmp_path: Path):
    path = [weights_at(t) for t in TIMES[:3]]
    missing = departure(RunData(written(tmp_path / "missing", path, [0.0] * 3, kernels=False)))
    assert "the first kernel" in missing.reason
    assert math.isnan(float(missing))
    rising = departure(RunData(written(tmp_path / "rising", [-2 * t * problem()[2] for t in TIMES[:3]], [0.0] * 3)))
    assert rising.reason == "the loss on the probe did not fall"
