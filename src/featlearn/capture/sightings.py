"""What a few samples see of a direction when they are run alone, to be found again in a larger batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from featlearn.capture.graph import Node, Value, gradients_at
from featlearn.linalg.later import Later
from featlearn.ops import Layout


@dataclass(frozen=True)
class Sightings:
    """Gradients at the uses of parameters in a smaller batch."""

    gradients: Mapping[int, Tensor | None]
    """Number of a node -> gradients at its output, samples first."""


@dataclass(frozen=True)
class Unconfirmed:
    """Samples of a batch that a smaller one has, or will have, seen."""

    places: Tensor | slice
    """Where they stand in the larger batch."""
    seen: Callable[[], Sightings]
    direction: Tensor | None = None
    """What it has seen, if that is to be compared with what is asked for."""


Chosen = Mapping[int, Tensor | None]
"""Number of a node -> gradients of some samples at its output."""


def sightings(outputs: Tensor, order: Sequence[Node], used: Mapping[Node, Layout], direction: Tensor) -> Sightings:
    """The gradients of a direction at these nodes.

    Each sample has a power of two of its own, which is taken out again: one that is taken for another has the wrong
    size.
    """
    codes = _codes(len(outputs), outputs.dtype, outputs.device)
    cotangent = direction.to(outputs, non_blocking=True) * codes[:, None]
    found = gradients_at(outputs, [(node, 0) for node in used], cotangent) if used else {}
    seen = by_sample(order, used, found)
    return Sightings({
        number: None if gradient is None else gradient / codes.to(gradient)[:, None, None]
        for number, gradient in seen.items()
    })  # fmt: skip


@lru_cache(maxsize=16)
def _codes(samples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    numbers = torch.arange(samples, device=device)
    return torch.exp2((3 * numbers % 7 - 3).to(dtype))


def by_sample(
    order: Sequence[Node], used: Mapping[Node, Layout], gradients: Mapping[Value, Tensor | None]
) -> dict[int, Tensor | None]:
    """Number of a node -> the gradient at its output, samples first."""
    found: dict[int, Tensor | None] = {}
    for number, node in enumerate(order):
        if (node, 0) in gradients:
            gradient = gradients[node, 0]
            found[number] = None if gradient is None else used[node].samples_first(gradient.detach(), 1)
    return found


def mixed(directions: Tensor) -> Tensor:
    """All of them (K, ...) with weights of their own, so that one pass sees something of each: (...)."""
    found: Tensor = torch.tensordot(weights(len(directions), directions.dtype, directions.device), directions, 1)
    return found


@lru_cache(maxsize=16)
def weights(directions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers between 1 and 2 that no simple relation connects; 1 for a single direction."""
    return torch.tensor([1.0 + k * 0.6180339887498949 % 1.0 for k in range(directions)], dtype=dtype, device=device)


def expect_same(later: Later, seen: Sightings, here: Chosen, precision: float) -> None:
    """The smaller batch has the gradients that its samples have in the larger one.

    In single precision to a tenth: units that are zero but for rounding are on in one batch and off in the next, and
    samples that are taken for others differ by much more.
    """
    slack = min(0.1, 256 * precision**0.5)
    small, there = [], []
    for number, gradient in here.items():
        alone = seen.gradients.get(number)
        if alone is None or gradient is None:
            if alone is not gradient:
                later.doubt()
        elif gradient.shape != alone.shape:
            later.doubt()
        else:
            small.append(alone)
            there.append(gradient)
    if small:
        differences = torch._foreach_norm(torch._foreach_sub(there, small))
        for difference, size in zip(differences, torch._foreach_norm(small), strict=True):
            later.expect(lambda difference, size: difference <= slack * size, difference, size)
