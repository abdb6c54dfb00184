"""000 Fig. 7: spectra and errors against the formulas of Sec. 5, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import fig7, linear
from papers.tests import test_000_fig3 as descent
from papers.tests.verdicts import failing


@pytest.fixture(scope="module")
def numbers():
    found = linear.measure(descent.SETUP, Context(seed=3, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def spectrum(K, y):
    values, vectors = numpy.linalg.eigh(K)
    return values[::-1][:7], (vectors.T @ y)[::-1][:7] ** 2 / (y @ y)


@pytest.mark.parametrize("place", [linear.SMALL, linear.LARGE, linear.DECAYING])
def test_both_forms_are_those_of_the_paper(numbers, place):
    start = descent.SETUP.starts[place]
    X, s, path = descent.plain(start)
    (V0, W0), (V, W), y = path[0], path[-1], X @ s
    exact = (X @ W.T @ W @ X.T + V @ V * X @ X.T) / 49
    first = (X @ W0.T @ W0 @ X.T + V0 @ V0 * X @ X.T) / 49
    scale = 2 * 7 * start.deviation**2
    forms = {
        "error": numpy.outer(y, y) / (V @ V) + V @ V * X @ X.T / 49,
        "error/first-kernel": numpy.outer(y, y) / (V @ V) + V @ V * first / scale,
        "error/printed": numpy.outer(y, y) / (V @ V) + V @ V * first / scale**2,
    }
    for i, K in enumerate((exact, forms["error"])):
        values, power = spectrum(K, y)
        assert numbers["eigenvalues"][place, i] == pytest.approx(values, rel=1e-6)
        assert numbers["task_power"][place, i] == pytest.approx(power, rel=1e-5, abs=1e-9)
    for name, form in forms.items():
        expected = numpy.linalg.norm(form - exact) / numpy.linalg.norm(exact)
        assert numbers[name][place] == pytest.approx(expected, rel=1e-6)
    across = W - numpy.outer(V, V) @ W / (V @ V)
    assert numbers["across"][place] == pytest.approx(numpy.linalg.norm(across) / numpy.linalg.norm(W), rel=1e-6)
    difference = numpy.linalg.norm(first - scale * X @ X.T / 49) / numpy.linalg.norm(first)
    assert numbers["first-kernel"][place] == pytest.approx(difference, rel=1e-6)


def test_what_descent_conserves_keeps_the_part_across():
    """W W^T - V V^T is constant in the flow; V takes one direction of it, and W across V keeps all others."""
    slow = replace(descent.SETUP, lr=0.005, steps=300)
    _, _, path = descent.plain(slow.starts[linear.LARGE], slow)
    first, last = (W @ W.T - numpy.outer(V, V) for V, W in (path[0], path[-1]))
    assert numpy.linalg.norm(last - first) < 0.02 * numpy.linalg.norm(first)
    V, W = path[-1]
    across = numpy.eye(7) - numpy.outer(V, V) / (V @ V)
    assert numpy.linalg.norm(across @ (W @ W.T - first) @ across) < 0.02 * numpy.linalg.norm(first)
    assert numpy.linalg.norm(across @ W) > 0.9 * numpy.linalg.norm(W)


def made_up(**changes):
    spectra = numpy.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    power = numpy.array([[0.8, 0.1, 0.1], [0.8, 0.1, 0.1]])
    found = {
        "eigenvalues": numpy.stack([spectra] * 4),
        "task_power": numpy.stack([power] * 4),
        "error": numpy.array([0.003, 0.1, 0.6, 0.005]),
        "across": numpy.array([0.3, 0.9, 0.99, 0.002]),
        "first-kernel": numpy.full(4, 0.4),
        "error/printed": numpy.full(4, 4.0),
        "error/first-kernel": numpy.full(4, 0.4),
    }
    return Runs([0], [found | {name: act(found[name]) for name, act in changes.items()}])


KNOWN = ["implicit", "first-kernel", "second-form"]


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, KNOWN),
        ({"eigenvalues": lambda v: v * numpy.array([[1.0], [1.1]])}, ["eigenvalues", *KNOWN]),
        ({"task_power": lambda v: numpy.stack([v[:, 0], v[:, 0, ::-1]], 1)}, ["task-power", *KNOWN]),
        ({"error": lambda v: 10 * v}, ["kernel", *KNOWN]),
        ({"across": lambda v: v[::-1]}, ["decay", *KNOWN]),
        ({"across": lambda v: 0.01 * v, "first-kernel": lambda v: 0.1 * v}, ["second-form"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert failing(fig7, linear.Setup(), made_up(**changes)) == broken


def test_power_in_other_modes_is_half_of_the_differences():
    runs = made_up(task_power=lambda v: numpy.stack([v[:, 0], numpy.tile([0.7, 0.2, 0.1], (4, 1))], 1))
    assert fig7.displaced_power(runs, 0) == pytest.approx([0.1])


def test_large_weights_fail_and_decaying_ones_do_not():
    claims = {claim.id: claim for claim in fig7.claims(linear.Setup(), made_up())}
    told = claims["kernel"].details()["choices"]
    assert [(one["other"], one["verdict"]) for one in told] == [("of 1", "fails"), ("of 1, with weight decay", "holds")]
