"""Event times: the loss halves, alignment rises, the kernel grows; and whether alignment was silent."""

import math
from dataclasses import dataclass

import torch

from featlearn.diagnosis.evidence import ALIGNMENT_ROSE, NORM_GREW, SETTLED
from featlearn.diagnosis.run_data import Curve, RunData

RISEN = 0.01
"""Smallest rise of alignment that gets an event time."""
WIDE = 1.5
"""Consecutive measurements whose steps differ by more than this factor leave a gap: no time is given inside it."""


@dataclass(frozen=True)
class CrossingTime:
    """When a curve reached a level; all nan if it never did, or did before the first measurement."""

    at: float
    """step, interpolated"""
    after: float
    """step of the last measurement before it"""
    by: float
    """step of the first measurement after it"""

    @property
    def wide(self) -> bool:
        """Whether it lies in a gap between measurements."""
        return self.by > max(WIDE * self.after, self.after + 1)

    @property
    def earliest(self) -> float:
        """Lower bound of the step."""
        return self.after if self.wide else self.at

    @property
    def latest(self) -> float:
        """Upper bound of the step."""
        return self.by if self.wide else self.at

    def precedes(self, other: "CrossingTime") -> bool | None:
        """Whether it happened first, or at the same time; None if both lie in one gap."""
        if self.latest <= other.earliest:
            return True
        return False if self.earliest >= other.latest else None


NEVER = CrossingTime(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Events:
    """Event times, and by how much alignment and the kernel grew."""

    loss_half: CrossingTime
    """the loss is at half of its first value"""
    alignment_90: CrossingTime
    """centered kernel-task alignment reaches 90 % of its rise; never if it rose by less than 0.01"""
    norm_10: CrossingTime
    """the kernel norm passes 10 % of its final value; never if it started above"""
    rise: float
    """of alignment, from the first to the last measurement"""
    growth: float
    """last kernel norm divided by the first"""
    settled: float
    """the first recorded step from which the kernel stays near the last one; nan if only the last measurement is"""

    @property
    def silent(self) -> bool | None:
        """Whether alignment was complete before kernel norm and loss moved (Atanasov et al. 2022); None if unknown."""
        return None if self.missing else not self.against

    @property
    def against(self) -> str:
        """Why alignment was not silent; empty if nothing indicates that."""
        if self.rise < ALIGNMENT_ROSE.high:
            return f"alignment changed by {self.rise:.2g}, and a rise counts from {ALIGNMENT_ROSE.high:g}"
        if self.growth < NORM_GREW.low:
            return f"the kernel norm became {self.growth:.3g} times its first, so that there is no time before it grew"
        return "alignment was not the first" if False in self._order else ""

    @property
    def missing(self) -> str:
        """Why it is unknown whether alignment was silent; empty if it is known."""
        if math.isnan(self.rise):
            return "centered alignment is not known before and after training"
        if math.isnan(self.growth):
            return "the kernel norm is not known before and after training"
        if math.isnan(self.loss_half.at):
            return "the loss on the probe has not halved"
        return (
            "" if self.against or None not in self._order else "the order of events lies in a gap between measurements"
        )

    @property
    def _order(self) -> list[bool | None]:
        return [self.alignment_90.precedes(other) for other in (self.norm_10, self.loss_half)]


def alignment_curve(run_data: RunData) -> Curve | None:
    """Centered kernel-task alignment; None also for a constant target, which vanishes when centered."""
    return run_data.curve("ntk/centered_alignment")


def events(run_data: RunData) -> Events:
    """The event times of one run."""
    loss, alignment, norm = run_data.loss, alignment_curve(run_data), run_data.since_start("ntk/norm")
    half = norm_10 = aligned = NEVER
    rise = growth = math.nan
    if loss is not None and loss.from_start and loss.first > 0:
        half = crossing(loss, 0.5 * loss.first, logarithmic=True)
    if alignment is not None and alignment.from_start:
        rise = alignment.rise
        if rise >= RISEN:
            aligned = crossing(alignment, alignment.first + 0.9 * rise)
    if norm is not None and norm.first > 0:
        growth = norm.last / norm.first
        norm_10 = crossing(norm, 0.1 * norm.last, logarithmic=True) if norm.first < 0.1 * norm.last else NEVER
    return Events(half, aligned, norm_10, rise, growth, _settled(run_data))


def _settled(run_data: RunData) -> float:
    """Return the first step from which the kernel differs by at most a tenth of the norm of the last kernel."""
    *earlier, last = run_data.kernels or [(0, torch.zeros(1))]
    settled = math.nan
    for step, kernel in reversed(earlier if len(earlier) > 1 else []):
        if float((kernel - last[1]).norm()) > SETTLED.high * float(last[1].norm()):
            break
        settled = float(step)
    return settled


def crossing(curve: Curve, level: float, *, logarithmic: bool = False) -> CrossingTime:
    """When a curve first reaches a level from the side on which it starts.

    Use `logarithmic` for exponential growth or decay, where linear interpolation is biased.
    """
    away = curve.values - level
    crossed = (away * away[0].sign() <= 0).nonzero().flatten()
    if not len(crossed) or int(crossed[0]) == 0:
        return NEVER
    i = int(crossed[0])
    before, after = curve.values[i - 1 : i + 1].tolist()
    if logarithmic and min(before, after, level) > 0:
        before, after, level = (math.log(value) for value in (before, after, level))
    begin, end = curve.steps[i - 1 : i + 1].tolist()
    return CrossingTime(begin + (level - before) / (after - before) * (end - begin), begin, end)
