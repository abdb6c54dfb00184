"""Whether learning features helped: test error of the network, beside chance and beside kernel regression."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featlearn.diagnosis.loss_kind import BINARY, SQUARE, declared
from featlearn.diagnosis.machine import as_matrix, kernels_at
from featlearn.diagnosis.rates import LossRates
from featlearn.diagnosis.run_data import RunData

RIDGE = 1e-3
"""Of the mean eigenvalue: regression without any would follow rounding."""
SAME = 0.01
"""A gain below this is none, however small its standard error."""
RESOLVED = 0.1
"""A gain that may be larger, by two standard errors, is not excluded by the test points."""
FITS = 0.9
"""Squared error on the probe, relative to a constant prediction, above which it does not fit what was trained."""

Helped = Literal["yes", "no", "cannot tell"]
Unit = Literal["misclassified", "variance", "labels", ""]


@dataclass(frozen=True, kw_only=True)
class Usefulness:
    """Test errors of a network, of kernel regression on the probe, and of the best constant prediction."""

    first: float
    """regression with the first kernel; nan if unknown"""
    later: float
    """regression with the last kernel; nan if unknown"""
    network: float
    """the network itself; nan if unknown"""
    constant: float
    """the most frequent class, or the mean of the targets"""
    error: float
    """standard error of later - first, over the test points"""
    gain_error: float
    """standard error of first - network"""
    learned_error: float
    """standard error of constant - network"""
    unit: Unit
    """"misclassified", a share of the test points; "labels", of their labels; "variance", the share that is missed"""
    samples: int
    """samples of the probe, on which the regression is trained"""
    tested: int = 0
    """samples of the test data"""
    reason: str = ""
    """why the regression, or everything, is unknown"""
    remedy: str = ""
    """what to pass to `fl.watch` so that it is known; empty if nothing helps"""

    @property
    def worse_than_constant(self) -> bool:
        """Whether regression with both kernels is worse than a constant prediction."""
        return min(self.first, self.later) >= self.constant

    @property
    def nothing_learnable(self) -> bool:
        """Whether neither the network nor regression with the first kernel is clearly better than a constant."""
        return self.learned is False and not self.first < self.constant - RESOLVED

    @property
    def learned(self) -> bool | None:
        """Whether the network is better than a constant prediction, by twice the standard error.

        False if its gain is at most `RESOLVED`, by twice the standard error. Else None: the test points cannot tell.
        """
        gain = self.constant - self.network
        if gain > 2 * _finite(self.learned_error):
            return True
        return False if self.most_learned <= RESOLVED else None

    @property
    def most_learned(self) -> float:
        """Largest gain over a constant prediction that the test points leave open: two standard errors above theirs."""
        return self.constant - self.network + 2 * _finite(self.learned_error)

    @property
    def helped(self) -> Helped:
        """Whether the network is better than regression with the first kernel, and than a constant prediction."""
        if self.learned is None:
            harmed = self.network - self.first > 2 * _finite(self.gain_error)
            return "no" if harmed and self.first < self.constant - RESOLVED else "cannot tell"
        if not self.learned:
            return "no"
        if not math.isfinite(self.first) or self.worse_than_constant:
            return "cannot tell"
        gain, margin = self.first - self.network, 2 * _finite(self.gain_error)
        if gain > max(margin, SAME):
            return "yes"
        return "no" if gain + margin <= RESOLVED else "cannot tell"


def usefulness(run_data: RunData) -> Usefulness:
    """Return the errors on the test points at the end of a run."""
    steps = run_data.array_steps("test")
    last = max(steps, default=-1)
    y = next((part for step in steps if (part := run_data.array("test", step, "y")) is not None), None)
    f = run_data.array("test", last, "f") if last > 0 else None
    if run_data.targets is None and y is None and "log-probability" not in str(run_data.run.config.get("readout")):
        return _unknown("the run has no targets")
    if last < 0:
        return _unknown("no test data", "Pass test=(x, y) to fl.watch to see whether that helped.")
    readout = str(run_data.run.config.get("readout"))
    if y is None and "log-probability" in readout:
        reason = "the readout is a log-probability of the targets, which kernel methods do not predict"
        before = run_data.array("test", min(steps), "f")
        if "mean log-probability" in readout and before is not None and f is not None:
            losses = [-float(outputs.double().mean()) for outputs in (before, f)]
            verb = "fell" if losses[1] < losses[0] else "rose"
            if all(map(math.isfinite, losses)):
                reason = f"test loss {verb} from {losses[0]:.3g} to {losses[1]:.3g}, but {reason}"
        return _unknown(reason)
    if y is None:
        return _unknown("the test data has no targets", "Pass test=(x, y) with targets to see whether that helped.")
    if f is None:
        return _unknown("the test data was not measured at the end")
    wanted, outputs = (part.double().reshape(len(part), -1) for part in (y, f))
    unit = _criterion(run_data)
    if not unit:
        network, reason = run_data.run.network, "the training loss is not known to be squared error or a cross-entropy"
        undeclared = network is None or network.loss is None
        return _unknown(reason, "Pass loss= to fl.watch to see whether that helped." if undeclared else "")
    if not bool((wanted != wanted[0]).any()):
        return _unknown("the targets of the test points are constant")
    network = _errors(run_data.loss_kind.predictions(outputs), wanted, unit)
    constant = _constant_errors(wanted, unit)
    kernels = [kernels_at(run_data, "kernel", step) for step in (0, last)]
    reason, first, later = "", None, None
    if kernels[0] is None or kernels[1] is None or run_data.targets is None or run_data.unfrozen:
        reason = "kernels between test points and probe were not recorded at both ends"
    else:
        try:
            first, later = (_errors(_predicted(run_data, *pair), wanted, unit) for pair in kernels if pair is not None)
        except RuntimeError:  # LinAlgError is one: a singular matrix
            reason = "the regression could not be computed"
    return Usefulness(
        first=_mean(first),
        later=_mean(later),
        network=_mean(network),
        constant=_mean(constant),
        error=_standard_error(first, later),
        gain_error=_standard_error(first, network),
        learned_error=_standard_error(constant, network),
        unit=unit,
        samples=run_data.samples,
        tested=len(wanted),
        reason=reason,
    )


def _criterion(run_data: RunData) -> Unit:
    """Return how errors are counted; empty if squared error does not fit what was trained."""
    probe = run_data.run.config.get("probe")
    if isinstance(probe, dict) and probe.get("classification") is True:
        return "misclassified" if run_data.loss_is_known or _classifies(run_data) else ""
    if run_data.loss_kind is BINARY and run_data.loss_is_known:
        return "labels"
    if run_data.loss_kind is not SQUARE or not run_data.loss_is_known:
        return ""
    y, loss = run_data.targets, run_data.loss
    if y is None or loss is None or declared(run_data.run.config.get("loss_convention")) is SQUARE:
        return "variance"
    spread = float((y.double() - y.double().mean(0)).square().sum(1).mean())
    # Fitted by its own loss, and yet no better than a constant in squared error: targets of another loss.
    return "" if run_data.loss_left < FITS and float(loss.values.min()) > FITS * spread else "variance"


def _classifies(run_data: RunData) -> bool:
    """Return whether the largest output is the class of most samples of the probe: half of the way from chance to all.

    Embeddings may have labels beside them, which are not what is trained.
    """
    y, steps = run_data.targets, run_data.array_steps("outputs")
    f = run_data.array("outputs", steps[-1], "f") if steps else None
    if y is None or f is None or f.numel() != y.numel():
        return False
    labels = y.argmax(1)
    chance = float(labels.bincount().max()) / len(labels)
    return float((f.reshape(y.shape).argmax(1) == labels).double().mean()) >= (1 + chance) / 2


def _unknown(reason: str, remedy: str = "") -> Usefulness:
    nan = math.nan
    return Usefulness(
        first=nan,
        later=nan,
        network=nan,
        constant=nan,
        error=nan,
        gain_error=nan,
        learned_error=nan,
        unit="",
        samples=0,
        reason=reason,
        remedy=remedy,
    )


def _predicted(run_data: RunData, kernel: Tensor, cross: Tensor) -> Tensor:
    """Return predictions (P', C) of regression on the probe."""
    targets, matrix = LossRates(run_data).targets, as_matrix(kernel).double()
    ridge = RIDGE * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64)
    rows = targets if len(matrix) == len(targets) else targets.reshape(-1, 1)
    predictions: Tensor = as_matrix(cross).double() @ torch.linalg.solve(matrix + ridge, rows)
    return predictions.reshape(len(cross), -1)


def _errors(predicted: Tensor, wanted: Tensor, unit: Unit) -> Tensor:
    """Return errors (P',) of the test points, whose mean is the error."""
    if unit == "misclassified":
        return (predicted.argmax(1) != wanted.argmax(1)).double()
    if unit == "labels":
        return ((predicted > 0.5) != (wanted > 0.5)).double().mean(1)
    return (predicted - wanted).square().sum(1) / _spread(wanted)


def _constant_errors(wanted: Tensor, unit: Unit) -> Tensor:
    """Return errors (P',) of the best constant prediction: the most frequent class, or the mean."""
    return _errors(wanted.mean(0).expand_as(wanted), wanted, unit)


def _spread(wanted: Tensor) -> Tensor:
    return (wanted - wanted.mean(0)).square().sum(1).mean()


def _mean(errors: Tensor | None) -> float:
    return math.nan if errors is None else float(errors.mean())


def _standard_error(before: Tensor | None, after: Tensor | None) -> float:
    """Return the standard error of the mean difference of paired errors (P',)."""
    if before is None or after is None or len(before) < 2:
        return math.nan
    return float((before - after).std()) / math.sqrt(len(before))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
