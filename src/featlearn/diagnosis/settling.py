"""When the kernel settled: the step from which descent with the frozen kernel predicts the rest of the loss."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.diagnosis.evidence import POWER_LAW, SETTLED
from featlearn.diagnosis.loss_speed import LossSpeed, TimeScale, Unknown
from featlearn.diagnosis.replay import Replay
from featlearn.diagnosis.run_data import Curve

CANDIDATES = 25
"""Largest number of steps tried; fewer for cross-entropy, whose descent is integrated step by step."""
CANDIDATES_OF_ENTROPY = 5
COMPARED_OF_ENTROPY = 5
"""Number of later losses that a prediction is compared with, for cross-entropy."""
LEFT = 0.3
"""Logarithm of the factor by which the loss must still fall for a prediction to be meaningful."""
FALLING = 0.9
"""Share of the first loss below which its exponent is computed."""
SPAN = 3.0
"""Smallest factor of time over which the law of the loss is determined: over less, an exponential and a power law look
alike."""
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
    """When the kernel settled, and how the loss fell before and after."""

    step: float
    """nan if it did not settle while the loss still fell"""
    error: float
    """largest error of the predicted logarithm of the loss from there; of the best step, if it did not settle"""
    fitted: bool
    """whether the rate was fitted within a factor of two, because terms between outputs were not recorded or the
    learning rate is unknown"""
    before: tuple[float, float] | None
    """local exponents -d log loss / d log time in the first and the second half of the time before it settled, or of
    the whole time if it did not"""
    after: tuple[float, float] | None
    """the same after it settled"""
    still: bool = False
    """whether the kernel never moved; `error` is then its relative change"""


def settling(loss_speed: LossSpeed) -> Settling | Unknown:
    """Try the recorded steps in turn."""
    run_data, time_scale, speed = loss_speed.run_data, loss_speed.time_scale, loss_speed.speed
    loss = None if run_data.loss is None else above_rounding(run_data.loss)
    if loss is None or len(run_data.kernel_steps) < 3:
        return Unknown("too few kernels and losses were recorded")
    elapsed = Curve(loss.steps, loss_speed.elapsed.at(loss.steps))
    change = _change(loss_speed)
    if change <= STILL:
        return Settling(0.0, change, False, None, _exponents(loss, elapsed, 0.0, math.inf), still=True)
    exact = run_data.targets is not None and run_data.targets.shape[1] == 1 and isinstance(time_scale, TimeScale)
    if exact and isinstance(time_scale, TimeScale):
        rate = time_scale.rate
    elif not isinstance(speed, Unknown):
        rate = speed.rate
    else:
        return Unknown(f"no rate is known: {speed.reason}")
    rates = torch.tensor([1.0]) if exact else torch.logspace(-math.log10(FREE), math.log10(FREE), 9)
    rates = rate * rates.double()
    most = CANDIDATES_OF_ENTROPY if run_data.loss_kind.logistic else CANDIDATES
    best, found = math.inf, math.nan
    for step in _some(run_data.kernel_steps, most):
        later = loss.steps > step
        now = float(loss.at(torch.tensor([float(step)])))
        if int(later.sum()) < 3 or now <= loss.last * math.exp(LEFT):
            break
        tried = rates[::4] if run_data.loss_kind.logistic else rates
        error = _error(loss_speed, step, tried, _thinned(loss, later, logistic=run_data.loss_kind.logistic))
        best = min(best, error)
        if error <= SETTLED.high:
            found = float(step)
            break
    if math.isinf(best):
        return Unknown("the loss on the probe hardly fell while kernels were recorded")
    before, after = _exponents(loss, elapsed, 0.0, found), _exponents(loss, elapsed, found, math.inf)
    return Settling(found, best, not exact, before, after)


def _thinned(loss: Curve, later: Tensor, *, logistic: bool) -> Curve:
    """Return the later losses, some of them for a logistic loss, whose descent is followed step by step."""
    steps, values = loss.steps[later], loss.values[later]
    if not logistic or len(steps) <= COMPARED_OF_ENTROPY:
        return Curve(steps, values)
    some = torch.linspace(0, len(steps) - 1, COMPARED_OF_ENTROPY).round().long()
    return Curve(steps[some], values[some])


def _change(loss_speed: LossSpeed) -> float:
    """Largest change of the kernel, including its norm, relative to the first; nan if that is missing."""
    run_data, steps = loss_speed.run_data, loss_speed.run_data.kernel_steps
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


def _some(steps: list[int], most: int) -> list[int]:
    if len(steps) <= most:
        return steps
    return sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})


def _error(loss_speed: LossSpeed, step: int, rates: Tensor, rest: Curve) -> float:
    """Largest difference between predicted and measured log loss over the rest, for the best rate."""
    run_data = loss_speed.run_data
    since = loss_speed.elapsed.at(rest.steps) - loss_speed.elapsed.at(torch.tensor([float(step)]))
    measured = rest.values.clamp_min(1e-300).log()
    replay = Replay(
        run_data.kernel(step)[None], torch.zeros(1), run_data.outputs(step), loss_speed.targets, run_data.loss_kind
    )
    errors = []
    for rate in rates.tolist():
        predicted = replay.frozen_losses(rate * since)
        errors.append(float((predicted.clamp_min(1e-300).log() - measured).abs().max()))
    return min(errors, default=math.inf)


def _exponents(loss: Curve, elapsed: Curve, begin: float, end: float) -> tuple[float, float] | None:
    """Exponents of the loss over time between two steps, in the first and the second half of log time."""
    if math.isnan(begin):
        return None
    end = math.inf if math.isnan(end) else end
    # before the loss begins to fall it is flat in log time, whatever the law
    fallen = loss.values <= FALLING * loss.first
    inside = (loss.steps >= max(begin, 1.0)) & (loss.steps <= end) & (loss.values > 0) & fallen
    if int(inside.sum()) < 6:
        return None
    t, v = elapsed.values[inside].log(), loss.values[inside].log()
    if float(t[-1] - t[0]) < math.log(SPAN):
        return None
    middle = (t[0] + t[-1]) / 2
    halves = [(t <= middle), (t >= middle)]
    if min(int(half.sum()) for half in halves) < 3:
        return None
    slopes = [_slope(t[half], v[half]) for half in halves]
    return -slopes[0], -slopes[1]


def _slope(x: Tensor, y: Tensor) -> float:
    away = x - x.mean()
    return float((away * y).sum() / away.square().sum())


def against_power_law(exponents: tuple[float, float] | None) -> str:
    """How the loss fell compared with a power law, in words; empty if unknown."""
    if exponents is None:
        return ""
    first, second = exponents
    if second <= 0.02:
        return "hardly at all"
    if first <= 0 or second / first > POWER_LAW.high:
        return "faster than a power law"
    return "as a power law" if second / first >= POWER_LAW.low else "slower than a power law"
