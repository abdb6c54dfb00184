"""Output directions that differ by a factor in every unit alone: one direction then stands for the sum of all.

Behind the last linear layer and an elementwise nonlinearity, the gradient of output k at unit m of sample p is
a[k, m] b[p, m]. Gram matrices summed over k are then those of sqrt(sum_k a[k, m]^2) b[p, m] alone, for a K-th of the
operations. Whether it is so is asked of the numbers, sample by sample, to the rounding of one product.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Factors
from featlearn.contraction.gram import cheapest, extent
from featlearn.contraction.hardware import elementwise_cost


class UnequalChunksError(Exception):
    """Directions that one chunk has shown to be proportional are not so in another."""


@dataclass(frozen=True)
class Proportions:
    """How the directions of one parameter relate."""

    which: Tensor
    """(blocks, m): the direction that stands for all; -1 for units that were zero so far."""
    ratio: Tensor
    """(directions, blocks, m): all directions over that one."""


class ProportionalOutputs:
    """Decides for every parameter, once for all chunks of samples.

    `deferred`: the parameters in `known` have been found proportional before. Nothing is decided, and that they still
    are is one of the deferred checks.
    """

    def __init__(self, known: frozenset[str] = frozenset(), deferred: DeferredChecks | None = None) -> None:
        self.found: dict[str, Proportions] = {}
        self._apart: set[str] = set()
        self._known, self._deferred = known, deferred

    def apply(self, name: str, factors: Factors) -> Factors:
        """The same sum of Gram matrices from one direction, if there is one."""
        if self._deferred is not None:
            wanted = name in self._known
        else:
            wanted = name in self.found or (name not in self._apart and worthwhile(factors))
        single = wanted and len(factors.parts) == 1
        grads = _summed(factors.parts[0].grads, self.found.get(name), self._deferred) if single else None
        if grads is None:
            if name in self.found:
                raise UnequalChunksError
            self._apart.add(name)
            return factors
        summed, self.found[name] = grads
        return replace(factors, parts=(replace(factors.parts[0], grads=summed),))


def worthwhile(factors: Factors) -> bool:
    """Whether what is saved outweighs the comparison."""
    if factors.directions == 1 or len(factors.parts) > 1:
        return False
    grads = factors.parts[0].grads
    weight = elementwise_cost(grads.device)
    full = extent(factors, weight)
    saved = cheapest(full, full, "sum", weight) - cheapest(one := replace(full, directions=1), one, "sum", weight)
    return saved > 4 * weight * grads.numel() + (STARTS if grads.is_cuda else 0)


# Multiply-adds that a GPU does while the comparison is started.
STARTS = 2**34
# Samples of which a CPU finds out how directions relate, and whether it is worth to compare all.
FEW = 16


def _summed(
    grads: Tensor, known: Proportions | None, deferred: DeferredChecks | None
) -> tuple[Tensor, Proportions] | None:
    """(1, samples, positions, blocks, m), and how directions relate; None if they do not."""
    some = grads if grads.is_cuda else grads[:, :FEW]
    found = _relations(some, known)
    if not grads.is_cuda:
        if not bool(_proportional(some, found)):
            return None
        silent = found.which < 0
        if grads.shape[1] > FEW and bool(silent.any()):  # units that are zero in the few may not be so in others
            rest = _relations(grads[..., silent].unsqueeze(3), None)
            found.which[silent], found.ratio[:, silent] = rest.which[0], rest.ratio[:, 0]
    same = _proportional(grads, found)
    if deferred is not None and grads.is_cuda:
        deferred.expect(bool, same)
    elif not bool(same):
        return None
    return (_taken(grads, found) * found.ratio.square().sum(0).sqrt())[None], found


def _relations(grads: Tensor, known: Proportions | None) -> Proportions:
    """Which direction is the largest in each unit, and all directions over it; what is known stays."""
    place = grads.abs().amax(0).flatten(0, 1).argmax(0)  # where a unit is largest: (blocks, m)
    there = grads.flatten(1, 2).gather(1, place.expand(len(grads), 1, *place.shape)).squeeze(1)
    which = there.abs().argmax(0)
    base = there.gather(0, which[None])
    ratio = torch.where(base == 0, 0.0, there / base)
    which = torch.where(base[0] == 0, -1, which)
    if known is not None:
        which = torch.where(known.which < 0, which, known.which)
        ratio = torch.where(known.which < 0, ratio, known.ratio)
    return Proportions(which, ratio)


def _taken(grads: Tensor, found: Proportions) -> Tensor:
    """(samples, positions, blocks, m) of the direction that stands for all."""
    return grads.gather(0, found.which.clamp_min(0).expand(1, *grads.shape[1:]))[0]


def _proportional(grads: Tensor, found: Proportions) -> Tensor:
    """Whether all directions are those multiples of one, in each of them and for each sample."""
    slack, base = 8 * torch.finfo(grads.dtype).eps, _taken(grads, found)
    together = len(grads) if grads.numel() <= TOGETHER[grads.is_cuda] else 1
    split = zip(grads.split(together), found.ratio.split(together), strict=True)
    parts = [_differences(directions, ratios, base) for directions, ratios in split]
    error, size = (torch.cat(norms) for norms in zip(*parts, strict=True))
    # Squares of numbers that are much smaller or larger would be zero, or infinite, and agree with anything.
    ordinary = (size.amax() > 1e-15) & (size.amax() < 1e15)
    return (error <= slack * size).all() & ordinary


# Numbers up to which all directions are compared at once, on a CPU and on a GPU: few ops, but a copy of all of them.
TOGETHER = (2**16, 2**24)


def _differences(directions: Tensor, ratios: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """(K, samples) how far directions are from those multiples of one, and how large they are."""
    difference = torch.addcmul(directions, base, ratios[:, None, None], value=-1)
    errors, sizes = (torch.linalg.vector_norm(one, 2, (2, 3, 4)) for one in (difference, directions))
    return errors, sizes
