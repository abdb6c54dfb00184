"""The linearization gap of a run, over its steps and at its end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from featlearn.diagnosis.run_data import Curve, RunData
from featlearn.diagnosis.words import dead_network
from featlearn.linalg.estimate import Estimate

LEAST = 3
"""Fewest samples of a probe for which `fl.watch` records the gap."""


@dataclass(frozen=True, eq=False, kw_only=True)
class GapCurve:
    """The share of the change of the centered outputs that the linearization at the start misses.

    Through the link where the run recorded that, else the plain gap.
    """

    probe: Curve | None
    """over steps, on the probe; None if it was not recorded"""
    test: Curve | None
    """the same on the test points"""
    unshrunk: Curve | None
    """on the probe, from first weights that shrank as those of the run did; None if no weight decays"""
    plain: Curve | None
    """the plain gap on the probe; the same as `probe` where the gap through the link was not recorded"""
    errors: Mapping[str, float]
    """standard errors at the end, by the names above"""
    rounding: float
    """rounding error of the gap at the end; 0 if it was not recorded"""
    samples: int
    through_link: bool
    """whether the gap was measured through the link"""
    reason: str = ""
    """why it is unknown"""

    @property
    def known(self) -> bool:
        """Whether it was recorded."""
        return self.probe is not None

    @property
    def without_decay(self) -> bool:
        """Whether weight decay explains a part of the gap, so that the gap without it counts."""
        if self.probe is None or self.unshrunk is None or self.unshrunk.steps[-1] != self.probe.steps[-1]:
            return False
        return self.unshrunk.last < self.probe.last

    @property
    def where(self) -> str:
        """The samples of `value`, in words."""
        if self.without_decay:
            return "on the probe, the shrinking by weight decay left out"
        return "on the probe" if self.test is None else "on test points"

    @cached_property
    def value(self) -> Estimate:
        """The gap at the end: on the test points if there are any, else on the probe.

        Weight decay shrinks layers without learning. Where that explains a part of the gap, the gap without it, which
        is measured on the probe.
        """
        if self.probe is None:
            return Estimate(math.nan, math.nan, 1)
        name, curve = ("probe", self.probe) if self.test is None else ("test", self.test)
        if self.without_decay and self.unshrunk is not None:
            name, curve = "unshrunk", self.unshrunk
        return Estimate(curve.last, self.errors.get(name, math.nan), self.samples)

    @property
    def plain_value(self) -> Estimate:
        """The plain gap on the probe at the end."""
        if self.plain is None or self.probe is None:
            return Estimate(math.nan, math.nan, 1)
        return Estimate(self.plain.last, self.errors.get("plain", math.nan), self.samples)

    @cached_property
    def over_steps(self) -> Curve | None:
        """On the probe over steps, at each the smaller of the gaps with and without weight decay."""
        if self.probe is None or self.unshrunk is None:
            return self.probe
        other = dict(zip(self.unshrunk.steps.tolist(), self.unshrunk.values.tolist(), strict=True))
        pairs = zip(self.probe.steps.tolist(), self.probe.values.tolist(), strict=True)
        values = [min(value, other.get(step, value)) for step, value in pairs]
        return Curve(self.probe.steps, torch.tensor(values, dtype=torch.float64))

    @property
    def steps(self) -> list[int]:
        """The steps at which it was recorded."""
        return [] if self.probe is None else [int(step) for step in self.probe.steps]

    @property
    def values(self) -> list[float]:
        """On the probe, at these steps."""
        return [] if self.probe is None else [float(value) for value in self.probe.values]

    def __float__(self) -> float:
        return float(self.value)


def gap_curve(run_data: RunData) -> GapCurve:
    """Return the recorded gaps of a run; a single measurement after the start is enough."""
    through_link = run_data.curve("gap/link", least=1) is not None
    recorded = {"probe": "probe", "test": "test", "unshrunk": "unshrunk", "plain": "probe"}
    if through_link:
        recorded |= {"probe": "link", "test": "link_test"}
    curves = {name: run_data.curve(f"gap/{scalar}", least=1) for name, scalar in recorded.items()}
    last = {name: run_data.curve(f"gap/{scalar}_error", least=1) for name, scalar in recorded.items()}
    probe, reason = curves["probe"], ""
    if probe is not None and not run_data.since_start("probe/loss") and "probe/loss" in run_data.scalar_names:
        probe, reason = None, "the run does not begin at its start"
    elif probe is None:
        reason = _missing(run_data)
    rounding = run_data.curve("gap/rounding", least=1)
    return GapCurve(
        probe=probe,
        test=curves["test"],
        unshrunk=curves["unshrunk"] if run_data.decays else None,
        plain=curves["plain"],
        errors={name: curve.last for name, curve in last.items() if curve is not None},
        rounding=0.0 if rounding is None else rounding.last,
        samples=max(run_data.samples, 1),
        through_link=through_link,
        reason=reason,
    )


def _missing(run_data: RunData) -> str:
    """Return why no gap is known."""
    if run_data.diverged is not None:
        return "training broke down before a linearization gap was measured"
    if run_data.steps == 0:
        return "no step was trained"
    failure = run_data.failure_of("gap")
    if failure:
        return f"the linearization gap could not be measured: {failure}"
    if run_data.loss is not None and run_data.loss.first == 0:
        return "the loss was zero from the start, so that there was nothing to learn"
    if run_data.dead:
        return dead_network(run_data.dead_layers)
    if {"gap/probe", "gap/link"} & set(run_data.scalar_names):
        return "the outputs changed by no more than rounding, or by the same for all samples of the probe"
    if 0 < run_data.samples < LEAST:
        return f"the linearization gap of fewer than {LEAST} samples has no error; give a larger probe"
    return "the linearization gap was not recorded: quantities= left it out, or the first weights are not known"
