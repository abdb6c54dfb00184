"""The linearisation gap of a run, over its steps and at its end."""

import math
from dataclasses import dataclass
from functools import cached_property

from featlearn.diagnosis.run_data import Curve, RunData
from featlearn.linalg.estimate import Estimate


@dataclass(frozen=True, eq=False)
class GapCurve:
    """The share of the change of the centred outputs that the linearisation at the start misses."""

    probe: Curve | None
    """over steps, on the probe; None if it was not recorded"""
    test: Curve | None
    """the same on the test points"""
    unshrunk: Curve | None
    """the same from first weights that shrank, layer by layer, as those of the run did; None if they did not"""
    probe_error: float
    test_error: float
    samples: int

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
        curve, error = (self.probe, self.probe_error) if self.test is None else (self.test, self.test_error)
        value = curve.last
        if self.unshrunk is not None and self.unshrunk.steps[-1] == self.probe.steps[-1]:
            value = min(value, self.unshrunk.last)
        return Estimate(value, error, self.samples)

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
    curves = {name: run_data.curve(f"gap/{name}", least=1)
              for name in ("probe", "test", "unshrunk", "probe_error", "test_error")}  # fmt: skip
    probe = curves["probe"]
    if probe is not None and not run_data.since_start("probe/loss") and "probe/loss" in run_data.scalar_names:
        probe = None  # the run does not begin at its start
    errors = [math.nan if curves[name] is None else curves[name].last for name in ("probe_error", "test_error")]  # type: ignore[union-attr]
    samples = run_data.samples
    return GapCurve(probe, curves["test"], curves["unshrunk"], errors[0], errors[1], max(samples, 1))
