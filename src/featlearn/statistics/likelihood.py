"""Log-likelihoods of targets given outputs, and their first two derivatives."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from featlearn import losses
from featlearn.errors import InputValueError, did_you_mean

SMALLEST = 1e-200
"""Smallest probability whose square root is divided by."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Likelihood:
    """Likelihood of targets (P, C) at outputs (P, C), in float64. Squared errors have noise of standard deviation 1."""

    kind: Literal["mse", "cross-entropy", "bce"]
    outputs: Tensor
    targets: Tensor

    def log_probability(self, variance: float = 1.0) -> float:
        """Return the log-probability of all targets; `variance` is that of the noise of squared errors."""
        f, y = self.outputs, self.targets
        if self.kind == "cross-entropy":
            return float((y * f.log_softmax(1)).sum())
        if self.kind == "bce":
            return -float(functional.binary_cross_entropy_with_logits(f, y, reduction="sum"))
        return -0.5 * self.squared_error / variance - 0.5 * f.numel() * math.log(2 * math.pi * variance)

    @property
    def squared_error(self) -> float:
        """Sum of squared differences between outputs and targets."""
        return float((self.outputs - self.targets).square().sum())

    @property
    def curvature_root(self) -> Tensor:
        """Matrices L (P, C, C) with L L^T = the negative second derivative of the log-likelihood of each sample."""
        f = self.outputs
        if self.kind == "cross-entropy":  # diag(p) - p p^T = L L^T for L = diag(r) - p r^T with r = sqrt(p)
            p = f.softmax(1)
            root = p.sqrt()
            return root.diag_embed() - p[:, :, None] * root[:, None, :]
        if self.kind == "bce":
            return (f.sigmoid() * (-f).sigmoid()).sqrt().diag_embed()
        return torch.eye(f.shape[1]).to(f).expand(len(f), -1, -1)

    @property
    def whitened_slope(self) -> Tensor:
        """Vectors a (P, C) with L a = the derivative of the log-likelihood in the outputs."""
        f, y = self.outputs, self.targets
        if self.kind == "cross-entropy":
            p = f.softmax(1)
            return (y - p) / p.clamp(min=SMALLEST).sqrt()
        if self.kind == "bce":
            return (y - f.sigmoid()) / (f.sigmoid() * (-f).sigmoid()).clamp(min=SMALLEST).sqrt()
        return y - f


def likelihood_of(loss: losses.Loss, outputs: Tensor, y: Tensor) -> Likelihood:
    """Return the likelihood whose negative logarithm a named loss is, after a check of the targets."""
    kind = likelihood_kind(loss)
    name = losses.name(loss)
    assert name is not None
    losses.check_targets(name, outputs, y)
    y = y.detach().to(outputs.device)
    if kind == "cross-entropy" and y.shape != outputs.shape:
        if bool((y < 0).any()):
            raise InputValueError(f"y has classes from {int(y.min())}, expected 0 and above; leave ignored samples out")
        y = functional.one_hot(y, outputs.shape[1])
    return Likelihood(kind=kind, outputs=outputs.double(), targets=y.double().reshape(outputs.shape))


def likelihood_kind(loss: losses.Loss) -> Literal["mse", "cross-entropy", "bce"]:
    """Return which likelihood a loss stands for; refuse a loss that has none."""
    kind = losses.form(loss)
    if kind is None:
        names = ", ".join(map(repr, losses.NAMES))
        hint = did_you_mean(getattr(loss, "__name__", type(loss).__name__), losses.NAMES)
        raise InputValueError(f"loss is a function without a likelihood, expected one of {names}{hint}")
    return kind


def probabilities(kind: str, mean: Tensor, covariance: Tensor) -> Tensor | None:
    """Return class probabilities by MacKay's probit approximation; None for squared errors.

    For C classes all outputs of a sample are divided by sqrt(1 + pi/8 v), where v is C / (2 (C - 1)) times the variance
    of f_c - f_k, averaged over pairs of classes. It is MacKay's formula for C = 2. What is common to all outputs, which
    the data cannot determine, has no effect.

    Args:
        kind: Kind of the likelihood.
        mean: Outputs (P, C).
        covariance: Covariances (P, C, C).
    """
    if kind == "mse":
        return None
    variances = covariance.diagonal(dim1=1, dim2=2)
    if kind == "bce":
        return (mean / (1 + math.pi / 8 * variances).sqrt()).sigmoid()
    classes = mean.shape[1]
    pairs = (classes * variances.sum(1) - covariance.sum((1, 2))).clamp(min=0.0) / (classes - 1) ** 2
    return (mean / (1 + math.pi / 8 * pairs).sqrt()[:, None]).softmax(1)
