"""002 map: its score and its theory against written-out cases, and claims that must fail."""

import math

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import map as silent_map
from papers.tests.verdicts import failing

SETUP = silent_map.Setup(data="digits", samples=12, powers=(0.0, 0.5, 1.0), sigmas=(0.01, 0.1, 1.0), width=9)
CONTEXT = Context(seed=0, folder=None)


def test_the_score_is_the_share_of_the_angle():
    def kernel(degrees, size=1.0):
        return size * torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])

    assert silent_map.score(kernel(0), kernel(45, 7.0), kernel(60, 3.0)) == pytest.approx(0.75)
    assert silent_map.score(kernel(0), kernel(0, 2.0), kernel(60)) == pytest.approx(0.0, abs=1e-3)
    assert silent_map.score(kernel(0), kernel(-30), kernel(60)) == pytest.approx(-0.5)


def test_early_weights_have_the_kernel_of_the_library():
    X, y = silent_map.task(SETUP, CONTEXT, 0.5)
    weights = fl.theory.deep_linear.minimum_norm(X, y)
    generator = torch.Generator().manual_seed(5)
    W0, a0 = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((7, X.shape[1]), (7,)))
    covariance = X.T @ X / len(X)
    assert torch.allclose(covariance @ weights, X.T @ y / len(X))
    W, a = silent_map.early_weights(W0, a0, X.T @ y / len(X), 0.4)
    wanted = fl.theory.deep_linear.early_kernel(
        0.4, W0, a0, weights / weights.norm(), weights.norm(), covariance=covariance
    )
    found = W.T @ W + a.square().sum() * torch.eye(X.shape[1], dtype=torch.float64)
    assert torch.allclose(found, wanted)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_theory_gives_the_score_of_gradient_flow(power):
    """Kernels of the integrated network where a tenth of its loss is gone, and at its end."""
    X, y = silent_map.task(SETUP, CONTEXT, power)
    model = MLP(
        X.shape[1],
        None,
        width=9,
        hidden_layers=1,
        activation="linear",
        weight_variance=0.02**2,
        generator=CONTEXT.generator(1),
    ).double()
    W0, a0 = (weight.detach().clone() for weight in model.parameters())
    times = torch.linspace(0, 40, 801, dtype=torch.float64)
    path = fl.theory.deep_linear.flow([W0, a0], X, y, times=times, rate=1 / len(X))
    begun = int((path.loss <= 0.9 * path.loss[0]).nonzero()[0])
    found = silent_map.score(*path.kernel(times[[0, begun, 800]]))
    assert silent_map.theory_score(X, y, W0, a0[0], 0.9) == pytest.approx(found, abs=0.03 if power == 0 else 0.06)


def test_training_stops_at_its_end_and_keeps_three_kernels():
    X, y = silent_map.task(SETUP, CONTEXT, 0.0)
    model = MLP(
        X.shape[1],
        None,
        width=9,
        hidden_layers=1,
        activation="linear",
        weight_variance=0.01,
        generator=CONTEXT.generator(1),
    ).double()
    first = fl.ntk(model, X)
    kernels, left = silent_map.trained(model, X, y, SETUP)
    assert torch.equal(kernels[0], first)
    assert left <= SETUP.end
    final = fl.theory.deep_linear.final_ntk(X, y, 2)
    assert silent_map.angle(kernels[2], final) < 0.1
    assert silent_map.angle(kernels[2], fl.ntk(model, X)) == 0.0


def test_claims_fail_on_numbers_that_break_them():
    good = numpy.array([[0.95, 0.7, 0.1], [0.6, 0.4, 0.0], [0.2, 0.1, -0.1]])

    def verdict(linear=good, relu=good, theory=good, left=5e-4):
        numbers = {"score": numpy.stack([linear, relu]), "theory": theory, "left": numpy.full((2, 3, 3), left)}
        return failing(silent_map, SETUP, Runs([0], [numbers]))

    assert verdict() == []
    assert verdict(relu=good - 0.3) == ["silent-relu"]
    assert verdict(theory=good + 0.2) == ["theory"]
    assert verdict(left=0.6) == ["trained"]
    flat = numpy.array([[0.95, 0.96, 0.1], [0.97, 0.4, 0.0], [0.9, 0.1, -0.1]])
    assert verdict(linear=flat, theory=flat) == ["sensitive-linear", "small-weights", "anisotropy"]
    assert verdict(relu=good[::-1]) == ["silent-relu", "sensitive-relu", "carries-over"]
