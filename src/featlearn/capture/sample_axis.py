"""Where the samples lie in a node's output.

Backward passes are linear in their cotangent. Scale the cotangent of sample i by a power of two of its own: every
element of a gradient that belongs to sample i alone is scaled by exactly that factor, bit for bit, whatever the
network; an element that several samples share is not. The split (before, samples, after) of the output's elements
under which each slice shows its own factor is the sample axis. No such split: the value does not belong to samples one
by one (a weight, a table, rows picked by routing), and nothing is assumed of it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from featlearn.ops.form import Layout


def sample_codes(samples: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A power of two for each sample, all different while the number format has room for that."""
    span = 3 if dtype == torch.float16 else 32
    cycles = -(-samples // (2 * span + 1))
    exponents = (
        torch.cat([torch.randperm(2 * span + 1, generator=generator, device="cpu") for _ in range(cycles)])[:samples]
        - span
    )
    return torch.exp2(exponents.double()).to(dtype)


def sample_layout(plain: Tensor | None, coded: Tensor | None, codes: Tensor, shape: torch.Size) -> Layout | None:
    """The sample axis of a value, from its gradients under the plain and under the coded cotangent."""
    samples = len(codes)
    candidates = list(splits(shape, samples))
    if plain is None or coded is None:  # the outputs do not depend on this value
        return candidates[0] if candidates else None
    plain, coded = plain.detach(), coded.detach()
    # Rounding differs between the passes only where a device sums in no fixed order.
    slack = 64 * torch.finfo(plain.dtype).eps
    for layout in candidates:
        split = (layout.before, samples, layout.after)
        expected = plain.reshape(split) * codes.to(plain.device, plain.real.dtype)[:, None]
        difference = (coded.reshape(split) - expected).abs().amax((0, 2))
        if bool((difference <= slack * expected.abs().amax((0, 2))).all()):
            return layout
    return None


def splits(shape: torch.Size, samples: int) -> Iterator[Layout]:
    """Every way in which the samples can lie inside one axis; none if the value is empty."""
    total, before = shape.numel(), 1
    if total == 0:
        return
    for size in shape:
        if size % samples == 0:
            inside = size // samples
            for outer in range(1, inside + 1):
                if inside % outer == 0:
                    yield Layout(before * outer, samples, total // (before * outer * samples))
        before *= size
