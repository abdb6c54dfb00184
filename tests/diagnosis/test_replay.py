"""Descent replayed with recorded kernels, against the dynamics of the library."""

import math

import pytest
import torch

from featlearn.diagnosis.replay import Replay, _crossing
from featlearn.dynamics import evolving_kernel_descent, kernel_descent


def problem(samples: int = 7, outputs: int = 3, times: int = 60, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(2, samples, samples + 2, dtype=torch.float64, generator=generator)
    ends = root @ root.mT / samples
    share = torch.linspace(0, 1, times, dtype=torch.float64)[:, None, None] ** 2
    y, f = torch.randn(2, samples, outputs, dtype=torch.float64, generator=generator)
    return (1 - share) * ends[0] + share * 4 * ends[1], torch.linspace(0, 1.5, times, dtype=torch.float64), f, y


def test_moving_kernels_are_followed_as_by_the_integrator():
    kernels, times, f, y = problem()
    exact = evolving_kernel_descent(kernels, times, y, rate=0.7, f0=f).loss[-1] / len(y)
    assert Replay(kernels, times, f, y).loss(0.7) == pytest.approx(float(exact), rel=2e-3)
    # second order in the spacing
    every = slice(None, None, 59)
    coarse = Replay(kernels[every], times[every], f, y).loss(0.7)
    assert abs(coarse - float(exact)) > 3 * abs(Replay(kernels, times, f, y).loss(0.7) - float(exact))


@pytest.mark.parametrize("entropy", [False, True])
def test_the_first_kernel_is_followed_as_by_kernel_descent(entropy: bool):
    kernels, times, f, y = problem()
    if entropy:
        y = (3 * y).softmax(1)
    replay = Replay(kernels, times, f, y, entropy)
    moments = torch.tensor([0.01, 0.3, 2.0, 5.0], dtype=torch.float64)
    exact = kernel_descent(kernels[0], y, times=moments, f0=f, loss="cross-entropy" if entropy else "mse").loss / len(y)
    tolerance = 0.03 if entropy else 1e-9  # steps of half the inverse of the largest eigenvalue
    torch.testing.assert_close(replay.frozen_losses(moments), exact, rtol=tolerance, atol=0)
    assert replay.frozen_loss(2.0) == pytest.approx(float(exact[2]), rel=tolerance)


@pytest.mark.parametrize("entropy", [False, True])
def test_rates_and_times_to_a_level_are_found(entropy: bool):
    kernels, times, f, y = problem()
    if entropy:
        y = (3 * y).softmax(1)
    replay = Replay(kernels, times, f, y, entropy)
    rate = replay.rate_to(replay.loss(0.37))
    assert rate == pytest.approx(0.37, rel=5e-3)
    assert replay.frozen_time(replay.frozen_loss(1.3), 100.0) == pytest.approx(1.3, rel=5e-3)
    assert replay.frozen_time(replay.frozen_loss(1.3), 0.5) == 0.5


def test_cross_entropy_that_is_too_stiff_gives_a_lower_bound():
    kernels, times, f, y = problem()
    replay = Replay(1e3 * kernels, times, f, torch.nn.functional.one_hot(y.argmax(1)).double(), True)
    bound = replay.frozen_time(1e-6, 1e9)
    assert 0 < bound < 1e9
    assert replay.frozen_loss(bound) > 1e-6


def test_levels_that_are_never_reached():
    _, times, f, y = problem()
    blind = torch.zeros(7, 7, dtype=torch.float64)
    blind[0, 0] = 1.0
    replay = Replay(blind.expand(3, 7, 7), times[:3], f, y)
    assert replay.rate_to(1e-6) is None
    assert replay.frozen_time(1e-6, 1e3) == 1e3


@pytest.mark.parametrize("guess", [math.nan, math.inf, 0.0, 1e-200, 1e200, -1.0])
def test_a_search_from_a_guess_that_is_no_rate_ends(guess: float):
    assert _crossing(lambda at: 1.0 - at, guess) is None
