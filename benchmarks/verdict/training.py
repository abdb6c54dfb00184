"""Training of one trial inside `fl.watch` with its default settings."""

import contextlib
import copy
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import featlearn as fl
from benchmarks.verdict.constructions import Descent, Samples, Trial

if TYPE_CHECKING:
    from featlearn.record import Run

CHECKED_EVERY = 10
"""Steps between looks at the loss on the probe and at the largest stable rate."""

RISE = 1.05
"""How fast the rate may rise from step to step with momentum."""

State = dict[str, Tensor]


@dataclass
class Trained:
    """A run and what the references need of it."""

    run: "Run"
    initial: State
    final: State
    losses: list[float] = field(default_factory=list)
    """first and last loss on the probe"""
    left: float = math.nan
    """share of the first loss on the probe that is left, a constant in the targets left out"""
    states: dict[int, State] = field(default_factory=dict)
    """at steps that are powers of two, and at the end"""


def trained(trial: Trial, path: Path, seed: int) -> Trained:
    """Train, and leave the model as it was at the end."""
    optimizer, rate = optimizer_of(trial, seed)
    initial = copied(trial.model)
    batches, states = batches_of(trial, seed), {}
    first = measured_loss(trial)
    with (
        contextlib.redirect_stderr(io.StringIO()),
        fl.watch(
            trial.model,
            trial.probed,
            out=path,
            test=trial.test,
            optimizer=optimizer,
            loss=trial.loss.name,
            settings={"seed": seed},
        ) as watch,
    ):
        for step in range(trial.steps):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = trial.loss.value(trial.model(x), y)
            loss.backward()
            if rate is not None:
                rate.set(step)
            optimizer.step()
            watch.step(loss=loss)
            if step + 1 & step == 0:
                states[step + 1] = copied(trial.model)
            if (step + 1) % CHECKED_EVERY == 0:
                now = measured_loss(trial)
                if not now.plain < 30 * first.plain or now.left(first) <= trial.stop:  # broken down, or done
                    break
    last, final = measured_loss(trial), copied(trial.model)
    states[step + 1] = final
    return Trained(watch.run, initial, final, [first.plain, last.plain], last.left(first), states)


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss on the probe, in eval mode."""

    plain: float
    centered: float
    """for squared error without the mean over samples of each output, else as it is"""

    def left(self, first: "MeasuredLoss") -> float:
        return self.centered / first.centered


def measured_loss(trial: Trial, samples: Samples | None = None) -> MeasuredLoss:
    x, y = trial.probed if samples is None else samples
    mode = trial.model.training
    trial.model.eval()
    with torch.no_grad():
        f = trial.model(x)
        plain = float(trial.loss.value(f, y))
        centered = float(trial.loss.value(f - f.mean(0), y - y.mean(0))) if trial.loss.squared else plain
    trial.model.train(mode)
    return MeasuredLoss(plain, centered)


def copied(model: nn.Module) -> State:
    return copy.deepcopy({name: value.detach() for name, value in model.state_dict().items()})


def batches_of(trial: Trial, seed: int) -> Iterator[Samples]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        if trial.batch:
            yield trial.train.rows(torch.randint(len(trial.train.x), (trial.batch,), generator=generator))
        else:
            yield trial.train


def optimizer_of(trial: Trial, seed: int) -> tuple[torch.optim.Optimizer, "StableRate | None"]:
    parameters = [p for p in trial.model.parameters() if p.requires_grad]
    if isinstance(trial.how, Descent):
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, 1.0, momentum=trial.how.momentum)
        return optimizer, StableRate(trial, trial.how, optimizer, seed)
    return trial.how.optimizer(parameters, lr=trial.how.lr, **dict(trial.how.settings)), None  # type: ignore[call-arg]


class StableRate:
    """Sets the learning rate to a share of 2 over the curvature of the loss on the probe, found by power iteration."""

    def __init__(self, trial: Trial, how: Descent, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self.model, self.x, self.how = trial.model, trial.probed.x, how
        self.group, self.steps = optimizer.param_groups[0], trial.steps
        generator = torch.Generator().manual_seed(seed)
        self.vector = {name: torch.randn(p.shape, generator=generator) for name, p in self._parameters().items()}
        with torch.no_grad():
            self.curvature = trial.loss.curvature(*self.model(self.x).shape)
        self.stable = self._stable(20)

    def _parameters(self) -> State:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def _stable(self, iterations: int) -> float:
        """2 over the largest eigenvalue of the curvature, after so many more iterations."""
        mode, size = self.model.training, math.nan
        self.model.eval()
        parameters = self._parameters()

        def outputs(given: State) -> Tensor:
            return torch.func.functional_call(self.model, given, (self.x,))

        _, back = torch.func.vjp(outputs, parameters)
        for _ in range(iterations):
            _, change = torch.func.jvp(outputs, (parameters,), (self.vector,))
            (found,) = back(change)
            size = math.sqrt(sum(float(part.square().sum()) for part in found.values()))
            self.vector = {name: part / size for name, part in found.items()}
        self.model.train(mode)
        return 2 / (self.curvature * size)

    def set(self, step: int) -> None:
        """For the step to come, after its gradient is known."""
        if step % CHECKED_EVERY == 0 and step:
            self.stable = self._stable(2)
        how, parameters = self.how, [p for p in self.group["params"] if p.grad is not None]
        weight = sum(float(p.detach().square().sum()) for p in parameters)
        gradient = sum(float(p.grad.square().sum()) for p in parameters)
        longest = how.stride * math.sqrt(weight / max(gradient, 1e-300))
        # momentum makes every step longer in the end, and what is stable larger; it keeps old gradients, so that a rate
        # that jumps up would apply to those of a time when the rate was small
        rate = min(how.share * self.stable, (1 - how.momentum) * longest)
        self.group["lr"] = min(rate, RISE * self.group["lr"]) if how.momentum and step else rate
        if how.shrinking:
            self.group["weight_decay"] = how.shrinking * (1 - how.momentum) / (self.steps * self.group["lr"])
