"""What a claim says of its numbers."""

import json
import math
import statistics

import numpy
import pytest
import torch

from featlearn.errors import FeatlearnError, InputValueError
from featlearn.papers.claims import Claim, failed, share, verdict


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


def test_bounds_are_written_and_judged_without_the_noise_of_arithmetic():
    found = claim([-0.9], (1.9 - 3, 2.1 - 3), paper=0.1 + 0.2)
    assert (2.1 - 3, 0.1 + 0.2) != (-0.9, 0.3)
    assert found.to_json()["band"] == [-1.1, -0.9]
    assert found.to_json()["paper"] == 0.3
    assert claim([0.3], (0.1 + 0.2, None)).holds
    assert json.dumps(claim([1.0], (1, None)).to_json()["band"]) == "[1, null]"
    assert claim([1.0], (numpy.float32(0.5), numpy.int64(2))).to_json()["band"] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("values", "known", "words"),
    [
        (2.0, None, "holds"),
        (1.0, None, "fails"),
        (1.0, "A misprint.", "fails, as known"),
        (2.0, "A misprint.", "holds"),
    ],
)
def test_the_verdict_says_what_was_known(values, known, words):
    assert verdict(claim(values, (2, 3), known=known).to_json()) == words


@pytest.mark.parametrize(
    ("values", "band", "words"),
    [
        ([True, False, True], (1, None), "2 of 3 seeds"),
        (True, (1, None), "1 of 1 seed"),
        ([True, True], (0.5, None), None),
        ([1.0, 1.5], (1, None), None),
        ([1.0, math.nan], (1, None), None),
        ("word", "word", None),
    ],
)
def test_a_yes_or_no_is_counted(values, band, words):
    found = claim(values, band)
    assert share(found.to_json(), found.details()["values"]) == words


@pytest.mark.parametrize("values", [numpy.ones((3, 2)), [[1.0], [2.0]], torch.ones(2, 1), ["word"]])
def test_values_have_one_axis(values):
    with pytest.raises(InputValueError, match=r"'a' has values .* one number for each seed"):
        claim(values, (None, None))


def test_one_number_may_be_an_array_or_a_tensor():
    assert claim(numpy.array(0.25), (None, None)).each == [0.25]
    assert claim(torch.tensor([0.25, 0.5]), (None, None)).each == [0.25, 0.5]


@pytest.mark.parametrize(("values", "band"), [([1.0], "word"), ("word", (0, 1)), ([1.0], (2, 1))])
def test_what_cannot_be_judged_is_refused(values, band):
    with pytest.raises(FeatlearnError, match="'a'"):
        claim(values, band)
