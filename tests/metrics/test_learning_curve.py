"""Learning curves from one kernel, against slow regressions on the same draws, the theory and power laws."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn import metrics
from tests.metrics.test_risk import COEFFICIENTS, NOISE, VALUES, K, Y, design


def slow(K: Tensor, Y: Tensor, n: int, draws: int, ridge: float) -> tuple[float, float]:
    """One regression for every sample of every draw."""
    source = torch.Generator().manual_seed(5)
    errors = np.zeros((draws, len(K)))
    for draw in range(draws):
        chosen = torch.randperm(len(K), generator=source)[:n].tolist()
        for i in range(len(K)):
            rest = [j for j in chosen if j != i]
            part = K[rest][:, rest] + ridge * torch.eye(len(rest), dtype=K.dtype)
            f = K[i, rest] @ torch.linalg.solve(part, Y[rest])
            errors[draw, i] = (f - Y[i]).square().mean()
    among = errors.mean(0).var() / len(K)
    one = errors.mean(1).var(ddof=1) / (1 - n / len(K))  # of a training set of its own samples
    return errors.mean(), math.sqrt(among + one * (n / len(K) + (1 - n / len(K)) / draws))


@pytest.mark.parametrize(("n", "ridge"), [(2, 0.3), (7, 0.01), (12, 0.3)])
def test_every_sample_is_predicted_from_the_others_of_a_draw(n: int, ridge: float):
    found = metrics.learning_curve(K, Y, [n], ridge, draws=4, generator=torch.Generator().manual_seed(5))
    error, stderr = slow(K, Y, n, 4, ridge)
    assert float(found.error) == pytest.approx(error, rel=1e-9)
    assert float(found.stderr) == pytest.approx(stderr, rel=1e-9)
    assert found.extrapolated.tolist() == [False]


@pytest.mark.parametrize("ridge", [0.0, 0.2, None])
def test_all_samples_are_the_risk_with_one_left_out(ridge: float | None):
    found, risk = metrics.learning_curve(K, Y, [13], ridge), metrics.predicted_risk(K, Y, ridge)
    assert float(found.error) == pytest.approx(float(risk.leave_one_out), rel=1e-8)
    assert float(found.stderr) == pytest.approx(float(risk.leave_one_out.stderr), rel=1e-8)
    assert float(found.ridge) == float(risk.ridge)


@pytest.mark.parametrize("ridge", [0.0, 0.05])
def test_the_curve_of_a_normal_design_is_that_of_the_theory(ridge: float):
    """Kernels of 200 samples, where the theory with their spectra would say 0 at n = 200 without a ridge."""
    sizes = [20, 75, 150, 200]
    curves = [metrics.learning_curve(*design(200, seed), sizes, ridge, draws=4).error for seed in range(20)]
    found = fl.Estimate.from_samples(torch.stack(curves))
    theory = fl.theory.transfer.learning_curve_general(torch.tensor(sizes), VALUES, COEFFICIENTS, ridge, NOISE)
    expected, stderr = theory.error + NOISE, torch.as_tensor(found.stderr)
    assert bool((stderr < 0.07 * expected).all())
    assert bool(((found.value - expected).abs() < 3 * stderr + 0.02 * expected).all())


def test_beyond_its_samples_the_curve_is_continued():
    """Noise-free labels of a power law: from 200 samples to 800, within a tenth of the theory."""
    x = torch.randn(200, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrix, y = (x * VALUES) @ x.T, x @ COEFFICIENTS
    sizes = [800, 50, 200, 400, 100]
    found = metrics.learning_curve(matrix, y, sizes, 0.5, draws=20)
    theory = fl.theory.transfer.learning_curve_general(torch.tensor(sizes), VALUES, COEFFICIENTS, 0.5)
    assert found.extrapolated.tolist() == [True, False, False, True, False]
    np.testing.assert_allclose(found.error, theory.error, rtol=0.1)
    # a straight line through the three sizes, by another library
    at = {n: float(found.error[sizes.index(n)]) for n in (50, 100, 200)}
    slope = np.polyfit(np.log(list(at)), np.log(list(at.values())), 1)[0]
    assert float(found.error[0]) == pytest.approx(at[200] * 4**slope, rel=1e-9)
    assert float(found.stderr[0] / found.error[0]) > float(found.stderr[3] / found.error[3])


def test_a_rising_curve_is_continued_level():
    """Labels without a rule and a kernel of rank 40, whose error has its peak at n = 40."""
    drawn = torch.randn(40, 41, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = metrics.learning_curve(drawn[:, 1:] @ drawn[:, 1:].T, drawn[:, 0], [10, 40, 160], 0.0)
    assert float(found.error[1]) > float(found.error[0])
    assert float(found.error[2]) == float(found.error[1])


def test_draws_repeat_and_follow_a_generator():
    same = [metrics.learning_curve(K, Y, [5, 9], 0.1).error for _ in range(2)]
    assert torch.equal(*same)
    other = metrics.learning_curve(K, Y, [5, 9], 0.1, generator=torch.Generator().manual_seed(9)).error
    assert not torch.equal(same[0], other)
