"""003 Fig. 12: its rule written out, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import chain, fig12
from papers.tests.verdicts import failing

SETUP = fig12.Setup(samples=20, unseen=9, dimension=6, width=7, steps=6, every=3, last=3)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("method", [fig12.STANDARD, fig12.SLO])
def test_training_is_the_rule_of_the_paper_written_out(start, method):
    """The hidden layer with the smallest UC-NFC moves by lr s g / (eps + |g|), the others by lr / s."""
    context = Context(seed=2, folder=None)
    task = chain.chain(context, SETUP.samples, SETUP.unseen, SETUP.dimension, SETUP.degree)
    found = fig12.trained(SETUP, start, method, task, context)
    model = fig12.network(SETUP, start, task, context)
    weights = [weight.detach().double().requires_grad_() for weight in model.parameters()]
    bound = [0.1 / 6**0.5, 0.1 / 7**0.5, 0.1 / 7**0.5, 0.1 / 7**0.5]
    if start == 1:
        bound = [0.1 / 6**0.5, 1 / 7**0.5, 1 / 7**0.5, 0.01 / 7**0.5]
    for weight, most in zip(weights, bound, strict=True):
        assert 0.5 * most < float(weight.detach().abs().max()) <= most * (1 + 1e-6)
    x, y = task.x.double(), task.y.double()

    def correlations():
        h, J, found = x, weights[3].detach(), []
        gates = []
        for weight in weights[:3]:
            h = torch.relu(h @ weight.detach().T)
            gates.append((h > 0).double())
        J = J * gates[2]
        for layer in (2, 1, 0):
            W, K = weights[layer].detach(), J.T @ J
            F, G = W.T @ W, W.T @ K @ W
            found.insert(0, float((F * G).sum() / (F.norm() * G.norm())))
            J = (J @ W) * gates[layer - 1] if layer else J
        return found

    for _ in range(SETUP.steps):
        h = x
        for weight in weights[:3]:
            h = torch.relu(h @ weight.T)
        gradients = torch.autograd.grad(((h @ weights[3].T).squeeze(1) - y).square().mean(), weights)
        behind = int(numpy.argmin(correlations()))
        with torch.no_grad():
            for k, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
                speed = SETUP.boost if k == behind else 1 / SETUP.boost
                slowed = SETUP.slo_lr * speed / (SETUP.eps + float(gradient.norm()))
                weight -= (SETUP.lr if method == fig12.STANDARD else slowed) * gradient
    assert found["uc"][-1] == pytest.approx(correlations(), abs=1e-3)
    assert len(found["test"]) == 3


def made_up(slo, standard, test):
    """Both starts alike; three moments."""
    uc = numpy.stack([numpy.tile(numpy.array(one, dtype=float), (3, 1)) for one in (standard, slo)])
    losses = numpy.stack([numpy.full(3, value) for value in (0.5, test)])
    one = {
        "steps": numpy.array([0, 3, 6]),
        "uc": numpy.stack([uc, uc]),
        "test": numpy.stack([losses, losses]),
        "train": numpy.stack([losses, losses]),
    }
    return Runs([0], [one])


def test_claims_hold_and_fail_as_the_numbers_say():
    assert failing(fig12, SETUP, made_up((0.9, 0.95, 0.92), (0.8, 0.4, 0.3), 0.3)) == []
    assert failing(fig12, SETUP, made_up((0.7, 0.95, 0.92), (0.8, 0.4, 0.3), 0.6)) == ["same", "high", "above", "test"]
    assert failing(fig12, SETUP, made_up((0.2, 0.2, 0.2), (0.8, 0.4, 0.3), 0.8)) == [
        "lowest",
        "high",
        "above",
        "test",
        "learns",
    ]
