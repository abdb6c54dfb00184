"""Descent replayed with recorded kernels, against the dynamics of the library."""

import math

import numpy
import pytest
import torch
from torch import Tensor

from featlearn.diagnosis.loss_kind import BINARY, CROSS_ENTROPY, KINDS, SQUARE, LossKind
from featlearn.diagnosis.replay import Replay
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
    assert Replay(kernels, times, f, y).losses(0.7)[-1] == pytest.approx(float(exact), rel=2e-3)
    # second order in the spacing
    every = slice(None, None, 59)
    coarse = Replay(kernels[every], times[every], f, y).losses(0.7)[-1]
    assert abs(coarse - float(exact)) > 3 * abs(Replay(kernels, times, f, y).losses(0.7)[-1] - float(exact))


def targets_of(kind: LossKind, y: Tensor) -> Tensor:
    return {SQUARE: y, CROSS_ENTROPY: (3 * y).softmax(1), BINARY: (y > 0).double()}[kind]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_first_kernel_is_followed_as_by_kernel_descent(kind: LossKind):
    kernels, times, f, y = problem()
    y = targets_of(kind, y)
    replay = Replay(kernels, times, f, y, kind)
    moments = torch.tensor([0.01, 0.3, 2.0, 5.0], dtype=torch.float64)
    outputs = kernel_descent(kernels[0], y, times=moments, f0=f, loss=kind.name).outputs
    exact = torch.stack([kind.mean(g, y) for g in outputs])
    tolerance = 0.03 if kind.logistic else 1e-9  # steps of half the inverse of the largest eigenvalue
    torch.testing.assert_close(replay.frozen_losses(moments), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("kind", "written_out"),
    [
        (SQUARE, lambda f, y: sum((f - y) ** 2)),
        (CROSS_ENTROPY, lambda f, y: -sum(y * numpy.log(numpy.exp(f) / numpy.exp(f).sum()))),
        (BINARY, lambda f, y: numpy.mean(y * numpy.log1p(numpy.exp(-f)) + (1 - y) * numpy.log1p(numpy.exp(f)))),
    ],
    ids=["mse", "cross-entropy", "bce"],
)
def test_each_loss_is_its_definition_and_falls_along_what_its_predictions_miss(kind: LossKind, written_out):
    """The loss by hand in numpy; its gradient by the outputs is in proportion to predictions - y."""
    _, _, f, y = problem()
    y = targets_of(kind, y)
    by_hand = numpy.mean([written_out(row, wanted) for row, wanted in zip(f.numpy(), y.numpy(), strict=True)])
    assert float(kind.mean(f, y)) == pytest.approx(by_hand, rel=1e-12)
    moving = f.clone().requires_grad_()
    kind.mean(moving, y).backward()
    assert moving.grad is not None
    missed = kind.predictions(f) - y
    torch.testing.assert_close(moving.grad / moving.grad.norm(), missed / missed.norm(), rtol=1e-10, atol=1e-12)


def test_binary_cross_entropy_with_moving_kernels_is_that_of_small_euler_steps():
    kernels, times, f, y = problem(times=30)
    labels = (y > 0).double()
    g = f.clone()
    for i in range(len(times) - 1):
        middle, length = (kernels[i] + kernels[i + 1]) / 2, float(times[i + 1] - times[i])
        for _ in range(200):
            g = g - 0.7 * length / 200 * middle @ (1 / (1 + torch.exp(-g)) - labels)
    by_hand = -float((labels * torch.log(torch.sigmoid(g)) + (1 - labels) * torch.log(torch.sigmoid(-g))).mean())
    assert Replay(kernels, times, f, labels, BINARY).losses(0.7)[-1] == pytest.approx(by_hand, rel=0.02)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_rate_to_a_level_is_found(kind: LossKind):
    kernels, times, f, y = problem()
    replay = Replay(kernels, times, f, targets_of(kind, y), kind)
    rate = replay.rate_to(float(replay.losses(0.37)[-1]))
    assert rate == pytest.approx(0.37, rel=5e-3)


def test_levels_that_are_never_reached():
    _, times, f, y = problem()
    blind = torch.zeros(7, 7, dtype=torch.float64)
    blind[0, 0] = 1.0
    replay = Replay(blind.expand(3, 7, 7), times[:3], f, y)
    assert replay.rate_to(1e-6) is None


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0])
def test_a_search_with_a_kernel_that_sets_no_scale_ends(factor: float):
    kernels, times, f, y = problem()
    assert Replay(factor * kernels[:3], times[:3], f, y).rate_to(0.1) is None
