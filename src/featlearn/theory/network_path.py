"""Predictions of a theory for one network: its path, and each assumption of the theory with a number."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, ratio
from featlearn.theory.arguments import checked_time_axis, checked_times
from featlearn.theory.prediction import Prediction


class Assumption(TypedDict):
    """One assumption of a theory, with the number that decides it."""

    name: str
    """What the theory assumes, for example "inputs are whitened"."""
    value: float
    """The number that was measured, for example the condition of the inputs."""
    holds: bool
    """Whether the number is inside the range in which the theory holds."""
    measure: str
    """What the number is and where its limit lies."""


def assumption(name: str, value: float | Tensor, most: float, measure: str, *, least: float = 0.0) -> Assumption:
    """Judge an assumption that holds while a number is between `least` and `most`."""
    number = float(value)
    return Assumption(name=name, value=number, holds=least <= number <= most, measure=measure)


@dataclass(frozen=True, eq=False)
class NetworkPath(Prediction):
    """Outputs and kernel that a theory predicts for one network over training; T times, P samples, C outputs."""

    theory: str
    """Name of the theory, for example "deep_linear"."""
    times: Tensor
    """(T,): with the learning rate and loss of a trainer, steps of training."""
    outputs: Tensor
    """(T, P) or (T, P, C), as the targets."""
    targets: Tensor
    """(P,) or (P, C)"""
    kernels: Callable[[Tensor], Tensor] = field(repr=False)
    """Kernels (T, P, P) of the training samples at times (T,), averaged over outputs as by `fl.ntk`."""
    assumptions: list[Assumption]
    """What the theory assumes, each with its number."""
    readings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further numbers of the theory; the docstring of its `from_network` names them."""

    @property
    def holds(self) -> bool:
        """Whether all assumptions hold."""
        return all(each["holds"] for each in self.assumptions)

    @property
    def loss(self) -> Tensor:
        """(T,): |f - y|^2, summed over samples and outputs."""
        return (self.outputs - self.targets).flatten(1).square().sum(1)

    def kernel(self, t: Any) -> Tensor:
        """Return the kernel of the training samples: (P, P) at one time, (T, P, P) at several, at any times."""
        asked = checked_times(t, "t")
        stack = self.kernels(checked_time_axis(asked, "t").to(self.times.device))
        return stack if asked.dim() else stack[0]

    @cached_property
    def _kernel_curves(self) -> Tensor:
        """(3, T): norm, trace, and kernel-task alignment."""
        rows = self.targets.reshape(len(self.targets), -1)
        task_norm = (rows.T @ rows).norm()
        curves = []
        for time in self.times:
            kernel = self.kernels(time[None])[0]
            overlap = (rows * (kernel @ rows)).sum()
            curves.append(torch.stack([kernel.norm(), kernel.trace(), ratio(overlap, kernel.norm() * task_norm)]))
        return torch.stack(curves, 1)

    @property
    def kernel_norm(self) -> Tensor:
        """(T,): Frobenius norm of the kernel."""
        return self._kernel_curves[0]

    @property
    def kernel_trace(self) -> Tensor:
        """(T,): trace of the kernel."""
        return self._kernel_curves[1]

    @property
    def alignment(self) -> Tensor:
        """(T,): kernel-task alignment."""
        return self._kernel_curves[2]

    def curves(self) -> dict[str, Tensor]:
        """Loss, and alignment, norm and trace of the kernel."""
        return {
            "loss": self.loss,
            "ntk/alignment": self.alignment,
            "ntk/norm": self.kernel_norm,
            "ntk/trace": self.kernel_trace,
        }

    def __str__(self) -> str:
        """Return the theory and its assumptions, one line each."""
        return "\n".join([f"{self.theory}: {'holds' if self.holds else 'does not hold'}", *lines(self.assumptions)])

    def __repr__(self) -> str:
        """Return the theory and sizes."""
        return f"NetworkPath({self.theory!r}, times={len(self.times)}, outputs={tuple(self.outputs.shape)})"


def lines(assumptions: Sequence[Assumption]) -> list[str]:
    """Return one line for each assumption: whether it holds, and its number."""
    return [
        f"  {each['name']}: {'yes' if each['holds'] else 'no'}, {each['measure']} {each['value']:.3g}"
        for each in assumptions
    ]


def checked_data(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return inputs as rows (P, D) and targets (P,) or (P, C), in double."""
    inputs, targets = checked_finite(x, "x").double(), checked_finite(y, "y").double()
    if inputs.dim() < 2 or targets.dim() not in (1, 2) or len(inputs) != len(targets) or not targets.numel():
        raise InputValueError(
            f"x has shape {tuple(inputs.shape)} and y {tuple(targets.shape)}, expected inputs (P, ...) and targets "
            "(P,) or (P, C); pass one-hot targets for classes"
        )
    return inputs.flatten(1), targets.to(inputs.device)


def path_times(times: Any, loss_left: Callable[[Tensor], float], unit: float) -> Tensor:
    """Return the times asked for, or 65 times until the share of the loss that is left no longer falls.

    Args:
        times: (T,), or None.
        loss_left: Loss at one time (1,), as a share of the first.
        unit: Time to begin with, such as the inverse of the largest rate.
    """
    if times is not None:
        return checked_time_axis(times, increasing=True)
    last, left = unit, loss_left(torch.tensor([unit], dtype=torch.float64))
    for _ in range(24):
        longer = loss_left(torch.tensor([2 * last], dtype=torch.float64))
        settled = left < 0.9 and longer > 0.97 * left
        last, left = 2 * last, longer
        if settled or left < 1e-3:
            break
    return torch.linspace(0, last, 65, dtype=torch.float64)
