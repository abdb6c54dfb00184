"""003 Fig. 6: claims that must fail, and what other choices give; numbers are tested with Fig. 5."""

import numpy
import pytest

from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_003 import fig6, initial_scales
from papers.tests.verdicts import failing

SETUP = initial_scales.Setup(scales=(1.0, 0.1), steps=16, first=1, early=2, stride=7)
FALLING, RISING = (0.9, 0.5, 0.3, 0.2), (0.2, 0.15, 0.3, 0.4)


def made_up(changes=(), pearson=()):
    """PTK-centered correlations fall and the UC-NFC rises, but where `changes` has another curve.

    Keys are (decay, scale, layer).
    """
    found = {}
    for kind, other in (("cosine", changes), ("pearson", pearson)):
        values = numpy.full((3, 2, 5, 2, 3), numpy.nan)
        values[..., 0] = numpy.linspace(0.4, 0.9, 5)[:, None]
        values[:, :, 1:, :, 2] = numpy.array(FALLING)[:, None]
        for (decay, scale, layer), each in dict(other).items():
            values[decay, scale, 1:, layer, 2] = each
        found[kind] = values
    return Runs([0], [found])


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({(0, 0, 0): RISING}, ["decreases-1-large"]),
        ({(1, 1, 0): RISING}, ["decreases-1"]),
        ({(1, 0, 1): RISING}, ["decreases-2"]),
        ({(1, 0, 1): (0.1, 0.2, 0.5, 0.7)}, ["decreases-2", "not-driving"]),
        ({(2, 0, 1): RISING, (2, 1, 0): RISING}, []),  # the third spectrum is another choice
    ],
)
def test_claims_fail_on_numbers_that_break_them(changes, broken):
    assert SETUP.measured == [0, 1, 2, 9, 16]
    assert failing(fig6, SETUP, made_up(changes.items())) == broken


def test_choices_are_pearson_earlier_steps_and_the_third_spectrum():
    runs = made_up({(0, 0, 0): RISING, (2, 0, 0): (0.9, 0.5, 0.3, 0.6)}.items(), {(1, 0, 0): (0.1, 0, 0, 0.2)}.items())
    large = {claim.id: claim for claim in fig6.claims(SETUP, runs)}["decreases-1-large"]
    assert float(large.values[0]) == pytest.approx(0.2)
    assert [float(choice.values[0]) for choice in large.choices] == pytest.approx([0.1, -0.05, -0.3])
    assert [choice.other for choice in large.choices][1:] == ["until step 2", "1/(1+k^2)"]
