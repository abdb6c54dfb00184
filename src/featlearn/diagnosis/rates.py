"""The rate of a run: how much time of kernel descent one unit of its learning rate is worth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from featlearn.diagnosis.evidence import FALLEN
from featlearn.diagnosis.loss_kind import CROSS_ENTROPY
from featlearn.diagnosis.replay import Replay
from featlearn.diagnosis.run_data import Curve, RunData, as_probabilities, evenly
from featlearn.dynamics import rate
from featlearn.losses import NAMES

LEVEL = 0.2
"""The replay is compared with the run at this share of the first loss, or at the lowest loss if that is higher."""
REPLAYED = 40
"""Largest number of kernels that are replayed."""
SAMPLES = 64
"""Largest number of probe samples that are replayed for cross-entropy."""
AGREES = 1.5
"""Factor within which a declared rate agrees with the fitted one."""
FIRST_IS_MISSING = "the first kernel, with outputs and targets, is not there"


@dataclass(frozen=True)
class Unknown:
    """An unknown value, with the reason."""

    reason: str


@dataclass(frozen=True)
class TimeScale:
    """Time t in df/dt = -K (f - y): a rate times the sum of learning rates over steps."""

    rate: float
    """per unit of learning rate, or per step if none was recorded"""
    source: str
    """the source of the rate, in words"""


class LossRates:
    """The rate of a run, declared or fitted."""

    def __init__(self, run_data: RunData) -> None:
        self.run_data = run_data

    @cached_property
    def elapsed(self) -> Curve:
        """Steps -> sum of learning rates over steps; the step itself if no learning rate is known."""
        run_data = self.run_data
        lr = run_data.curve("lr")
        last = float(max(run_data.steps, 1))
        if lr is None or not bool((lr.values > 0).all()):
            ends = torch.tensor([0.0, last], dtype=torch.float64)
            return Curve(ends, ends)
        steps = torch.cat([lr.steps.new_zeros(1), lr.steps, lr.steps.new_full((1,), last)]).unique()
        values = lr.at(steps)
        spent = ((values[1:] + values[:-1]) / 2 * steps.diff()).cumsum(0)
        return Curve(steps, torch.cat([steps.new_zeros(1), spent]))

    @cached_property
    def best(self) -> TimeScale | Unknown:
        """The declared rate of one output, if it agrees with the loss; else the rate fitted to the loss.

        With several outputs the recorded kernels omit terms between them, for which a fitted rate makes up.
        """
        fitted, declared, y = self.of_loss, self._declared(), self.run_data.targets
        if declared is None or y is None or y.shape[1] > 1:
            return fitted
        if isinstance(fitted, Unknown):  # two kernels alone fit no rate
            return declared if len(self.run_data.kernel_steps) == 2 else fitted
        ratio = declared.rate / fitted.rate
        if 1 / AGREES <= ratio <= AGREES:
            return declared
        return TimeScale(fitted.rate, f"{fitted.source} (the declared one is {ratio:.3g} times that)")

    @cached_property
    def of_loss(self) -> TimeScale | Unknown:
        """The rate at which descent with the recorded kernels reaches the measured loss at the measured step."""
        loss, steps = self.run_data.loss, self.run_data.kernel_steps
        if loss is None or not loss.from_start:
            return Unknown("the loss on the probe was not recorded before training")
        if not steps or steps[0] != 0:
            return Unknown(FIRST_IS_MISSING)
        if len(steps) < 3:
            return Unknown(
                f"{len(steps)} kernels with outputs were recorded, and 3 are needed; watch with budget=None, or a "
                "schedule (every=) with more of them"
            )
        level = max(float(loss.values.min()), LEVEL * loss.first)
        if not level <= FALLEN.high * loss.first:
            left = level / loss.first
            fell = f"fell only to {left:.2g} of the first" if left < 1 else "did not fall"
            return Unknown(f"the loss on the probe {fell}")
        at = reached(loss, level)
        if not at > 0:
            return Unknown("the loss on the probe was lowest before training")
        per_unit = self._replay([s for s in steps if s < at], at).rate_to(level)
        if per_unit is None:
            return Unknown("descent with the recorded kernels does not come to the loss of the run")
        source = "the one with which the recorded kernels come to the measured loss"
        if self.run_data.loss_kind.logistic and len(self.targets) > SAMPLES:
            source += f", on {SAMPLES} of {len(self.targets)} samples"
        return TimeScale(per_unit, source)

    def _replay(self, steps: Sequence[int], until: float) -> Replay:
        """A replay with the kernels of these steps and the interpolated kernel of its last, fractional step."""
        run_data = self.run_data
        after = next(s for s in run_data.kernel_steps if s >= until or s == run_data.kernel_steps[-1])
        steps = evenly(steps, REPLAYED)
        share = min(1.0, (until - steps[-1]) / max(after - steps[-1], 1))
        last = torch.lerp(run_data.kernel(steps[-1]).double(), run_data.kernel(after).double(), share)
        kernels = torch.stack([*(run_data.kernel(s).double() for s in steps), last])
        start, targets = run_data.outputs(0), self.targets
        if run_data.loss_kind.logistic and len(start) > SAMPLES:
            some = torch.linspace(0, len(start) - 1, SAMPLES).round().long()
            kernels, start, targets = kernels[:, some][:, :, some], start[some], targets[some]
        elapsed = self.elapsed.at(torch.tensor([*map(float, steps), until]))
        return Replay(kernels, elapsed, start, targets, run_data.loss_kind)

    @cached_property
    def targets(self) -> Tensor:
        """(P, C) in double; one-hot rows for cross-entropy, whose targets may be recorded without their mean."""
        y = self.run_data.targets
        assert y is not None
        return as_probabilities(y.double()) if self.run_data.loss_kind is CROSS_ENTROPY else y.double()

    def loss_of(self, f: Tensor) -> float:
        """The loss of outputs (P, C), in the unit of `RunData.loss`."""
        return float(self.run_data.loss_kind.mean(f, self.targets))

    def _declared(self) -> TimeScale | None:
        run_data, y = self.run_data, self.run_data.targets
        loss = run_data.run.config.get("loss_convention")
        kind, momentum, one_rate = run_data.optimizer
        if loss not in NAMES or kind != "SGD" or not one_rate or run_data.curve("lr") is None or y is None:
            return None
        per_lr = rate(1.0, loss, P=len(y), C=y.shape[1]) / (1 - momentum)
        return TimeScale(per_lr, f"the declared learning rate and loss {loss!r}")


def reached(curve: Curve, level: float) -> float:
    """The fractional step at which a falling curve first reaches a level, by logarithmic interpolation."""
    i = int((curve.values <= level * (1 + 1e-9)).nonzero()[0])
    if i == 0:
        return float(curve.steps[0])
    above, below = (max(float(v), 1e-300) for v in curve.values[i - 1 : i + 1])
    share = math.log(above / max(level, 1e-300)) / math.log(above / below) if above > below else 1.0
    return float(curve.steps[i - 1] + min(max(share, 0.0), 1.0) * (curve.steps[i] - curve.steps[i - 1]))
