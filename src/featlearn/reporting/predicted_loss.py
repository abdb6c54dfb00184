"""Losses predicted by kernels: the first one frozen, the first one rescaled to its later norm, all recorded ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.rates import Unknown
from featlearn.diagnosis.replay import Replay
from featlearn.diagnosis.run_data import Curve, evenly

SAMPLES = 128
"""Largest number of probe samples for cross-entropy, whose descent is integrated step by step."""
REPLAYED = 40
"""Largest number of kernels in the evolving prediction."""


@dataclass(frozen=True)
class PredictedLoss:
    """Predicted losses in the unit of the measured loss, at its steps."""

    frozen: Curve
    rescaled: Curve
    """with the first kernel times |K(t)| / |K(0)|: the effect of growth alone (aKGD of Shan & Bordelon 2021a)"""
    evolving: Curve | None
    """with the recorded kernels; None for cross-entropy"""
    source: str
    """the source of the rate, in words"""


def predicted_loss(findings: Findings) -> PredictedLoss | Unknown:
    """The losses on the probe that the recorded kernels of a run predict."""
    rates, run_data = findings.rates, findings.run_data
    loss, steps = run_data.loss, run_data.kernel_steps
    if loss is None or len(steps) < 2 or steps[0] != 0:
        return Unknown("kernels with outputs and targets, from step 0 on, and the loss on the probe are needed")
    scale = rates.best
    if isinstance(scale, Unknown):
        return scale
    rate, source = scale.rate, scale.source
    kernels = [run_data.kernel(step).double() for step in steps]
    growth = Curve(_steps(steps), torch.stack([kernel.norm() for kernel in kernels]) / kernels[0].norm())
    elapsed = rates.elapsed.at(loss.steps)
    size = growth.at(loss.steps)
    grown = torch.cat([elapsed[:1], elapsed[:1] + ((size[1:] + size[:-1]) / 2 * elapsed.diff()).cumsum(0)])
    some = slice(None)
    if run_data.loss_kind.logistic and len(kernels[0]) > SAMPLES:
        some = slice(None, None, -(-len(kernels[0]) // SAMPLES))
        source += f"; on one in {-(-len(kernels[0]) // SAMPLES)} samples of the probe"
    start, targets = run_data.outputs(0)[some], rates.targets[some]
    replay = Replay(kernels[0][some, some][None], torch.zeros(1), start, targets, run_data.loss_kind)
    return PredictedLoss(
        Curve(loss.steps, replay.frozen_losses(rate * elapsed)),
        Curve(loss.steps, replay.frozen_losses(rate * grown)),
        None if run_data.loss_kind.logistic else _evolving(findings, rate),
        source,
    )


def _steps(steps: Sequence[int]) -> Tensor:
    return torch.tensor(steps, dtype=torch.float64)


def _evolving(findings: Findings, rate: float) -> Curve:
    """Return the losses of descent with the recorded kernels."""
    run_data, rates = findings.run_data, findings.rates
    steps = evenly(run_data.kernel_steps, REPLAYED)
    kernels = torch.stack([run_data.kernel(step) for step in steps])
    replay = Replay(kernels, rates.elapsed.at(_steps(steps)), run_data.outputs(0), rates.targets)
    return Curve(_steps(steps), replay.losses(rate))
