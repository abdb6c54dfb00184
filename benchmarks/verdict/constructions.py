"""A construction: a way to train whose regime is fixed by theory, not by what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Regime = Literal["lazy", "rich", "neither", "lazy then rich"]


class Samples(NamedTuple):
    """Inputs with their targets: (P, C) numbers, or (P,) class labels."""

    x: Tensor
    y: Tensor

    def rows(self, some: Any) -> "Samples":
        return Samples(self.x[some], self.y[some])


@dataclass(frozen=True)
class Loss:
    """A loss, its name for `fl.watch`, and the largest curvature that it has in an output of a sample."""

    name: str | None
    value: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[int, int], float]
    """(P, C) -> the bound"""
    squared: bool = False


def _squared(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum(1).mean()


SQUARED = Loss("mean", _squared, lambda P, C: 2 / P, squared=True)
MSE = Loss("mean-over-outputs", nn.functional.mse_loss, lambda P, C: 2 / (P * C), squared=True)
CROSS_ENTROPY = Loss("cross-entropy", nn.functional.cross_entropy, lambda P, C: 0.5 / P)
BCE = Loss(None, nn.functional.binary_cross_entropy_with_logits, lambda P, C: 0.25 / (P * C))
"""Several labels for each sample; `fl.watch` has no name for it, and is given none."""


@dataclass(frozen=True)
class Descent:
    """SGD at a share of the largest stable rate, which is followed through training.

    So training is close to gradient flow, of which the theories speak, whatever the size of the kernel.
    """

    momentum: float = 0.0
    share: float = 0.5
    """of the largest stable rate"""
    stride: float = 0.01
    """what a step may change of the weights; a small kernel, from small weights, allows steps that are too long"""
    shrinking: float = 0.0
    """weight decay, so that all steps together shrink the weights by exp(-shrinking)"""


@dataclass(frozen=True)
class Fixed:
    """An optimizer with the settings that a user would write down."""

    optimizer: type[torch.optim.Optimizer]
    lr: float
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Trial:
    """All that is needed to train once."""

    model: nn.Module
    train: Samples
    test: Samples
    loss: Loss
    how: Descent | Fixed
    steps: int
    probe: int = 0
    """the first so many of the training samples; 0 for all"""
    batch: int = 0
    """0 for all of the training samples, else so many drawn at each step"""
    stop: float = 0.1
    """training ends where so much is left of the first loss on the probe, a constant in the targets left out"""

    @property
    def probed(self) -> Samples:
        return self.train.rows(slice(self.probe or None))


Make = Callable[[int, Any], Trial]
"""(seed, variant) -> a trial"""


@dataclass(frozen=True)
class Construction:
    """A way to train, with the regime that theory gives it."""

    name: str
    regime: Regime
    reason: str
    """why the regime is fixed, in one sentence"""
    make: Make
    variants: Sequence[Any] = (None,)
    seeds: int = 3


class Job(NamedTuple):
    """One run of a suite."""

    suite: str
    construction: str
    variant: Any
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.construction, str(self.variant), self.seed


def jobs(suite: str, constructions: Sequence[Construction], first_seed: int, only: str | None = None) -> list[Job]:
    """Seed by seed, so that the first lines of a table are spread over all constructions."""
    most = max(one.seeds for one in constructions)
    return [
        Job(suite, one.name, variant, first_seed + i)
        for i in range(most)
        for one in constructions
        if i < one.seeds and (only is None or only in one.name)
        for variant in one.variants
    ]
