"""Losses of single samples in the layout of a replay: outputs (n, C, M) of M replays, and what is read from them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from featlearn import losses
from featlearn.errors import InputValueError

FACTORS = {"mean": 2.0, "mean-half": 1.0, "sum-half": 1.0}
"""Derivative of a squared error over its residual; 2 / C where the loss is a mean over outputs."""


@dataclass(frozen=True)
class Objective:
    """A named training loss, as a mean or a sum over the samples of a batch."""

    kind: Literal["mse", "cross-entropy", "bce"]
    factor: float
    """Factor of the derivative of a sample's loss."""
    averaged: bool
    """Whether the loss is a mean over samples."""

    def slopes(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of each sample's loss in its outputs, for f (n, C, M) and targets y (n, C, M or 1)."""
        predicted = f.softmax(1) if self.kind == "cross-entropy" else f.sigmoid() if self.kind == "bce" else f
        return self.factor * (predicted - y)

    def values(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample (n, M)."""
        if self.kind == "cross-entropy":
            return -(y * f.log_softmax(1)).sum(1)
        if self.kind == "bce":
            return self.factor * (functional.softplus(f) - y * f).sum(1)
        return self.factor / 2 * (f - y).square().sum(1)

    def curvature(self, f: Tensor) -> float:
        """Return the second derivative of a sample's loss, summed over outputs where they interact, for f (n, C)."""
        if self.kind == "mse":
            return self.factor
        p = f.softmax(1) if self.kind == "cross-entropy" else f.sigmoid()
        each = p * (1 - p)
        return self.factor * float((each.sum(1) if self.kind == "cross-entropy" else each.amax(1)).mean())

    def margins(self, f: Tensor, y: Tensor) -> Tensor:
        """Return how far each target is ahead (n, M).

        For classes: the output of the right class less the log-sum-exp of the others. For one output, and for
        independent labels: outputs times the sign of the targets, averaged.
        """
        if f.shape[1] > 1 and self.kind != "bce":
            right = (y == y.amax(1, keepdim=True)).expand_as(f)
            return (f * right).sum(1) - f.masked_fill(right, -torch.inf).logsumexp(1)
        return (f * (y - (0.5 if self.kind == "bce" else 0.0)).sign()).mean(1)


def objective_of(loss: losses.Loss, outputs: int) -> Objective:
    """Return the objective of a named loss; refuse others."""
    name, kind = losses.name(loss), losses.form(loss)
    if name is None or kind is None:
        raise InputValueError(f"the loss has no name, expected one of {', '.join(map(repr, losses.NAMES))}")
    mean_over_outputs = {"mse": 2.0, "mean-over-outputs": 2.0, "bce": 1.0}
    factor = mean_over_outputs[name] / outputs if name in mean_over_outputs else FACTORS.get(name, 1.0)
    return Objective(kind, factor, name != "sum-half")


def target_rows(loss: losses.Loss, f: Tensor, y: Tensor, name: str = "y") -> Tensor:
    """Return targets as rows (P, C), after a check: classes become one-hot rows for cross-entropy."""
    known = losses.name(loss)
    assert known is not None
    try:
        losses.check_targets(known, f, y)
        if y.shape != f.shape and known == "cross-entropy" and bool((y < 0).any()):
            raise InputValueError("there are ignored samples, expected classes >= 0; leave these samples out")
    except InputValueError as error:
        raise InputValueError(f"the targets of {name} do not fit the loss {known!r}: {error}") from error
    if known == "cross-entropy" and y.shape != f.shape:
        y = functional.one_hot(y.long(), f.shape[1])
    return y.reshape(f.shape).to(f)
