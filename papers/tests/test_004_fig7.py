"""004 Fig. 7: its numbers against obvious ones, and claims that must fail."""

import math

import numpy
import pytest
import torch

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs, as_array
from featlearn_papers.paper_004 import fig1, fig7
from papers.tests.verdicts import failing

SETUP = fig1.Setup(
    task="classification",
    width=7,
    linear_width=6,
    samples=4,
    steps=60,
    moments=6,
    speed=0.05,
    large_speed=0.02,
    law_widths=(5, 9, 30),
    variances=(1.0, 3.0),
)


@pytest.fixture(scope="module")
def numbers():
    found = fig1.measure(SETUP, Context(seed=3, folder=None))
    return {name: as_array(values, name) for name, values in found.items()}


def test_training_is_descent_on_the_cross_entropy_written_out_by_hand():
    """Residuals are the probability less the label; leaky ReLU of slope 0.01."""
    at = fig1.initial_state(SETUP, "near-orthogonal", "leaky_relu", torch.Generator().manual_seed(5))
    x, y = numpy.array([0.5, -1.2, 4.0]), numpy.array([0.0, 0.0, 1.0])
    alignments, losses = fig1.trained(
        SETUP, at, "leaky_relu", torch.tensor(x, dtype=torch.float64)[:, None], torch.tensor(y)
    )
    u, w = at.u.numpy().copy(), at.w.numpy().copy()
    for step in range(SETUP.steps + 1):
        h = numpy.outer(x, w)
        slope = numpy.where(h > 0, 1.0, 0.01)
        chance = 1 / (1 + numpy.exp(-at.scale * (slope * h) @ u))
        if step % SETUP.stride == 0:
            moment = step // SETUP.stride
            assert losses[moment] == pytest.approx(-numpy.log(numpy.where(y == 1, chance, 1 - chance)).mean(), rel=1e-9)
            assert alignments[moment] == pytest.approx(u @ w / math.sqrt((u @ u) * (w @ w)), rel=1e-9)
        pull = at.lr * at.scale * (chance - y) / len(x)
        u, w = u - pull @ (slope * h), w - (pull * x) @ (slope * u)


def test_the_classes_are_the_gaussians_of_the_paper_and_all_networks_see_them(numbers):
    wide = fig1.Setup(task="classification", samples=20_000)
    x, y = fig1.points(wide, "linear", Context(seed=1, folder=None))
    for label, mean in ((0, 0.0), (1, 4.0)):
        assert float(x[y == label].mean()) == pytest.approx(mean, abs=0.05)
        assert float(x[y == label].std()) == pytest.approx(1, abs=0.05)
    assert torch.equal(x, fig1.points(wide, "swish", Context(seed=1, folder=None))[0])
    assert numbers["alignment"].shape == (5, 4, 7)
    assert "theory" not in numbers


def test_equal_layers_stay_equal_where_units_are_homogeneous_only(numbers):
    """The derivation behind what is known of leaky ReLU, and what it does not say of sigmoid and swish."""
    lowest = dict(zip(fig1.ACTIVATIONS, numbers["alignment"][:, 2].min(1), strict=True))
    for activation in ("linear", "relu", "leaky_relu"):
        assert lowest[activation] == pytest.approx(1, abs=1e-5)
    for activation in ("sigmoid", "swish"):
        assert lowest[activation] < 1 - 1e-4


def made_up():
    """Ideal curves; the loss has converged at a third of the time."""
    time = numpy.linspace(0, 1, 7)
    good = numpy.zeros((5, 4, 7))
    good[:, 1] = 0.9 * time
    good[:, 2] = 1.0
    good[2:, 2] = 1 - 0.1 * time
    good[:, 3] = 0.995 - 0.05 * time
    loss = numpy.broadcast_to(numpy.array([1.0, 0.6, 0.3, 0.3, 0.3, 0.3, 0.3]), good.shape)
    law = numpy.stack([numpy.zeros((4, 3)), numpy.tile(9 / numpy.sqrt(SETUP.law_widths), (4, 1))], -1)
    return {"alignment": good, "loss": loss, "law": law, "lowest": numpy.array([0.97, 0.995])}


def test_claims_fail_on_numbers_that_break_them():
    good, time = made_up(), numpy.linspace(0, 1, 7)

    def failed(activation, start, curve):
        changed = good["alignment"].copy()
        changed[activation, start] = curve
        return failing(fig7, SETUP, Runs([0], [good | {"alignment": changed}]))

    assert failing(fig7, SETUP, Runs([0], [good])) == []
    assert failed(3, 1, 0.4 * time) == ["align"]
    assert failed(1, 3, 0.995 + 0.001 * time) == ["disalign", "monotone", "keeps-falling"]
    assert failed(1, 3, [0.99, 0.98, 0.95, 0.96, 0.97, 0.97, 0.97]) == ["monotone", "keeps-falling"]
    assert failed(1, 3, [0.99, 0.98, 0.95, 0.95, 0.95, 0.95, 0.95]) == ["keeps-falling"]
    assert failed(2, 2, 1 - 0.005 * time) == ["deviates-sigmoid"]
    assert failed(3, 2, 1.0) == ["deviates-swish"]
    assert failed(4, 2, 1.0) == ["deviates-leaky"]
    assert failed(1, 2, 1 - 0.1 * time) == ["stays"]
    assert failed(0, 2, 1 - 0.1 * time) == ["stays"]
    slower = good["law"].copy()
    slower[1, :, 1] = 0.3
    assert failing(fig7, SETUP, Runs([0], [good | {"law": slower}])) == ["kernel-sigmoid"]


def test_the_fall_after_the_loss_begins_at_the_moment_of_its_share():
    good = made_up()
    assert fig7.later_fall(Runs([0], [good]), 0.99) == pytest.approx(0.05 * 4 / 6)
    assert fig7.later_fall(Runs([0], [good]), 0.5) == pytest.approx(0.05 * 5 / 6)
    claims = {one.id: one for one in fig7.claims(SETUP, Runs([0], [good]))}
    assert [one["verdict"] for one in claims["deviates-sigmoid"].details()["choices"]] == ["holds", "fails"]
    assert claims["deviates-leaky"].known
    assert claims["stays"].check
