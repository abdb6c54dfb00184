"""Judge a claim by the confidence interval of its mean over seeds."""

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

Band = tuple[float | None, float | None] | str
"""Lowest and highest value at which a claim holds, None for no bound; or the one word that it must be."""

CONFIDENCE = 0.9
"""of the two-sided interval"""
MOST_SEEDS = 200
"""more seeds than this are not worth counting"""


class Verdict(StrEnum):
    """The verdict on one claim."""

    HOLDS = "holds"
    """the interval lies inside the band"""
    DEPENDS = "depends"
    """it holds under our choice and fails under another one that was run"""
    UNDECIDED = "undecided"
    """the interval crosses a bound of the band"""
    NOT_JUDGED = "not judged"
    """the run cannot test the claim, for example because it stopped after 6 of 200 epochs"""
    FAILS = "fails"
    """the interval lies outside the band"""

    @property
    def as_json(self) -> bool | None:
        """`holds` of claims.json: True, False, or None where nothing is decided."""
        return {Verdict.HOLDS: True, Verdict.DEPENDS: True, Verdict.FAILS: False}.get(self)


def judge(values: Sequence[float], band: tuple[float | None, float | None]) -> Verdict:
    """Compare the interval of one number per seed with a band. Without any number the claim fails.

    A single number has no interval and is judged as it is. NaN is outside every band.
    """
    if not values or any(map(math.isnan, values)):
        return Verdict.FAILS
    bounds = interval(values)
    low, high = (values[0], values[0]) if bounds is None else map(tidy, bounds)
    if within(low, band) and within(high, band):
        return Verdict.HOLDS
    lowest, highest = map(tidy, band)
    outside = (lowest is not None and high < lowest) or (highest is not None and low > highest)
    return Verdict.FAILS if outside else Verdict.UNDECIDED


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the two-sided t-interval of the mean at 90 %; None for fewer than two values, or infinite ones."""
    deviation = spread(values)
    if deviation is None or not math.isfinite(deviation):
        return None
    half = _quantile(len(values) - 1) * deviation / math.sqrt(len(values))
    center = mean(values)
    return center - half, center + half


def seeds_needed(values: Sequence[float], band: tuple[float | None, float | None]) -> int | None:
    """Return how many seeds of the same mean and spread would decide; None for more than 200, or too few values."""
    deviation = spread(values)
    distances = [abs(mean(values) - bound) for bound in map(tidy, band) if bound is not None]
    if not deviation or not math.isfinite(deviation) or not distances:
        return None
    counts = range(len(values) + 1, MOST_SEEDS + 1)
    distance = min(distances)
    return next((n for n in counts if _quantile(n - 1) * deviation / math.sqrt(n) < distance), None)


def _quantile(degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def within(value: float, band: tuple[float | None, float | None]) -> bool:
    """Return whether a number lies in a band, bounds included; False for NaN."""
    low, high = map(tidy, band)
    return not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN where one is NaN, or there is none."""
    return sum(values) / len(values) if values else math.nan


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds (n - 1); None for fewer than two."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def tidy(value: Any) -> Any:
    """2.1 - 3 as -0.9: a bound is judged as it is written down. Words, None and whole numbers stay as they are."""
    return value if value is None or isinstance(value, int | str) else float(f"{value:.12g}")
