"""Count the work of training and of measuring, decide from it what is measured, and time both.

Work is counted in multiply-adds, which follow from shapes alone. No clock enters, so that two runs of one seed measure
the same things on an idle and on a busy machine. Seconds are printed and recorded, and decide nothing.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featlearn.gradients.directions import output_directions
from featlearn.measurement import Measurement
from featlearn.monitoring.pictures import picture_work
from featlearn.monitoring.probe_data import Sizes
from featlearn.monitoring.schedule import ScheduledQuantity
from featlearn.network.inputs import tensors_in
from featlearn.planning.kernel_plan import parameter_plans
from featlearn.planning.plan import ParameterPlan
from featlearn.torch_internals import add_pre_forward_hook, drop_pre_forward_hook

FREQUENT = ("gap", "moved", "richness", "weights", "layers", "convergence", "test")
"""Quantities of a few passes, which are measured more often than kernels and neural features."""
FREQUENT_PART = 0.3
"""Part of the budget for the frequent quantities."""
LAUNCH = 1e6
"""Multiply-adds that fit into the time in which one op of one pass is launched."""
FIRST = {"cpu": 3e10, "cuda": 3e12}
"""Largest work of the first measurement, else the probe is reduced: about a second of one core or of a GPU."""
EARLY = {"cpu": 1e10, "cuda": 1e12}
"""Multiply-adds spent before training has earned them: most happens in the first steps."""
FEWEST = 32
"""Smallest number of samples to which a probe is reduced."""
CLOSEST = 1.4
"""A logarithmic schedule leaves steps closer than this factor to the last kernel to the frequent quantities."""
UNSEEN = {"frequent": 1.4, "rare": 2.0}
"""Factors between measured steps where no forward pass of the training is seen."""


class TrainingPasses:
    """Counts forward passes of a model in training mode, with gradients, by a hook that takes microseconds.

    The hook is gone during measurements and after the run. A copy of the model does not count: it holds a function of
    the standard library that does nothing in the place of the hook.
    """

    KEY: Any = "featlearn"

    def __init__(self) -> None:
        self.count = 0
        """Number of forward passes."""
        self.samples = 0
        """Number of samples in all of them."""

    def attach(self, model: nn.Module) -> None:
        """Begin to count."""
        if isinstance(model, nn.TransformerEncoderLayer):  # in eval mode, a hook would switch its fast path off
            return
        add_pre_forward_hook(model, self.KEY, self)

    def detach(self, model: nn.Module) -> None:
        """Stop counting."""
        drop_pre_forward_hook(model, self.KEY)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count one forward pass."""
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        self.count += 1
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            first = next(iter(tensors_in((args, kwargs))), None)
        self.samples += len(first) if first is not None and first.dim() else 1

    def __deepcopy__(self, memo: object) -> Any:
        return contextlib.nullcontext.__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext, "__exit__")


@dataclass(frozen=True)
class NetworkWork:
    """Multiply-adds of passes through a network."""

    sample: float
    """Of one sample in a forward pass."""
    launch: float
    """Of a pass itself, whatever its number of samples."""
    unread: bool
    """Whether a parameter takes a backward pass for each sample and output."""

    def passes(self, count: float, samples: float) -> float:
        """Work of so many forward passes; a backward pass counts as two."""
        return count * (samples * self.sample + self.launch)

    def backward(self, directions: int, samples: float) -> float:
        """Work of a forward pass, and of a backward pass for each output direction."""
        loop = samples * self.passes(3 * directions, 1) if self.unread else 0.0
        return self.passes(1 + 2 * directions, samples) + loop


def forward_work(measurement: Measurement) -> NetworkWork:
    """Work of passes through a network, from a few samples."""
    return _network_work(parameter_plans(measurement, "sum", 1, (1, 1), ()))


def _network_work(plans: Sequence[ParameterPlan]) -> NetworkWork:
    return NetworkWork(
        sum(_multiply_adds(plan) for plan in plans),
        LAUNCH * sum(max(1, len(plan.uses)) for plan in plans),
        any(plan.route == "fallback" for plan in plans),
    )


