"""000 Fig. 5: how rises are compared, and claims that must fail. `test_000_fig1` has the alignments of the parts."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_000 import fig5
from papers.tests.verdicts import failing

EYE = numpy.eye(5)


def path(rise):
    """(T, C, C): alignments that start at 0.1 and rise by this much in three moments."""
    return 0.1 + numpy.linspace(0, 1, 3)[:, None, None] * rise


READOUT = path(numpy.tile([0.02, 0.03, 0.025, 0.024, 0.022], (5, 1)))
HIDDEN = path(0.01 + 0.05 * EYE + 0.001 * numpy.array([0, 2, 1, 1, 0]))


def made_up(readout=READOUT, hidden=HIDDEN):
    parts = numpy.stack([readout + hidden, readout, hidden], 1)
    mnist = {"mse/classes": parts, "mse/centered_classes": parts[:, [0, 2, 1]]}
    return {
        "mnist": Runs([0], [mnist]),
        "depth": Runs([0], [{"classes": parts[None], "centered_classes": parts[None]}]),
    }


@pytest.mark.parametrize(
    ("parts", "broken"),
    [
        ({}, []),
        ({"readout": path(-0.01 + 0 * EYE + READOUT[-1] - 0.1 - 0.02)}, ["readout-aligns"]),
        ({"readout": path(numpy.tile([0.02, 0.021, 0.022, 0.06, 0.021], (5, 1)))}, ["readout-alike"]),
        ({"hidden": HIDDEN[:, [1, 2, 3, 4, 0]]}, ["hidden-own", "hidden-most", "hidden-specialized"]),
        ({"hidden": path(0.01 + 0.05 * EYE + 0.06 * (numpy.arange(5) == 1))}, ["hidden-most"]),
        ({"readout": READOUT + 1e-3 * numpy.arange(5)[:, None]}, ["readout-equal"]),
    ],
)
def test_claims_fail_on_numbers_that_break_them(parts, broken):
    assert failing(fig5, {}, made_up(**parts)) == broken


def test_the_own_rise_is_compared_with_the_mean_and_the_best_of_the_others():
    rise = numpy.array([[0.0] * 5] * 3 + [[1.0, 2.0, 3.0, 10.0, 6.0]] + [[0.0] * 5])
    classes = path(rise)[None]
    assert fig5.own_less_others(classes) == pytest.approx([7.0])
    assert fig5.own_less_best(classes) == pytest.approx([4.0])
    assert fig5.score(classes) == pytest.approx([7.0 / numpy.std([1, 2, 3, 6], ddof=1)])
    # the other outputs have no rise: (0 + 0 + 0 + 7 + 0) / 5
    assert fig5.all_outputs(classes) == pytest.approx([7.0 / 5])


def test_other_choices_are_told():
    claims = {claim.id: claim for claim in fig5.claims({}, made_up())}
    told = [(one["other"], one["measured"]) for one in claims["hidden-own"].details()["choices"]]
    # centered alignments of the made-up run have the parts exchanged
    rises = READOUT[-1, 3] - 0.1
    assert told[0][1] == pytest.approx(rises[3] - numpy.delete(rises, 3).mean())
    # 0.05 more on the diagonal, and 1e-3 times (1 - mean of 0, 2, 1, 0) for output 3
    assert told[1:] == [("one", pytest.approx(0.05025)), ("mean over all outputs", pytest.approx(0.05))]
