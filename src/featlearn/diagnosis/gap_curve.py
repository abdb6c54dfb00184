"""The linearization gap of a run, over its steps and at its end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from featlearn.diagnosis.run_data import Curve, RunData
from featlearn.linalg.estimate import Estimate

LEAST = 3
"""Fewest samples of a probe for which `fl.watch` records the gap."""


@dataclass(frozen=True, eq=False)
class GapCurve:
    """The share of the change of the centered outputs that the linearization at the start misses."""

    probe: Curve | None
    """over steps, on the probe; None if it was not recorded"""
    test: Curve | None
    """the same on the test points"""
    unshrunk: Curve | None
    """the same from first weights that shrank, layer by layer, as those of the run did; None if they did not"""
    errors: Mapping[str, float]
    """standard errors at the end, by the names above"""
    samples: int
    reason: str = ""
    """why it is unknown"""

    @property
    def known(self) -> bool:
        """Whether it was recorded."""
        return self.probe is not None

    @cached_property
    def value(self) -> Estimate:
        """At the end of the run: on the test points if there are any, else on the probe.

        Where layers have shrunk as a whole, which weight decay does without learning, the smaller of the gaps with and
        without that.
        """
        if self.probe is None:
            return Estimate(math.nan, math.nan, 1)
        name, curve = ("probe", self.probe) if self.test is None else ("test", self.test)
        if self.unshrunk is not None and self.unshrunk.steps[-1] == self.probe.steps[-1]:
            name, curve = min((name, curve), ("unshrunk", self.unshrunk), key=lambda one: one[1].last)
        return Estimate(curve.last, self.errors.get(name, math.nan), self.samples)

    @cached_property
    def over_steps(self) -> Curve | None:
        """On the probe over steps, at each the smaller of the gaps with and without the shrinking of layers."""
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
    """The recorded gaps of a run; a single measurement after the start is enough."""
    names = ("probe", "test", "unshrunk")
    curves = {name: run_data.curve(f"gap/{name}", least=1) for name in names}
    last = {name: run_data.curve(f"gap/{name}_error", least=1) for name in names}
    errors = {name: curve.last for name, curve in last.items() if curve is not None}
    probe, reason = curves["probe"], ""
    if probe is not None and not run_data.since_start("probe/loss") and "probe/loss" in run_data.scalar_names:
        probe, reason = None, "the run does not begin at its start"
    elif probe is None:
        reason = _missing(run_data)
    return GapCurve(probe, curves["test"], curves["unshrunk"], errors, max(run_data.samples, 1), reason)


def _missing(run_data: RunData) -> str:
    """Why no gap is known."""
    if run_data.diverged is not None:
        return "training broke down before a linearization gap was measured"
    if "gap/probe" in run_data.scalar_names:
        return "the outputs changed by no more than rounding, or by the same for all samples of the probe"
    if 0 < run_data.samples < LEAST:
        return f"the linearization gap of fewer than {LEAST} samples has no error; give a larger probe"
    return "the linearization gap was not recorded: quantities= left it out, or the first weights are not known"
