"""When the kernel settled: the step from which descent with the frozen kernel predicts the rest of the loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.diagnosis.evidence import SETTLED
from featlearn.diagnosis.rates import LossRates, TimeScale, Unknown
from featlearn.diagnosis.replay import Replay
from featlearn.diagnosis.run_data import Curve, RunData, evenly

CANDIDATES = 25
"""Largest number of steps tried; fewer for cross-entropy, whose descent is integrated step by step."""
CANDIDATES_OF_ENTROPY = 5
COMPARED_OF_ENTROPY = 5
"""Number of later losses that a prediction is compared with, for cross-entropy."""
LEFT = 0.3
"""Logarithm of the factor by which the loss must still fall for a prediction to be meaningful."""
FLOOR = 1e-13
"""Share of the first loss below which it is rounding error: outputs in float32 leave a residual of 1e-7."""
PLATEAU = 1e-9
"""A loss that fell below this share of the first is at its rounding floor within ten times its lowest value."""
STILL = 1e-6
"""Relative change below which a kernel counts as constant: it is settled from the start."""
FREE = 2.0
"""Factor by which a fitted rate may differ from the overall one."""


@dataclass(frozen=True)
class Settling:
    """When the kernel settled."""

    step: float
    """nan if it did not settle while the loss still fell"""
    error: float
    """largest error of the predicted logarithm of the loss from there; of the best step, if it did not settle"""
    fitted: bool
    """whether the rate was fitted within a factor of two, because terms between outputs were not recorded or the
    learning rate is unknown"""
    still: bool = False
    """whether the kernel never moved; `error` is then its relative change"""


def settling(rates: LossRates) -> Settling | Unknown:
    """Try the recorded steps in turn."""
    run_data, scale = rates.run_data, rates.best
    loss = None if run_data.loss is None else above_rounding(run_data.loss)
    if loss is None or len(run_data.kernel_steps) < 3:
        return Unknown("too few kernels and losses were recorded")
    change = _change(run_data)
    if change <= STILL:
        return Settling(0.0, change, fitted=False, still=True)
    if not isinstance(scale, TimeScale):
        return scale
    logistic = run_data.loss_kind.logistic
    factors = [1.0] if rates.exact else [FREE ** (i / 4) for i in range(-4, 5, 4 if logistic else 1)]
    best = math.inf
    for step in evenly(run_data.kernel_steps, CANDIDATES_OF_ENTROPY if logistic else CANDIDATES):
        later = loss.steps > step
        now = float(loss.at(torch.tensor([float(step)])))
        if int(later.sum()) < 3 or now <= loss.last * math.exp(LEFT):
            break
        rest = _thinned(loss, later, logistic=logistic)
        error = _error(rates, step, [scale.rate * factor for factor in factors], rest)
        if error <= SETTLED.high:
            return Settling(float(step), error, fitted=not rates.exact)
        best = min(best, error)
    if math.isinf(best):
        return Unknown("the loss on the probe hardly fell while kernels were recorded")
    return Settling(math.nan, best, fitted=not rates.exact)


def _thinned(loss: Curve, later: Tensor, *, logistic: bool) -> Curve:
    """Return the later losses, some of them for a logistic loss, whose descent is followed step by step."""
    steps, values = loss.steps[later], loss.values[later]
    if not logistic or len(steps) <= COMPARED_OF_ENTROPY:
        return Curve(steps, values)
    some = list(evenly(range(len(steps)), COMPARED_OF_ENTROPY))
    return Curve(steps[some], values[some])


def _change(run_data: RunData) -> float:
    """Largest change of the kernel, including its norm, relative to the first; nan if that is missing."""
    steps = run_data.kernel_steps
    if steps[0] != 0:
        return math.nan
    first = run_data.kernel(0).double()
    return max(float((run_data.kernel(step).double() - first).norm() / first.norm()) for step in steps[1:])


def above_rounding(loss: Curve) -> Curve | None:
    """The loss until it reaches the rounding floor; None if that leaves fewer than two measurements."""
    lowest = float(loss.values.min())
    floor = max(FLOOR * loss.first, 10 * lowest if lowest < PLATEAU * loss.first else 0.0)
    below = (loss.values <= floor).nonzero().flatten()
    end = int(below[0]) if len(below) else len(loss.steps)
    return Curve(loss.steps[:end], loss.values[:end]) if end > 1 else None


def _error(rates: LossRates, step: int, tried: list[float], rest: Curve) -> float:
    """Largest difference between predicted and measured log loss over the rest, for the best rate."""
    run_data = rates.run_data
    since = rates.elapsed.at(rest.steps) - rates.elapsed.at(torch.tensor([float(step)]))
    measured = rest.values.clamp_min(1e-300).log()
    replay = Replay(
        run_data.kernel(step)[None], torch.zeros(1), run_data.outputs(step), rates.targets, run_data.loss_kind
    )
    errors = []
    for rate in tried:
        predicted = replay.frozen_losses(rate * since)
        errors.append(float((predicted.clamp_min(1e-300).log() - measured).abs().max()))
    return min(errors, default=math.inf)
