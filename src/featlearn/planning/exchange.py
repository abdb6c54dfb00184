"""Which of two exchanges each parameter takes when the samples of a kernel are divided among ranks.

The code that runs and the model of its costs ask here, with the numbers of the same plan.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.gradients.directions import OutputSelection
from featlearn.measurement import Measurement
from featlearn.planning.plan import ParameterGroup

if TYPE_CHECKING:
    from featlearn.planning.plan import Plan

# Multiply-adds of forming gradients in the time in which a number is sent: 30 to 40 were measured with gloo on two
# cores; between GPUs of one node it is some 200 at the full rate of both.
SENT = 64
SHARE = 4
"""Slices are taken where kernels of all pairs of samples fit into this part of the memory budget of a rank."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter whose gradients ranks exchange: numbers of one sample, all output directions together."""

    name: str
    size: float
    """Entries of its gradient."""
    kept: float
    """Numbers that are kept of a sample: factors, or the gradient where it is formed early."""
    positions: float
    """Products that an entry of the gradient is formed from; 0 where the backward pass gives it."""
    pair: float | None = None
    """Multiply-adds for a pair of samples where pairs of positions are multiplied; None where gradients are formed."""
    early: bool = False
    """Whether gradients are formed before they are exchanged."""


@dataclass(frozen=True)
class SharedKernel:
    """A kernel whose samples are divided among ranks."""

    ranks: int
    samples: tuple[int, int]
    symmetric: bool
    entries: int
    """Numbers of one kernel of all samples."""
    kernels: int
    """How many there are, one for each layer, say."""
    itemsize: int
    memory: float
    """The byte budget of a rank."""

    @property
    def held(self) -> int:
        """Bytes of all kernels of all samples."""
        return self.entries * self.kernels * self.itemsize

    @property
    def turns(self) -> int:
        """How many other ranks the gradients of a rank travel to in a ring; each of them forms those it receives."""
        return self.ranks // 2 if self.symmetric else self.ranks - 1

    @property
    def reserved(self) -> int:
        """Bytes of the budget that are left for kernels of all pairs of samples, which slices need; 0 for a ring."""
        return self.held if self.ranks > 1 and self.held <= self.memory / SHARE else 0

    def sliced(self, parameters: Iterable[SharedParameter], groups: Iterable[ParameterGroup] = ()) -> frozenset[str]:
        """The parameters of which every rank takes a slice; all others travel around a ring.

        Those that are sent and formed in less time that way, if together they gain what it takes to add up the kernels
        of all ranks. `groups`: of the plan; slices are taken where the gradients of all samples of a rank are held at
        once.
        """
        if not self.reserved:
            return frozenset()
        share = max(-(-count // self.ranks) for count in self.samples)
        in_blocks = {name for group in groups if group.block < share for name in group.names}
        gains = {one.name: self._gain(one) for one in parameters if one.pair is None and one.name not in in_blocks}
        gains = {name: gain for name, gain in gains.items() if gain > 0}
        return frozenset(gains) if sum(gains.values()) > self.entries * self.kernels else frozenset()

    def _gain(self, one: SharedParameter) -> float:
        """What slices save, in numbers that a rank sends in the same time.

        With slices each rank forms the gradients of its own samples, in a ring those that it receives, too.
        """
        left, right = (-(-count // self.ranks) for count in self.samples)
        formed = 0.0 if one.early else one.size * one.positions / SENT
        slices = (left if self.symmetric else left + right) * (one.size + formed)
        return right * (one.kept + formed) * self.turns + left * formed - slices


def shared_kernel(
    ranks: int,
    samples: tuple[int, int],
    symmetric: bool,
    directions: OutputSelection,
    measurement: Measurement,
    by: str,
    memory: int,
) -> SharedKernel:
    """The kernels of a measurement, of so many samples on all ranks together."""
    entries = math.prod(directions.kernel_shape(*samples))
    kernels = len(set(kernel_keys(measurement.parameters, by).values()))
    return SharedKernel(ranks, samples, symmetric, entries, kernels, measurement.dtype.itemsize, memory)


def shared_parameters(plan: "Plan", itemsize: int) -> list[SharedParameter]:
    """The parameters of the plan of a rank; those that the few samples do not use are left out, and go round."""
    pairs = math.prod(plan.samples)
    return [
        SharedParameter(
            p.name,
            math.prod(p.shape) * plan.directions,
            p.kept // itemsize,
            p.positions,
            p.operations / pairs if p.route == "pairs" else None,
            p.form_early,
        )
        for p in plan.parameters
        if p.uses
    ]
