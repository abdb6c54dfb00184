"""004 Fig. 6: its measures against obvious ones, and claims that must fail."""

from dataclasses import replace

import numpy
import pytest

from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004 import fig6, initial_scales
from papers.tests.verdicts import failing

SIX = initial_scales.Setup(
    data="digits",
    samples=30,
    width=11,
    hidden_layers=5,
    sigmas=(0.5, 1.0, 3.0),
    lrs=(0.2, 0.1, 1e-4),
    steps=6,
    moments=2,
)
FOUR = replace(initial_scales.unscaled(SIX), hidden_layers=3)
SETUPS = {"six": SIX, "four": FOUR}


def test_six_layers_have_five_pairs_and_four_layers_are_the_runs_of_fig_2_at_sigma_1():
    deep = initial_scales.measure(SIX, Context(seed=0, folder=None))
    assert deep["alignment"].shape == (3, 2, 5, 3)
    every = initial_scales.measure(replace(SIX, hidden_layers=3), Context(seed=0, folder=None))
    one = initial_scales.measure(FOUR, Context(seed=0, folder=None))
    assert numpy.array_equal(one["alignment"][0], every["alignment"][1])
    assert numpy.array_equal(one["loss"][0], every["loss"][1])


@pytest.mark.parametrize("scale", list(Scale))
def test_both_depths_are_measured_at_the_same_moments_and_rate(scale):
    six, four = initial_scales.SIX_LAYERS.size(scale).setup, initial_scales.FOUR_LAYERS_UNSCALED.size(scale).setup
    assert (six.hidden_layers, four.hidden_layers) == (5, 3)
    assert (six.steps, six.moments, six.samples, six.width) == (four.steps, four.moments, four.samples, four.width)
    assert six.lrs[six.unscaled] == four.lrs[four.unscaled]


def test_unsteadiness_is_the_way_beyond_the_net_change():
    curves = numpy.full((1, 2, 2, 4), 0.5)
    curves[0, 0] = [[0.5, 0.7, 0.6, 0.8], [0.5, 0.6, 0.7, 0.8]]  # back by 0.1 and forth again; straight
    runs = Runs([0], [{"alignment": curves, "loss": numpy.array([[3.0, 2.0, 2.5, 1.0]])}])
    assert fig6.unsteadiness(FOUR, runs) == pytest.approx([0.2 / 0.5 / 2])
    assert fig6.rising_losses(FOUR, runs) == pytest.approx([1 / 3])


def test_claims_fail_on_numbers_that_break_them():
    first = numpy.full((3, 2, 5), SIX.width**-0.5)
    last = first * numpy.array([1.5, 1.1, 1.02])[:, None, None]
    good = {"first": first, "last": last, "accuracy": numpy.ones((3, 3)), "middle": 2 * last}
    steady = numpy.stack([first[1:2, :, :3], (first + last)[1:2, :, :3] / 2, last[1:2, :, :3]], -1)
    four = Runs([0], [{"alignment": steady, "loss": numpy.array([[2.0, 1.0, 0.5]])}])

    def verdict(**changes):
        now = good | changes
        curves = numpy.stack([now["first"], now["middle"], now["last"]], -1)
        loss = numpy.array([[2.0, 3.0, 0.5]] * 3)
        six = Runs([0], [{"alignment": curves, "accuracy": now["accuracy"], "loss": loss}])
        return failing(fig6, SETUPS, {"six": six, "four": four})

    def moved(sigma, norm, factor):
        changed = last.copy()
        changed[sigma, norm] = first[sigma, norm] * factor
        return changed

    assert verdict() == []
    assert verdict(accuracy=numpy.array([[1.0, 1.0], [1.0, 0.9], [1.0, 1.0]])) == ["accuracy"]
    assert verdict(first=1.2 * first, last=1.2 * last, middle=2 * last) == ["start"]
    assert verdict(last=moved(1, 0, numpy.array([0.99, 1.3, 1.3, 1.3, 1.3]))) == ["rises"]
    assert verdict(last=moved(1, 0, 1.6)) == ["falls-with-scale"]
    assert verdict(last=moved(0, 0, 1.2)) == ["small"]
    assert verdict(last=moved(2, 0, 0.8)) == ["large"]
    assert verdict(last=moved(0, 1, 0.9)) == ["spectral"]
    assert verdict(last=moved(2, 1, 1.2)) == ["spectral-large"]
    assert verdict(middle=(first + last) / 2) == ["less-stable"]


def test_the_verdict_where_small_rises_are_taken_as_equal_is_told():
    first = numpy.full((3, 2, 5), SIX.width**-0.5)

    def verdicts(factors):
        curves = numpy.stack([first, first * numpy.array(factors)[:, None, None]], -1)
        numbers = {"alignment": curves, "accuracy": numpy.ones((3, 2)), "loss": numpy.ones((3, 2))}
        runs = {"six": Runs([0], [numbers]), "four": Runs([0], [{name: numbers[name][1:2] for name in numbers}])}
        (claim,) = [one for one in fig6.claims(SETUPS, runs) if one.id == "falls-with-scale"]
        return claim.verdict, [one["verdict"] for one in claim.details()["choices"]]

    assert verdicts([1.5, 1.0, 1.005]) == ("fails", ["holds"])
    assert verdicts([1.5, 1.0, 1.02]) == ("fails", ["fails"])
