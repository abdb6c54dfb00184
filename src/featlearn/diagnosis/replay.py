"""Kernel descent with recorded kernels: with all of them in turn, and with the first one frozen."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from featlearn.diagnosis.logistic_flow import LogisticFlow
from featlearn.diagnosis.loss_kind import SQUARE, LossKind

FACTORS = 24
"""Most factors of 4 by which a rate is changed until its loss lies on the other side of a level."""
RESOLUTION = 1e-3
"""Relative error of a rate."""


@dataclass(frozen=True, eq=False)
class SquareFlow:
    """df/dt = -K (f - y) in the eigenbasis of the kernel."""

    values: Tensor
    """(P,)"""
    vectors: Tensor
    """(P, P)"""
    targets: Tensor
    """(P, C)"""

    def after(self, f: Tensor, begin: float, end: float) -> Tensor:
        """Return outputs (P, C) at a later time."""
        decay = torch.exp(-self.values * (end - begin))[:, None]
        return self.targets + self.vectors @ (decay * (self.vectors.mT @ (f - self.targets)))


@dataclass(frozen=True, eq=False)
class Replay:
    """df/dt = -rate K(t) (f - y), or with softmax(f) or sigmoid(f) for f, for kernels known at some times.

    All outputs share one kernel. Each interval uses the mean of the kernels at its ends, which is accurate to second
    order in its length.
    """

    kernels: Tensor
    """(T, P, P)"""
    times: Tensor
    """(T,) increasing, from 0"""
    start: Tensor
    """(P, C) outputs at time 0"""
    targets: Tensor
    """(P, C); probabilities for cross-entropy"""
    kind: LossKind = SQUARE

    @cached_property
    def _flows(self) -> list[SquareFlow | LogisticFlow]:
        """Descent with the kernel of each interval."""
        return [self._flow((one.double() + other.double()) / 2) for one, other in itertools.pairwise(self.kernels)]

    def _flow(self, kernel: Tensor) -> SquareFlow | LogisticFlow:
        values, vectors = torch.linalg.eigh((kernel + kernel.mT) / 2)
        values = values.clamp_min(0.0)
        if self.kind.logistic:
            return LogisticFlow(values, vectors, self.targets, self.kind)
        return SquareFlow(values, vectors, self.targets)

    def losses(self, rate: float) -> Tensor:
        """Return the losses (T,) with the recorded kernels."""
        return self._losses(self._flows, (rate * self.times).tolist())

    def frozen_losses(self, rated_times: Tensor) -> Tensor:
        """Return the losses (T,) after rate times time, in order, with the first kernel."""
        times = [0.0, *rated_times.tolist()]
        return self._losses([self._flow(self.kernels[0].double())] * len(rated_times), times)[1:]

    def _losses(self, flows: list[SquareFlow | LogisticFlow], times: list[float]) -> Tensor:
        f, losses = self.start, [self.kind.mean(self.start, self.targets)]
        for flow, (begin, end) in zip(flows, itertools.pairwise(times), strict=True):
            f = flow.after(f, begin, end)
            losses.append(self.kind.mean(f, self.targets))
        return torch.stack(losses)

    def rate_to(self, level: float) -> float | None:
        """Return the rate at which the loss reaches `level` at the last time; None if there is none."""
        from scipy.optimize import brentq

        def difference(log_rate: float) -> float:
            return float(self.losses(math.exp(log_rate))[-1]) - level

        scale = float(self.kernels[0].diagonal().mean()) * float(self.times[-1])
        if not 0 < scale < math.inf:
            return None
        sign = 1 if difference(-math.log(scale)) > 0 else -1
        places = [sign * math.log(4) * i - math.log(scale) for i in range(FACTORS)]
        beyond = next((place for place in places if sign * difference(place) <= 0), None)
        if beyond is None:
            return None
        return math.exp(brentq(difference, beyond - sign * math.log(4), beyond, xtol=RESOLUTION))
