"""003 Fig. 1: its numbers against plain algebra, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.frame.schedule import growing_steps
from featlearn_papers.paper_003 import chain, fig1

SETUP = fig1.Setup(samples=30, dimension=7, degree=3, width=9, lr=0.1, steps=40, rotations=3)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    found = fig1.measure(SETUP, Context(seed=2, folder=tmp_path_factory.mktemp("fig1")))
    return {name: as_array(values, name) for name, values in found.items()}


def verdicts(numbers):
    return {claim.id: claim for claim in fig1.claims(SETUP, Runs([0], [numbers]))}


def by_hand(weights, x, y, lr, steps):
    """Gradient descent of f = a relu(V relu(W x)) written out, in numpy; the gradients of f in h = W x at the end."""
    W, V, a = weights
    for _ in range(steps):
        h = x @ W.T
        g = numpy.maximum(h, 0) @ V.T
        f = numpy.maximum(g, 0) @ a[0]
        out = 2 * (f - y)[:, None] / len(y)
        da = (out * numpy.maximum(g, 0)).sum(0)[None]
        dg = out * a * (g > 0)
        dV = dg.T @ numpy.maximum(h, 0)
        dW = ((dg @ V) * (h > 0)).T @ x
        W, V, a = W - lr * dW, V - lr * dV, a - lr * da
    h = x @ W.T
    g = numpy.maximum(h, 0) @ V.T
    return W, ((a * (g > 0)) @ V) * (h > 0)


def cosine(a, b):
    return (a * b).sum() / numpy.sqrt((a * a).sum() * (b * b).sum())


def test_numbers_are_those_of_gradient_descent_written_out(numbers):
    context = Context(seed=2, folder=None)
    task = chain.chain(context, SETUP.samples, 1, SETUP.dimension, SETUP.degree)
    model = chain.network(context, task, SETUP.width, SETUP.first)
    weights = [weight.detach().double().numpy() for weight in model.parameters()]
    W, J = by_hand(weights, task.x.double().numpy(), task.y.double().numpy(), SETUP.lr, SETUP.steps)
    K = J.T @ J / SETUP.samples
    # the figure trains in single precision
    assert numbers["nfm"] == pytest.approx(W.T @ W, abs=1e-5)
    assert numbers["agop"] == pytest.approx(W.T @ K @ W, abs=1e-5)
    assert numbers["nfc"][-1] == pytest.approx(cosine(W.T @ W, W.T @ K @ W), abs=1e-5)
    eigenvalues = numpy.linalg.eigvalsh(K)
    assert numbers["spread"] == pytest.approx(eigenvalues.std() / eigenvalues.mean(), rel=1e-4)


def test_the_egop_is_that_of_a_ring_of_three(numbers):
    block = numpy.zeros((7, 7))
    block[:3, :3] = numpy.ones((3, 3)) + numpy.eye(3)  # (S S^T of the triangle), divided by Var y = 3
    assert numbers["egop"] == pytest.approx(block / 3, abs=1e-12)
    assert numbers["nfm_egop"] == pytest.approx(cosine(numbers["nfm"], block), abs=1e-9)


def test_corruption_keeps_the_spectrum_of_k(numbers):
    """Of W^T Q W only what W lets through is seen: with Q of K's spectrum its trace is at most |W|^2 times the top."""
    trace = numpy.trace(numbers["corrupted_agop"])
    weight = numpy.trace(numbers["nfm"])
    assert numbers["spectrum"][-1] * weight - 1e-9 <= trace <= numbers["spectrum"][0] * weight
    assert numbers["corrupted_lowest"][-1] <= numbers["corrupted"][-1]
    assert cosine(numbers["corrupted_agop"], numbers["agop"]) < 0.999


def test_weights_begin_as_torch_begins_them_times_the_factor():
    context = Context(seed=0, folder=None)
    task = chain.chain(context, 10, 2, 8)
    first, hidden, readout = (
        weight.detach().abs().max() for weight in chain.network(context, task, 300, 0.1, 0.01).parameters()
    )
    assert float(first) == pytest.approx(0.1 / 8**0.5, rel=0.02)
    assert float(hidden) == pytest.approx(1 / 300**0.5, rel=0.02)
    assert float(readout) == pytest.approx(0.01 / 300**0.5, rel=0.05)
    assert task.x_test.shape == (2, 8)


def test_claims_fail_on_numbers_that_break_them(numbers):
    good = numbers | {
        "nfc": numpy.array([0.5, 0.93]),
        "corrupted": numpy.array([0.5, 0.53]),
        "spread": numpy.array(5.9),
        "nfm_egop": numpy.array(0.9),
        "agop_egop": numpy.array(0.95),
        "corrupted_agop_egop": numpy.array(0.6),
    }
    assert all(claim.holds for claim in verdicts(good).values())
    bad = {
        "nfc": numpy.array([0.99, 0.8]),
        "corrupted": numpy.array([0.1, 0.85]),
        "spread": numpy.array(4.0),
        "nfm_egop": numpy.array(0.32),
        "agop_egop": numpy.array(0.5),
        "corrupted_agop_egop": numpy.array(0.7),
    }
    assert not any(claim.holds for claim in verdicts(numbers | bad).values())


def test_moments_end_at_the_last_step():
    assert growing_steps(10, 2.0) == [0, 1, 2, 4, 8, 10]
    assert torch.tensor(growing_steps(800, 1.3)).diff().min() > 0
