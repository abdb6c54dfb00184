"""003 Fig. 16: diagonals against matrices written out, stand-ins named as such, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003 import fig16
from papers.tests.verdicts import failing

SETUP = replace(fig16.EXPERIMENT.size(Scale.SMOKE).setup, samples=24, unseen=8, width=6, batch=10, epochs=2, probe=24)


def test_training_and_diagonals_are_those_of_adam_written_out():
    context = Context(seed=1, folder=None)
    found = fig16.measure(SETUP, context)
    x, y = fig16.pictures(SETUP, context, "train")
    assert sorted(y.tolist()) == [-1.0] * 12 + [1.0] * 12
    model = MLP(
        64,
        None,
        width=6,
        hidden_layers=2,
        distribution="uniform",
        weight_variance=1 / 3,
        generator=context.generator(1),
    )
    weights = [weight.detach().double() for weight in model.parameters()]
    weights[0] *= SETUP.first
    moments, order, step = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights], context.generator(2), 0
    for _ in range(SETUP.epochs):
        rows = torch.randperm(24, generator=order)
        for some in (rows[:10], rows[10:20]):
            step += 1
            leaves = [weight.clone().requires_grad_() for weight in weights]
            h = torch.relu(torch.relu(x[some].flatten(1).double() @ leaves[0].T) @ leaves[1].T)
            gradients = torch.autograd.grad(((h @ leaves[2].T).squeeze(1) - y[some]).square().mean(), leaves)
            for weight, gradient, (mean, square) in zip(weights, gradients, moments, strict=True):
                mean.mul_(0.9).add_(0.1 * gradient)
                square.mul_(0.999).add_(0.001 * gradient**2)
                weight -= SETUP.lr * mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    W, V, a = weights
    h = x.flatten(1).double() @ W.T
    J = ((a * (torch.relu(h) @ V.T > 0)) @ V) * (h > 0)
    F, G = W.T @ W, W.T @ (J.T @ J / 24) @ W
    assert torch.allclose(found["nfm"].flatten(), F.diagonal(), rtol=1e-2)
    assert torch.allclose(found["agop"].flatten(), G.diagonal(), rtol=2e-2, atol=1e-12)
    expected = numpy.corrcoef(F.diagonal().numpy(), G.diagonal().numpy())[0, 1]
    assert found["diagonals_path"][-1] == pytest.approx(expected, abs=1e-2)
    assert found["cosine_path"][-1] == pytest.approx(float((F * G).sum() / (F.norm() * G.norm())), abs=1e-2)


def test_only_celeba_is_held_to_the_numbers_of_the_paper():
    laptop, paper = (fig16.EXPERIMENT.size(scale).setup for scale in (Scale.LAPTOP, Scale.PAPER))
    assert (laptop.data, paper.data) == ("cifar10", "celeba")
    runs = made_up(0.9, 0.1)
    least = {claim.id: claim.least for claim in fig16.claims(laptop, runs)}
    assert least["number"] is least["corrupted-number"] is Scale.PAPER
    assert "stand-in" in fig16.FIG_16.about


def made_up(agree, corrupted):
    paths = {
        "diagonals": agree,
        "corrupted_diagonals": corrupted,
        "cosine": 0.9,
        "corrupted_cosine": 0.5,
        "pearson": 0.8,
    }
    return Runs([0], [{f"{name}_path": numpy.array([0.0, value]) for name, value in paths.items()}])


def test_claims_fail_on_numbers_that_break_them():
    assert failing(fig16, SETUP, made_up(0.91, 0.04)) == []
    assert failing(fig16, SETUP, made_up(0.6, 0.5)) == ["alike", "obscured", "number", "corrupted-number"]
    assert failing(fig16, SETUP, made_up(0.8, 0.9)) == ["lower", "obscured", "corrupted-number"]
