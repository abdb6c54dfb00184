"""What a claim says of its numbers."""

import json
import math
import statistics

import numpy
import pytest
import torch
from scipy import stats

from featlearn.errors import FeatlearnError, InputValueError
from featlearn_papers.frame.claims import Choice, Claim, counts, failed, share, verdict
from featlearn_papers.frame.verdict import seeds_needed


def claim(values, band, **more):
    fields = {"id": "a", "claim": "It is so.", "paper": 0.5, "values": values, "band": band, "band_from": "choice"}
    return Claim(**(fields | more))


@pytest.mark.parametrize(
    ("values", "band", "verdict"),
    [
        ([0.2, 0.2], (0.2, 0.2), "holds"),
        ([0.10, 0.11, 0.12], (None, 0.15), "holds"),
        ([0.1, 0.1, 0.2], (None, 0.15), "undecided"),
        ([0.154, 0.155, 0.156], (None, 0.15), "fails"),
        ([0.14, 0.155, 0.17], (None, 0.15), "undecided"),
        ([0.1, 0.9, 0.9], (None, 0.15), "undecided"),
        ([0.8, 0.9, 0.9], (None, 0.15), "fails"),
        ([0.1, 0.3], (0.21, None), "undecided"),
        ([5.0], (None, None), "holds"),
        ([0.3], (None, 0.15), "fails"),
        ([1.0, math.nan], (None, None), "fails"),
        (math.inf, (0.0, None), "holds"),
        ([True, True, True], (1, None), "holds"),
        ([True, False, True], (1, None), "undecided"),
        ([False, False, False], (1, None), "fails"),
        (numpy.array([0.1, 0.11, 0.12], dtype=numpy.float32), (0.09, 0.13), "holds"),
        ("kernel", "kernel", "holds"),
        ("kernel", "learning", "fails"),
        ([], (None, 1.0), "fails"),
    ],
)
def test_the_interval_of_the_mean_decides(values, band, verdict):
    judged = claim(values, band)
    assert judged.verdict == verdict
    assert judged.to_json()["holds"] is {"holds": True, "undecided": None, "fails": False}[verdict]
    assert judged.holds is (verdict == "holds")


def test_the_interval_is_that_of_student():
    values = [0.3, 0.9, 0.4, 0.75]
    low, high = claim(values, (None, None)).interval
    expected = stats.t.interval(0.9, 3, statistics.mean(values), statistics.stdev(values) / 2)
    assert (low, high) == pytest.approx(expected, rel=1e-12)


def test_as_many_seeds_as_are_needed_decide():
    values = [0.10, 0.16, 0.16]
    needed = seeds_needed(values, (None, 0.15))
    half = stats.t.ppf(0.95, needed - 1) * statistics.stdev(values) / math.sqrt(needed)
    fewer = stats.t.ppf(0.95, needed - 2) * statistics.stdev(values) / math.sqrt(needed - 1)
    assert half < abs(statistics.mean(values) - 0.15) <= fewer
    assert claim(values, (None, 0.15)).details()["seeds_needed"] == needed
    assert claim([0.1, 0.1, 0.1], (None, 0.15)).details()["seeds_needed"] is None


def test_a_claim_that_another_choice_refutes_depends_on_it():
    refuted = Choice(made="this", other="that", values=[0.3, 0.31])
    judged = claim([0.1, 0.1], (None, 0.15), choices=[refuted])
    assert judged.verdict == "depends"
    assert judged.holds
    assert counts([judged.to_json()])["depends"] == 1
    assert judged.to_json()["choices"] == [{"made": "this", "other": "that", "verdict": "fails"}]
    assert claim([0.1, 0.1], (None, 0.15), choices=[refuted], check=True).verdict == "holds"


