"""002 Fig. F.1: its points and lines against written-out regressions, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import figF1
from papers.tests.verdicts import failing

SETUP = figF1.Setup(
    dimension=24,
    samples=(4, 8, 16),
    fixed=8,
    spikes=(0.0, 1.0, 10.0),
    overlaps=(0.0, 0.75, 1.0),
    draws=60,
    depths=(2, 3),
    width=40,
)


@pytest.fixture(scope="module")
def numbers():
    found = figF1.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_without_a_spike_the_error_is_what_the_samples_do_not_span(numbers):
    """1 - P / D on average, whatever the task."""
    wanted = 1 - numpy.array(SETUP.samples) / 24
    assert numbers["spikes"][0] == pytest.approx(wanted, abs=0.03)
    assert figF1.formulas(SETUP)["spikes"][0] == pytest.approx(wanted)
    assert numbers["both"][0] == pytest.approx(numpy.full(3, 1 - 8 / 24), abs=0.04)


def test_the_formula_is_that_of_the_sheet():
    """E_g at P = 20, D = 60, overlap 1 for A = 0, 1, 3, 10, 30."""
    found = figF1.theory(figF1.Setup(), 20, numpy.array([0.0, 1.0, 3.0, 10.0, 30.0]), 1.0)
    assert found == pytest.approx([0.6667, 0.3805, 0.1737, 0.0387, 0.0062], abs=6e-5)


def test_trained_kernels_predict_as_a_regression_that_is_written_out(numbers):
    """k(x) K^-1 y with the kernel x^T M x' on the same training sets, tested on many new points."""
    context = Context(seed=0, folder=None)
    _, layers, w = figF1.trained(SETUP, context)
    assert float(w.norm()) == pytest.approx(1.0)
    values, vectors = torch.linalg.eigh(layers[0])
    generator, errors = context.generator(8), []
    for _ in range(SETUP.draws):
        x = torch.randn(8, 25, dtype=torch.float64, generator=generator)[:, :24] @ vectors.T
        fitted = layers[0] @ x.T @ torch.linalg.solve(x @ layers[0] @ x.T, x @ w)
        errors.append(float((fitted - w).square().sum()))
    assert numbers["probes"][0, 1] == pytest.approx(numpy.mean(errors), rel=1e-6)
    assert numbers["strength"] == pytest.approx([1.0, 2.0], rel=0.01)
    assert numbers["probe_strength"][0] == pytest.approx(float(values[-1] / values[:-1].mean() - 1))


def test_claims_fail_on_numbers_that_break_them(numbers):
    def verdict(**changes):
        return set(failing(figF1, SETUP, Runs([0], [numbers | changes]))) - {"probes", "printed"}

    assert verdict() == set()
    assert verdict(spikes=numbers["spikes"][::-1]) == {"theory-a", "few-samples", "transfer"}
    assert verdict(overlaps=numbers["overlaps"][::-1]) == {"theory-b", "overlap"}
    assert verdict(both=numbers["both"][:, ::-1]) == {"theory-c", "lowest", "same-task"}
    assert verdict(networks=numbers["networks"][::-1]) == {"networks", "transfer"}
    assert verdict(strength=numpy.array([1.0, 1.0])) == {"strength"}
    fitting = {"probe_strength": numpy.array([1.0, 1.0]), "probes": numbers["networks"][:1].repeat(2, 0)}
    assert "probes" not in failing(figF1, SETUP, Runs([0], [numbers | fitting]))
