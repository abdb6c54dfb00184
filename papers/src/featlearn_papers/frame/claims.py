"""What a paper says, as sentences that a reproduction can find to hold or to fail."""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from featlearn.errors import InputValueError
from featlearn_papers.frame.scale import Scale
from featlearn_papers.frame.verdict import Band, Verdict, interval, judge, mean, seeds_needed, spread, tidy

Values = float | str | Collection[float]
"""One number for each seed; truth values for a yes or no, whose mean is the share of seeds; or a word."""

BandSource = Literal["print", "theory", "trial", "choice"]
"""Where a band comes from: a number or statement of the paper; a derivation; what this very experiment gave when it was
tried before; or our reading of words that give no number."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Something that was chosen and that can decide a verdict, with what the other choice gives.

    For example the cut of small eigenvalues, the measure of "before", or the number of steps.
    """

    made: str
    """What the verdict is based on."""
    other: str
    """What could have been chosen in its place."""
    values: Values | None = None
    """Ours under the other choice; None where it was not tried."""
    band: Band | None = None
    """None for that of the claim."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a paper, with what was measured for it.

    It holds if the 90 % interval of the mean over seeds lies inside the band, fails if it lies outside, and is
    undecided if it crosses a bound. The band is set before the run and never fitted to what came out.
    """

    id: str
    """Unique within the figure: "alignment-rises"."""
    claim: str
    """What the paper says, in our words, with the place if it is not the caption."""
    paper: float | str | None
    """The value that the paper gives, in words where it gives no number."""
    values: Values
    """Ours."""
    band: Band
    band_from: BandSource
    why: str = ""
    """How the band was found, and why ours may differ."""
    known: str | None = None
    """The derivation that shows the print to be wrong; None elsewhere, also where our own trials failed."""
    check: bool = False
    """Whether the sentence cannot fail (it is true by construction, a formula against itself, or an input): it is shown
    apart and not counted."""
    cause: str | None = None
    """Why the claim fails and when it holds, shown by a run; None where that is not known."""
    not_judged: str | None = None
    """Why this run cannot test the claim: "6 of 200 epochs"; None where it can."""
    choices: Sequence[Choice] = ()
    """What was chosen and decides the verdict."""
    least: Scale = Scale.SMOKE
    """The smallest scale at which it can be judged; below, it is left out."""

    def __post_init__(self) -> None:
        if self.band_from not in get_args(BandSource):
            raise InputValueError(
                f"claim {self.id!r} has band_from {self.band_from!r}, expected {' or '.join(get_args(BandSource))}"
            )
        _check(self.id, self.values, self.band)
        for choice in self.choices:
            if choice.values is not None:
                _check(f"{self.id}: {choice.other}", choice.values, self.band if choice.band is None else choice.band)

    @property
    def each(self) -> list[float]:
        """The values of the seeds; none for a word."""
        return _each(self.values)

    @property
    def chance(self) -> bool:
        """Whether there is a number for each seed, and not one for all."""
        return not isinstance(_plain(self.values), float | int | str)

    @property
    def measured(self) -> float | str:
        """The mean over seeds, or the word; nan where a seed is nan, or there is none."""
        return self.values if isinstance(self.values, str) else mean(self.each)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for fewer than two."""
        return spread(self.each)

    @property
    def difference(self) -> float | None:
        """Ours less the paper's value, where both are numbers."""
        ours, theirs = self.measured, self.paper
        return None if isinstance(ours, str) or isinstance(theirs, str) or theirs is None else ours - theirs

    @property
    def interval(self) -> tuple[float, float] | None:
        """90 % interval of the mean over seeds; None for fewer than two seeds."""
        return interval(self.each)

    @property
    def verdict(self) -> Verdict:
        """By the interval and the band, and by the other choices that were run."""
        if self.not_judged is not None:
            return Verdict.NOT_JUDGED
        verdict = _verdict(self.values, self.band)
        if verdict is not Verdict.HOLDS or self.check:
            return verdict
        others = [self._verdict_of(choice) for choice in self.choices if choice.values is not None]
        return Verdict.DEPENDS if Verdict.FAILS in others else verdict

    def _verdict_of(self, choice: Choice) -> Verdict:
        assert choice.values is not None
        return _verdict(choice.values, self.band if choice.band is None else choice.band)

    @property
    def holds(self) -> bool:
        """True if it holds under the choices that were made."""
        return self.verdict in (Verdict.HOLDS, Verdict.DEPENDS)

    def to_json(self, *, enough: bool = True) -> dict[str, Any]:
        """Return the fields of claims.json; null for what is not finite or not bounded.

        Without `enough` seeds a claim about chance is undecided whatever they say.
        """
        verdict = self.verdict
        if not enough and self.chance and verdict is not Verdict.NOT_JUDGED:
            verdict = Verdict.UNDECIDED
        bounds = self.interval
        return {
            "id": self.id,
            "claim": self.claim,
            "paper": tidy(finite(self.paper)),
            "measured": finite(self.measured),
            "band": _band(self.band),
            "band_from": self.band_from,
            "verdict": str(verdict),
            "holds": verdict.as_json,
            "known": self.known,
            "check": self.check,
            "interval": None if bounds is None else [finite(bound) for bound in bounds],
            "cause": self.cause if verdict is Verdict.FAILS else None,
            "choices": [
                {key: self._considered(choice)[key] for key in ("made", "other", "verdict")} for choice in self.choices
            ],
        }

    def details(self) -> dict[str, Any]:
        """What the page of a figure says beside these."""
        return {
            "values": [finite(v) for v in self.each],
            "spread": finite(self.spread),
            "difference": finite(self.difference),
            "why": self.why,
            "not_judged": self.not_judged,
            "seeds_needed": self._seeds_needed(),
            "choices": [self._considered(choice) for choice in self.choices],
        }

    def _seeds_needed(self) -> int | None:
        """Return how many seeds would decide; None where the verdict does not wait for seeds."""
        if isinstance(self.band, str) or self.verdict is not Verdict.UNDECIDED:
            return None
        return seeds_needed(self.each, self.band)

    def _considered(self, choice: Choice) -> dict[str, Any]:
        entry: dict[str, Any] = {"made": choice.made, "other": choice.other, "verdict": None}
        if choice.values is None:
            return entry
        band = self.band if choice.band is None else choice.band
        values = choice.values
        return entry | {
            "measured": finite(values if isinstance(values, str) else mean(_each(values))),
            "values": [finite(v) for v in _each(values)],
            "band": _band(band),
            "verdict": str(self._verdict_of(choice)),
        }


