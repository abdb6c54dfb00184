"""003 Fig. 17: its steps against the rule of the paper written out, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import fig17
from papers.tests.verdicts import failing

SETUP = replace(fig17.SMOKE, samples=30, unseen=7, width=8, epochs=4, every=2, probe=30)
SETUPS = {"whole": SETUP, "batches": replace(SETUP, batch=8)}


@pytest.mark.parametrize("batch", [None, 8])
@pytest.mark.parametrize("method", [fig17.STANDARD, fig17.SLO])
def test_training_is_the_rule_of_the_paper_written_out(method, batch):
    """W <- W - lr C g / (eps + |g|) with C = (2.5, 0.4 ...), or W <- W - lr g; epochs of whole batches."""
    setup, context = replace(SETUP, batch=batch), Context(seed=3, folder=None)
    (x, y), (unseen, wanted) = fig17.standardized(setup, context)
    found = fig17.trained(setup, method, (x, y), (unseen, wanted), context)
    model = MLP(
        64, 10, width=8, hidden_layers=2, distribution="uniform", weight_variance=1 / 3, generator=context.generator(1)
    )
    weights = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    first = weights[0].detach().double()

    def output(inputs):
        return torch.relu(torch.relu(inputs.flatten(1) @ weights[0].T) @ weights[1].T) @ weights[2].T

    order = context.generator(2)
    for _ in range(setup.epochs):
        rows = torch.randperm(30, generator=order)
        for some in [slice(None)] if batch is None else [rows[8 * k : 8 * k + 8] for k in range(3)]:
            gradients = torch.autograd.grad((output(x[some]) - y[some]).square().mean(), weights)
            with torch.no_grad():
                for weight, gradient, speed in zip(weights, gradients, (2.5, 0.4, 0.4), strict=True):
                    slowed = setup.slo_lr * speed / (setup.eps + float(gradient.norm()))
                    weight -= (setup.lr if method == fig17.STANDARD else slowed) * gradient
    with torch.no_grad():
        assert found["train"][-1] == pytest.approx(float((output(x) - y).square().mean()), rel=1e-4)
        assert found["test"][-1] == pytest.approx(float((output(unseen) - wanted).square().mean()), rel=1e-4)
    W, V, a = (weight.detach().double() for weight in weights)
    h = x.flatten(1).double() @ W.T
    J = ((a[None] * (torch.relu(h) @ V.T > 0)[:, None]) @ V * (h > 0)[:, None]).flatten(0, 1)
    K, moved = J.T @ J / 30, W - first
    assert found["share"][-1][0] == pytest.approx(
        float(torch.trace(moved.T @ moved @ moved.T @ K @ moved) / torch.trace(W.T @ W @ W.T @ K @ W)), rel=1e-3
    )
    assert found["cosine"][-1][0][fig17.UNCENTERED] == pytest.approx(
        float((W.T @ W * (W.T @ K @ W)).sum() / ((W.T @ W).norm() * (W.T @ K @ W).norm())), abs=1e-4
    )
    assert torch.allclose(found["nfm"].flatten(), (W.T @ W).diagonal(), rtol=1e-4, atol=1e-8)
    assert torch.allclose(found["agop"].flatten(), (W.T @ K @ W).diagonal(), rtol=1e-3, atol=1e-9)


def test_pixels_have_mean_0_and_deviation_1_over_the_training_set():
    (x, _), (unseen, _) = fig17.standardized(SETUP, Context(seed=3, folder=None))
    varying = x.std(0) > 0
    assert torch.allclose(x.mean(0), torch.zeros(1, 8, 8), atol=1e-6)
    assert torch.allclose(x.std(0, correction=0)[varying], torch.ones(int(varying.sum())), atol=1e-5)
    assert len(unseen) == 7


def made_up(standard, slo, share=0.95):
    """Four moments of two layers; the diagonals of both methods are alike, but for a share of noise."""
    pair = numpy.stack([numpy.full((4, 2, 2), value) for value in (standard, slo)])
    shares = numpy.stack([numpy.full((4, 2), value) for value in (share - 0.5, share)])
    base, noise = numpy.random.default_rng(0).random((2, 1, 5, 5))
    diagonals = numpy.stack([base + (1 - standard) * noise, base + (1 - slo) * noise])
    one = {
        "epochs": numpy.arange(4),
        "cosine": pair,
        "pearson": pair,
        "share": shares,
        "nfm": numpy.stack([base, base]),
        "agop": diagonals,
    }
    return Runs([0], [one])


def test_claims_fail_on_numbers_that_break_them():
    good, bad = made_up(0.4, 0.9), made_up(0.9, 0.4, share=0.5)
    assert failing(fig17, SETUPS, {"whole": good, "batches": bad}) == []
    assert failing(fig17, SETUPS, {"whole": bad, "batches": good}) == ["uc", "c", "near-one", "diagonals"]
    found = {claim.id: claim for claim in fig17.claims(SETUPS, {"whole": good, "batches": bad})}
    assert found["uc"].measured == pytest.approx(0.5)
    assert [choice.other for choice in found["share"].choices] == ["the last quarter", "batches of 8 for 4 epochs"]
