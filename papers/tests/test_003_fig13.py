"""003 Fig. 13: layers are counted one by one, and claims fail when they should."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import fig13, networks
from papers.tests.verdicts import failing


def made_up(gap, uncentered=(0.3, 0.3, 0.3, 0.8)):
    """Two seeds of six networks; `gap` (T, L) is C - UC at steps 1, 5, 10 and 100, above the same UC in all layers."""
    gap, lower = numpy.array(gap, dtype=float), numpy.array(uncentered)[:, None]
    values = numpy.stack([lower + 0 * gap, lower + gap], -1)
    one = {"steps": numpy.array([1, 5, 10, 100]), "cosine": values, "pearson": 1 - values}
    return {name: Runs([0, 1], [one, one]) for name in networks.PERCEPTRONS}


GOOD = [[0.3, 0.4], [0.3, 0.4], [0.2, 0.3], [0.05, 0.09]]


def test_shares_are_of_single_layers():
    runs = made_up([[0.3, -0.4], [0.3, -0.3], [0.2, -0.3], [0.05, 0.15]])
    assert fig13.share(runs, fig13.higher) == pytest.approx([0.5, 0.5])
    assert fig13.share(runs, fig13.near) == pytest.approx([0.5, 0.5])
    assert fig13.share(runs, fig13.earlier) == pytest.approx([0.5, 0.5])


def test_claims_hold_and_fail_as_the_numbers_say():
    assert failing(fig13, {}, made_up(GOOD)) == []
    turned = [[-value for value in row] for row in GOOD]
    assert failing(fig13, {}, made_up(turned)) == ["higher", "early"]
    late = [*GOOD[:3], [0.5, 0.6]]
    behind = made_up(late, uncentered=(0.3, 0.3, 0.3, 0.35))
    assert failing(fig13, {}, behind) == ["early", "converge"]
    assert failing(fig13, {}, made_up(GOOD, uncentered=(0.7, 0.7, 0.7, 0.6))) == ["rises", "centered"]
    found = {claim.id: claim for claim in fig13.claims({}, behind)}
    assert [choice.other for choice in found["converge"].choices] == ["Pearson's of the authors' code", "0.2"]
    assert found["early"].choices[0].values == pytest.approx([1.0, 1.0])  # the made-up Pearson's is turned round