def _check(id: str, values: Values, band: Band) -> None:
    try:
        _each(values)
    except (TypeError, ValueError) as error:
        shape = getattr(values, "shape", None)
        got = repr(values) if shape is None else f"of shape {tuple(shape)}"
        raise InputValueError(
            f"claim {id!r} has values {got}, expected one number for each seed, or one number"
        ) from error
    if isinstance(values, str) != isinstance(band, str):
        raise InputValueError(
            f"claim {id!r} has values {values!r} and band {band!r}, expected words for both, or numbers and "
            "(lowest, highest)"
        )
    if not isinstance(band, str):
        low, high = band
        if low is not None and high is not None and not low <= high:
            raise InputValueError(f"claim {id!r} has band {band!r}, expected (lowest, highest)")


def _plain(values: Values) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _each(values: Values) -> list[float]:
    if isinstance(values, str):
        return []
    plain = _plain(values)
    return [float(v) for v in plain] if isinstance(plain, Collection) else [float(plain)]


def _verdict(values: Values, band: Band) -> Verdict:
    if isinstance(values, str) or isinstance(band, str):
        return Verdict.HOLDS if values == band else Verdict.FAILS
    return judge(_each(values), band)


def _band(band: Band) -> Any:
    return band if isinstance(band, str) else [tidy(bound) for bound in band]


KINDS = ("holds", "depends", "undecided", "not judged", "fails", "known", "checks")


def kind(claim: dict[str, Any]) -> str:
    """Under which of `KINDS` a claim, as in claims.json, is counted."""
    if claim["check"]:
        return "checks"
    return "known" if claim["known"] is not None and not claim["holds"] else str(claim["verdict"])


def counts(claims: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many claims, as in claims.json, there are of each of `KINDS`."""
    found = [kind(claim) for claim in claims]
    return {name: found.count(name) for name in KINDS}


def failed(claims: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those, as in claims.json, that were tested and do not hold although no derivation is against them.

    Checks too: one that does not hold is an error of ours.
    """
    tested = [claim for claim in claims if claim["verdict"] != Verdict.NOT_JUDGED]
    return [claim for claim in tested if not claim["holds"] and claim["known"] is None]


def verdict(claim: dict[str, Any]) -> str:
    """Return the verdict on a claim, as in claims.json, in words."""
    words = "holds, depends on a choice" if claim["verdict"] == Verdict.DEPENDS else str(claim["verdict"])
    return words if claim["holds"] or claim["known"] is None else f"{words}, as known"


def share(claim: dict[str, Any], values: Sequence[float | None]) -> str | None:
    """How many seeds say yes, where a claim, as in claims.json, asks it of all; None for other claims."""
    if claim["band"] != [1, None] or not set(values) <= {0, 1}:
        return None
    return f"{values.count(1)} of {counted(len(values), 'seed')}"


def counted(count: int, noun: str) -> str:
    """'1 seed', '3 seeds'."""
    return f"{count} {noun}{'s' * (count != 1)}"


def finite(value: Any) -> Any:
    """None for nan and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: Any) -> None:
    """Readable, and equal for equal content."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
