"""Output directions that differ by a factor in every unit alone: one direction then stands for the sum of all.

Behind the last linear layer and an elementwise nonlinearity, the gradient of output k at unit m of sample p is
a[k, m] b[p, m]. Gram matrices summed over k are then those of sqrt(sum_k a[k, m]^2) b[p, m] alone, for a K-th of the
operations. Whether it is so is asked of the numbers, sample by sample, to the rounding of one product.
"""

from dataclasses import replace

import torch
from torch import Tensor

from featlearn.linalg.factors import Factors
from featlearn.linalg.gram import cheapest, extent
from featlearn.linalg.later import Later
from featlearn.linalg.rates import elementwise_cost


class UnequalChunksError(Exception):
    """Directions that one chunk has shown to be proportional are not so in another."""


class Collapse:
    """Decides for every parameter, once for all chunks of samples.

    `later`: the parameters in `known` have been found to be so before; nothing is decided, and whether it still is so
    is asked for.
    """

    def __init__(self, known: frozenset[str] = frozenset(), later: Later | None = None) -> None:
        self.found: dict[str, Tensor] = {}
        """Parameter -> which direction stands for all, (blocks, m); -1 for units that were zero so far."""
        self._apart: set[str] = set()
        self._known, self._later = known, later

    def apply(self, name: str, factors: Factors) -> Factors:
        """The same sum of Gram matrices from one direction, if there is one."""
        if self._later is not None:
            wanted = name in self._known
        else:
            wanted = name in self.found or (name not in self._apart and worthwhile(factors))
        grads = _summed(factors.parts[0].grads, self.found.get(name), self._later) if wanted else None
        if grads is None:
            if name in self.found:  # begin anew, without it
                del self.found[name]
                self._apart.add(name)
                raise UnequalChunksError
            self._apart.add(name)
            return factors
        summed, reference = grads
        self.found[name] = reference
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


def _summed(grads: Tensor, reference: Tensor | None, later: Later | None) -> tuple[Tensor, Tensor] | None:
    """(1, samples, positions, blocks, m) and the direction that each unit's were taken from; None if none will do."""
    some = grads if grads.is_cuda else grads[:, :FEW]
    which, ratio = _relations(some, reference)
    silent = (ratio == 0).all(0)
    if not grads.is_cuda:
        if not bool(_proportional(some, _taken(some, which), ratio).all()):
            return None
        if grads.shape[1] > FEW and bool(silent.any()):  # units that are zero in the few may not be so in others
            before = None if reference is None else reference[silent][None]
            others, ratios = _relations(grads[..., silent].unsqueeze(3), before)
            which[silent], ratio[:, silent] = others[0], ratios[:, 0]
            silent = (ratio == 0).all(0)
    base = _taken(grads, which)
    same = _proportional(grads, base, ratio).all()
    if later is not None and grads.is_cuda:
        later.expect(bool, same)
    elif not bool(same):
        return None
    return (base * ratio.square().sum(0).sqrt())[None], torch.where(silent, -1, which)


def _relations(grads: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which direction is the largest in each unit, unless that is known, (blocks, m), and all directions over it."""
    sizes = grads.abs()
    if reference is not None:
        known = _taken(sizes, reference.clamp_min(0))
        largest = torch.where(reference < 0, sizes.amax(0), known)
    else:
        largest = sizes.amax(0)
    place = largest.flatten(0, 1).argmax(0)  # where a unit is largest: (blocks, m)
    there = grads.flatten(1, 2).gather(1, place.expand(len(grads), 1, *place.shape)).squeeze(1)
    which = there.abs().argmax(0)
    if reference is not None:
        which = torch.where(reference < 0, which, reference)
    base = there.gather(0, which[None])
    return which, torch.where(base == 0, 0.0, there / base)


def _taken(grads: Tensor, which: Tensor) -> Tensor:
    """(samples, positions, blocks, m) of the direction that each unit has been given."""
    return grads.gather(0, which.expand(1, *grads.shape[1:]))[0]


def _proportional(grads: Tensor, base: Tensor, ratio: Tensor) -> Tensor:
    """Whether all directions are those multiples of one, for each of them and each sample."""
    slack = 8 * torch.finfo(grads.dtype).eps
    found = []
    for direction, factor in zip(grads, ratio, strict=True):
        difference = torch.addcmul(direction, base, factor, value=-1)
        error, size = (torch.linalg.vector_norm(one, 2, (1, 2, 3)) for one in (difference, direction))
        found.append(error <= slack * size)
    return torch.stack(found)
