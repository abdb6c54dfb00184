"""000 Fig. 3: its numbers against plain descent and the kernel in closed form, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_000 import fig3, linear
from papers.tests.verdicts import failing

SETUP = linear.Setup(width=7, samples=11, steps=40, growth=2.0, lr=0.7)


@pytest.fixture(scope="module")
def numbers():
    found = linear.measure(SETUP, Context(seed=3, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def plain(start, setup=SETUP):
    """The same descent by autograd: X, s and the weights at every step."""
    context = Context(seed=3, folder=None)
    X, s = linear.task(setup, context.generator())
    generator = context.generator(1)
    W, V = (torch.randn(shape, generator=generator).double() * start.deviation for shape in ((7, 7), (7,)))
    path = []
    for _ in range(setup.steps + 1):
        path.append((V.numpy(), W.numpy()))
        V, W = (weight.detach().requires_grad_() for weight in (V, W))
        penalty = start.decay / 2 * (V.square().sum() + W.square().sum())
        loss = (X @ (V @ W) / 7 - X @ s).square().mean() + penalty
        V, W = (w.detach() - setup.lr * g for w, g in zip((V, W), torch.autograd.grad(loss, (V, W)), strict=True))
    return X.numpy(), s.numpy(), path


@pytest.mark.parametrize("place", [linear.SMALL, linear.MEDIUM, linear.LARGE, linear.DECAYING])
def test_curves_are_those_of_plain_descent(numbers, place):
    X, s, path = plain(SETUP.starts[place])
    y = X @ s
    assert SETUP.moments == [0, 1, 2, 4, 8, 16, 32, 40]
    for i, step in enumerate(SETUP.moments):
        V, W = path[step]
        K = (X @ W.T @ W @ X.T + V @ V * X @ X.T) / 49  # Eq. 12 with the order of W mended
        learned = W.T @ V / 7
        top = numpy.linalg.eigh(K)[1][:, -1]
        expected = {
            "loss": ((X @ learned - y) ** 2).mean(),
            "teacher": learned @ s / numpy.linalg.norm(learned),
            "alignment": y @ K @ y / numpy.linalg.norm(K) / (y @ y),
            "top": abs(top @ y) / numpy.linalg.norm(y),
        }
        for name, value in expected.items():
            assert numbers[name][place, i] == pytest.approx(value, rel=1e-7), (name, step)


def test_the_limit_of_small_weights_is_the_alignment_of_its_kernel(numbers):
    X, s, _ = plain(SETUP.starts[0])
    y, K = X @ s, X @ (numpy.outer(s, s) + numpy.eye(7)) @ X.T
    assert numbers["best"] == pytest.approx(y @ K @ y / numpy.linalg.norm(K) / (y @ y))


def test_a_long_run_from_small_weights_comes_to_the_limit():
    setup = linear.Setup(width=6, samples=9, steps=900, growth=30.0, lr=1.0)
    found = linear.measure(setup, Context(seed=2, folder=None))
    assert found["alignment"][0][-1] == pytest.approx(float(found["best"]), abs=0.01)


def made_up(**changes):
    curve = numpy.linspace(0, 1, 5)
    found = {
        "best": numpy.array(0.4),
        "loss": numpy.tile([1.0, 0.5, 0.1, 1e-4, 1e-9], (4, 1)),
        "teacher": numpy.tile(curve, (4, 1)),
        "alignment": 0.2 + numpy.outer([0.2, 0.15, 0.05, 0.2], curve),
        "top": 0.1 + numpy.outer([0.8, 0.6, 0.1, 0.8], curve),
    }
    return Runs([0], [found | {name: act(found[name]) for name, act in changes.items()}])


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"loss": lambda v: v**0.1}, ["converges"]),
        ({"teacher": lambda v: 0.9 * v}, ["teacher"]),
        ({"alignment": lambda v: v[:, ::-1]}, ["aligns", "limit"]),
        ({"best": lambda v: v + 0.05}, ["limit"]),
        ({"top": lambda v: v[:, ::-1]}, ["top-eigenvector"]),
        ({"alignment": lambda v: v[[0, 2, 1, 3]]}, ["smaller-stronger"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert failing(fig3, linear.Setup(), made_up(**changes)) == broken


def test_what_larger_weights_give_is_the_other_choice():
    claims = {claim.id: claim for claim in fig3.claims(linear.Setup(), made_up())}
    told = claims["limit"].details()["choices"]
    assert [(one["other"], one["verdict"]) for one in told] == [("of 0.3", "fails"), ("of 1", "fails")]
    assert [one["measured"] for one in told] == pytest.approx([-0.05, -0.15])
