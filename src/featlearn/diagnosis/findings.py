"""All numbers of one run that a diagnosis is based on."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from featlearn.diagnosis.events import Events, crossing, events
from featlearn.diagnosis.evidence import FALLEN, FITTED, GAP, LINEAR_IN_WEIGHTS, MOVED_OUTPUTS, NOT_KNOWN
from featlearn.diagnosis.gap_curve import GapCurve, gap_curve
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism, layer_learning, mechanisms
from featlearn.diagnosis.machine import KernelMachine, kernel_machine
from featlearn.diagnosis.moved_features import MovedFeatures, moved_features, recorded_estimate
from featlearn.diagnosis.opinions import Opinion, opinions
from featlearn.diagnosis.rates import LossRates
from featlearn.diagnosis.run_data import Curve, RunData, fell
from featlearn.diagnosis.usefulness import Usefulness, usefulness
from featlearn.linalg.estimate import Estimate
from featlearn.metrics import kernel_distance
from featlearn.record import Run

FOLDS = 16
"""Groups of samples that are left out in turn for a standard error."""
LATE = 0.25
"""A loss is still falling, or has hardly begun to, if more than this share of its fall came in the second half of the
steps; it is one half where the loss falls at a constant pace."""
LATER = 3.0
"""A run that is rich after this many times the steps in which it fitted its data is lazy then rich; sooner, rich."""


class Findings:
    """Numbers of one run; nan if they were not recorded."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.run_data = RunData(run)
        self.rates = LossRates(self.run_data)

    @cached_property
    def gap(self) -> GapCurve:
        """The linearization gap."""
        return gap_curve(self.run_data)

    @cached_property
    def useful(self) -> Usefulness:
        """Test error of regression with the first and the last kernel."""
        return usefulness(self.run_data)

    @cached_property
    def turning(self) -> Estimate:
        """1 - cosine of the first and the last kernel, both centered."""
        return self._compared(lambda a, b: float(kernel_distance(a, b, centered=True)), "ntk/centered_distance")

    @cached_property
    def turning_raw(self) -> float:
        """The same without centering: dominated by a constant in ReLU networks."""
        return float(self._compared(lambda a, b: float(kernel_distance(a, b)), "ntk/distance"))

    @cached_property
    def growth(self) -> Estimate:
        """Norm of the last kernel divided by that of the first."""
        if self.both_kernels:
            return self._compared(lambda a, b: float(b.norm() / a.norm()))
        norm = self.run_data.since_start("ntk/norm")
        return NOT_KNOWN if norm is None or norm.first <= 0 else Estimate(norm.last / norm.first, math.nan, 1)

    @property
    def both_kernels(self) -> bool:
        """Whether the first kernel and a later one were recorded."""
        steps = self.run_data.kernel_steps
        return len(steps) > 1 and steps[0] == 0

    def _compared(self, measure: Callable[[Tensor, Tensor], float], scalar: str | None = None) -> Estimate:
        """A number of the first and the last kernel, from the recorded kernels if there are two, else from the scalar.

        Its error is that of leaving out groups of samples in turn.
        """
        steps = self.run_data.kernel_steps
        if self.both_kernels:
            first, last = (self.run_data.kernel(step).double() for step in (steps[0], steps[-1]))
            return jackknife(measure, first, last)
        recorded = self.run_data.curve(scalar) if scalar is not None else None
        return NOT_KNOWN if recorded is None else Estimate(recorded.last, math.nan, 1)

    @property
    def loss_left(self) -> float:
        """Share of the learnable loss that is left."""
        return self.run_data.loss_left

    @cached_property
    def learned(self) -> bool | None:
        """Whether the run learned enough for its regime to be judged; None if nothing is known of its loss."""
        if self.loss_left <= FALLEN.high or self.settled_loss or self.run_data.outputs_moved >= MOVED_OUTPUTS:
            return True
        return None if math.isnan(self.loss_left) and math.isnan(self.run_data.outputs_moved) else False

    @cached_property
    def features_moved(self) -> MovedFeatures:
        """Relative change of the representation that enters the last trained map, with that of each layer."""
        return moved_features(self.run_data)

    @cached_property
    def statistics_moved(self) -> Estimate:
        """The same by buffers alone."""
        return recorded_estimate(self.run_data, "statistics/moved")

    @property
    def linear(self) -> bool:
        """Whether the model is linear in its trained weights: the gap is tiny beside their change."""
        return float(self.gap) < LINEAR_IN_WEIGHTS * self.weights_moved

    @cached_property
    def settled_loss(self) -> bool:
        """Whether the loss fell and has stopped falling: most of its fall came in the first half of the steps."""
        passed = self.run_data.curve("loss")
        trusted = passed is None or self.run_data.loss_is_known or not fell(passed)
        curve = self.run_data.loss if trusted else passed
        curve = curve or passed
        if curve is None or len(curve.steps) < 4 or not curve.last < curve.first:
            return False
        half = float(curve.at(torch.tensor([float(curve.steps[-1]) / 2])))
        return half - curve.last <= LATE * (curve.first - curve.last)

    @cached_property
    def rich_from(self) -> float:
        """The step from which the gap was rich, for a run that fitted its data while the gap was lazy; else nan."""
        curve = self.gap.over_steps
        loss = self.run_data.centered_loss or self.run_data.loss or self.run_data.curve("loss")
        if curve is None or loss is None or loss.first <= 0 or curve.last <= GAP.high:
            return math.nan
        fitted = (loss.values <= FITTED.high * loss.first).nonzero().flatten()
        if not len(fitted):
            return math.nan
        step = float(loss.steps[int(fitted[0])])
        if float(curve.at(torch.tensor([step]))) > GAP.low:
            return math.nan
        # An earlier excursion above the threshold was before the data were fitted.
        below = ((curve.values <= GAP.high) & (curve.steps < curve.steps[-1])).nonzero().flatten()
        since = int(below[-1]) if len(below) else 0
        found = crossing(Curve(curve.steps[since:], curve.values[since:]), GAP.high).at
        return found if found >= LATER * step else math.nan

    @cached_property
    def opinions(self) -> dict[str, Opinion]:
        """Metrics that need no kernel, by name."""
        return opinions(self.run_data, settled=self.settled_loss)

    @cached_property
    def constant_target(self) -> bool:
        """Whether the centered targets vanish."""
        if self.run_data.targets is None:
            return False
        y = self.run_data.targets.double()
        return float((y - y.mean(0)).abs().max()) <= 1e-6 * float(y.abs().max())

    @property
    def weights_moved(self) -> float:
        """|W - W0| / |W0| of all weights together."""
        distance = self.run_data.curve("weights/distance")
        return math.nan if distance is None else distance.last

    @cached_property
    def events(self) -> Events:
        """Event times."""
        return events(self.run_data)

    @cached_property
    def machine(self) -> KernelMachine:
        """Kernel regression against the network; undecided after little training, when every kernel fits."""
        found = kernel_machine(self.run_data)
        if found.errors and not self.loss_left <= FALLEN.high:
            return replace(found, of=None, reason="the loss has hardly fallen, so that any kernel would do")
        return found

    @cached_property
    def mechanisms(self) -> dict[str, LayerPairMechanism]:
        """By layer pair."""
        return mechanisms(self.run_data)

    @cached_property
    def layers(self) -> dict[str, LayerLearning]:
        """By layer."""
        return layer_learning(self.run_data)


def jackknife(measure: Callable[[Tensor, Tensor], float], first: Tensor, last: Tensor) -> Estimate:
    """A number of two kernels (P, P) with its standard error: groups of samples are left out in turn."""
    samples = len(first)
    value, count = measure(first, last), min(FOLDS, samples)
    if count < 3 or not math.isfinite(value):
        return Estimate(value, math.nan, samples)
    values = []
    for fold in range(count):
        kept = (torch.arange(samples) % count != fold).nonzero().flatten()
        values.append(measure(first[kept][:, kept], last[kept][:, kept]))
    spread = torch.tensor(values, dtype=torch.float64)
    return Estimate(value, math.sqrt(float((spread - spread.mean()).square().sum()) * (count - 1) / count), samples)
