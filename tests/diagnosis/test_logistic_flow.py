"""Implicit steps of training on logistic losses, against a closed form and an explicit integrator."""

import math

import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.diagnosis.logistic_flow import LogisticFlow, steps_within
from featlearn.diagnosis.loss_kind import BINARY, CROSS_ENTROPY, LossKind


def flow_of(kernel: Tensor, targets: Tensor, kind: LossKind) -> LogisticFlow:
    return LogisticFlow(*torch.linalg.eigh(kernel), targets, kind)


def follow(flow: LogisticFlow, f: Tensor, time: float, ratio: float) -> Tensor:
    guess, done = None, 0.0
    for length in [1e-3 * time, *steps_within(1e-3 * time, time, ratio)]:
        f, _, guess = flow.step(f, length, guess)
        done += length
    assert done == pytest.approx(time)
    return f


@pytest.mark.parametrize("time", [0.1, 30.0, 1e6])
def test_one_sample_of_a_logistic_loss_has_a_closed_form(time: float):
    """df/dt = k / (1 + exp(f)) gives f + exp(f) = k t + f0 + exp(f0)."""
    k, f0 = 2.5, 0.3
    one = torch.ones(1, 1, dtype=torch.float64)
    f = float(follow(flow_of(k * one, one, BINARY), f0 * one, time, 0.01))
    assert f + math.exp(f) == pytest.approx(k * time + f0 + math.exp(f0), rel=0.02)


def problem(samples: int = 9, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(samples, samples, dtype=torch.float64, generator=generator)
    labels = torch.randint(outputs, (samples,), generator=generator)
    y = torch.nn.functional.one_hot(labels, outputs).double()
    return root @ root.mT, y, 0.3 * torch.randn(samples, outputs, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("kind", [CROSS_ENTROPY, BINARY])
@pytest.mark.parametrize("full", [False, True])
def test_it_is_the_flow_of_an_explicit_integrator(kind: LossKind, full: bool):
    kernel, y, f0 = problem()
    mixed = torch.tensor([[1.0, 0.2, 0.0], [0.2, 0.8, -0.1], [0.0, -0.1, 0.5]], dtype=torch.float64)
    whole = torch.einsum("pq,cd->pqcd", kernel, mixed)
    rows = whole.transpose(1, 2).reshape(y.numel(), -1) if full else kernel
    exact = fl.dynamics.kernel_descent(whole if full else kernel, y, times=[2.0], f0=f0, loss=kind.name).outputs[-1]
    flow = flow_of(rows, y, kind)
    errors = [float((follow(flow, f0, 2.0, ratio) - exact).norm() / (exact - f0).norm()) for ratio in (0.2, 0.05)]
    assert errors[0] < 0.05
    assert errors[1] < 0.35 * errors[0]  # of first order: four times shorter steps


def test_an_implicit_step_fulfils_its_equation():
    """f1 = f0 - h K (softmax(f1) - y), for a step thousands of times longer than an explicit one may be."""
    kernel, y, f0 = problem()
    length = 1e4 / float(torch.linalg.eigvalsh(kernel)[-1])
    f1, slope, _ = flow_of(kernel, y, CROSS_ENTROPY).step(f0, length)
    torch.testing.assert_close(slope, f1.softmax(1) - y, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(f1, f0 - length * kernel @ slope, rtol=1e-3, atol=1e-3)


def test_steps_are_short_beside_the_time_passed_and_end_where_they_should():
    lengths = steps_within(1.0, 10.0, 0.5)
    assert sum(lengths) == pytest.approx(9.0)
    time = 1.0
    for length in lengths:
        assert length <= 0.5 * time + 1e-12
        time += length
    assert steps_within(3.0, 3.0, 0.5) == []
