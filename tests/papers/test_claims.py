"""What a claim says of its numbers."""

import math
import statistics

import numpy
import pytest

from featlearn.errors import FeatlearnError
from featlearn.papers.claims import Claim, failed


def claim(values, band, **more):
    return Claim(**({"id": "a", "claim": "It is so.", "paper": 0.5, "values": values, "band": band} | more))


@pytest.mark.parametrize(
    ("values", "band", "holds"),
    [
        ([0.1, 0.3], (0.2, 0.2), True),
        ([0.1, 0.31], (None, 0.2), False),
        ([0.1, 0.3], (0.21, None), False),
        ([5.0], (None, None), True),
        ([1.0, math.nan], (None, None), False),
        (math.inf, (0.0, None), True),
        ([True, True, True], (1, None), True),
        ([True, False, True], (1, None), False),
        (numpy.array([0.1, 0.3], dtype=numpy.float32), (0.199, 0.201), True),
        ("kernel", "kernel", True),
        ("kernel", "learning", False),
        ([], (None, 1.0), False),
    ],
)
def test_the_mean_over_seeds_must_lie_in_the_band(values, band, holds):
    assert claim(values, band).holds is holds


def test_spread_and_difference():
    values = [0.3, 0.9, 0.4]
    found = claim(numpy.array(values), (None, None), paper=0.2)
    assert found.spread == pytest.approx(statistics.stdev(values), rel=1e-12)
    assert found.difference == pytest.approx(statistics.mean(values) - 0.2, rel=1e-12)
    assert claim([0.3], (None, None)).spread is None
    assert claim("word", "word").difference is None
    assert claim([0.3], (None, None), paper="about a third").difference is None


def test_the_seven_fields_and_nothing_that_json_does_not_have():
    found = claim([math.nan], (None, 2.0)).to_json()
    assert list(found) == ["id", "claim", "paper", "measured", "band", "holds", "known"]
    assert found["measured"] is None
    assert found["band"] == [None, 2.0]
    assert found["holds"] is False


def test_only_a_claim_that_nothing_is_known_against_fails_the_run():
    claims = [claim([1.0], (2, 3), known="It is a misprint."), claim([1.0], (2, 3), id="b"), claim([2.0], (2, 3))]
    assert [one["id"] for one in failed(one.to_json() for one in claims)] == ["b"]


@pytest.mark.parametrize(("values", "band"), [([1.0], "word"), ("word", (0, 1)), ([1.0], (2, 1))])
def test_what_cannot_be_judged_is_refused(values, band):
    with pytest.raises(FeatlearnError, match="'a'"):
        claim(values, band)