def _multiply_adds(plan: ParameterPlan) -> float:
    size = torch.Size(plan.shape).numel()
    if plan.uses and all("Embedding" in use for use in plan.uses):
        return plan.positions * (size // max(plan.shape[0], 1))
    return max(plan.positions, 1) * size


def quantity_work(measurement: Measurement, sizes: Sizes, *, ends: bool) -> dict[str, float]:
    """Quantity -> multiply-adds of one measurement; `ends`: the first or the last one, with kernels of test points."""
    directions = output_directions("full" if ends and sizes.full else sizes.kernel, measurement.classes)
    samples = sizes.samples
    both = samples + sizes.tests if ends else samples
    plans = parameter_plans(measurement, directions.mode, directions.count, (both, both), ())
    network = _network_work(plans)
    kernel = network.backward(directions.count, both) + sum(plan.operations for plan in plans)
    # Covariances of inputs and of gradients, their products and roots.
    matrices = [plan for plan in plans if len(plan.shape) > 1 and plan.positions]
    decomposed = sum(2.0 * min(torch.Size(plan.shape[1:]).numel(), 4096) ** 3 for plan in matrices)
    return {
        "gap": network.passes(4, samples) + network.passes(4, sizes.tests),
        "moved": network.passes(4, samples),
        "richness": network.passes(1, samples),
        "weights": network.passes(1, 1),
        "layers": network.passes(3, samples),
        "convergence": network.passes(3, samples),
        "test": network.passes(1, sizes.tests),
        "features": (1 if ends else 2) * (network.backward(sizes.features, samples) + decomposed),
        "kernel": kernel,
        "optimizer": kernel,
        "pictures": network.backward(*picture_work(measurement.classes, samples)) if ends else 0.0,
    }


@dataclass
class Share:
    """Quantities that are measured at the same steps, with their part of the budget."""

    part: float
    """Share of the work of training."""
    early: float
    """Multiply-adds available at the start."""
    unseen: float
    """Factor between measured steps where the work of training is not known."""
    closest: float = 1.0
    """Smallest factor between measured steps."""
    count: int = 0
    """Number of measurements after the first one."""
    last: int = 0
    """Step of the latest measurement."""

    def allows(self, step: int, work: float, training: float | None) -> bool:
        """Return whether this much work is available at a scheduled step, after this much work of training."""
        if training is None:
            return step >= self.unseen * self.last
        available = self.early + self.part * training
        return (self.count + 1) * work <= available and step >= self.closest * self.last


@dataclass
class Budget:
    """Decides what is measured at a scheduled step, from the work of training and of measuring."""

    share: float | None
    """Share of the work of training; None to measure all that is scheduled."""
    logarithmic: bool
    work: Mapping[str, float] = field(default_factory=dict)
    """Quantity -> multiply-adds of one measurement in the middle of the run."""
    network: NetworkWork | None = None
    measured: float = 0.0
    """Multiply-adds of all measurements so far, and of the last one."""

    def begin(self, work: Mapping[str, float], first: float, network: NetworkWork, device: str) -> None:
        """Set the work of each quantity, and of the first measurement, before anything is measured."""
        self.work, self.network, self.measured = work, network, 2 * first  # the last one is like the first
        share, early = self.share or 0.0, EARLY.get(device, EARLY["cpu"])
        rare = 1 - FREQUENT_PART
        self.frequent = Share(FREQUENT_PART * share, FREQUENT_PART * early, UNSEEN["frequent"])
        self.rare = Share(rare * share, rare * early, UNSEEN["rare"], CLOSEST if self.logarithmic else 1.0)

    def training(self, passes: TrainingPasses, steps: int, step: int) -> float | None:
        """Return the multiply-adds of training until a step; None where none of its forward passes is seen.

        `steps`: number of steps in which the passes were made. Earlier processes of a resumed run worked as much.
        """
        if not passes.count or not steps or self.network is None:
            return None
        made = self.network.passes(3 * passes.count, passes.samples / passes.count)
        return made * step / steps

    def chosen(self, step: int, due: Sequence[ScheduledQuantity], training: float | None) -> list[ScheduledQuantity]:
        """Return the quantities that are measured at this step."""
        if self.share is None:
            return list(due)
        rare = [quantity for quantity in due if quantity.name not in FREQUENT]
        if rare and self.rare.allows(step, self._work(rare), training):
            shares, chosen = [self.frequent, self.rare], list(due)
        else:
            chosen = [quantity for quantity in due if quantity.name in FREQUENT]
            if not chosen or not self.frequent.allows(step, self._work(chosen), training):
                return []
            shares = [self.frequent]
        for share in shares:
            share.count, share.last = share.count + 1, step
        self.measured += self._work(chosen)
        return chosen

    def steps_for_rare(self, due: Sequence[ScheduledQuantity], step_work: float) -> float:
        """Return the number of training steps that pay for one measurement of the costly quantities; 0 without any."""
        rare = [quantity for quantity in due if quantity.name not in FREQUENT]
        return self._work(rare) / (self.rare.part * step_work) if self.share and rare else 0.0

    def _work(self, quantities: Sequence[ScheduledQuantity]) -> float:
        # The work of a user's function is not known: it may read a kernel.
        return sum(self.work.get(quantity.name, self.work["kernel"]) for quantity in quantities)

    def holds_from(self, training: float, steps: int) -> int:
        """Return the number of steps from which the measurements made are within the budget."""
        return math.ceil(self.measured * steps / (self.share * training)) if self.share and training else 0

    def resume(self, frequent: Sequence[int], rare: Sequence[int]) -> None:
        """Continue after the steps at which earlier processes measured."""
        if self.share is None:
            return
        for share, steps in ((self.frequent, frequent), (self.rare, rare)):
            share.count, share.last = len(set(steps) - {0}), max(steps, default=0)


LARGEST_SHARE = 1.0
"""Larger shares of the training time are reported in seconds: 829 % of a run of 40 ms means nothing."""


class Cost(NamedTuple):
    """Wall time in seconds."""

    training: float = 0.0
    measuring: float = 0.0
    """All measurements, first and last included."""

    @property
    def overhead(self) -> float:
        """Measuring relative to training."""
        return self.measuring / self.training if self.training > 0 else 0.0

    @property
    def wall_share(self) -> float:
        """Measuring relative to training and measuring together."""
        whole = self.training + self.measuring
        return self.measuring / whole if whole > 0 else 0.0

    def __str__(self) -> str:
        small = self.overhead <= LARGEST_SHARE
        share = f"{percent(self.overhead)} of training" if small else f"training took {self.training:.2g} s"
        return f"{self.measuring:.1f} s of {sum(self):.1f} s for measuring, first and last included: {share}"


def percent(share: float) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * share:.2g} %" if share < 0.095 else f"{100 * share:.0f} %"


class Stopwatch:
    """Wall time of training and of measuring."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = clock()
        self._measured = 0.0
        self._open: float | None = None
        self._before, self._trained_before = Cost(), 0.0

    def resume(self, cost: Cost | None, trained: float) -> None:
        """Continue a run: its cost so far, None where that is unknown, and its seconds of training."""
        self._before, self._trained_before = cost or Cost(), trained

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count a block as measuring; blocks inside it count once."""
        if self._open is not None:
            yield
            return
        self._open = self._clock()
        try:
            yield
        finally:
            self._measured += self._clock() - self._open
            self._open = None

    @property
    def training(self) -> float:
        """Seconds of training in this process."""
        now = self._clock() if self._open is None else self._open
        return now - self._begun - self._measured

    @property
    def trained(self) -> float:
        """Seconds of training, with those of earlier processes."""
        return self._trained_before + self.training

    @property
    def cost(self) -> Cost:
        """Cost of the run, with that of earlier processes as far as it is known."""
        return Cost(self._before.training + self.training, self._before.measuring + self._measured)
