"""When a claim holds: the mean over seeds and the seeds themselves must lie in its band."""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

Band = tuple[float | None, float | None] | str
"""Lowest and highest value at which a claim holds, None for no bound; or the one word that it must be."""


class Verdict(StrEnum):
    """On one claim."""

    HOLDS = "holds"
    """the mean and at least two thirds of the seeds lie in the band"""
    UNDECIDED = "undecided"
    """the mean lies in the band and the seeds do not, or the reverse"""
    FAILS = "fails"

    @property
    def as_json(self) -> bool | None:
        """True, None for undecided, False: `holds` of claims.json."""
        return {Verdict.HOLDS: True, Verdict.UNDECIDED: None, Verdict.FAILS: False}[self]


def judged(values: Sequence[float], band: tuple[float | None, float | None]) -> Verdict:
    """The verdict on one number for each seed; without any it fails."""
    inside = sum(within(value, band) for value in values)
    # in whole numbers: two of three seeds are two thirds
    votes = [within(mean(values), band), bool(values) and 3 * inside >= 2 * len(values)]
    return Verdict.HOLDS if all(votes) else Verdict.UNDECIDED if any(votes) else Verdict.FAILS


def within(value: float, band: tuple[float | None, float | None]) -> bool:
    """Whether a number lies in a band, bounds included; never for nan."""
    low, high = map(tidy, band)
    return not math.isnan(value) and (low is None or value >= low) and (high is None or value <= high)


def mean(values: Sequence[float]) -> float:
    """nan where one is nan, or there is none."""
    return sum(values) / len(values) if values else math.nan


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds (n - 1); None for fewer than two."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def tidy(value: Any) -> Any:
    """2.1 - 3 as -0.9: a bound is judged as it is written down. Words, None and whole numbers stay as they are."""
    return value if value is None or isinstance(value, int | str) else float(f"{value:.12g}")
