"""The regime as a function of its numbers: every branch, with errors that reach over thresholds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featlearn.diagnosis.evidence import (
    FALLEN,
    GAP,
    GREW,
    OVERSHOT,
    SAME_SHAPE,
    Sample,
    estimate_of,
    sample_of,
)
from featlearn.diagnosis.judgment import Numbers, verdict_of
from featlearn.linalg.estimate import Estimate

LOW, HIGH = GAP.low / 3, 3 * GAP.high
BETWEEN = (GAP.low + GAP.high) / 2


def one(value: float | None, error: float = math.nan) -> Sample | None:
    return None if value is None else Sample(value, math.nan, 1, error)


def numbers(
    gap: Sample | None,
    *,
    turning: float | None = 0.2,
    growth: float | None = 1.5,
    left: float | None = 0.1,
    departed: bool | None = None,
    settled: bool = False,
    rich_from: float = math.nan,
) -> Numbers:
    return Numbers(gap, one(turning), one(growth), one(left), departed, settled, rich_from)


ONLY_GREW = {"turning": SAME_SHAPE.low / 2, "growth": 2 * GREW.high}
HARDLY = (1 + FALLEN.high) / 2

TABLE = {
    "no gap": (None, {}, "cannot tell", "the linearization gap was not recorded"),
    "small": (one(LOW), {}, "lazy", f"linearization at the start says (gap {LOW:.3g})"),
    "small and sure": (one(LOW, 0.01), {}, "lazy", f"gap {LOW:.3g} ± 0.01"),
    "small, its error reaches over": (one(LOW, GAP.low), {}, "mixed", f"reach over the threshold {GAP.low:g}"),
    "between": (one(BETWEEN), {}, "mixed", "between lazy and rich"),
    "between, hardly trained": (one(BETWEEN), {"left": HARDLY}, "cannot tell", "every network begins lazily"),
    "between, a loss that can fall no further": (one(BETWEEN), {"left": HARDLY, "settled": True}, "mixed", "between"),
    "large": (one(HIGH), {}, "rich", "features were learned"),
    "large and sure": (one(HIGH, 0.1), {}, "rich", f"misses {HIGH:.3g} ± 0.1 of"),
    "large, its error reaches over": (one(HIGH, HIGH), {}, "mixed", f"reach over the threshold {GAP.high:g}"),
    "just above, without an error": (one(1.01 * GAP.high), {}, "rich", "features were learned"),
    "just above, with one": (one(1.01 * GAP.high, 0.02), {}, "mixed", "reach over"),
    "small, but hardly trained": (one(LOW), {"left": HARDLY}, "cannot tell", f"has fallen only to {HARDLY:.2g}"),
    "small, a loss that can fall no further": (one(LOW), {"left": HARDLY, "settled": True}, "lazy", "features are"),
    "small, of an unknown loss": (one(LOW), {"left": None}, "lazy", "features are those of the start"),
    "small, but departed": (one(LOW), {"departed": True}, "mixed", "departed from that of the frozen first kernel"),
    "small and followed": (one(LOW), {"departed": False}, "lazy", "features are those of the start"),
    "hardly trained and departed": (one(LOW), {"left": HARDLY, "departed": True}, "cannot tell", "fallen only to"),
    "large, hardly trained": (one(HIGH), {"left": HARDLY}, "rich", f"But the loss has fallen only to {HARDLY:.2g}"),
    "far away, its error reaches over": (
        one(2 * OVERSHOT.high, 0.8 * OVERSHOT.high),
        {"left": HARDLY},
        "cannot tell",
        "Lower the learning rate",
    ),
    "thrown far away": (one(2 * OVERSHOT.high), {"left": HARDLY}, "cannot tell", "Lower the learning rate"),
    "far away, but it learned": (one(2 * OVERSHOT.high), {}, "rich", "features were learned"),
    "grew without turning": (one(HIGH), ONLY_GREW, "mixed", "because the kernel grew 4 times; it hardly turned"),
    "grew without turning, departed": (one(HIGH), {**ONLY_GREW, "departed": True}, "mixed", "because the kernel grew"),
    "turned a little, grew": (
        one(HIGH),
        {"turning": SAME_SHAPE.high / 2, "growth": 4.0},
        "rich",
        "Mostly the kernel grew, 4 times; it turned by 0.01",
    ),
    "kept shape and size": (one(HIGH), {"turning": SAME_SHAPE.low / 2, "growth": 1.0}, "rich", "were learned"),
    "kept its shape, and followed": (
        one(HIGH),
        {"turning": SAME_SHAPE.low / 2, "growth": 1.0, "departed": False},
        "mixed",
        "but training was that of the frozen first kernel",
    ),
    "followed, but turned": (one(HIGH), {"departed": False}, "rich", "features were learned"),
    "nothing known of kernels": (one(HIGH), {"turning": None, "growth": None}, "rich", "features were learned"),
    "late": (one(HIGH), {"rich_from": 900.0}, "lazy then rich", "lazy, then rich from step 900 on"),
    "late, its error reaches over": (one(HIGH, HIGH), {"rich_from": 900.0}, "mixed", "reach over"),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_regime_follows_from_its_numbers(case: str):
    gap, others, regime, says = TABLE[case]
    found = verdict_of(numbers(gap, **others))
    assert found.regime == regime
    assert says in found.sentence
    first = {"cannot tell": "cannot tell whether", "lazy then rich": "lazy, then rich"}.get(regime, regime)
    assert found.sentence.startswith(first)


def test_growth_that_may_be_none_is_no_growth():
    """The kernel became 4 ± 2 times as large: growth does not explain the gap."""
    found = verdict_of(numbers(one(HIGH))._replace(turning=one(SAME_SHAPE.low / 2), growth=one(4.0, 2.0)))
    assert found.regime == "rich"


maybe = st.none() | st.builds(
    Sample, st.floats(0, 50), st.just(math.nan), st.just(1), st.floats(0, 2) | st.just(math.nan)
)
several = st.builds(Sample, st.floats(0, 3), st.floats(0, 2), st.integers(2, 9), st.floats(0, 2) | st.just(math.nan))


@settings(max_examples=500, deadline=None)
@given(
    st.builds(
        Numbers,
        maybe | several,
        maybe,
        maybe,
        maybe,
        st.none() | st.booleans(),
        st.booleans(),
        st.floats(1, 1e6) | st.just(math.nan),
    )
)
def test_no_headline_contradicts_its_evidence(given: Numbers):
    found = verdict_of(given)
    side = None if given.gap is None else given.gap.side(GAP)
    if found.regime == "lazy":
        assert side == -1
        assert not given.departed
        assert given.left is None or given.left.mean <= FALLEN.high or given.settled
    if found.regime in ("rich", "lazy then rich"):
        assert side == 1
    if found.regime == "lazy then rich":
        assert math.isfinite(given.rich_from)
    if side is None:
        assert found.regime == "cannot tell"
    if side == 0:
        assert found.regime in ("mixed", "cannot tell")


def test_errors_of_runs_and_between_runs_are_not_taken_for_less_than_they_are():
    """By hand: three runs of 0.1, 0.2, 0.3 with errors of their own."""
    alike = [Estimate(value, error, 40) for value, error in ((0.1, 0.03), (0.2, 0.06), (0.3, 0.09))]
    found = sample_of(alike)
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.spread == pytest.approx(0.1)
    assert found.own == pytest.approx(0.06)
    assert found.error == pytest.approx(0.1 / math.sqrt(3))
    unsure = sample_of([Estimate(float(one), 0.6, 40) for one in alike])
    assert unsure is not None
    assert unsure.error == pytest.approx(0.6 / math.sqrt(3))
    single = sample_of(alike[:1])
    assert single is not None
    assert single.words == "0.1 ± 0.03"
    assert float(estimate_of(single).stderr) == 0.03


def test_an_error_that_is_not_known_is_not_called_zero():
    found = estimate_of(sample_of([Estimate(0.1, math.nan, 1)]))
    assert float(found) == 0.1
    assert math.isnan(float(found.stderr))
    assert math.isnan(float(estimate_of(None)))
