"""002 Fig. E.3: final kernels against the formula written out, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import figE3
from papers.tests.verdicts import failing

SETUP = figE3.Setup(data="digits", samples=20, width=15, depths=(2, 3), sigma=0.05, moments=30)


@pytest.fixture(scope="module")
def numbers():
    found = figE3.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_inputs_have_the_power_of_the_spectrum_and_are_sorted_by_class():
    context = Context(seed=0, folder=None)
    X, y = figE3.task(SETUP, context)
    whole = figE3.task(figE3.Setup(data="digits", samples=20, power=1.0), context)[0]
    values, raw = (torch.linalg.svdvals(each).square() for each in (X, whole))
    assert (values / values[0]).numpy() == pytest.approx((raw / raw[0]).numpy() ** 0.25, rel=1e-6)
    assert float(values.mean()) == pytest.approx(20.0)
    assert (y.diff() >= 0).all()
    assert set(y.tolist()) == {-1.0, 1.0}


def test_the_final_kernel_is_the_corrected_formula(numbers):
    """s^(2-2/L) [((L-1)/s^2) y y^T + X X^T], with s^2 = y^T (X X^T)^-1 y."""
    X, y = figE3.task(SETUP, Context(seed=0, folder=None))
    gram = X @ X.T
    square = float(y @ torch.linalg.solve(gram, y))
    assert float(numbers["s"]) == pytest.approx(square**0.5)
    for i, depth in enumerate(SETUP.depths):
        wanted = square ** (1 - 1 / depth) * ((depth - 1) / square * torch.outer(y, y) + gram)
        assert numbers["corrected"][i] == pytest.approx(wanted.numpy())
        assert numpy.linalg.norm(numbers["last"][i] - wanted.numpy()) < 0.02 * float(wanted.norm())
        assert numbers["loss"][i, -1] < 1e-4


def test_distances_are_those_of_the_nearest_multiple():
    kernel = numpy.array([[[[2.0, 0.0], [0.0, 1.0]]]])
    assert figE3.distance(kernel, 3 * kernel) == pytest.approx(numpy.zeros((1, 1)), abs=1e-7)
    assert figE3.distance(kernel, numpy.eye(2)[None, None]) == pytest.approx((1 - 9 / 10) ** 0.5)


def test_claims_fail_on_numbers_that_break_them(numbers):
    def verdict(**changes):
        return set(failing(figE3, SETUP, Runs([0], [numbers | changes]))) - {"printed"}

    assert verdict() == set()
    assert verdict(last=numbers["first"]) == {"corrected"}
    turned = numbers["alignment"][::-1]
    assert verdict(alignment=turned) == {"depth", "maximum"}
    assert verdict(alignment=numbers["alignment"][:, ::-1]) >= {"aligns", "maximum"}
    assert verdict(function=numpy.array([0.0, 0.1])) == {"solution"}
    assert "printed" in failing(figE3, SETUP, Runs([0], [numbers | {"printed": numbers["first"]}]))
