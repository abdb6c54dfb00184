"""All numbers of one run that a diagnosis is based on."""

import math
from dataclasses import replace
from functools import cached_property, lru_cache

from featlearn.diagnosis.events import Events, events
from featlearn.diagnosis.evidence import FALLEN
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism, layer_learning, mechanisms
from featlearn.diagnosis.loss_speed import LossSpeed, SpeedRatio, Unknown
from featlearn.diagnosis.machine import KernelMachine, kernel_machine
from featlearn.diagnosis.run_data import RunData
from featlearn.diagnosis.settling import Settling, settling
from featlearn.errors import FeatlearnError
from featlearn.metrics import feature_rate, kernel_distance
from featlearn.record import Run


class Findings:
    """Numbers of one run; nan if they were not recorded."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.run_data = RunData(run)
        self.loss_speed = LossSpeed(self.run_data)

    @cached_property
    def moved(self) -> float:
        """1 - cosine of the first and the last kernel, both centred."""
        return self._distance(centered=True)

    @cached_property
    def moved_raw(self) -> float:
        """The same without centring: dominated by a constant in ReLU networks."""
        return self._distance(centered=False)

    def _distance(self, *, centered: bool) -> float:
        """From the recorded kernels if there are at least two, else from the recorded scalar."""
        steps = self.run_data.kernel_steps
        if len(steps) > 1 and steps[0] == 0:
            first, last = (self.run_data.kernel(step).double() for step in (steps[0], steps[-1]))
            return float(kernel_distance(first, last, centered=centered))
        recorded = self.run_data.curve("ntk/centered_distance" if centered else "ntk/distance")
        return math.nan if recorded is None else recorded.last

    @cached_property
    def loss_left(self) -> float:
        """Lowest loss divided by the first."""
        loss = self.run_data.loss
        if loss is None or not loss.from_start or loss.first <= 0:
            return math.nan
        return float(loss.values.min()) / loss.first

    @cached_property
    def constant_target(self) -> bool:
        """Whether the centred targets vanish."""
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
    def speed(self) -> SpeedRatio | Unknown:
        """Speed of the loss relative to the frozen first kernel."""
        return self.loss_speed.speed

    @cached_property
    def events(self) -> Events:
        """Event times."""
        return events(self.run_data)

    @cached_property
    def settling(self) -> Settling | Unknown:
        """When the kernel settled."""
        return settling(self.loss_speed)

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

    @property
    def specialization(self) -> float:
        """Mean of the diagonal of the last specialisation matrix minus the mean of the rest."""
        return self._specialization(-1)

    @property
    def specialization_at_start(self) -> float:
        """The same for the first matrix."""
        return self._specialization(0)

    def _specialization(self, at: int) -> float:
        diagonal, y = self.run_data.curve("ntk/specialization"), self.run_data.targets
        if diagonal is None or y is None or y.shape[1] < 2 or (at == 0 and not diagonal.from_start):
            return math.nan
        # every column averages to 1
        outputs = y.shape[1]
        return (float(diagonal.values[at]) - 1) * outputs / (outputs - 1)

    @cached_property
    def feature_rate(self) -> float:
        """The effective feature rate of the whole run, for kernels and targets of norm one."""
        run_data, y, steps = self.run_data, self.run_data.targets, self.run_data.kernel_steps
        if y is None or len(steps) < 2 or steps[0] != 0:
            return math.nan
        key = "mean" if y.shape[1] == 1 else "each"
        first, last = run_data.array("kernel", steps[0], key), run_data.array("kernel", steps[-1], key)
        if first is None or last is None or first.shape != last.shape:
            return math.nan
        try:
            return float(feature_rate(first, last, y[:, 0] if key == "mean" else y, normalized=True))
        except FeatlearnError:
            return math.nan


@lru_cache(maxsize=8)
def findings_of(run: Run) -> Findings:
    """The findings of a run, cached: an open run does not change, and verdicts and page share them."""
    return Findings(run)
