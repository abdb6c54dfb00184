"""A single output direction in place of all, consistent on every rank."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from featlearn.contraction.factors import Factors, Gradients
from featlearn.contraction.proportional_outputs import ProportionalOutputs
from featlearn.distributed.group import RankGroup


def same_directions(ranks: RankGroup, gradients_by_name: Mapping[str, Gradients]) -> dict[str, Gradients]:
    """Replace all directions of gradients by a single one, if all ranks with gradients agree on it.

    Gram matrices summed over directions are unchanged. The sign of a direction in every unit depends on the samples, so
    it is normalized here.
    """
    single: dict[str, Gradients] = {}
    shares: dict[str, Tensor | None] = dict.fromkeys(gradients_by_name)
    with ranks.together():
        proportional = ProportionalOutputs()
        for name, gradients in gradients_by_name.items():
            if not isinstance(gradients, Factors):
                continue
            reduced = proportional.apply(name, gradients)
            if (direction := proportional.shares.get(name)) is not None:
                sign, part = _signs(direction), reduced.parts[0]
                single[name] = replace(reduced, parts=(replace(part, grads=part.grads * sign),))
                shares[name] = (direction * sign).cpu()
    reports = ranks.gathered(shares)
    agreed = {name for name in single if _agree([reduced[name] for reduced in reports if name in reduced])}
    return {name: single[name] if name in agreed else gradients for name, gradients in gradients_by_name.items()}


def _signs(shares: Tensor) -> Tensor:
    """Return signs (blocks, m) that make inner products with a fixed vector positive, for (directions, blocks, m)."""
    generator = torch.Generator("cpu").manual_seed(0)
    fixed = torch.randn(len(shares), generator=generator, dtype=torch.float64, device="cpu").to(shares)
    return torch.where(torch.einsum("k,kbm->bm", fixed, shares) < 0, -1.0, 1.0).to(shares)


def _agree(shares_of_ranks: list[Tensor | None]) -> bool:
    """Return whether all ranks have a direction, equal in units where several have one."""
    common: Tensor | None = None
    for shares in shares_of_ranks:
        if shares is None:
            return False
        if common is None:
            common = shares
            continue
        both = common.any(0) & shares.any(0)
        if float(((shares - common).abs().amax(0) * both).amax()) > 16 * torch.finfo(shares.dtype).eps:
            return False
        common = torch.where(common.any(0), common, shares)
    return True
