"""What kernels predict for the loss, against small steps and closed forms; pictures and bands against loops."""

import math
from pathlib import Path

import numpy
import pytest
import torch

from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.rates import Unknown
from featlearn.reporting.content_blocks import thin
from featlearn.reporting.matrix_sections import smaller
from featlearn.reporting.predicted_loss import PredictedLoss, predicted_loss
from tests.diagnosis.recording import written

STEPS = [0, 1, 2, 4, 7, 11, 18, 28, 40]


def growing(path: Path, turn: float, outputs: int = 1):
    """Outputs under K(t) = (1 + t) K0 plus `turn` times t of another matrix, by small steps; rate 1, lr 1/20."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 7, dtype=torch.float64, generator=generator) for _ in range(2))
    first, other = a @ a.T / 7, b @ b.T / 7
    y = torch.randn(5, outputs, dtype=torch.float64, generator=generator)
    kernels = [first * (1 + s / 20) + turn * s / 20 * other for s in STEPS]
    f, path_of_f, parts = torch.zeros(5, outputs, dtype=torch.float64), [], 20
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            path_of_f.append(f.clone())
        for i in range(parts):
            t = (step + (i + 0.5) / parts) / 20
            f = y + torch.matrix_exp(-(first * (1 + t) + turn * t * other) / 20 / parts) @ (f - y)
    run = written(path, STEPS, torch.stack(kernels), torch.stack(path_of_f), y, lr=1 / 20)
    return run, first, y


def test_frozen_rescaled_and_evolving_losses(tmp_path: Path):
    run, first, y = growing(tmp_path / "run", turn=1.0)
    found = predicted_loss(Findings(run))
    assert isinstance(found, PredictedLoss)
    values, vectors = torch.linalg.eigh(first)
    power = (vectors.T @ y).square()[:, 0]
    frozen = [float((power * torch.exp(-2 * values * s / 20)).sum() / 5) for s in STEPS]
    assert found.frozen.steps.tolist() == STEPS
    assert found.frozen.values.tolist() == pytest.approx(frozen, rel=1e-9)
    _, measured = run.scalar("probe/loss")
    assert found.evolving is not None
    assert found.evolving.values.tolist() == pytest.approx(measured.tolist(), rel=0.05)
    assert (found.rescaled.values[1:] < found.frozen.values[1:]).all()
    assert float(found.rescaled.values[-1]) > 1.5 * measured[-1]


@pytest.mark.parametrize("outputs", [1, 3])  # of one the rate is known, for more it is fitted
def test_growth_alone_is_the_rescaled_prediction(tmp_path: Path, outputs: int):
    run, first, y = growing(tmp_path / "run", 0.0, outputs)
    found = predicted_loss(Findings(run))
    assert isinstance(found, PredictedLoss)
    values, vectors = torch.linalg.eigh(first)
    power = (vectors.T @ y).square().sum(1)
    closed = [float((power * torch.exp(-2 * values * (t + t * t / 2))).sum() / 5) for t in (s / 20 for s in STEPS)]
    assert found.rescaled.values.tolist() == pytest.approx(closed, rel=1e-2)
    assert found.rescaled.values.tolist() == pytest.approx(run.scalar("probe/loss")[1].tolist(), rel=1e-2)


def test_a_run_without_kernels_has_no_prediction(tmp_path: Path):
    from tests.reporting.runs import by_hand

    found = predicted_loss(Findings(by_hand(tmp_path / "a", {"probe/loss": [1.0, 0.5]}, [0, 1])))
    assert isinstance(found, Unknown)
    assert "kernels" in found.reason


@pytest.mark.parametrize("size", [3, 64, 65, 150])
def test_smaller_pictures_are_means(size: int):
    matrix = numpy.random.default_rng(0).normal(size=(size, size))
    found = smaller(matrix, 64)
    side = min(size, 64)
    assert found.shape == (side, side)
    edges = [round(size * i / side) for i in range(side + 1)]
    for i, j in [(0, 0), (1, side - 1), (side - 1, 2 % side), (side // 2, side // 3)]:
        block = [matrix[a, b] for a in range(edges[i], edges[i + 1]) for b in range(edges[j], edges[j + 1])]
        assert found[i, j] == pytest.approx(math.fsum(block) / len(block))


@pytest.mark.parametrize("count", [1, 2, 199, 200, 201, 100_000])
def test_thinned_lines_keep_their_ends(count: int):
    x, y = thin(range(count), [2 * i for i in range(count)], 200)
    assert len(x) <= 200
    assert (x[0], x[-1]) == (0, count - 1)
    assert y == [2 * i for i in x]
    assert x == sorted(set(x))
    assert len(x) == count or len(x) > 100
