"""When things happened: the half of the loss, alignment, the growth of the kernel; and whether alignment was silent."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.diagnosis.evidence import ALIGNMENT_ROSE, NORM_GREW
from featlearn.diagnosis.reading import Curve, Reading

RISEN = 0.01
"""Smallest rise of alignment for which a time is reported."""
WIDE = 1.5
"""Measurements whose steps differ by more than this factor leave a gap without a time; consecutive steps do not."""
SAME = 1.1
"""Training loss fills gaps of the probe loss if the two agree within this factor, up to a constant one."""
COMPARED = 3
"""Steps of the probe loss at which they are compared at least, while it is above LEFT of the first."""
LEFT = 0.05


@dataclass(frozen=True)
class Moment:
    """When a curve came to a level; all nan if it did not, or had before the first measurement."""

    at: float
    """a fraction of steps, by interpolation"""
    after: float
    """the last measurement before"""
    by: float
    """the first one at which it had happened"""

    @property
    def wide(self) -> bool:
        """Whether it lies in a gap between measurements."""
        return self.by > max(WIDE * self.after, self.after + 1)

    @property
    def earliest(self) -> float:
        """As far as it can be told."""
        return self.after if self.wide else self.at

    @property
    def latest(self) -> float:
        """As far as it can be told."""
        return self.by if self.wide else self.at

    def precedes(self, other: "Moment") -> bool | None:
        """Whether it came first, or at the same time; None where both lie in one gap."""
        if self.latest <= other.earliest:
            return True
        return False if self.earliest >= other.latest else None


NEVER = Moment(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Events:
    """What happened when, and by how much alignment and the kernel grew."""

    loss_half: Moment
    """the loss is at half of its first value"""
    alignment_90: Moment
    """90 % of the rise of centred kernel-task alignment are done; never where it rose by less than a hundredth"""
    norm_10: Moment
    """the kernel norm passes 10 % of its final value; never if it started above"""
    rise: float
    """of alignment, first to last"""
    growth: float
    """last kernel norm by the first"""

    @property
    def silent(self) -> bool | None:
        """Alignment rose before kernel norm and loss moved (Atanasov et al. 2022); None where the data do not tell."""
        return None if self.missing else not self.against

    @property
    def against(self) -> str:
        """Why alignment was not silent, if known; empty where nothing contradicts it."""
        if self.rise < ALIGNMENT_ROSE.high:
            return f"alignment changed by {self.rise:.2g}, and a rise counts from {ALIGNMENT_ROSE.high:g}"
        if self.growth < NORM_GREW.low:
            return f"the kernel norm became {self.growth:.3g} times its first, so that there is no time before it grew"
        return "alignment was not the first" if False in self._order else ""

    @property
    def missing(self) -> str:
        """Why it is unknown whether alignment was silent; empty where it is known."""
        if math.isnan(self.rise):
            return "centred alignment is not known before and after training"
        if math.isnan(self.growth):
            return "the kernel norm is not known before and after training"
        if math.isnan(self.loss_half.at):
            return "the loss has not halved"
        return (
            "" if self.against or None not in self._order else "the order of events lies in a gap between measurements"
        )

    @property
    def _order(self) -> list[bool | None]:
        return [self.alignment_90.precedes(other) for other in (self.norm_10, self.loss_half)]


def alignment_curve(reading: Reading) -> Curve | None:
    """Centred kernel-task alignment; None also for a constant target, which is zero after centring."""
    return reading.curve("ntk/centered_alignment")


def events(reading: Reading) -> Events:
    """The event times of one run."""
    loss, alignment, norm = halving_loss(reading), alignment_curve(reading), reading.since_start("ntk/norm")
    half = norm_10 = aligned = NEVER
    rise = growth = math.nan
    if loss is not None and loss.first > 0:
        half = crossing(loss, 0.5 * loss.first, logarithmic=True)
    if alignment is not None and alignment.from_start:
        rise = alignment.rise
        if rise >= RISEN:
            aligned = crossing(alignment, alignment.first + 0.9 * rise)
    if norm is not None and norm.first > 0:
        growth = norm.last / norm.first
        norm_10 = crossing(norm, 0.1 * norm.last, logarithmic=True) if norm.first < 0.1 * norm.last else NEVER
    return Events(half, aligned, norm_10, rise, growth)


def crossing(curve: Curve, level: float, *, logarithmic: bool = False) -> Moment:
    """When a curve first comes to a level from the side on which it starts.

    `logarithmic` for what grows or falls by factors: linear interpolation comes too early for a growing one.
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
    return Moment(begin + (level - before) / (after - before) * (end - begin), begin, end)


def halving_loss(reading: Reading) -> Curve | None:
    """The loss on the probe and, in its gaps, the one that was recorded in training, if the two agree."""
    probe = reading.loss
    if probe is None or not probe.from_start or not bool((probe.values > 0).all()):
        return probe if probe is not None and probe.from_start else None
    trained = _training_loss(reading)
    if trained is None:
        return probe
    common = ~_in_gap(trained, probe.steps) & (probe.values > LEFT * probe.first)
    ratio = (trained.logarithmic_at(probe.steps) - probe.values.log())[common]
    if len(ratio) < COMPARED or float(ratio.max() - ratio.min()) > math.log(SAME):
        return probe
    gaps = _in_gap(probe, trained.steps)
    steps = torch.cat([probe.steps, trained.steps[gaps]])
    values = torch.cat([probe.values, trained.values[gaps] / ratio.mean().exp()])
    order = steps.argsort()
    return Curve(steps[order], values[order])


def _training_loss(reading: Reading) -> Curve | None:
    """What the loop passed, a mean since the line before; each loss was that before a step, hence the middle."""
    passed = reading.curve("loss")
    if passed is None or not bool((passed.values > 0).all()):
        return None
    before = torch.cat([passed.steps.new_zeros(1), passed.steps[:-1]])
    return Curve((before + passed.steps - 1).clamp_min(0) / 2, passed.values)


def _in_gap(curve: Curve, steps: Tensor) -> Tensor:
    """Whether steps lie between measurements that leave a gap, or beyond the last."""
    after = torch.searchsorted(curve.steps, steps)  # of the first measurement not before
    met = curve.steps[after.clamp_max(len(curve.steps) - 1)]
    before = curve.steps[(after - 1).clamp_min(0)]
    wide = met > (WIDE * before).maximum(before + 1)
    return (met != steps) & (wide | (after == len(curve.steps)))
