"""What a paper says, as sentences that a reproduction can find to hold or to fail."""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featlearn.errors import InputValueError
from featlearn.papers.scale import Scale

Band = tuple[float | None, float | None] | str
"""Lowest and highest value at which a claim holds, None for no bound; or the one word that it must be."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a paper, with what was measured for it.

    A claim of numbers holds if their mean over seeds lies in the band, bounds included. The band is set before the run,
    from the paper's value and the spread that seeds and unspecified settings are known to have: it is never fitted to
    what came out.
    """

    id: str
    """Unique within the figure: "alignment-rises"."""
    claim: str
    """What the paper says, in our words, with the place if it is not the caption."""
    paper: float | str | None
    """The value that the paper gives, in words where it gives no number."""
    values: float | str | Collection[float]
    """Ours: one number for each seed; truth values for a yes or no, whose mean is the share of seeds; or a word."""
    band: Band
    why: str = ""
    """Where the band comes from, and why ours may differ."""
    known: str | None = None
    """Why the claim of the print is known to fail; None where it should hold. Where it holds all the same, it holds."""
    least: Scale = Scale.SMOKE
    """The smallest scale at which it can be judged; below, it is left out."""

    def __post_init__(self) -> None:
        try:
            _ = self.each
        except (TypeError, ValueError) as error:
            shape = getattr(self.values, "shape", None)
            got = repr(self.values) if shape is None else f"of shape {tuple(shape)}"
            raise InputValueError(
                f"claim {self.id!r} has values {got}, expected one number for each seed, or one number"
            ) from error
        if isinstance(self.values, str) != isinstance(self.band, str):
            raise InputValueError(
                f"claim {self.id!r} has values {self.values!r} and band {self.band!r}, expected words for both, or "
                "numbers and (lowest, highest)"
            )
        if not isinstance(self.band, str):
            low, high = self.band
            if low is not None and high is not None and not low <= high:
                raise InputValueError(f"claim {self.id!r} has band {self.band!r}, expected (lowest, highest)")

    @property
    def each(self) -> list[float]:
        """The values of the seeds; none for a word."""
        if isinstance(self.values, str):
            return []
        values = self.values.tolist() if hasattr(self.values, "tolist") else self.values
        return [float(v) for v in values] if isinstance(values, Collection) else [float(values)]

    @property
    def measured(self) -> float | str:
        """The mean over seeds, or the word; nan where a seed is nan, or there is none."""
        if isinstance(self.values, str):
            return self.values
        return sum(self.each) / len(self.each) if self.each else math.nan

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for fewer than two."""
        if len(self.each) < 2:
            return None
        mean = sum(self.each) / len(self.each)
        return math.sqrt(sum((v - mean) ** 2 for v in self.each) / (len(self.each) - 1))

    @property
    def difference(self) -> float | None:
        """Ours less the paper's value, where both are numbers."""
        ours, theirs = self.measured, self.paper
        return None if isinstance(ours, str) or isinstance(theirs, str) or theirs is None else ours - theirs

    @property
    def holds(self) -> bool:
        """Whether the mean lies in the band; never for nan."""
        ours = self.measured
        if isinstance(ours, str) or isinstance(self.band, str):
            return ours == self.band
        low, high = map(tidy, self.band)
        return not math.isnan(ours) and (low is None or ours >= low) and (high is None or ours <= high)

    def to_json(self) -> dict[str, Any]:
        """The seven fields of claims.json; null for what is not finite or not bounded."""
        return {
            "id": self.id,
            "claim": self.claim,
            "paper": tidy(finite(self.paper)),
            "measured": finite(self.measured),
            "band": self.band if isinstance(self.band, str) else [tidy(bound) for bound in self.band],
            "holds": self.holds,
            "known": self.known,
        }

    def details(self) -> dict[str, Any]:
        """What the page of a figure says beside these."""
        return {
            "values": [finite(v) for v in self.each],
            "spread": finite(self.spread),
            "difference": finite(self.difference),
            "why": self.why,
        }


def failed(claims: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those, as in claims.json, that do not hold though nothing is known against them."""
    return [claim for claim in claims if not claim["holds"] and claim["known"] is None]


def verdict(claim: dict[str, Any]) -> str:
    """On a claim as in claims.json, in words."""
    if claim["holds"]:
        return "holds"
    return "fails" if claim["known"] is None else "fails, as known"


def share(claim: dict[str, Any], values: Sequence[float | None]) -> str | None:
    """How many seeds say yes, where a claim, as in claims.json, asks it of all; None for other claims."""
    if claim["band"] != [1, None] or not set(values) <= {0, 1}:
        return None
    return f"{values.count(1)} of {counted(len(values), 'seed')}"


def counted(count: int, noun: str) -> str:
    """'1 seed', '3 seeds'."""
    return f"{count} {noun}{'s' * (count != 1)}"


def tidy(value: Any) -> Any:
    """2.1 - 3 as -0.9: a bound is judged as it is written down. Words, None and whole numbers stay as they are."""
    return value if value is None or isinstance(value, int | str) else float(f"{value:.12g}")


def finite(value: Any) -> Any:
    """None for nan and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: Any) -> None:
    """Readable, and equal for equal content."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
