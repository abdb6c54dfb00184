"""The regime of one run or several, from the linearization gap; and the verdict in a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from featlearn.diagnosis.events import crossing
from featlearn.diagnosis.evidence import (
    FALLEN,
    FEATURES_MOVED,
    GAP,
    GREW,
    OVERSHOT,
    SAME_SHAPE,
    STATISTICS_MOVED,
    Sample,
    estimate_of,
    mean,
    sample,
    sample_of,
)
from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.words import percent, percent_with_error
from featlearn.linalg.estimate import Estimate

Regime = Literal["lazy", "rich", "mixed", "lazy then rich", "cannot tell"]
STALE = 4.0
"""Measurements whose steps differ by more than this factor do not date the moment when features were learned."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The regime as a word and in sentences."""

    regime: Regime
    headline: str
    """What happened, in one sentence after the name of the run."""
    number: str = ""
    """The number behind it, in one sentence; empty if the headline has it."""
    so_far: str = ""
    """What it looks like so far, and what is missing, where too little was learned; else empty."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What the regime rests on, over all runs; None where it is unknown."""

    gap: Sample | None
    """Through the link where that was recorded."""
    missing: str = "the linearization gap was not recorded"
    """Why there is no gap, where there is none."""
    where: str = "on test points"
    """The samples of the gap, in words."""
    rounding: float = 0.0
    """Rounding error of the gap."""
    features_moved: Sample | None = None
    """Relative change of what enters the last trained map, by weights alone."""
    statistics_moved: Sample | None = None
    turning: Sample | None = None
    growth: Sample | None = None
    left: Sample | None = None
    """Share of the learnable loss that is left."""
    learned: bool | None = True
    """Whether enough was learned for a regime."""
    linear: bool = False
    """Whether the model is linear in its trained weights."""
    began: float = math.nan
    """First step at which the gap was rich for good; nan if unknown."""
    rich_from: float = math.nan
    """Step from which the gap was rich, after the data were fitted; nan if it was not so."""
    unfrozen: int = 0
    """Step by which the set of trained weights changed: the next measurement; 0 if it never did."""
    before: float = math.nan
    """The last gap before that step."""


def numbers(findings: Sequence[Findings]) -> dict[str, Estimate]:
    """Return the numbers behind the regime, as means over runs with their errors; nan if unknown."""
    return {
        "gap": estimate_of(sample_of([one.gap.value for one in findings])),
        "plain_gap": estimate_of(sample_of([one.gap.plain_value for one in findings])),
        "features_moved": estimate_of(sample_of([one.features_moved for one in findings])),
        "statistics_moved": estimate_of(sample_of([one.statistics_moved for one in findings])),
        "turning": estimate_of(sample_of([one.turning for one in findings])),
        "turning_raw": estimate_of(sample([one.turning_raw for one in findings])),
        "growth": estimate_of(sample_of([one.growth for one in findings], logarithmic=True)),
        "alignment_rise": estimate_of(sample([one.events.rise for one in findings])),
        "loss_left": estimate_of(sample([one.loss_left for one in findings])),
        "weights_moved": estimate_of(sample([one.weights_moved for one in findings])),
    }


def regime_numbers(findings: Sequence[Findings]) -> Numbers:
    """Return what the regime rests on."""
    enough = [one.learned for one in findings]
    places = {one.gap.where for one in findings if one.gap.known}
    unfrozen = max(one.run_data.unfrozen for one in findings)
    return Numbers(
        gap=sample_of([one.gap.value for one in findings]),
        missing="; ".join(dict.fromkeys(one.gap.reason for one in findings if one.gap.reason)),
        where=places.pop() if len(places) == 1 else "on test points or the probe",
        rounding=max(one.gap.rounding for one in findings),
        features_moved=sample_of([_by_weights(one) for one in findings]),
        statistics_moved=sample_of([one.statistics_moved for one in findings]),
        turning=sample_of([one.turning for one in findings]),
        growth=sample_of([one.growth for one in findings], logarithmic=True),
        left=sample([one.loss_left for one in findings]),
        learned=False if False in enough else None if None in enough else True,
        linear=all(one.linear for one in findings),
        began=mean([_began(one) for one in findings]),
        rich_from=rich_from(findings),
        unfrozen=unfrozen,
        before=mean([_gap_before(one, unfrozen) for one in findings]) if unfrozen else math.nan,
    )


def _by_weights(findings: Findings) -> Estimate:
    """Return how far the weights alone moved the features."""
    moved = findings.features_moved
    return Estimate(moved.by_weights, moved.stderr, moved.samples)


def rich_from(findings: Sequence[Findings]) -> float:
    """Return the mean step from which the gap was rich after the data were fitted; nan if any run was not so."""
    steps = [one.rich_from for one in findings]
    return mean(steps) if all(map(math.isfinite, steps)) else math.nan


def _began(findings: Findings) -> float:
    """Return the step at which the gap passed its upper threshold for the last time; nan if that is not resolved."""
    curve = findings.gap.over_steps
    if curve is None or len(curve.steps) < 2 or curve.last <= GAP.high:
        return math.nan
    below = (curve.values <= GAP.high).nonzero().flatten()
    if not len(below):
        return math.nan
    since = int(below[-1])
    time = crossing(type(curve)(curve.steps[since:], curve.values[since:]), GAP.high)
    return time.at if time.by <= max(STALE * time.after, time.after + 1) else math.nan


