"""004 Fig. 2: its numbers against obvious ones, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_004 import fig2, initial_scales
from papers.tests.verdicts import failing

SETUP = initial_scales.Setup(
    data="digits", samples=30, width=11, sigmas=(0.5, 1.0, 3.0), lrs=(0.2, 0.1, 0.01), steps=6, moments=2
)


def test_alignment_and_accuracy_are_those_of_the_weights_after_plain_descent():
    """Products of the weights, written out, along descent with gradients from autograd."""
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])

    def network():
        generator = torch.Generator().manual_seed(2)
        return MLP(5, 3, width=(7, 6, 4), weight_variance=2.0, generator=generator).double()

    found = initial_scales.trained(SETUP, network(), x, labels, lr=0.3)
    weights = [weight.detach().requires_grad_() for weight in network().parameters()]
    for step in range(SETUP.steps + 1):
        h = x
        for weight in weights[:-1]:
            h = torch.relu(h @ weight.T)
        f = h @ weights[-1].T
        loss = -f.log_softmax(1)[torch.arange(9), labels].mean()
        if step % SETUP.stride == 0:
            t = step // SETUP.stride
            plain = [weight.detach().numpy() for weight in weights]
            for row, order in enumerate(("fro", 2)):
                size = [numpy.linalg.norm(weight, order) for weight in plain]
                wanted = [numpy.linalg.norm(plain[i + 1] @ plain[i], order) / size[i] / size[i + 1] for i in range(3)]
                assert found["alignment"][row, :, t] == pytest.approx(wanted, rel=1e-9)
            assert found["loss"][t] == pytest.approx(float(loss.detach()), rel=1e-9)
            assert found["accuracy"][t] == pytest.approx(float((f.argmax(1) == labels).double().mean()))
        gradients = torch.autograd.grad(loss, weights)
        weights = [(w - 0.3 * g).detach().requires_grad_() for w, g in zip(weights, gradients, strict=True)]


def test_all_scales_start_from_the_same_draws():
    numbers = initial_scales.measure(SETUP, Context(seed=0, folder=None))
    assert numbers["alignment"].shape == (3, 2, 3, 3)
    start = numbers["alignment"][..., 0]
    assert start[1] == pytest.approx(start[0], rel=1e-5)
    assert start[2] == pytest.approx(start[0], rel=1e-5)
    assert not numpy.allclose(numbers["alignment"][0, ..., -1], start[0], rtol=1e-3)


def test_claims_fail_on_numbers_that_break_them():
    first = numpy.full((3, 2, 3), SETUP.width**-0.5)
    last = first * numpy.array([1.5, 1.1, 1.02])[:, None, None]

    def verdict(**changes):
        numbers = {"first": first, "last": last, "accuracy": numpy.ones((3, 3))} | changes
        curves = numpy.stack([numbers["first"], numbers["last"]], -1)
        runs = Runs([0], [{"alignment": curves, "accuracy": numbers["accuracy"]}])
        return failing(fig2, {"chosen": SETUP, "raw": SETUP}, {"chosen": runs, "raw": runs})

    def moved(sigma, norm, factor):
        changed = last.copy()
        changed[sigma, norm] = first[sigma, norm] * factor
        return changed

    assert verdict() == []
    assert verdict(accuracy=numpy.array([[1.0, 1.0], [1.0, 0.9], [1.0, 1.0]])) == ["accuracy"]
    assert verdict(first=1.2 * first, last=1.2 * last) == ["start"]
    assert verdict(last=moved(1, 0, 0.99)) == ["rises", "falls-with-scale"]
    assert verdict(last=moved(1, 0, numpy.array([0.99, 1.3, 1.3]))) == ["rises"]
    assert verdict(last=moved(0, 0, 1.2)) == ["small"]
    assert verdict(last=moved(2, 0, 0.8)) == ["large"]
    assert verdict(last=moved(0, 1, 0.9)) == ["spectral"]
    assert verdict(last=moved(2, 1, 1.2)) == ["spectral-large"]


def test_raw_pixels_are_the_other_choice():
    raw = initial_scales.raw(SETUP)
    assert raw.normalization == "unit"
    assert raw.lrs == pytest.approx((0.6, 0.1, 0.01))


def test_the_verdict_on_raw_pixels_is_told():
    first = numpy.full((3, 2, 3), SETUP.width**-0.5)
    last = first * numpy.array([1.5, 1.1, 1.02])[:, None, None]

    def runs(accuracy):
        curves = numpy.stack([first, last], -1)
        return Runs([0], [{"alignment": curves, "accuracy": numpy.full((3, 3), accuracy)}])

    found = fig2.claims({"chosen": SETUP, "raw": SETUP}, {"chosen": runs(1.0), "raw": runs(0.5)})
    claims = {one.id: one for one in found}
    assert claims["accuracy"].holds
    assert [one["verdict"] for one in claims["accuracy"].details()["choices"]] == ["fails"]
    assert [one["verdict"] for one in claims["rises"].details()["choices"]] == ["holds"]
