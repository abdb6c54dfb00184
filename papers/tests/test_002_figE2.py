"""002 Fig. E.2: its inputs and times against obvious ones, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch

from featlearn.errors import InputValueError
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import figE2
from featlearn_papers.paper_002.silence import two_classes
from papers.tests.verdicts import failing

SETUP = figE2.Setup(
    data="digits",
    samples=20,
    test_samples=15,
    pooling=1,
    depths=(2, 3),
    times=(6.0, 9.0),
    width=30,
    sigma=0.3,
    larger=0.4,
    moments=4,
)
CONTEXT = Context(seed=0, folder=None)


def test_coordinates_of_the_span_change_no_product_of_inputs():
    given = figE2.task(SETUP, CONTEXT)
    images = two_classes(CONTEXT, "digits", 20, 15)
    assert given.x.shape == (20, 20)
    assert torch.allclose(given.x @ given.x.T, images.x @ images.x.T, atol=1e-3)
    assert torch.allclose(given.test_x @ given.x.T, images.test_x @ images.x.T, atol=1e-3)
    # whitened, fewer samples than pixels: orthogonal
    assert torch.allclose(given.exact @ given.exact.T, 20 * torch.eye(20, dtype=torch.float64), atol=1e-6)


def test_images_that_span_fewer_directions_than_they_are_many_are_refused():
    """64 pixels, some of them always empty: 70 digits cannot be orthogonal."""
    with pytest.raises(InputValueError, match=r"70 images of digits span \d+ directions"):
        figE2.task(replace(SETUP, samples=70), CONTEXT)


def test_all_batches_are_read_where_they_are_asked_for():
    asked = []

    class Reader(Context):
        def dataset(self, name, **options):
            asked.append(options.pop("batches"))
            options.pop("normalization")
            return super().dataset("digits", **options)

    figE2.task(replace(SETUP, data="cifar10"), Reader(seed=0, folder=None))
    two_classes(Reader(seed=0, folder=None), "cifar10", 20, 15)
    assert asked == [None, (1,)]


def test_half_times_are_those_of_descent_by_hand():
    found = figE2.measure(SETUP, CONTEXT)
    given = figE2.task(SETUP, CONTEXT)
    W, a = (weight.detach().clone() for weight in figE2.network(SETUP, CONTEXT, given, 2, SETUP.larger).parameters())
    losses = []
    while not losses or losses[-1] > losses[0] / 2:
        h = given.x @ W.T
        residual = torch.relu(h) @ a[0] - given.y
        losses.append(float(residual.square().mean()))
        pull = residual / 20 * SETUP.lr
        W, a = W - ((pull[:, None] * (h > 0)) * a[0]).T @ given.x, a - (pull @ torch.relu(h))[None]
    assert SETUP.lr * (len(losses) - 2) < found["half_time"][0][1] <= SETUP.lr * (len(losses) - 1)
    assert found["2/predictions"].shape == (3, 15)
    assert found["3/loss"][-1] < found["3/loss"][0]
    assert numpy.isnan(figE2.half_time(SETUP, CONTEXT, given, 2, 0.3))


def test_claims_fail_on_numbers_that_break_them():
    steps = numpy.arange(101.0)
    good = {"half_time": numpy.array([[4.0, 3.0], [12.0, 9.0]])}
    for depth in (2, 3):
        good |= {
            f"{depth}/steps": steps,
            f"{depth}/norm": numpy.exp((steps - 100) / 10),
            f"{depth}/alignment": numpy.clip(steps / 50, 0.1, 1),
            f"{depth}/centered_alignment": numpy.clip(steps / 50, 0.1, 1),
            f"{depth}/error": numpy.array([0.05, 0.5, 0.05]),
            f"{depth}/correlation": numpy.array([0.99, 0.5, 0.99]),
        }

    def verdict(**changes):
        return failing(figE2, SETUP, Runs([0], [good | changes]))

    assert verdict() == []
    assert verdict(half_time=numpy.array([[4.0, 3.0], [15.0, 9.0]])) == ["power-3"]
    assert verdict(**{"2/alignment": steps / 100}) == ["silent-2"]
    assert verdict(**{"3/error": numpy.array([0.3, 0.5, 0.3])}) == ["final-3"]
    assert verdict(**{"3/error": numpy.array([0.05, 0.1, 0.05])}) == ["initial-3"]
    runs = Runs([0], [good])
    assert figE2.grown(runs, 2)[0] == pytest.approx(100 - 10 * numpy.log(10), abs=0.1)