def _gap_before(findings: Findings, step: int) -> float:
    """Return the last gap on the probe that was measured before a step; nan if there is none."""
    curve = findings.gap.probe
    earlier = [] if curve is None else [float(v) for s, v in zip(curve.steps, curve.values, strict=True) if s < step]
    return earlier[-1] if earlier else math.nan


def judge(given: Numbers) -> Verdict:
    """Return the regime: what the gap says, unless other evidence contradicts it or too little was learned to tell."""
    gap = given.gap
    if gap is None:
        return _cannot_tell(f"lazy or rich cannot be told: {given.missing}.")
    side = gap.side(GAP, given.rounding)
    if given.rounding and side == 0 and gap.side(GAP) != 0:
        return _cannot_tell(
            f"lazy or rich cannot be told: rounding alone may be {given.rounding:.2g} of the change of the outputs "
            f"(gap {gap.words}). Measure in float64 (dtype=torch.float64), or train on."
        )
    hardly = given.left is not None and given.left.mean > FALLEN.high
    if hardly and not given.linear and gap.side(OVERSHOT) != -1 and given.left is not None:
        return _cannot_tell(
            f"lazy or rich cannot be told: weights were thrown far away (gap {gap.words}) while "
            f"{percent(given.left.mean)} of the loss is left. Lower the learning rate."
        )
    if given.learned is False and not given.linear:
        return _too_early(given, gap, side)
    if side == 1 and math.isfinite(given.rich_from):
        return Verdict(
            regime="lazy then rich",
            headline=f"lazy at first, then it learned features, from step {given.rich_from:.0f} on.",
            number=f"It had fitted its data before. {_misses(given, gap)}",
        )
    if side == 1:
        return _left_linearization(given, gap)
    return _between(given, gap) if side == 0 else _lazy(given, gap)


def _cannot_tell(headline: str, so_far: str = "") -> Verdict:
    return Verdict(regime="cannot tell", headline=headline, so_far=so_far)


def _too_early(given: Numbers, gap: Sample, side: int) -> Verdict:
    looks = {1: "like it is learning features", 0: "neither lazy nor rich", -1: "lazy"}[side]
    missing = "too little of what is to be learned was learned"
    if given.left is not None:
        missing = f"{percent(min(given.left.mean, 1.0))} of the loss is left"
    so_far = f"So far it looks {looks} (gap {gap.mean:.2g}), but {missing}."
    return _cannot_tell(f"too early to tell. {so_far}", so_far)


def _lazy(given: Numbers, gap: Sample) -> Verdict:
    statistics = given.statistics_moved
    if statistics is not None and statistics.side(STATISTICS_MOVED) == 1:
        return Verdict(
            regime="lazy",
            headline=f"lazy in the trained weights; BatchNorm statistics moved the features by {statistics.mean:.2g}.",
            number=_misses(given, gap),
        )
    return Verdict(regime="lazy", headline="lazy: it learned no new features.", number=_misses(given, gap))


def _between(given: Numbers, gap: Sample) -> Verdict:
    number = _misses(given, gap)
    if not GAP.low <= gap.mean <= GAP.high:
        threshold = GAP.low if gap.mean < GAP.low else GAP.high
        number += f" Two standard errors reach over the threshold {threshold:g}: more test points or runs would tell."
    return Verdict(regime="mixed", headline="between lazy and learning features.", number=number)


def _left_linearization(given: Numbers, gap: Sample) -> Verdict:
    turned, grew, moved, number = given.turning, given.growth, given.features_moved, _misses(given, gap)
    if moved is not None and moved.side(FEATURES_MOVED) == -1:
        return Verdict(
            regime="mixed",
            headline="curved in its parameters, with the features of the start.",
            number=f"{number} The features moved by {percent(moved.mean)}.",
        )
    same_shape = turned is not None and turned.side(SAME_SHAPE) == -1
    if same_shape and grew is not None and grew.side(GREW) == 1:
        return Verdict(
            regime="mixed",
            headline=f"it learned faster, but few features: its kernel grew {grew.mean:.3g} times and hardly rotated.",
            number=number,
        )
    if turned is not None and grew is not None and turned.mean < SAME_SHAPE.high and grew.side(GREW) == 1:
        number += f" Mostly the kernel grew, {grew.mean:.3g} times; it rotated by {turned.words}."
    since = f", from step {given.began:.0f} on" if math.isfinite(given.began) and given.began >= 2 else ""
    if given.unfrozen and given.before < GAP.low:
        since = f", after more weights were unfrozen by step {given.unfrozen} (gap {given.before:.2g} until then)"
    return Verdict(regime="rich", headline=f"it learned features{since}.", number=number)


def _misses(given: Numbers, gap: Sample) -> str:
    share = percent_with_error(gap)
    what = "as much as" if gap.mean >= 1.005 else "of what"
    return f"A linear model around the starting point misses {share} {what} this network learned, {given.where}."
