"""002 Fig. J.1: images that are not whitened, and claims that must fail. Kernels are tested with Fig. J.2."""

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_002 import figJ1
from featlearn_papers.paper_002.silence import two_classes
from papers.tests.residual_runs import SETUP, STEPS, changed, made_up
from papers.tests.verdicts import failing

CONTEXT = Context(seed=0, folder=None)


def test_images_keep_all_directions_and_have_the_total_of_whitened_ones():
    whitened = two_classes(CONTEXT, "digits", 12, 30, flatten=False)
    images = two_classes(CONTEXT, "digits", 12, 30, power=None, flatten=False)
    pixels = two_classes(CONTEXT, "digits", 12, 30, power=None, mean_eigenvalue=None, flatten=False)
    drawn = CONTEXT.dataset("digits", classes=(0, 1), samples=42, generator=CONTEXT.generator())
    assert torch.equal(pixels.x, drawn.x[:12])
    assert torch.equal(pixels.test_x, drawn.x[12:])
    assert torch.equal(images.y, whitened.y)
    factor = images.x.norm() / pixels.x.norm()
    assert torch.allclose(images.test_x, factor * pixels.test_x, atol=1e-5)
    assert images.x.square().sum() / 12 == pytest.approx(12, rel=1e-4)  # 12 eigenvalues of X^T X / P, 1 in the mean
    assert whitened.x.square().sum() / 12 == pytest.approx(12, rel=1e-4)
    both = torch.cat([images.x, images.test_x]).flatten(1).double()
    assert torch.linalg.matrix_rank(both) > 12  # whitened test images lie in the span of the 12
    # more images than pixels: 64 directions
    many = two_classes(CONTEXT, "digits", 200, 10, power=None, mean_eigenvalue=2.0)
    assert many.x.square().sum() / 200 == pytest.approx(128, rel=1e-4)


def late(found):
    """The alignment of the first network arrives after its loss has fallen."""
    slow = 0.1 + 0.4 * numpy.clip(STEPS / 90, 0, 1)
    numbers = {
        "alignment": slow,
        "centered_alignment": slow,
        "error": [0.2, 0.5, 0.15],
        "correlation": [0.95, 0.8, 0.9],
    }
    return changed(found, 0, **numbers)


def verdict(images, whitened=None):
    runs = {"images": Runs([0], [images]), "whitened": Runs([0], [whitened or made_up()])}
    return failing(figJ1, {"images": SETUP, "whitened": SETUP}, runs)


def test_claims_fail_on_numbers_that_break_them():
    good = late(made_up())
    assert verdict(good) == []
    assert verdict(changed(good, 0, alignment=0.5 - 0.4 * numpy.exp(-STEPS / 4))) == ["loss-first", "less-silent"]
    later = changed(made_up(), 0, alignment=0.05 + 0.0045 * STEPS, error=[0.3, 0.5, 0.2])
    assert verdict(good, later) == ["less-silent", "degraded"]
    assert verdict(changed(good, 0, correlation=[0.995, 0.8, 0.9])) == ["not-perfect"]
    assert verdict(changed(good, 0, error=[0.08, 0.5, 0.05])) == ["degraded"]
    assert verdict(changed(good, 0, error=[0.4, 0.5, 0.3])) == ["beats-initial"]
    assert verdict(changed(good, 0, error=[0.2, 0.5, 0.4])) == ["adam"]


def test_loss_left_is_that_of_the_moment_when_the_alignment_has_settled():
    left = figJ1.loss_left(Runs([0], [late(made_up())]), "alignment")[0]
    # 0.1 + 0.4 t / 90 is within a tenth of 0.5 from t = 78.75 on; the first measured step of that time is 79
    assert left[0] == pytest.approx(1 - 1 / (1 + numpy.exp((60 - 79) / 3)), rel=1e-3)
    # 0.5 - 0.4 exp(-t / 5) from t = 5 ln 8 on, measured at 11
    assert left[1] == pytest.approx(
        (1 - 1 / (1 + numpy.exp((30 - 11) / 3))) / (1 - 1 / (1 + numpy.exp(30 / 3))), rel=1e-3
    )


def test_the_picture_has_every_network_of_both_experiments():
    runs = {"images": Runs([0], [late(made_up())]), "whitened": Runs([0], [made_up()])}
    figure = figJ1.plot({"images": SETUP, "whitened": SETUP}, runs)
    titles = [ax.get_title("left") for ax in figure.axes]
    assert titles[:2] == ["a  dynamics", "b  predictions"]
    assert [tick.get_text() for tick in figure.axes[5].get_xticklabels()] == ["images", "pixels", "whitened"]
