"""Whether training made a better kernel: test error of regression with the first and with the last one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.diagnosis.loss_speed import LossSpeed
from featlearn.diagnosis.machine import kernels_at
from featlearn.diagnosis.run_data import RunData
from featlearn.dynamics import kernel_regression
from featlearn.errors import FeatlearnError

RIDGE = 1e-3
"""Of the mean eigenvalue: regression without any would follow rounding."""


@dataclass(frozen=True)
class Usefulness:
    """Test error of kernel regression on the probe; rich is not the same as good."""

    first: float
    """with the first kernel"""
    later: float
    """with the last kernel"""
    network: float
    """of the network itself"""
    error: float
    """standard error of later - first, over the test points"""
    unit: str
    """"misclassified", a share of the test points, or "variance", the share of the targets' that is missed"""
    reason: str = ""
    """why it is unknown"""

    @property
    def better(self) -> bool | None:
        """Whether the later kernel has the smaller error, by twice its standard error; None if that is not known."""
        change = self.later - self.first
        return change < 0 if abs(change) > 2 * self.error else None


def usefulness(run_data: RunData) -> Usefulness:
    """Regression on the probe with the kernels of the first and the last measurement."""
    last = max(run_data.array_steps("test"), default=-1)
    y = run_data.array("test", 0, "y")
    pairs = [kernels_at(run_data, "kernel", step) for step in (0, last)]
    f = run_data.array("test", last, "f")
    if last <= 0 or y is None or f is None or run_data.targets is None or pairs[0] is None or pairs[1] is None:
        return _unknown("kernels between test points and probe were not recorded at both ends")
    wanted = y.double().reshape(len(y), -1)
    probe = run_data.run.config.get("probe")
    labels = isinstance(probe, dict) and probe.get("classification") is True
    if not labels and not bool((wanted != wanted[0]).any()):
        return _unknown("the targets of the test points are constant")
    try:
        first, later = (_errors(_predicted(run_data, *pair), wanted, labels) for pair in pairs if pair is not None)
    except (FeatlearnError, RuntimeError):
        return _unknown("the regression could not be computed")
    network = _errors(run_data.loss_kind.predictions(f.double().reshape(len(f), -1)), wanted, labels)
    noise = float((later - first).std()) / math.sqrt(len(first)) if len(first) > 1 else math.nan
    return Usefulness(
        float(first.mean()),
        float(later.mean()),
        float(network.mean()),
        noise,
        "misclassified" if labels else "variance",
    )


def _unknown(reason: str) -> Usefulness:
    return Usefulness(math.nan, math.nan, math.nan, math.nan, "", reason)


def _predicted(run_data: RunData, kernel: Tensor, cross: Tensor) -> Tensor:
    targets = LossSpeed(run_data).targets
    diagonal = torch.einsum("ppcc->pc", kernel) if kernel.dim() == 4 else kernel.diagonal()
    found = kernel_regression(kernel, targets, cross, ridge=RIDGE * float(diagonal.double().mean()))
    return found.reshape(len(cross), -1)


def _errors(predicted: Tensor, wanted: Tensor, labels: bool) -> Tensor:
    """(P',) errors of the test points, whose mean is the error."""
    if labels:
        return (predicted.argmax(1) != wanted.argmax(1)).double()
    spread = (wanted - wanted.mean(0)).square().sum(1).mean()
    return (predicted - wanted).square().sum(1) / spread
