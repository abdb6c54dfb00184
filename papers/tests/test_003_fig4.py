"""003 Fig. 4 and 11: their steps and numbers against plain algebra, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_003 import chain, fig4, fig11, speed_limits

SETUP = speed_limits.Setup(
    samples=24, unseen=5, dimension=6, degree=3, width=7, scales=(1.0, 0.05), rates=(0.03, 0.2), steps=6
)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    found = speed_limits.measure(SETUP, Context(seed=1, folder=tmp_path_factory.mktemp("fig4")))
    return {name: as_array(values, name) for name, values in found.items()}


def verdicts(numbers):
    return {claim.id: claim for claim in fig4.claims(SETUP, Runs([0], [numbers]))}


def start(scale):
    context = Context(seed=1, folder=None)
    task = chain.chain(context, SETUP.samples, SETUP.unseen, SETUP.dimension, SETUP.degree)
    return task, chain.network(context, task, SETUP.width, scale, SETUP.readout)


@pytest.mark.parametrize("method", [speed_limits.STANDARD, speed_limits.SLO])
@pytest.mark.parametrize("position", [0, 1])
def test_training_is_the_rule_of_the_paper_written_out(numbers, method, position):
    """W <- W - lr C g / (eps + |g|) with C = (500, 0.002, 0.002), or W <- W - lr g."""
    scale, lr = SETUP.scales[position], SETUP.rates[position]
    task, model = start(scale)
    weights = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    first = weights[0].detach().double()

    def output(x):
        return torch.relu(torch.relu(x @ weights[0].T) @ weights[1].T) @ weights[2][0]

    for _ in range(SETUP.steps):
        gradients = torch.autograd.grad((output(task.x) - task.y).square().mean(), weights)
        with torch.no_grad():
            for weight, gradient, speed in zip(weights, gradients, (500.0, 0.002, 0.002), strict=True):
                factor = lr if method == speed_limits.STANDARD else lr * speed / (SETUP.eps + float(gradient.norm()))
                weight -= factor * gradient
    path = {name: numbers[name][method, position, -1] for name in ("train", "test", "uncentered", "centered", "share")}
    with torch.no_grad():
        assert path["train"] == pytest.approx(float((output(task.x) - task.y).square().mean()), rel=1e-4)
        assert path["test"] == pytest.approx(float((output(task.x_test) - task.y_test).square().mean()), rel=1e-4)
    W, V, a = (weight.detach().double() for weight in weights)
    h = task.x.double() @ W.T
    J = ((a * (torch.relu(h) @ V.T > 0)) @ V) * (h > 0)
    K, moved = J.T @ J, W - first

    def overlap(w):
        return torch.trace(w.T @ w @ w.T @ K @ w)

    def correlation(w):
        return float(overlap(w) / ((w.T @ w).norm() * (w.T @ K @ w).norm()))

    assert path["uncentered"] == pytest.approx(correlation(W), abs=1e-4)
    assert path["centered"] == pytest.approx(correlation(moved), abs=1e-4)
    assert path["share"] == pytest.approx(float(overlap(moved) / overlap(W)), rel=1e-3)
    for name, matrix in (("nfm", W.T @ W), ("agop", W.T @ K @ W / SETUP.samples)):
        assert numpy.allclose(numbers[name][method, position], matrix.numpy(), rtol=1e-3, atol=1e-6)


def test_nothing_is_centered_before_the_first_step(numbers):
    assert numpy.isnan(numbers["centered"][..., 0]).all()
    assert (numbers["share"][..., 0] == 0).all()


def finals(**values):
    """Numbers with given ends, (methods, scales); two moments."""
    return {name: numpy.stack([numpy.zeros((2, 2)), numpy.array(value)], -1) for name, value in values.items()}


def test_claims_fail_on_numbers_that_break_them():
    good = finals(
        uncentered=[[0.6, 0.95], [0.95, 0.96]],
        centered=[[0.8, 0.96], [0.95, 0.96]],
        share=[[0.01, 0.9], [0.98, 1.0]],
        nfm_egop=[[0.33, 0.85], [0.8, 0.84]],
        agop_egop=[[0.5, 0.9], [0.85, 0.9]],
        train=[[0.1, 0], [0.01, 0.0]],
    )
    assert [id for id, claim in verdicts(good).items() if not claim.holds] == []
    bad = finals(
        uncentered=[[0.96, 0.5], [0.5, 0.6]],
        centered=[[0.97, 0.5], [0.4, 0.6]],
        share=[[0.5, 0.4], [0.1, 1.0]],
        nfm_egop=[[0.9, 0.85], [0.3, 0.84]],
        agop_egop=[[0.9, 0.9], [0.85, 0.9]],
        train=[[0.1, 0], [0.2, 0.0]],
    )
    holding = [id for id, claim in verdicts(bad).items() if claim.holds]
    assert holding == ["c-fraction"]  # there the UC-NFC rises by 0.46 with the scale, the C-NFC by 0.47
    assert not any(claim.known for claim in verdicts(good).values())


def test_claims_of_fig_11_fail_on_numbers_that_break_them():
    def failing(**values):
        runs = Runs([0], [finals(**values)])
        return [claim.id for claim in fig11.claims(SETUP, runs) if not claim.holds]

    good = {
        "uncentered": [[0.6, 0.95], [0.95, 0.96]],
        "nfm_egop": [[0.33, 0.85], [0.8, 0.84]],
        "agop_egop": [[0.7, 0.9], [0.85, 0.9]],
    }
    assert failing(**good) == []
    assert failing(**{**good, "uncentered": [[0.96, 0.95], [0.95, 0.96]]}) == ["correspondence"]
    assert failing(**{**good, "nfm_egop": [[0.33, 0.85], [0.5, 0.84]]}) == ["nfm-invariant"]
    assert failing(**{**good, "agop_egop": [[0.3, 0.9], [0.6, 0.9]]}) == ["faster", "agop-invariant"]
    assert failing(**{**good, "nfm_egop": [[0.5, 0.45], [0.5, 0.55]]}) == ["small", "quality", "faster"]
