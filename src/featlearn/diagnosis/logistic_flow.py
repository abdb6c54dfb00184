"""Training with a frozen kernel on a logistic loss, by implicit steps in the kernel's eigenbasis."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from featlearn.diagnosis.loss_kind import CROSS_ENTROPY, LossKind

RANK = 1e-7
"""Eigenvalues below this share of the largest are rounding of kernels in single precision."""
NEWTON, GRADIENTS = 12, 40
"""Most Newton steps of an implicit step, and most conjugate gradient steps of each."""
TOLERANCE = 1e-5
"""Residual of an implicit step, relative to its size."""
RATIO = 0.25
"""Length of a step as a share of the time already passed."""
INEXACT = 0.1
"""Residual of a Newton step; the next one removes it."""


@dataclass(frozen=True, eq=False)
class LogisticFlow:
    """df/dt = -K (predictions(f) - y), by implicit Euler steps: stable for steps of any length.

    An explicit method needs steps below the inverse of the largest eigenvalue, thousands of them. Each implicit step is
    a convex problem in the modes of the kernel, solved by Newton's method with preconditioned conjugate gradients.
    """

    values: Tensor
    """(N,) eigenvalues of the kernel, N = P, or P C for a kernel between all outputs"""
    vectors: Tensor
    """(N, N) their eigenvectors"""
    targets: Tensor
    """(P, C) probabilities"""
    kind: LossKind

    @cached_property
    def _scaled(self) -> Tensor:
        """(N, R) eigenvectors times the roots of the eigenvalues above rounding: K = B B^T."""
        large = self.values > RANK * self.values.max()
        return self.vectors[:, large] * self.values[large].sqrt()

    @cached_property
    def _sizes(self) -> Tensor:
        """(R, 1) eigenvalues above rounding."""
        return self._scaled.square().sum(0)[:, None]

    def _push(self, modes: Tensor) -> Tensor:
        """Map coefficients of modes, (R, C) or (R, 1), to outputs (P, C)."""
        return (self._scaled @ modes).reshape(self.targets.shape)

    def _pull(self, slope: Tensor) -> Tensor:
        """Return the modes of a slope (P, C)."""
        rows = slope if len(self._scaled) == len(slope) else slope.reshape(-1, 1)
        return self._scaled.mT @ rows

    def step(self, f: Tensor, length: float, guess: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs (P, C) after a time, their slope predictions - y, and modes that guess the next step."""
        u = torch.zeros_like(self._pull(f)) if guess is None else guess
        slope, residual, error = self._residual(f, u, length)
        for _ in range(NEWTON):
            if error <= TOLERANCE * float(u.norm()):
                break
            direction = self._newton(slope + self.targets, residual, length)
            share = 1.0
            while True:  # the residual of a convex problem falls along a Newton direction, for a short enough step
                trial = u - share * direction
                trial_slope, trial_residual, trial_error = self._residual(f, trial, length)
                if trial_error < error or share < 1e-3:
                    break
                share /= 2
            u, slope, residual, error = trial, trial_slope, trial_residual, trial_error
        return f - self._push(u), slope, u

    def _residual(self, f: Tensor, u: Tensor, length: float) -> tuple[Tensor, Tensor, float]:
        slope = self.kind.predictions(f - self._push(u)) - self.targets
        residual = u - length * self._pull(slope)
        return slope, residual, float(residual.norm())

    def _newton(self, p: Tensor, residual: Tensor, length: float) -> Tensor:
        """Solve (1 + length B^T H B) x = residual by conjugate gradients, H the curvature at predictions p."""

        def product(modes: Tensor) -> Tensor:
            change = self._push(modes)
            if self.kind is CROSS_ENTROPY:
                curved = p * (change - (p * change).sum(1, keepdim=True))
            else:
                curved = p * (1 - p) * change
            return modes + length * self._pull(curved)

        scale = 1 + length * float((p * (1 - p)).mean()) * self._sizes
        x = torch.zeros_like(residual)
        r, limit = residual, INEXACT * float(residual.norm())
        z = r / scale
        direction, power = z, float((r * z).sum())
        for _ in range(GRADIENTS):
            image = product(direction)
            share = power / max(float((direction * image).sum()), 1e-300)
            x, r = x + share * direction, r - share * image
            if float(r.norm()) <= limit:
                break
            z = r / scale
            before, power = power, float((r * z).sum())
            direction = z + power / before * direction
        return x

    def after(self, f: Tensor, begin: float, end: float) -> Tensor:
        """Return outputs (P, C) at a later time."""
        modes = None
        for length in steps_within(begin, end, RATIO):
            f, _, modes = self.step(f, length, modes)
        return f


def steps_within(begin: float, end: float, ratio: float) -> list[float]:
    """Return the lengths of steps from one time to a later one, each at most `ratio` of the time already passed."""
    lengths, time = [], begin
    while time < end:
        length = min(max(ratio * time, 1e-3 * end), end - time)
        lengths.append(length)
        time = end if math.isclose(time + length, end) else time + length
    return lengths
