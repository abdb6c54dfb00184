"""Training of a linear network over time, in the quantities of a run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_rows, checked_time_axis, checked_times
from featlearn.theory.deep_linear.minimum_norm import modes, teacher
from featlearn.theory.prediction import Prediction


@dataclass(frozen=True, eq=False)
class LinearPath(Prediction):
    """A linear network over time, its kernel K(x, x') = x^T M(t) x' (traced, 1/C sum_c K^cc, for C outputs)."""

    times: Tensor
    X: Tensor
    """(P, D), the training inputs."""
    loss: Tensor
    """(T,): |f - y|^2"""
    weights: Tensor
    """(T, C, D): the product of the layers, f = weights x."""
    strength: Tensor
    """(T, R): of each mode of the teacher beta = sum_a s_a z_a v_a^T, largest s_a first: z_a^T weights v_a."""
    alignment: Tensor
    """(T,): kernel-task alignment."""
    kernel_norm: Tensor
    """(T,): Frobenius norm of the kernel (P, P)."""
    kernel_trace: Tensor
    """(T,)"""
    task: Tensor
    """(T,): y^T K y / |y|^2, for C outputs Tr(Y^T K Y) / |Y|^2."""
    metrics: Callable[[Tensor], Tensor]
    """M (T, D, D) at times (T,), which need not be those of the path."""
    layers: tuple[Tensor, ...] | None = None
    """The weight matrices, each (T, outputs, inputs), where they are known (`flow`)."""

    def curves(self) -> dict[str, Tensor]:
        """Loss, strength of the first mode, and the kernel's alignment, norm, trace and size along the task."""
        return {
            "loss": self.loss,
            "strength": self.strength[:, 0],
            "ntk/alignment": self.alignment,
            "ntk/norm": self.kernel_norm,
            "ntk/trace": self.kernel_trace,
            "ntk/task": self.task,
        }

    @property
    def outputs(self) -> Tensor:
        """(T, P, C): f on the training inputs."""
        return self.X @ self.weights.mT

    def kernel(self, t: Numbers, X1: Tensor | None = None, X2: Tensor | None = None) -> Tensor:
        """Return the kernel of `X1` (P1, D) with `X2` (P2, D), by default of the training inputs, at any time.

        (P1, P2) at one time, (T, P1, P2) at several.
        """
        asked = checked_times(t, "t")
        left = self.X if X1 is None else checked_rows(X1, "X1", self.X.shape[1]).to(self.X.device)
        right = left if X2 is None else checked_rows(X2, "X2", self.X.shape[1]).to(self.X.device)
        stack = left @ self.metrics(checked_time_axis(asked, "t").to(self.X.device)) @ right.T
        return stack if asked.dim() else stack[0]


@dataclass(frozen=True)
class Task:
    """A training set and its statistics that do not depend on its size."""

    X: Tensor
    """(P, D)"""
    targets: Tensor
    """(P, C)"""
    second: Tensor
    """X^T X (D, D)"""
    moment: Tensor
    """X^T Y (D, C)"""
    teacher: Tensor
    """beta (C, D), the interpolator of least norm"""
    z: Tensor
    """(C, R)"""
    s: Tensor
    """(R,), largest first"""
    v: Tensor
    """(R, D)"""

    @staticmethod
    def of(X: Tensor, y: Tensor) -> "Task":
        """Create a task from checked inputs (P, D) and targets (P,) or (P, C)."""
        targets = y.reshape(len(X), -1)
        weights = teacher(X, targets)
        z, s, v = modes(weights)
        mask = s > 0
        mask[0] = True
        return Task(X, targets, X.T @ X, X.T @ targets, weights, z[:, mask], s[mask], v[mask])

    def whitened(self) -> Tensor:
        """k with X^T X = k times a projector; an error for other inputs."""
        if not self.s[0] > 0:
            raise InputValueError("no part of y is linear in X, expected one: there is nothing to learn")
        values = torch.linalg.eigvalsh(self.second)
        values = values[values > 1e-10 * values[-1]]
        if float(values[-1] - values[0]) > 1e-6 * float(values[-1]):
            raise InputValueError(
                f"X^T X has eigenvalues from {values[0]:g} to {values[-1]:g}, expected whitened inputs, all but zeros "
                "equal; whiten them, or take deep_linear.flow, which holds for all"
            )
        size: Tensor = values.mean()
        return size

    def path(
        self,
        times: Tensor,
        weights: Tensor,
        metrics: Callable[[Tensor], Tensor],
        loss: Tensor | None = None,
        strength: Tensor | None = None,
        layers: tuple[Tensor, ...] | None = None,
    ) -> LinearPath:
        """Everything that follows from the product of the layers (T, C, D) and from M(t).

        `loss` and `strength` where they are known better than from `weights`.
        """
        if loss is None:
            loss = torch.stack([(self.X @ w.T - self.targets).square().sum() for w in weights])
        if strength is None:
            strength = torch.einsum("cr,tcd,rd->tr", self.z, weights, self.v)
        sums = torch.stack([self._kernel_sums(metrics(time[None])[0]) for time in times])  # (T, 3)
        overlap, square, trace = sums.unbind(1)
        norm = square.clamp(min=0).sqrt()
        return LinearPath(
            times=times,
            X=self.X,
            loss=loss,
            weights=weights,
            strength=strength,
            alignment=ratio(overlap, norm * (self.targets.T @ self.targets).norm()),
            kernel_norm=norm,
            kernel_trace=trace,
            task=overlap / self.targets.square().sum(),
            metrics=metrics,
            layers=layers,
        )

    def _kernel_sums(self, metric: Tensor) -> Tensor:
        """Compute <K, Y Y^T>, |K|^2, and the trace, without a P x P matrix."""
        product = metric @ self.second
        return torch.stack([(self.moment * (metric @ self.moment)).sum(), (product * product.T).sum(), product.trace()])
