"""Kernel descent with recorded kernels: with all of them in turn, and with the first one frozen."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from featlearn.diagnosis.logistic_flow import LogisticFlow, steps_within
from featlearn.diagnosis.loss_kind import SQUARE, LossKind

SUBSTEPS = 4000
"""Largest number of replayed steps of cross-entropy descent."""
RATIO = 0.25
"""Length of implicit steps with a frozen kernel, as a share of the time already passed."""
STRIDE = 0.5
"""Their step size times the largest eigenvalue: the derivative of softmax is at most 1/2."""


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
    def _modes(self) -> list[tuple[Tensor, Tensor]]:
        """Eigenvalues and eigenvectors of the first kernel, then of the kernel in each interval."""
        middle = (self.kernels[1:].double() + self.kernels[:-1].double()) / 2
        return [_modes(kernel) for kernel in [self.kernels[0].double(), *middle]]

    def loss(self, rate: float) -> float:
        """Loss at the last time, with the recorded kernels."""
        f = self.start
        for (values, vectors), length in zip(self._modes[1:], self.times.diff().tolist(), strict=True):
            f = self._moved(f, values, vectors, rate * length)
        return self._loss(f)

    def frozen_losses(self, rated_times: Tensor) -> Tensor:
        """Losses (T,) after rate times time, in order, with the first kernel."""
        values, vectors = self._modes[0]
        if not self.kind.logistic:
            # in eigenmodes; residuals in the null space stay
            power = (vectors.mT @ (self.start - self.targets)).square().sum(1)
            return torch.exp(-2 * values * rated_times[:, None]) @ power / len(self.targets)
        flow = LogisticFlow(values, vectors, self.targets, self.kind)
        losses, f, done, modes = [], self.start, 0.0, None
        for time in rated_times.tolist():
            for length in steps_within(done, time, RATIO):
                f, _, modes = flow.step(f, length, modes)
            done = time
            losses.append(self._loss(f))
        return torch.tensor(losses, dtype=torch.float64)

    def _moved(self, f: Tensor, values: Tensor, vectors: Tensor, length: float) -> Tensor:
        if not self.kind.logistic:
            away = vectors.mT @ (f - self.targets)
            return self.targets + vectors @ (torch.exp(-values * length)[:, None] * away)
        parts = max(1, math.ceil(length * float(values[-1]) / STRIDE))
        if parts > SUBSTEPS:
            raise TooStiffError
        kernel = (vectors * (values * length / parts)) @ vectors.mT
        for _ in range(parts):
            f = f - kernel @ (self.kind.predictions(f) - self.targets)
        return f

    def _loss(self, f: Tensor) -> float:
        return float(self.kind.mean(f, self.targets))

    def rate_to(self, level: float) -> float | None:
        """The rate at which the loss reaches `level` at the last time; None if none is found."""
        return _crossing(lambda rate: self.loss(rate) - level, 1 / self._scale(float(self.times[-1])))

    def _scale(self, time: float) -> float:
        """A typical decay rate of the first kernel times a time."""
        return float(self._modes[0][0].mean().clamp_min(1e-300)) * time


def _modes(kernel: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh((kernel + kernel.mT) / 2)
    return values.clamp_min(0.0), vectors


class TooStiffError(Exception):
    """Raised if descent needs more than SUBSTEPS steps."""


def _crossing(difference: Callable[[float], float], guess: float) -> float | None:
    """The zero of a falling function of a positive number, by bisection in its logarithm; None if there is none.

    Arguments that are too stiff count as beyond the zero.
    """

    def beyond(at: float) -> tuple[bool, bool]:
        """Whether a number is beyond the zero, and whether that was evaluated."""
        try:
            return difference(at) <= 0, True
        except TooStiffError:
            return True, False

    low = high = guess
    # Written so that a nan guess ends the search, too.
    while 1e-60 <= low <= 1e60 and beyond(low)[0]:
        low /= 4
    while 1e-60 <= low <= high <= 1e60 and not beyond(high)[0]:
        high *= 4
    if not 1e-60 <= low <= high <= 1e60:
        return None
    seen = beyond(high)[1]
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        passed, known = beyond(middle)
        low, high = (low, middle) if passed else (middle, high)
        seen = seen or (passed and known)
    return math.sqrt(low * high) if seen else None
