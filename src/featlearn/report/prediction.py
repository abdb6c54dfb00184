"""The loss that kernels predict: the first one frozen, the first one rescaled to its later size, all as they came."""

from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.diagnosis.findings import Findings
from featlearn.diagnosis.pace import Clock, Speed, Unknown
from featlearn.diagnosis.reading import Curve
from featlearn.diagnosis.replay import Replay, TooStiff
from featlearn.dynamics import kernel_descent
from featlearn.errors import FeatlearnError

SAMPLES = 128
"""Of the probe, at most, for cross-entropy, whose descent is followed step by step."""
REPLAYED = 40
"""Kernels at most, where all are used."""


@dataclass(frozen=True)
class Predicted:
    """Losses in the unit of the measured one, at its steps."""

    frozen: Curve
    rescaled: Curve
    """the first kernel times |K(t)| / |K(0)|: what growth alone would have done (aKGD of Shan & Bordelon 2021a)"""
    evolving: Curve | None
    """with the kernels as they came; None for cross-entropy"""
    source: str
    """in words, where the rate comes from"""


def predicted_loss(findings: Findings) -> Predicted | Unknown:
    """What the recorded kernels of a run predict for its loss on the probe."""
    pace, reading = findings.pace, findings.reading
    loss, steps = reading.loss, reading.kernel_steps
    if loss is None or len(steps) < 2 or steps[0] != 0:
        return Unknown("kernels with outputs and targets, from step 0 on, and the loss on the probe are needed")
    speed, clock = pace.speed, pace.clock
    single = pace.targets.shape[1] == 1
    # with several outputs the recorded kernels leave out terms between them, which a rate of their own makes up for
    if isinstance(speed, Speed) and not (single and isinstance(clock, Clock)):
        rate, source = speed.rate, "the one with which the recorded kernels come to the measured loss"
    elif isinstance(clock, Clock):
        rate, source = clock.rate, clock.source
    else:
        reasons = dict.fromkeys(one.reason for one in (speed, clock) if isinstance(one, Unknown))
        return Unknown(f"no rate is known: {'; '.join(reasons)}")
    kernels = [reading.kernel(step).double() for step in steps]
    growth = Curve(_steps(steps), torch.stack([kernel.norm() for kernel in kernels]) / kernels[0].norm())
    elapsed = pace.elapsed.at(loss.steps)
    size = growth.at(loss.steps)
    grown = torch.cat([elapsed[:1], elapsed[:1] + ((size[1:] + size[:-1]) / 2 * elapsed.diff()).cumsum(0)])
    some = slice(None)
    if reading.entropy and len(kernels[0]) > SAMPLES:
        some = slice(None, None, -(-len(kernels[0]) // SAMPLES))
        source += f"; on one in {-(-len(kernels[0]) // SAMPLES)} samples of the probe"
    start, targets = reading.outputs(0)[some], pace.targets[some]
    replay = Replay(kernels[0][some, some][None], torch.zeros(1), start, targets, reading.entropy)
    return Predicted(
        _followed(replay, loss.steps, rate * elapsed),
        _followed(replay, loss.steps, rate * grown),
        None if reading.entropy else _evolving(findings, rate),
        source,
    )


def _steps(steps: list[int]) -> Tensor:
    return torch.tensor(steps, dtype=torch.float64)


def _followed(replay: Replay, steps: Tensor, times: Tensor) -> Curve:
    """As far as it can be followed."""
    try:
        return Curve(steps, replay.frozen_losses(times))
    except TooStiff:
        low, high = 0, len(times)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                replay.frozen_losses(times[:middle])
                low = middle
            except TooStiff:
                high = middle
        return Curve(steps[:low], replay.frozen_losses(times[:low]))


def _evolving(findings: Findings, rate: float) -> Curve | None:
    """Interval by interval, with the mean of the kernels at its ends."""
    reading, pace = findings.reading, findings.pace
    steps = reading.kernel_steps
    if len(steps) > REPLAYED:
        steps = [steps[round(i * (len(steps) - 1) / (REPLAYED - 1))] for i in range(REPLAYED)]
    elapsed = pace.elapsed.at(_steps(steps))
    f, losses = reading.outputs(0), [pace.loss_of(reading.outputs(0))]
    try:
        for i, length in enumerate(elapsed.diff().tolist()):
            kernel = (reading.kernel(steps[i]).double() + reading.kernel(steps[i + 1]).double()) / 2
            f = kernel_descent(kernel, pace.targets, times=[length], rate=rate, f0=f).outputs[-1]
            losses.append(pace.loss_of(f))
    except FeatlearnError:
        return None
    return Curve(_steps(steps), torch.tensor(losses, dtype=torch.float64))
