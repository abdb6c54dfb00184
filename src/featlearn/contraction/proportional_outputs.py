"""Output directions whose gradients differ only by a factor for each unit: one then stands for the sum of all.

Behind the last linear layer and an elementwise nonlinearity, the gradient of output k at unit m of sample p is
a[k, m] b[p, m]. Gram matrices summed over k are then those of sqrt(sum_k a[k, m]^2) b[p, m] alone, for a K-th of the
operations. Whether it is so is asked of the numbers, sample by sample, to the rounding of one product.
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
    """Directions that one chunk has shown to be proportional are not so in another."""


class ProportionalOutputs:
    """Decides for every parameter, once for all chunks of samples.

    `deferred`: the parameters in `known` have been found proportional before. Nothing is decided, and that they still
    are is one of the deferred checks.
    """

    def __init__(self, known: frozenset[str] = frozenset(), deferred: DeferredChecks | None = None) -> None:
        self.found: dict[str, Tensor] = {}
        """(directions, blocks, m): the share of each direction in a unit, of length one; 0 where it was silent."""
        self._apart: set[str] = set()
        self._known, self._deferred = known, deferred

    def apply(self, name: str, factors: Factors) -> Factors:
        """The same sum of Gram matrices from one direction, if there is one."""
        if self._deferred is not None:
            wanted = name in self._known
        else:
            wanted = name in self.found or (name not in self._apart and worthwhile(factors))
        single = wanted and len(factors.parts) == 1
        summed = self._summed(name, factors.parts[0].grads) if single else None
        if summed is None:
            if name in self.found:
                raise UnequalChunksError
            self._apart.add(name)
            return factors
        return replace(factors, parts=(replace(factors.parts[0], grads=summed),))

    def _summed(self, name: str, grads: Tensor) -> Tensor | None:
        """(1, samples, positions, blocks, m) for all directions; None if they are not proportional."""
        some = grads if grads.is_cuda else grads[:, :FEW]
        shares = _shares(some, self.found.get(name))
        if not grads.is_cuda and grads.shape[1] > FEW:
            _, excess, largest = _projected(some, shares)
            if not _fits(float(excess), float(largest)):
                return None
            shares = _shares(grads, shares)  # units that are zero in the few may not be so in others
        summed, excess, largest = _projected(grads, shares)
        if self._deferred is not None and grads.is_cuda:
            self._deferred.expect(_fits, excess, largest)
        elif not _fits(float(excess), float(largest)):
            return None
        self.found[name] = shares
        return summed[None]


def worthwhile(factors: Factors) -> bool:
    """Whether what is saved outweighs the comparison."""
    if factors.directions == 1 or len(factors.parts) > 1:
        return False
    grads = factors.parts[0].grads
    if grads.stride(1) == 0 and grads.shape[2] == grads.shape[3] == 1:
        return False  # the same for all samples, at the last layer: one product of numbers serves them all
    weight = elementwise_cost(grads.device)
    full = extent(factors, weight)
    one = full._replace(directions=1)
    saved = cheapest(full, full, "sum", weight) - cheapest(one, one, "sum", weight)
    return saved > 4 * weight * grads.numel() + (STARTS if grads.is_cuda else 0)


# Multiply-adds that a GPU does while the comparison is started.
STARTS = 2**34
# Samples of which a CPU finds out how directions relate, and whether it is worth to compare all.
FEW = 16
# Numbers that are compared at once, on a CPU and on a GPU: few ops, but a copy of all of them.
TOGETHER = (2**16, 2**24)


def _shares(grads: Tensor, known: Tensor | None = None) -> Tensor:
    """The share of each direction in every unit, where that is largest; what is known stays."""
    if known is not None:
        silent = ~known.any(0)
        if bool(silent.any()):
            known = known.clone()
            known[:, silent] = _shares(grads[..., silent].unsqueeze(3))[:, 0]
        return known
    place = torch.linalg.vector_norm(grads, dim=0).flatten(0, 1).argmax(0)  # (blocks, m)
    there = grads.flatten(1, 2).gather(1, place.expand(len(grads), 1, *place.shape)).squeeze(1)
    norm = torch.linalg.vector_norm(there, dim=0)
    # Smaller ones count as silent, with no share at all: a share must have length one, or their sum would be too large.
    found: Tensor = torch.where(norm > 1e-15, there / norm, 0.0)
    return found


def _projected(grads: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All directions as shares of one, (samples, positions, blocks, m); by how much any of them is too far from that,
    and how large the largest is, sample by sample."""
    summed = _one_for_all(grads, shares)
    together = len(grads) if grads.numel() <= TOGETHER[grads.is_cuda] else 1
    split = zip(grads.split(together), shares[:, None, None].split(together), strict=True)
    parts = [_excess(directions, summed, some) for directions, some in split]
    if len(parts) == 1:
        return summed, *parts[0]
    excess, largest = (torch.stack(several).amax() for several in zip(*parts, strict=True))
    return summed, excess, largest


def _one_for_all(grads: Tensor, shares: Tensor) -> Tensor:
    """What all directions are shares of, if they are: on a GPU from all of them, which is two launches; on a CPU from
    the largest in every unit, which moves less memory."""
    if grads.is_cuda:
        return (grads * shares[:, None, None]).sum(0)
    which = shares.abs().argmax(0, keepdim=True)
    share = shares.gather(0, which)
    inverse = torch.where(share == 0, 0.0, 1.0 / share)[0]
    return grads.gather(0, which[:, None, None].expand(1, *grads.shape[1:]))[0] * inverse


def _excess(grads: Tensor, summed: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """How far directions are from these shares of one, beyond the rounding of their size; and their size."""
    difference = torch.addcmul(grads, summed, shares, value=-1)
    error, size = (torch.linalg.vector_norm(one, 2, (2, 3, 4)) for one in (difference, grads))
    return error.sub_(size, alpha=8 * torch.finfo(grads.dtype).eps).amax(), size.amax()


def _fits(excess: float, largest: float) -> bool:
    # Squares of numbers that are much smaller or larger would be zero, or infinite, and agree with anything.
    return excess <= 0.0 and 1e-15 < largest < 1e15 and math.isfinite(excess)
