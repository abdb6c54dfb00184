"""002 Fig. E.1: networks against the tangent kernel and the formula of the paper, and claims that must fail."""

import math

import numpy
import pytest
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import figE1
from featlearn_papers.paper_002.linear_networks import whitened_task
from papers.tests.verdicts import failing

SETUP = figE1.Setup(samples=14, inputs=6, width=9, depths=(2, 3), sigma=0.05, others=(0.02,), moments=40)


@pytest.fixture(scope="module")
def numbers():
    found = figE1.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_curves_start_at_the_kernel_of_the_network_and_end_at_the_formula(numbers):
    context = Context(seed=0, folder=None)
    X, y, beta = whitened_task(14, 6, context.generator())
    assert torch.allclose(X.T @ X / 14, torch.eye(6, dtype=torch.float64), atol=1e-12)
    for i, depth in enumerate(SETUP.depths):
        model = MLP(
            6,
            None,
            width=9,
            hidden_layers=depth - 1,
            activation="linear",
            weight_variance=0.05**2,
            generator=context.generator(depth),
        ).double()
        kernel = fl.ntk(model, X, dtype=torch.float64)
        assert numbers["alignment"][i, 0] == pytest.approx(float(y @ kernel @ y / (kernel.norm() * y @ y)))
        W = next(model.parameters()).detach()
        both = W.T @ W, torch.outer(beta, beta)
        assert numbers["cosine"][i, 0] == pytest.approx(float((both[0] * both[1]).sum() / both[0].norm()))
        assert numbers["best"][i] == pytest.approx(depth / math.sqrt(depth**2 - 1 + 6))
        assert numbers["alignment"][i, -1] == pytest.approx(numbers["best"][i], abs=0.01)
        assert numbers["loss"][i, -1] < 1e-3


def test_two_layers_need_a_logarithm_and_three_a_power(numbers):
    two, three = numbers["half_time"]
    assert two[0] - two[1] == pytest.approx(math.log(0.05 / 0.02), rel=0.03)  # 1/2s ln sigma^-2
    assert three[0] / three[1] == pytest.approx(0.05 / 0.02, rel=0.1)


def test_claims_fail_on_numbers_that_break_them():
    times = numpy.linspace(0, 10, 101)
    setup = figE1.Setup(depths=(2, 3), sigma=0.1, others=(0.05,))

    def verdict(**changes):
        good = {
            "times": numpy.stack([times, times]),
            "loss": numpy.stack([1 / (1 + numpy.exp(2 * (times - 3))), 1 / (1 + numpy.exp(8 * (times - 5)))]),
            "alignment": numpy.array([0.1, 0.9])[:, None] * numpy.linspace(0.1, 1, 101),
            "cosine": numpy.ones((2, 101)),
            "best": numpy.array([0.1, 0.9]),
            "half_time": numpy.array([[4.0, 3.0], [20.0, 10.0]]),
        }
        return failing(figE1, setup, Runs([0], [good | changes]))

    assert verdict() == []
    assert verdict(half_time=numpy.array([[4.0, 3.0], [15.0, 10.0]])) == ["power-3"]
    assert verdict(loss=numpy.stack([1 / (1 + numpy.exp(2 * (times - 3)))] * 2)) == ["sharper"]
    assert verdict(alignment=numpy.array([0.9, 0.1])[:, None] * numpy.ones(101)) == ["monotone", "maximum"]
    assert verdict(cosine=numpy.full((2, 101), 0.9)) == ["first-layer"]
