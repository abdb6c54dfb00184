"""When things happened: the half of the loss, alignment, the growth of the kernel; and whether alignment was silent."""

import math
from dataclasses import dataclass

from featlearn.diagnosis.evidence import ALIGNMENT_ROSE, NORM_GREW
from featlearn.diagnosis.reading import Curve, Reading
from featlearn.metrics import time_to

RISEN = 0.01
"""A rise of alignment that is large enough to have a time."""


@dataclass(frozen=True)
class Events:
    """Steps, fractions by interpolation; nan where a thing did not happen, or had before the first measurement."""

    loss_half: float
    """the loss is at half of its first value"""
    alignment_90: float
    """90 % of the rise of centred kernel-task alignment are done; nan where it rose by less than a hundredth"""
    norm_10: float
    """the kernel norm passes 10 % of its final value; nan if it started above"""
    rise: float
    """of alignment, first to last"""
    growth: float
    """last kernel norm by the first"""

    @property
    def silent(self) -> bool | None:
        """Alignment was done before kernel norm and loss moved (002); None where that cannot be told."""
        if self.missing:
            return None
        if self.rise < ALIGNMENT_ROSE.high or self.growth < NORM_GREW.low:
            return False
        return self.alignment_90 <= min(self.norm_10, self.loss_half)

    @property
    def missing(self) -> str:
        """Why it cannot be told whether alignment was silent; empty where it can."""
        if math.isnan(self.rise):
            return "no centred alignment was recorded twice, or the target is constant"
        if math.isnan(self.growth):
            return "the kernel norm was not recorded twice"
        return "the loss has not halved" if math.isnan(self.loss_half) else ""


def alignment_curve(reading: Reading) -> Curve | None:
    """Centred kernel-task alignment; None also for a constant target, of which nothing is left without its mean."""
    return reading.curve("ntk/centered_alignment")


def events(reading: Reading) -> Events:
    """The event times of one run."""
    loss, alignment, norm = reading.loss, alignment_curve(reading), reading.curve("ntk/norm")
    half = norm_10 = aligned = rise = growth = math.nan
    if loss is not None:
        half = time_to(loss.steps, loss.values, 0.5, of="initial")
    if alignment is not None:
        rise = alignment.rise
        if rise >= RISEN:
            aligned = time_to(alignment.steps, alignment.values - alignment.first, 0.9)
            # time_to starts at the level of the first value, 0, which is no event
            aligned = math.nan if aligned == float(alignment.steps[0]) else aligned
    if norm is not None and norm.first > 0:
        growth = norm.last / norm.first
        norm_10 = time_to(norm.steps, norm.values, 0.1)
    return Events(half, aligned, norm_10, rise, growth)
