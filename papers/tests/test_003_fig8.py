"""003 Fig. 8, 9 and 10: claims that must fail, and what other choices give; numbers are tested with Fig. 5."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import correlation_paths, fig8, fig9, fig10, initial_scales

SETUP = initial_scales.Setup(steps=16, first=1, early=2, stride=7)
UC = ((0.4, 0.5, 0.5, 0.6, 0.82), (0.4, 0.6, 0.7, 0.8, 0.9), (0.4, 0.7, 0.8, 0.9, 0.95))
C = ((0.9, 0.9, 0.9, 0.9), (0.91, 0.91, 0.91, 0.91), (0.92, 0.92, 0.92, 0.96))
TEST = (0.6, 0.5, 0.4)


def made_up(decay=0, *, uc=(), c=(), test=TEST, kind="cosine", place=""):
    """Good numbers for every claim, of three scales and five steps; `uc` and `c` change entries of one spectrum.

    Their keys are (scale, step, layer).
    """
    found = {}
    for where, steps in (("", slice(None)), ("all/", slice(None)), ("axes/", [0, 1, 4])):
        for each in initial_scales.KINDS:
            values = numpy.full((3, 3, 5, 2, 3), numpy.nan)
            values[..., 0] = numpy.array(UC)[:, :, None]
            values[:, :, 1:, :, 1] = numpy.array(C)[:, :, None]
            if (where, each) == (place, kind):
                for quantity, changes in enumerate((uc, c)):
                    for (scale, step, layer), value in dict(changes).items():
                        values[decay, scale, step, layer, quantity] = value
            found[f"{where}{each}"] = values[:, :, steps]
        losses = numpy.ones((3, 3, 5))
        losses[:, :, -1] = TEST
        if where == place:
            losses[decay, :, -1] = test
        found[f"{where}test"] = losses[..., steps]
    return Runs([0], [found])


def failing(runs, decay=0):
    return [claim.id for claim in correlation_paths.claims(SETUP, runs, decay) if not claim.holds]


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"c": {(0, step, 0): 0.1 for step in (2, 3)}}, ["robust-1", "c-above"]),
        ({"c": {(0, step, 1): 0.1 for step in (2, 3)}}, ["robust-2", "c-above"]),
        ({"uc": {(1, 0, 1): 0.7}}, ["uc-start"]),
        ({"uc": {(0, 0, 0): 0.5, (0, 4, 0): 0.45}}, ["uc-rises", "uc-high-1-large"]),
        ({"uc": {(2, 4, 0): 0.7}}, ["uc-high-1", "small-higher"]),
        ({"uc": {(1, 4, 1): 0.7}}, ["uc-high-2"]),
        ({"c": {(1, 1, 1): 0.75}}, ["c-early"]),
        ({"uc": {(1, 1, 1): 0.95}}, ["c-early-above", "c-above"]),
        ({"c": {(0, 4, 0): 0.97}}, ["small-higher"]),
        ({"test": (0.6, 0.4, 0.5)}, ["test-order"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert failing(made_up(**changes)) == broken


def test_each_figure_has_its_own_spectrum():
    runs = made_up(1, test=(0.4, 0.5, 0.6))
    assert [failing(runs, decay) for decay in range(3)] == [[], ["test-order"], []]
    for figure, decay in ((fig8.FIG_8, 0), (fig9.FIG_9, 1), (fig10.FIG_10, 2)):
        broken = [claim.id for claim in figure.claims(SETUP, runs) if not claim.holds]
        assert broken == failing(runs, decay)
        assert figure.experiment is initial_scales.SCALES


def choices(runs, id, decay=0):
    (claim,) = (claim for claim in correlation_paths.claims(SETUP, runs, decay) if claim.id == id)
    return {choice["other"]: choice["verdict"] for choice in claim.details()["choices"]}


def test_choices_are_judged_on_their_own_numbers():
    low = {(0, 4, 0): 0.5}
    assert choices(made_up(uc=low, kind="pearson"), "uc-high-1-large") == {
        "Pearson, as in the authors' code": "fails",
        "all hidden layers": "holds",
        "axes": "holds",
    }
    assert choices(made_up(uc=low, place="all/"), "uc-high-1-large")["all hidden layers"] == "fails"
    assert choices(made_up(uc=low, place="axes/"), "uc-high-1-large")["axes"] == "fails"
    assert choices(made_up(test=(0.4, 0.5, 0.6), place="axes/"), "test-order") == {
        "smallest scale against scale 1": "holds",
        "the best along the way": "holds",
        "axes": "fails",
    }
    slightly = made_up(c={(2, 4, 0): 0.945})
    assert choices(slightly, "c-above")["less than 0.01 is none"] == "holds"
    assert "c-above" in failing(slightly)


def test_ranges_are_over_scales_and_means_over_steps():
    uc, c = (numpy.zeros((1, 3, 3, 2)) for _ in range(2))
    uc[0, :, 1:, 1] = [[0, 0], [0.2, 0.1], [0.5, 0.1]]  # ranges 0.5 and 0.1
    c[0, :, 2, 1] = [0.3, 0.1, 0.3]  # 0 and 0.2
    assert correlation_paths.spread_gap(uc, c, 1, [3, 1]).tolist() == pytest.approx([(3 * -0.5 + 0.1) / 4])
    assert correlation_paths.spread_gap(uc, c, 0, [3, 1]).tolist() == [0]
