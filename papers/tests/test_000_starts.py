"""000/starts: losses of networks and frozen kernels from four starts against plain training in double."""

import numpy
import pytest
import scipy.linalg
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import mnist, starts

SETUP = starts.Setup(data="digits", samples=11, test_samples=7, width=9, lr=10.0, steps=12, growth=1.5)


def plain(start):
    """Without the library, in double: outputs (T, P C) at the moments, the first and last whole kernels, targets."""
    context = Context(seed=1, folder=None)
    given, generator = mnist.task(SETUP, context), context.generator(2)
    weights = [torch.randn(shape, generator=generator).double() for shape in ((9, 64), (9, 9), (10, 9))]
    weights[2] *= start.readout
    x, y = given.x.double(), given.y.double().flatten()
    x = x - x.mean(0) if start.centered else x

    def network(first, second, readout):
        hidden = (x @ first.T / 8).relu()
        return ((hidden @ second.T * (start.variances[1] / 9) ** 0.5).relu() @ readout.T / 3).flatten()

    outputs, kernels, first = [], [], network(*weights) if start.zero else torch.zeros(())
    for step in range(SETUP.steps + 1):
        f = network(*weights) - first
        jacobian = torch.cat([j.flatten(1) for j in torch.func.jacrev(network, (0, 1, 2))(*weights)], 1)
        if step in SETUP.moments:
            outputs.append(f)
            kernels.append(jacobian @ jacobian.T)
        change = (jacobian.T @ (f - y)) * (10.0 * 2 / y.numel())
        parts = change.split([w.numel() for w in weights])
        weights = [w - part.view_as(w) for w, part in zip(weights, parts, strict=True)]
    return torch.stack(outputs).numpy(), kernels[0].numpy(), kernels[-1].numpy(), y.numpy()


def norm_of_mean(kernel):
    """Of the mean over outputs, (P, P)."""
    return numpy.linalg.norm(numpy.einsum("icjc->ij", kernel.reshape(11, 10, 11, 10)) / 10)


@pytest.mark.parametrize("name", ["as in Fig. 1", "variances 1", "small readout", "all three"])
def test_losses_and_frozen_kernels_are_those_of_plain_training(name):
    found = starts.trained(SETUP, starts.STARTS[name], Context(seed=1, folder=None))
    outputs, first, last, y = plain(starts.STARTS[name])
    steps = numpy.array(SETUP.moments, float)
    numpy.testing.assert_allclose(as_array(found["loss"], ""), ((outputs - y) ** 2).mean(1), rtol=2e-5)
    growth = norm_of_mean(last) / norm_of_mean(first)
    for key, faster in (("kgd", 1.0), ("akgd", growth)):
        flow = [scipy.linalg.expm(-first * 10.0 * 2 / y.size * faster * t) @ (outputs[0] - y) for t in steps]
        numpy.testing.assert_allclose(as_array(found[key], ""), [(r**2).mean() for r in flow], rtol=1e-4)


def made_up(small):
    """Three seeds, two moments: networks behind their rescaled kernel but from a small readout."""
    numbers = {"steps": numpy.array([0, 10])}
    for name in starts.STARTS:
        end = small if name == "small readout" else 2.0
        rise = 0.3 if name == "small readout" else 0.2
        numbers |= {
            f"{name}/loss": numpy.array([1.0, end]),
            f"{name}/akgd": numpy.ones(2),
            f"{name}/kgd": numpy.ones(2),
            f"{name}/centered_alignment": numpy.array([0.1, 0.1 + rise]),
            f"{name}/stability": numpy.array(0.5),
        }
    return Runs([0, 1, 2], [numbers] * 3)


@pytest.mark.parametrize(("small", "verdict"), [(0.5, "holds"), (1.5, "fails")])
def test_a_start_from_which_the_network_stays_behind_fails(small, verdict):
    found = {claim.id: claim for claim in starts.claims(SETUP, made_up(small))}
    assert found["faster-small-readout"].verdict == verdict
    assert found["faster-as-in-fig-1"].verdict == "fails"
    assert found["turns-more"].verdict == "holds"
    assert float(numpy.mean(found["turns-more"].values)) == pytest.approx(1.5)
