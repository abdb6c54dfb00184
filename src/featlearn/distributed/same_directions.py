"""One output direction that stands for all of them, the same on every rank."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from featlearn.contraction.factors import Factors, Gradients
from featlearn.contraction.proportional_outputs import ProportionalOutputs
from featlearn.distributed.group import RankGroup


def same_directions(ranks: RankGroup, found: Mapping[str, Gradients]) -> dict[str, Gradients]:
    """Gradients with one direction in the place of all, where every rank that has any finds the same.

    Gram matrices are then right when summed over directions. A direction is found from samples, with a sign in every
    unit that depends on them; the sign is chosen here so that it does not.
    """
    single: dict[str, Gradients] = {}
    shares: dict[str, Tensor | None] = dict.fromkeys(found)
    with ranks.together():
        proportional = ProportionalOutputs()
        for name, gradients in found.items():
            if not isinstance(gradients, Factors):
                continue
            one = proportional.apply(name, gradients)
            if (direction := proportional.shares.get(name)) is not None:
                sign, part = _signs(direction), one.parts[0]
                single[name] = replace(one, parts=(replace(part, grads=part.grads * sign),))
                shares[name] = (direction * sign).cpu()
    said = ranks.gathered(shares)
    agreed = {name for name in single if _agree([one[name] for one in said if name in one])}
    return {name: single[name] if name in agreed else gradients for name, gradients in found.items()}


def _signs(shares: Tensor) -> Tensor:
    """(blocks, m): what makes the inner product with a fixed vector positive, for shares (directions, blocks, m)."""
    generator = torch.Generator("cpu").manual_seed(0)
    fixed = torch.randn(len(shares), generator=generator, dtype=torch.float64, device="cpu").to(shares)
    return torch.where(torch.einsum("k,kbm->bm", fixed, shares) < 0, -1.0, 1.0).to(shares)


def _agree(there: list[Tensor | None]) -> bool:
    """Whether all ranks have found a direction, and the same one in units where they have any."""
    seen: Tensor | None = None
    for shares in there:
        if shares is None:
            return False
        if seen is None:
            seen = shares
            continue
        both = seen.any(0) & shares.any(0)
        if float(((shares - seen).abs().amax(0) * both).amax()) > 16 * torch.finfo(shares.dtype).eps:
            return False
        seen = torch.where(seen.any(0), seen, shares)
    return True
