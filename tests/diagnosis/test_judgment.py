"""The regime as a function of its numbers: every branch, with errors that reach over thresholds."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featlearn.diagnosis.evidence import (
    GAP,
    GREW,
    OVERSHOT,
    SAME_SHAPE,
    Sample,
    estimate_of,
    sample,
)
from featlearn.diagnosis.judgment import Numbers, judge
from featlearn.linalg.estimate import Estimate

LOW, HIGH = GAP.low / 3, 3 * GAP.high
BETWEEN = (GAP.low + GAP.high) / 2


def one(value: float | None, error: float = math.nan) -> Sample | None:
    return None if value is None else Sample(value, math.nan, 1, error)


def numbers(gap: Sample | None, **others) -> Numbers:
    """Numbers of a run that learned enough, rotated and grew a little; estimates are given as plain numbers."""
    known = {"turning": 0.2, "growth": 1.5, "left": 0.1} | others
    estimates = ("turning", "growth", "left", "features_moved", "statistics_moved")
    return Numbers(gap=gap, **{key: one(value) if key in estimates else value for key, value in known.items()})


ONLY_GREW = {"turning": SAME_SHAPE.low / 2, "growth": 2 * GREW.high}
HARDLY = {"left": 0.97, "learned": False}
PERCENT = f"{100 * HIGH:.0f}%"

TABLE = {
    "no gap": (None, {}, "cannot tell", "the linearization gap was not recorded"),
    "small": (one(LOW), {}, "lazy", "lazy: it learned no new features"),
    "small and certain": (
        one(LOW, 0.01),
        {},
        "lazy",
        "misses 5.0% (±1.0%) of what this network learned, on test points",
    ),
    "small, its error reaches over": (one(LOW, GAP.low), {}, "mixed", f"reach over the threshold {GAP.low:g}"),
    "between": (one(BETWEEN), {}, "mixed", "between lazy and learning features"),
    "between, hardly trained": (one(BETWEEN), HARDLY, "cannot tell", "it looks neither lazy nor rich (gap 0.2)"),
    "between, a loss that can fall no further": (one(BETWEEN), {"left": 0.97}, "mixed", "between"),
    "large": (one(HIGH), {}, "rich", "it learned features."),
    "large and certain": (one(HIGH, 0.1), {}, "rich", f"misses {PERCENT} (±10%) of"),
    "large, its error reaches over": (one(HIGH, HIGH), {}, "mixed", f"reach over the threshold {GAP.high:g}"),
    "just above, without an error": (one(1.01 * GAP.high), {}, "rich", "it learned features"),
    "just above, with one": (one(1.01 * GAP.high, 0.02), {}, "mixed", "reach over"),
    "above one": (one(1.3), {}, "rich", "misses 130% of what this network learned"),
    "on the probe": (one(HIGH), {"where": "on the probe"}, "rich", "this network learned, on the probe"),
    "dated": (one(HIGH), {"began": 84.2}, "rich", "it learned features, from step 84 on"),
    "small, but hardly trained": (
        one(LOW),
        HARDLY,
        "cannot tell",
        "So far it looks lazy (gap 0.05), but 97% of the loss",
    ),
    "large, hardly trained": (
        one(HIGH),
        HARDLY,
        "cannot tell",
        "So far it looks like it is learning features (gap 0.75)",
    ),
    "hardly trained, no share of the loss": (
        one(LOW),
        {"left": None, "learned": False},
        "cannot tell",
        "but too little of what is to be learned was learned",
    ),
    "hardly trained, linear in the weights": (one(1e-7), {**HARDLY, "linear": True}, "lazy", "less than 0.1%"),
    "small, a loss that can fall no further": (one(LOW), {"left": 0.97}, "lazy", "no new features"),
    "small, of an unknown loss": (one(LOW), {"left": None, "learned": None}, "lazy", "no new features"),
    "head alone under BatchNorm": (
        one(1e-7),
        {"statistics_moved": 0.83},
        "lazy",
        "lazy in the trained weights; BatchNorm statistics moved the features by 0.83",
    ),
    "curved without features": (
        one(HIGH),
        {"features_moved": 0.001},
        "mixed",
        "curved in its parameters, with the features of the start",
    ),
    "features that moved": (one(HIGH), {"features_moved": 0.4}, "rich", "it learned features"),
    "rounding covers a large gap": (one(0.985), {"rounding": 0.9}, "cannot tell", "rounding alone may be 0.9"),
    "rounding covers a small gap": (one(LOW), {"rounding": 0.2}, "cannot tell", "rounding alone may be 0.2"),
    "rounding that covers nothing": (one(HIGH), {"rounding": 0.01}, "rich", "it learned features"),
    "more weights were unfrozen": (
        one(0.94),
        {"unfrozen": 200, "before": 0.0},
        "rich",
        "it learned features, after more weights were unfrozen by step 200 (gap 0 until then)",
    ),
    "far away, its error reaches over": (
        one(2 * OVERSHOT.high, 0.8 * OVERSHOT.high),
        HARDLY,
        "cannot tell",
        "Lower the learning rate",
    ),
    "thrown far away": (one(2 * OVERSHOT.high), HARDLY, "cannot tell", "Lower the learning rate"),
    "far away, but it learned": (one(2 * OVERSHOT.high), {}, "rich", "it learned features"),
    "grew without rotating": (one(HIGH), ONLY_GREW, "mixed", "its kernel grew 4 times and hardly rotated"),
    "rotated a little, grew": (
        one(HIGH),
        {"turning": SAME_SHAPE.high / 2, "growth": 4.0},
        "rich",
        "Mostly the kernel grew, 4 times; it rotated by 0.01",
    ),
    "kept shape and size": (one(HIGH), {"turning": SAME_SHAPE.low / 2, "growth": 1.0}, "rich", "it learned features"),
    "nothing known of kernels": (one(HIGH), {"turning": None, "growth": None}, "rich", "it learned features"),
    "late": (
        one(HIGH),
        {"rich_from": 900.0},
        "lazy then rich",
        "lazy at first, then it learned features, from step 900",
    ),
    "late, its error reaches over": (one(HIGH, HIGH), {"rich_from": 900.0}, "mixed", "reach over"),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_regime_follows_from_its_numbers(case: str):
    gap, others, regime, says = TABLE[case]
    verdict = judge(numbers(gap, **others))
    assert verdict.regime == regime
    assert says in f"{verdict.headline} {verdict.number}"
    assert bool(verdict.so_far) == ("too early" in verdict.headline)


def test_growth_that_may_be_none_is_no_growth():
    """The kernel became 4 ± 2 times as large: growth does not explain the gap."""
    given = replace(numbers(one(HIGH)), turning=one(SAME_SHAPE.low / 2), growth=one(4.0, 2.0))
    assert judge(given).regime == "rich"


maybe = st.none() | st.builds(
    Sample, st.floats(0, 50), st.just(math.nan), st.just(1), st.floats(0, 2) | st.just(math.nan)
)
several = st.builds(Sample, st.floats(0, 3), st.floats(0, 2), st.integers(2, 9), st.floats(0, 2) | st.just(math.nan))


@settings(max_examples=500, deadline=None)
@given(
    st.builds(
        Numbers,
        gap=maybe | several,
        features_moved=maybe,
        turning=maybe,
        growth=maybe,
        left=maybe,
        learned=st.none() | st.booleans(),
        rounding=st.floats(0, 1),
        rich_from=st.floats(1, 1e6) | st.just(math.nan),
    )
)
def test_no_headline_contradicts_its_evidence(given: Numbers):
    verdict = judge(given)
    side = None if given.gap is None else given.gap.side(GAP, given.rounding)
    if verdict.regime == "lazy":
        assert side == -1
    if verdict.regime in ("rich", "lazy then rich"):
        assert side == 1
    if verdict.regime in ("lazy", "rich", "mixed"):
        assert given.learned is not False
    if verdict.regime == "lazy then rich":
        assert math.isfinite(given.rich_from)
    if side is None:
        assert verdict.regime == "cannot tell"
    if side == 0:
        assert verdict.regime in ("mixed", "cannot tell")


def test_errors_of_runs_and_between_runs_are_not_taken_for_less_than_they_are():
    """By hand: three runs of 0.1, 0.2, 0.3 with errors of their own."""
    alike = [Estimate(value, error, 40) for value, error in ((0.1, 0.03), (0.2, 0.06), (0.3, 0.09))]
    found = sample(alike)
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.spread == pytest.approx(0.1)
    assert found.run_error == pytest.approx(0.06)
    assert found.error == pytest.approx(0.1 / math.sqrt(3))
    unsure = sample([Estimate(float(one), 0.6, 40) for one in alike])
    assert unsure is not None
    assert unsure.error == pytest.approx(0.6 / math.sqrt(3))
    assert found.words == f"0.2 ± {0.1 / math.sqrt(3):.2g} (mean of 3 runs)"  # the error that it is judged by
    single = sample(alike[:1])
    assert single is not None
    assert single.words == "0.1 ± 0.03"
    assert float(estimate_of(single).stderr) == 0.03


def test_an_error_that_is_not_known_is_not_called_zero():
    found = estimate_of(sample([Estimate(0.1, math.nan, 1)]))
    assert float(found) == 0.1
    assert math.isnan(float(found.stderr))
    assert math.isnan(float(estimate_of(None)))
