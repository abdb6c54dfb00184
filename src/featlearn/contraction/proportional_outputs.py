"""Output directions whose gradients differ only by a factor per unit, replaced by a single direction.

Before the last linear layer and an elementwise nonlinearity, the gradient of output k at unit m of sample p is a[k, m]
b[p, m]. Gram matrices summed over k are then those of sqrt(sum_k a[k, m]^2) b[p, m], with 1/K of the operations. The
numbers of every sample are checked, up to the rounding of a product.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Factors
from featlearn.contraction.gram import cheapest, extent
from featlearn.contraction.hardware import elementwise_cost


class UnequalChunksError(Exception):
    """Directions are proportional in one chunk but not in another."""


class ProportionalOutputs:
    """Reduce proportional directions of every parameter, consistently for all chunks of samples.

    With `deferred`, the parameters in `proportional` were proportional before, and proportionality becomes a deferred
    check.
    """

    def __init__(self, proportional: frozenset[str] = frozenset(), deferred: DeferredChecks | None = None) -> None:
        self.shares: dict[str, Tensor] = {}
        """(directions, blocks, m): share of each direction in a unit, of norm 1; 0 for silent units."""
        self._apart: set[str] = set()
        self._proportional, self._deferred = proportional, deferred

    def apply(self, name: str, factors: Factors) -> Factors:
        """Return factors with a single direction and the same sum of Gram matrices, if possible."""
        if self._deferred is not None:
            candidate = name in self._proportional
        else:
            candidate = name in self.shares or (name not in self._apart and worthwhile(factors))
        reducible = candidate and len(factors.parts) == 1
        summed = self._summed(name, factors.parts[0].grads) if reducible else None
        if summed is None:
            if name in self.shares:
                raise UnequalChunksError
            self._apart.add(name)
            return factors
        return replace(factors, parts=(replace(factors.parts[0], grads=summed),))

    def _summed(self, name: str, grads: Tensor) -> Tensor | None:
        """Return the single direction, (1, samples, positions, blocks, m); None if directions are not proportional."""
        sample_grads = grads if grads.is_cuda else grads[:, :FEW]
        shares = _shares(sample_grads, self.shares.get(name))
        if not grads.is_cuda and grads.shape[1] > FEW:
            _, excess, largest = _projected(sample_grads, shares)
            if not _fits(float(excess), float(largest)):
                return None
            shares = _shares(grads, shares)  # units silent in these samples may be active in others
        summed, excess, largest = _projected(grads, shares)
        if self._deferred is not None and grads.is_cuda:
            self._deferred.expect(_fits, excess, largest)
        elif not _fits(float(excess), float(largest)):
            return None
        self.shares[name] = shares
        return summed[None]


def worthwhile(factors: Factors) -> bool:
    """Return whether the savings outweigh the cost of the comparison."""
    if factors.directions == 1 or len(factors.parts) > 1:
        return False
    grads = factors.parts[0].grads
    if grads.stride(1) == 0 and grads.shape[2] == grads.shape[3] == 1:
        return False  # equal for all samples, at the last layer: products of single numbers suffice
    weight = elementwise_cost(grads.device)
    full = extent(factors, weight)
    reduced = full._replace(directions=1)
    saved = cheapest(full, full, "sum", weight) - cheapest(reduced, reduced, "sum", weight)
    return saved > 4 * weight * grads.numel() + (STARTS if grads.is_cuda else 0)


# Launch overhead of the comparison on a GPU, in multiply-adds.
STARTS = 2**34
# Samples used on a CPU to estimate shares, before all samples are compared.
FEW = 4
# Largest number of entries compared at once, on a CPU and on a GPU; comparing copies them.
TOGETHER = (2**16, 2**24)


def _shares(grads: Tensor, previous: Tensor | None = None) -> Tensor:
    """Return the share of each direction per unit, at the largest gradient; keep known shares."""
    if previous is not None:
        silent = ~previous.any(0)
        if bool(silent.any()):
            previous = previous.clone()
            previous[:, silent] = _shares(grads[..., silent].unsqueeze(3))[:, 0]
        return previous
    # Where the largest entry of any direction is: a norm over directions takes 14 times as long on a CPU.
    largest = torch.maximum(grads.amax(0), -grads.amin(0)).flatten(0, 1).argmax(0)  # (blocks, m)
    gradients = grads.flatten(1, 2).gather(1, largest.expand(len(grads), 1, *largest.shape)).squeeze(1)
    norm = torch.linalg.vector_norm(gradients, dim=0)
    # Smaller norms count as silent with share 0, because shares must have norm 1.
    shares: Tensor = torch.where(norm > 1e-15, gradients / norm, 0.0)
    return shares


def _projected(grads: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the single direction (samples, positions, blocks, m), its largest excess error, and the largest norm."""
    summed = _single_direction(grads, shares)
    batch = len(grads) if grads.numel() <= TOGETHER[grads.is_cuda] else 1
    split = zip(grads.split(batch), shares[:, None, None].split(batch), strict=True)
    parts = [_excess(directions, summed, batch_shares) for directions, batch_shares in split]
    if len(parts) == 1:
        return summed, *parts[0]
    excess, largest = (torch.stack(values).amax() for values in zip(*parts, strict=True))
    return summed, excess, largest


def _single_direction(grads: Tensor, shares: Tensor) -> Tensor:
    """Return the single direction: on a GPU from all directions (two launches), on a CPU from the largest per unit."""
    if grads.is_cuda:
        return (grads * shares[:, None, None]).sum(0)
    largest = shares.abs().argmax(0, keepdim=True)
    share = shares.gather(0, largest)
    inverse = torch.where(share == 0, 0.0, 1.0 / share)[0]
    return grads.gather(0, largest[:, None, None].expand(1, *grads.shape[1:]))[0] * inverse


def _excess(grads: Tensor, summed: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest deviation of directions from their shares beyond rounding, and the largest norm."""
    difference = torch.addcmul(grads, summed, shares, value=-1)
    error, size = (torch.linalg.vector_norm(tensor, 2, (2, 3, 4)) for tensor in (difference, grads))
    return error.sub_(size, alpha=8 * torch.finfo(grads.dtype).eps).amax(), size.amax()


def _fits(excess: float, largest: float) -> bool:
    # Squares of much smaller or larger numbers underflow or overflow, and could not be compared.
    return excess <= 0.0 and 1e-15 < largest < 1e15 and math.isfinite(excess)