def test_what_the_run_cannot_test_is_not_judged():
    judged = claim([0.3, 0.3], (None, 0.15), not_judged="6 of 200 epochs")
    assert judged.to_json()["verdict"] == "not judged"
    assert judged.to_json()["holds"] is None
    assert failed([judged.to_json()]) == []
    assert judged.to_json(enough=False)["verdict"] == "not judged"


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], numpy.ones(2), torch.ones(1)])
def test_too_few_seeds_decide_nothing(values):
    assert claim(values, (0, 2)).to_json(enough=False)["verdict"] == "undecided"
    assert claim(values, (2, 3)).to_json(enough=False)["verdict"] == "undecided"


@pytest.mark.parametrize(("values", "band"), [(1.0, (0, 2)), (numpy.array(1.0), (0, 2)), ("word", "word")])
def test_what_has_no_chance_in_it_needs_no_seeds(values, band):
    assert claim(values, band).to_json(enough=False)["verdict"] == "holds"


def test_spread_and_difference():
    values = [0.3, 0.9, 0.4]
    found = claim(numpy.array(values), (None, None), paper=0.2)
    assert found.spread == pytest.approx(statistics.stdev(values), rel=1e-12)
    assert found.difference == pytest.approx(statistics.mean(values) - 0.2, rel=1e-12)
    assert claim([0.3], (None, None)).spread is None
    assert claim("word", "word").difference is None
    assert claim([0.3], (None, None), paper="about a third").difference is None


def test_a_cause_is_given_for_a_failure_alone():
    assert claim([0.1, 0.1], (None, 0.15), cause="It is so.").to_json()["cause"] is None
    assert claim([0.3, 0.3], (None, 0.15), cause="It is so.").to_json()["cause"] == "It is so."


def test_the_fields_and_nothing_that_json_does_not_have():
    found = claim([math.nan], (None, 2.0), band_from="trial", check=True).to_json()
    names = ["id", "claim", "paper", "measured", "band", "band_from", "verdict", "holds", "known", "check"]
    names += ["interval", "cause", "choices"]
    assert list(found) == names
    assert (found["band_from"], found["verdict"], found["check"]) == ("trial", "fails", True)
    assert found["measured"] is None
    assert found["band"] == [None, 2.0]
    assert found["holds"] is False


def test_only_a_claim_that_nothing_is_known_against_fails_the_run():
    claims = [
        claim([1.0], (2, 3), known="It is a misprint."),
        claim([1.0], (2, 3), id="b"),
        claim([2.0], (2, 3)),
        claim([2.5, 2.5, 0.0], (2, 3), id="undecided"),
        claim([1.0], (2, 3), id="broken check", check=True),
        claim([2.0], (2, 3), id="check", check=True),
    ]
    found = [one.to_json() for one in claims]
    assert [one["id"] for one in failed(found)] == ["b", "undecided", "broken check"]
    numbers = {"holds": 1, "depends": 0, "undecided": 1, "not judged": 0, "fails": 1, "known": 1, "checks": 2}
    assert counts(found) == numbers


def test_a_claim_that_holds_although_it_is_known_to_fail_counts_as_holding():
    found = claim([2.0], (2, 3), known="A misprint.").to_json()
    assert counts([found])["holds"] == 1


def test_the_other_choice_has_its_own_verdict():
    choices = [
        Choice(made="this", other="that", values=[0.1, 0.9, 0.9]),
        Choice(made="this", other="wider", values=[0.9], band=(None, 1.0)),
        Choice(made="this", other="dear"),
    ]
    found = claim([0.1, 0.1], (None, 0.15), choices=choices).details()["choices"]
    assert [one["verdict"] for one in found] == ["undecided", "holds", None]
    assert found[0]["measured"] == pytest.approx(1.9 / 3)
    assert found[1]["band"] == [None, 1.0]


def test_a_choice_is_checked_as_its_claim():
    with pytest.raises(InputValueError, match="a: that"):
        claim([0.1], (0, 1), choices=[Choice(made="this", other="that", values="word")])


def test_a_band_says_where_it_comes_from():
    with pytest.raises(InputValueError, match="'a' has band_from 'hope', expected print or theory or trial or choice"):
        claim([0.1], (0, 1), band_from="hope")


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
