"""003 on optimizers and batches, which are ours: steps written out, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import batch, optimizers, small_perceptrons
from featlearn_papers.paper_003.optimizers import ADAM, EQUAL, FAST, LARS, LARS_AXIS, SGD
from papers.tests.verdicts import failing

IMAGES = replace(small_perceptrons.DIGITS, samples=20, unseen=6, epochs=2, batch=8, probe=10, width=5)
SETUP = optimizers.Setup(images=IMAGES)
BATCHES = batch.Setup(images=IMAGES, batches=(4, 8, 20))


def test_lars_moves_each_tensor_by_a_share_of_its_norm_against_its_gradient():
    first, second = (nn.Parameter(torch.randn(3, 4, dtype=torch.float64) * scale) for scale in (1.0, 20.0))
    still = nn.Parameter(torch.ones(2))
    before = [first.detach().clone(), second.detach().clone()]
    (first.square().sum() * 7 + second.sum() + 0 * still.sum()).backward()
    LARS([first, second, still], 0.1).step()
    for now, old, gradient in ((first, before[0], 14 * before[0]), (second, before[1], torch.ones(3, 4))):
        expected = old - 0.1 * old.norm() * gradient / gradient.norm()
        assert torch.allclose(now.detach(), expected, atol=1e-12)
    assert torch.equal(still.detach(), torch.ones(2))  # a gradient of zero moves nothing


@pytest.mark.parametrize("position", range(5))
def test_first_steps_are_those_of_the_rule(position):
    context = Context(seed=0, folder=None)
    train = optimizers.images(IMAGES, context)
    model = small_perceptrons.network(IMAGES, train, context)
    before = [weight.detach().clone() for weight in model.parameters()]
    rows = torch.randperm(20, generator=context.generator(2))[:8]
    nn.functional.mse_loss(model(train[0][rows]), train[1][rows]).backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    chosen = optimizers.optimizer(position, model, SETUP)
    small_perceptrons.stepping(model, train, chosen, 8, 10, context)()
    speeds = {EQUAL: (1, 1, 1), FAST: (2.5, 0.4, 0.4)}.get(position)
    for k, (weight, old, g) in enumerate(zip(model.parameters(), before, gradients, strict=True)):
        expected = {SGD: 5.0 * g, ADAM: 1e-3 * g / (g.abs() + 1e-8), LARS_AXIS: 0.02 * old.norm() * g / g.norm()}
        step = 0.1 * speeds[k] * g / g.norm() if speeds else expected[position]
        assert torch.allclose(weight.detach(), old - step, atol=1e-6)
    assert chosen.param_groups[0]["lr"] == pytest.approx(
        {SGD: 5.0, ADAM: 1e-3, LARS_AXIS: 0.02}.get(position, 0.1) * (1 + numpy.cos(numpy.pi / 10)) / 2
    )


def test_all_batches_take_as_many_steps_and_the_whole_one_has_no_noise():
    found = batch.measure(BATCHES, Context(seed=0, folder=None))
    assert found["steps"][-1] == IMAGES.steps == 4
    assert numpy.shape(found["cosine"]) == (3, len(found["steps"]), 2, 2)
    assert numpy.shape(found["train"]) == (3, len(found["steps"]))


def made_up(uncentered, centered, change=0.5, train=0.1, kinds=5):
    """Three moments of 100 steps; two layers."""
    pair = numpy.stack([numpy.full((kinds, 3, 2), 0.0)] * 2, -1)
    pair[..., 0] = numpy.array(uncentered)[:, None, None]
    pair[..., 1] = numpy.array(centered)[:, None, None]
    one = {
        "steps": numpy.array([1, 10, 100]),
        "cosine": pair,
        "pearson": pair,
        "change": numpy.full((kinds, 3, 2), change),
        "train": numpy.tile([1.0, 0.5, train], (kinds, 1)),
    }
    return one


def test_claims_on_optimizers_fail_on_numbers_that_break_them():
    good = made_up([0.6, 0.5, 0.55, 0.5, 0.7], [0.9, 0.8, 0.9, 0.9, 0.9])
    assert failing(optimizers, SETUP, Runs([0], [good])) == []
    bad = made_up([0.5, 0.6, 0.8, 0.5, 0.7], [0.7, 0.8, 0.7, 0.9, 0.9], train=0.5)
    assert failing(optimizers, SETUP, Runs([0], [bad])) == [
        "higher",
        "adam-centered",
        "adam-uncentered",
        "lars-slo",
        "fast",
        "learn",
    ]
    uneven = dict(good)
    uneven["change"] = good["change"] * numpy.array([1.0, 1.1])
    assert failing(optimizers, SETUP, Runs([0], [uneven])) == ["lars-step"]


def test_features_at_equal_losses_are_read_off_the_paths():
    uncentered = numpy.arange(6.0).reshape(1, 2, 3)
    runs = Runs(
        [0],
        [
            {
                "train": numpy.array([[1.0, 0.05, 0.01], [2.0, 0.4, 0.1]]),
                "cosine": numpy.stack([uncentered[0]] * 2, -1)[:, :, None],
            }
        ],
    )
    assert optimizers.learned(runs) == pytest.approx(numpy.array([[1.0, 5.0]]))


def test_equal_epochs_are_read_off_the_steps():
    runs = Runs([0], [{"steps": numpy.array([1, 5, 20, 100])}])
    values = numpy.arange(12.0).reshape(1, 3, 4)
    setup = replace(BATCHES, batches=(4, 20, 400))
    assert batch.at_epochs(setup, runs, values) == pytest.approx(numpy.array([[3.0, 6.0, 8.0]]))


def test_claims_on_batches_fail_on_numbers_that_break_them():
    good = made_up([0.6, 0.62, 0.64], [0.85, 0.9, 0.95], kinds=3)
    good["change"] = good["change"] * numpy.array([0.1, 0.5, 1.0])[:, None] * numpy.array([3, 2, 1])[:, None, None]
    assert failing(batch, BATCHES, Runs([0], [good])) == []
    bad = made_up([0.6, 0.75, 0.8], [0.75, 0.7, 0.7], kinds=3)
    assert failing(batch, BATCHES, Runs([0], [bad])) == ["higher", "near-one", "steps", "epochs", "noise"]
