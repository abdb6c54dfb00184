"""002 Fig. C.1: the two directions of its kernel against closed forms, and claims that must fail."""

import numpy
import pytest
import torch

import featlearn as fl
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_002 import figC1, phases
from papers.tests.verdicts import failing

SETUP = phases.Setup(samples=5, inputs=8, width=90, decay=1.0, lr=0.05, time=36.0, moments=90)


@pytest.fixture(scope="module")
def numbers():
    found = phases.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_inputs_have_the_spectrum_and_the_slant_that_were_asked_for(numbers):
    given = phases.task(SETUP, Context(seed=0, folder=None).generator())
    values = 1 / numpy.arange(1.0, 6)
    values /= values.mean()
    found = torch.linalg.eigvalsh(given.covariance).flip(0)
    assert found.numpy() == pytest.approx([*values, 0, 0, 0], abs=1e-12)
    # equal parts along all components
    assert numbers["slant"] == pytest.approx(values.mean() / (values**2).mean() ** 0.5)
    assert numbers["size"] == pytest.approx((values**2).mean() ** 0.5)
    assert torch.allclose(
        given.plane[0] * numbers["slant"].item() + given.plane[1] * (given.plane[1] @ given.tilted), given.tilted
    )


def test_the_early_kernel_is_the_corrected_spike(numbers):
    """Sigma beta beta^T Sigma / (beta^T Sigma^2 beta) + 1 has eigenvalues 2 and 1; the print's root would give more."""
    given = phases.task(SETUP, Context(seed=0, folder=None).generator())
    spike = fl.theory.deep_linear.unwhitened_spike(given.covariance, given.beta)
    assert float(phases.shape(spike, given)["spike"]) == pytest.approx(2.0)
    i = round(float(numbers["silent"]) / 0.4)
    assert numbers["spike"][i] == pytest.approx(2.0, abs=0.12)
    assert numbers["along_tilted"][i] > 0.98
    assert numbers["form"][i] == pytest.approx(numbers["theory"][1], abs=0.15)
    assert 1 + numbers["size"] > 2.15


def test_claims_fail_on_numbers_that_break_them(numbers):
    def verdict(**changes):
        return set(failing(figC1, SETUP, Runs([0], [numbers | changes]))) - {"round", "spike-strength-printed"}

    assert verdict() == set()
    whitened = numpy.ones_like(numbers["along"])
    assert {"not-beta", "realigns"} <= verdict(along=whitened)
    assert {"early-spike"} <= verdict(along_tilted=0.5 * whitened)
    assert {"late-spike"} <= verdict(along=numpy.full_like(whitened, float(numbers["slant"])))
    assert {"function"} <= verdict(position=numbers["position"][::-1])
    assert {"spike-strength"} <= verdict(spike=1 + float(numbers["size"]) * whitened)
