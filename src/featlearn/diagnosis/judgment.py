"""The regime of one run or several, from the linearization gap; and the verdict in a sentence."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    mean,
    sample,
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


NUMBERS: Mapping[str, Callable[[Findings], float | Estimate]] = {
    "gap": lambda one: one.gap.value,
    "plain_gap": lambda one: one.gap.plain_value,
    "features_moved": lambda one: one.features_moved,
    "statistics_moved": lambda one: one.statistics_moved,
    "turning": lambda one: one.turning,
    "turning_raw": lambda one: one.turning_raw,
    "growth": lambda one: one.growth,
    "alignment_rise": lambda one: one.events.rise,
    "loss_left": lambda one: one.loss_left,
    "weights_moved": lambda one: one.weights_moved,
}
"""The numbers behind the regime."""


def samples(findings: Sequence[Findings]) -> dict[str, Sample | None]:
    """Return the numbers behind the regime over runs; None if unknown."""
    return {
        name: sample([read(one) for one in findings], logarithmic=name == "growth") for name, read in NUMBERS.items()
    }


def regime_numbers(findings: Sequence[Findings], known: Mapping[str, Sample | None]) -> Numbers:
    """Return what the regime rests on. `known`: the `samples` of these findings."""
    enough = [one.learned for one in findings]
    places = {one.gap.where for one in findings if one.gap.known}
    unfrozen = max(one.run_data.unfrozen for one in findings)
    return Numbers(
        gap=known["gap"],
        missing="; ".join(dict.fromkeys(one.gap.reason for one in findings if one.gap.reason)),
        where=places.pop() if len(places) == 1 else "on test points or the probe",
        rounding=max(one.gap.rounding for one in findings),
        features_moved=sample([_by_weights(one) for one in findings]),
        statistics_moved=known["statistics_moved"],
        turning=known["turning"],
        growth=known["growth"],
        left=known["loss_left"],
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


def judge(known: Numbers) -> Verdict:
    """Return the regime: what the gap says, unless other evidence contradicts it or too little was learned to tell."""
    gap = known.gap
    if gap is None:
        return _cannot_tell(f"lazy or rich cannot be told: {known.missing}.")
    side = gap.side(GAP, known.rounding)
    if known.rounding and side == 0 and gap.side(GAP) != 0:
        return _cannot_tell(
            f"lazy or rich cannot be told: rounding alone may be {known.rounding:.2g} of the change of the outputs "
            f"(gap {gap.words}). Measure in float64 (dtype=torch.float64), or train on."
        )
    hardly = known.left is not None and known.left.mean > FALLEN.high
    if hardly and not known.linear and gap.side(OVERSHOT) != -1 and known.left is not None:
        return _cannot_tell(
            f"lazy or rich cannot be told: weights were thrown far away (gap {gap.words}) while "
            f"{percent(known.left.mean)} of the loss is left. Lower the learning rate."
        )
    if known.learned is False and not known.linear:
        return _too_early(known, gap, side)
    if side == 1 and math.isfinite(known.rich_from):
        return Verdict(
            regime="lazy then rich",
            headline=f"lazy at first, then it learned features, from step {known.rich_from:.0f} on.",
            number=f"It had fitted its data before. {_misses(known, gap)}",
        )
    if side == 1:
        return _left_linearization(known, gap)
    return _between(known, gap) if side == 0 else _lazy(known, gap)


def _cannot_tell(headline: str, so_far: str = "") -> Verdict:
    return Verdict(regime="cannot tell", headline=headline, so_far=so_far)


def _too_early(known: Numbers, gap: Sample, side: int) -> Verdict:
    looks = {1: "like it is learning features", 0: "neither lazy nor rich", -1: "lazy"}[side]
    missing = "too little of what is to be learned was learned"
    if known.left is not None:
        missing = f"{percent(min(known.left.mean, 1.0))} of the loss is left"
    so_far = f"So far it looks {looks} (gap {gap.mean:.2g}), but {missing}."
    return _cannot_tell(f"too early to tell. {so_far}", so_far)


def _lazy(known: Numbers, gap: Sample) -> Verdict:
    statistics = known.statistics_moved
    if statistics is not None and statistics.side(STATISTICS_MOVED) == 1:
        return Verdict(
            regime="lazy",
            headline=f"lazy in the trained weights; BatchNorm statistics moved the features by {statistics.mean:.2g}.",
            number=_misses(known, gap),
        )
    return Verdict(regime="lazy", headline="lazy: it learned no new features.", number=_misses(known, gap))


def _between(known: Numbers, gap: Sample) -> Verdict:
    number = _misses(known, gap)
    if not GAP.low <= gap.mean <= GAP.high:
        threshold = GAP.low if gap.mean < GAP.low else GAP.high
        number += f" Two standard errors reach over the threshold {threshold:g}: more test points or runs would tell."
    return Verdict(regime="mixed", headline="between lazy and learning features.", number=number)


def _left_linearization(known: Numbers, gap: Sample) -> Verdict:
    turned, grew, moved, number = known.turning, known.growth, known.features_moved, _misses(known, gap)
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
    since = f", from step {known.began:.0f} on" if math.isfinite(known.began) and known.began >= 2 else ""
    if known.unfrozen and known.before < GAP.low:
        since = f", after more weights were unfrozen by step {known.unfrozen} (gap {known.before:.2g} until then)"
    return Verdict(regime="rich", headline=f"it learned features{since}.", number=number)


def _misses(known: Numbers, gap: Sample) -> str:
    share = percent_with_error(gap)
    return f"A linear model around the starting point misses {share} of what this network learned, {known.where}."
