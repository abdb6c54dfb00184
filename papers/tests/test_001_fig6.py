"""001 Fig. 6: its numbers against the weights, and claims that must fail."""

import numpy
import pytest

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_001 import fig6

SETUP = fig6.Setup(inputs=60, width=300, samples=12, steps=80, moments=8)


@pytest.fixture(scope="module")
def numbers():
    found = fig6.measure(SETUP, Context(seed=0, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def trained(seed):
    """The same run by plain numpy: kernels and readings at the moments."""
    import torch

    generator = Context(seed=seed, folder=None).generator()
    x = (torch.randn(SETUP.samples, SETUP.inputs, generator=generator) / SETUP.inputs**0.5).double().numpy()
    y = torch.randn(SETUP.samples, generator=generator).sign().double().numpy()
    W = torch.randn(SETUP.width, SETUP.inputs, generator=generator).double().numpy() / SETUP.inputs**0.5
    V = torch.randn(1, SETUP.width, generator=generator).double().numpy()[0] / SETUP.width**0.5
    first = x @ W.T > 0
    for step in range(SETUP.steps + 1):
        arriving = x @ W.T
        gates, features = arriving > 0, numpy.maximum(arriving, 0)
        f = features @ V
        if step % SETUP.stride == 0:
            K_V, K_W = features @ features.T, (x @ x.T) * ((gates * V**2) @ gates.T)
            yield f, y, K_V, K_W, (gates != first).mean()
        pull = 2 * SETUP.lr / SETUP.samples * (y - f)
        W, V = W + ((gates * V) * pull[:, None]).T @ x, V + features.T @ pull


def test_kernels_and_gates_are_those_of_the_weights(numbers):
    for i, (f, y, K_V, K_W, flips) in enumerate(trained(0)):
        expected = {
            "loss": ((f - y) ** 2).mean(),
            "readout_task": y @ K_V @ y / (y @ y),
            "hidden_task": y @ K_W @ y / (y @ y),
            "readout_mean": numpy.trace(K_V) / len(y),
            "hidden_mean": numpy.trace(K_W) / len(y),
            "alignment": y @ (K_V + K_W) @ y / numpy.linalg.norm(K_V + K_W) / (y @ y),
        }
        for name, value in expected.items():
            assert numbers[name][i] == pytest.approx(value, rel=1e-3), (name, i)
        assert numbers["readings"][i, 0] == pytest.approx(flips, abs=2e-3)
        assert numbers["readings"][i, 3] == pytest.approx(y @ f / len(y), abs=1e-3)


def test_theory_starts_where_the_network_does(numbers):
    for name in fig6.PARTS:
        for kind in ("growth", "solve"):
            assert numbers[f"{kind}/{name}"][0] == pytest.approx(numbers[name][0], rel=1e-9)


def test_claims_fail_on_numbers_that_break_them(numbers):
    def failing(**changes):
        runs = Runs([0], [numbers | changes])
        return {claim.id for claim in fig6.claims(SETUP, runs) if not claim.holds}

    before = failing()
    assert {"hidden-printed"} <= before
    swapped = failing(readout_task=numbers["readout_mean"], readout_mean=numbers["readout_task"])
    assert {"readout-turns", "theory-readout-task", "theory-readout-mean"} <= swapped
    readings = numbers["readings"]
    assert failing(readings=readings * [5, 2, 1, -1]) - before >= {"ansatz", "ansatz-late", "sign"}
    assert "gates" in failing(readings=numpy.add(readings, [0.2, 0, 0, 0]))
    assert "hidden-isotropic" in failing(hidden_task=2 * numbers["hidden_task"])
    flat = numpy.ones(SETUP.moments + 1)
    assert {"learns", "aligns"} <= failing(loss=flat, alignment=flat)
