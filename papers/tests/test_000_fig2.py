"""000 Fig. 2: its numbers against matrices taken apart by numpy, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import fig2

SETUP = fig2.Setup(data="digits", samples=40, first=3, last=20)
CONTEXT = Context(seed=1, folder=None)


@pytest.fixture(scope="module")
def numbers():
    return {name: as_array(values, name) for name, values in fig2.measure(SETUP, CONTEXT).items()}


@pytest.fixture(scope="module")
def problem():
    x, y = fig2.task(SETUP, CONTEXT)
    return fl.theory.infinite_width.ntk(x, hidden_layers=3).numpy(), y.numpy()


def verdicts(numbers):
    return {claim.id: claim for claim in fig2.claims(SETUP, Runs([0], [numbers]))}


def test_the_task_is_even_against_odd():
    x, y = fig2.task(SETUP, CONTEXT)
    assert x.shape == (40, 64)
    assert set(y.tolist()) == {-1.0, 1.0}
    other = fig2.task(SETUP, Context(seed=2, folder=None))[0]
    assert not torch.equal(x, other)


def test_spectra_are_those_of_the_final_kernel(numbers, problem):
    K0, y = problem
    top = numpy.linalg.eigvalsh(K0)[-1]
    assert numbers["top"] == pytest.approx(top, rel=1e-10)
    for i, share in enumerate(SETUP.shares):
        values, vectors = numpy.linalg.eigh(K0 + share * float(numbers["threshold"]) * numpy.outer(y, y))
        assert numpy.allclose(numbers["eigenvalues"][i], values[::-1] / top, atol=1e-11)
        assert numpy.allclose(numbers["overlaps"][i], (vectors.T @ y)[::-1] ** 2 / (y @ y), atol=1e-8)


def test_the_dynamics_are_those_of_the_equations(numbers, problem):
    """Euler steps of dDelta/dt = -K Delta, dK/dt = gamma (K Delta Delta^T + Delta Delta^T K)."""
    K0, y = problem
    share = SETUP.shares.index(1.0)
    gamma, top = float(numbers["threshold"]), float(numbers["top"])
    moment = 30
    end, steps = float(SETUP.times[moment]) / top, 4000
    K, delta = K0.copy(), -y
    for _ in range(steps):
        outer = numpy.outer(delta, delta)
        K, delta = K + end / steps * gamma * (K @ outer + outer @ K), delta - end / steps * K @ delta
    assert numbers["loss"][share, moment] == pytest.approx(delta @ delta / (y @ y), rel=2e-3)
    aligned = y @ K @ y / (numpy.linalg.norm(K) * (y @ y))
    assert numbers["alignment"][share, moment] == pytest.approx(aligned, rel=2e-3)
    assert numbers["loss"][share, moment] < 0.7  # far enough for feature evolution to matter


def test_claims_fail_on_numbers_that_break_them(numbers):
    grid = SETUP.grid.numpy()
    broken = {
        "top_overlap": grid / grid.max(),
        "final_alignment": numbers["final_alignment"][::-1],
        "half": numbers["half"] * 1.3,
        "loss": numbers["loss"][::-1],
        "alignment": numbers["alignment"][::-1],
        "eigenvalues": numbers["eigenvalues"] * numpy.array([1, 1, 1, 2, 1, 1])[:, None],
        "overlaps": numbers["overlaps"][::-1],
    }
    touched = {
        "top_overlap": ["high-above"],
        "final_alignment": ["final-alignment"],
        "half": ["threshold"],
        "loss": ["accelerates"],
        "alignment": ["faster"],
        "eigenvalues": ["few-eigenvalues"],
        "overlaps": ["task-spectrum"],
    }
    for name, values in broken.items():
        failing = [id for id in touched[name] if not verdicts(numbers | {name: values})[id].holds]
        assert failing == touched[name]
