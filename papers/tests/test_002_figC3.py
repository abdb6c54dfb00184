"""002 Fig. C.3: q and r against gradient descent and against the printed numbers, and claims that must fail."""

import numpy
import pytest
import torch

from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import figC3
from papers.tests.verdicts import failing

SETUP = figC3.Setup(sigmas=(0.1, 0.01), moments=4)
CONTEXT = Context(seed=0, folder=None)


def whitened(samples=11, inputs=5):
    drawn = torch.randn(samples, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    X = samples**0.5 * left @ right
    return X, X @ torch.tensor([1.0, -0.5, 0.3, 0.2, 0.7], dtype=torch.float64)


def test_the_path_is_that_of_descent_in_small_steps_and_of_the_closed_form():
    X, y = whitened()
    s = (1 + 0.25 + 0.09 + 0.04 + 0.49) ** 0.5
    beta = torch.linalg.lstsq(X, y[:, None]).solution[:, 0] / s
    times = torch.tensor([0.0, 1.5, 3.0], dtype=torch.float64)
    found = figC3.path(X, y, 0.1, 7, times, CONTEXT)
    assert float(found["s"]) == pytest.approx(s)
    model = MLP(
        5, None, width=7, hidden_layers=1, activation="linear", weight_variance=0.01, generator=CONTEXT.generator(1)
    ).double()
    W, a = (weight.detach().clone() for weight in model.parameters())
    a, lr = a[0], 1e-3 / s
    first = None
    for step in range(3001):
        if step % 1500 == 0:
            q, r = float((a @ a + (W @ beta) @ (W @ beta)) / 2) / s, float(a @ W @ beta) / s
            assert found["measured"][:, step // 1500].tolist() == pytest.approx([q, r], rel=5e-3)
            first = first or (q, r)
        miss = s * beta - W.T @ a
        a, W = a + lr * W @ miss, W + lr * torch.outer(a, miss)
    # the formula of the sheet, written out
    (q, r), t = first, 3.0
    below = 1 + (q + r) / 2 * (numpy.exp(2 * t) - 1)
    kept = numpy.array([q * numpy.cosh(2 * t) + r * numpy.sinh(2 * t), r * numpy.cosh(2 * t) + q * numpy.sinh(2 * t)])
    assert found["theory"][:, -1].numpy() == pytest.approx(kept / below)
    dropped = numpy.array([q * numpy.cosh(2 * t), q * numpy.sinh(2 * t)]) / (1 + q / 2 * (numpy.exp(2 * t) - 1))
    assert found["printed"][:, -1].numpy() == pytest.approx(dropped)


def test_images_are_whitened_on_fewer_directions_than_they_have_pixels():
    setup = figC3.Setup(samples=9, inputs=4, width=3, sigmas=(0.1,), data="digits", images=60, image_width=5, moments=3)
    found = figC3.measure(setup, CONTEXT)
    assert found["images/inputs"] == 64
    assert 20 < found["images/rank"] < 60
    assert float(found["images/s"]) < 1 + 1e-9  # |beta|^2 is the share of y that the directions span


def made_up(**changes):
    theory = numpy.stack([numpy.linspace(0.1, 1, 5), numpy.linspace(0, 1, 5)])
    numbers = {
        "synthetic/theory": numpy.stack([theory, theory]),
        "synthetic/printed": numpy.stack([theory, theory]) + 0.03,
        "synthetic/measured": numpy.stack([theory + 3e-2, theory + 3e-4]),
        "images/theory": theory,
        "images/printed": theory + 0.02,
        "images/measured": theory + 1e-4,
        "images/rank": numpy.array(20),
        "images/inputs": numpy.array(64),
        "images/start": numpy.array(1.1),
    }
    return set(failing(figC3, SETUP, Runs([0], [numbers | changes])))


def test_claims_fail_on_numbers_that_break_them():
    printed = {"synthetic-printed", "images-printed"}
    theory = numpy.stack([numpy.linspace(0.1, 1, 5), numpy.linspace(0, 1, 5)])
    assert made_up() == printed
    assert made_up(**{"images/measured": theory + 0.02}) == {"images", "end", "synthetic-printed"}
    assert made_up(**{"synthetic/measured": numpy.stack([theory + 3e-3, theory + 2e-3])}) == {
        "synthetic",
        "order",
        *printed,
    }
    assert made_up(**{"images/start": numpy.array(1.4)}) == {"start", *printed}
