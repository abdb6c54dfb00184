"""Where the samples lie in a node's output.

Backward passes are linear in their cotangent. Scale the cotangent of sample i by a power of two of its own: every
element of a gradient that belongs to sample i alone is scaled by exactly that factor, bit for bit, whatever the
network; an element that several samples share is not. The split (before, samples, after) of the output's elements
under which each slice shows its own factor is the sample axis. No such split: the value does not belong to samples one
by one (a weight, a table, rows picked by routing), and nothing is assumed of it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featlearn.ops.form import Layout


def sample_codes(samples: int, precision: float, generator: torch.Generator) -> list[Tensor]:
    """Powers of two that tell every sample from every other: one for each, or one for each digit of its number.

    `precision` is the machine epsilon of the coarsest type on the way, which says how far exponents may go.
    """
    span = 400 if precision < 1e-12 else 3 if 5e-4 < precision < 2e-3 else 40  # double; half; single and bfloat16
    base = 2 * span + 1
    numbers = torch.randperm(samples, generator=generator, device="cpu")
    codes = [torch.exp2((numbers % base - span).double())]
    while samples > base:
        numbers, samples = numbers // base, -(-samples // base)
        codes.append(torch.exp2((numbers % base - span).double()))
    return codes


def sample_layout(
    plain: Tensor | None, coded: Sequence[Tensor | None], codes: Sequence[Tensor], shape: torch.Size
) -> Layout | None:
    """The sample axis of a value, from its gradients under the plain and under each coded cotangent."""
    candidates = splits(shape, len(codes[0]))
    if plain is None:  # the outputs do not depend on this value
        return next(candidates, None)
    return next((layout for layout in candidates if _shows(plain, coded, codes, layout)), None)


def _shows(plain: Tensor, coded: Sequence[Tensor | None], codes: Sequence[Tensor], layout: Layout) -> bool:
    """Whether every slice of this layout shows its own code in every digit."""
    split = (layout.before, layout.samples, layout.after)
    # Rounding differs between the passes only where a device sums in no fixed order.
    slack = 64 * torch.finfo(plain.dtype).eps
    for gradient, code in zip(coded, codes, strict=True):
        expected = plain.detach().reshape(split) * code.to(plain.device, plain.real.dtype)[:, None]
        found = torch.zeros_like(expected) if gradient is None else gradient.detach().reshape(split)
        difference = (found - expected).abs().amax((0, 2))
        if not bool((difference <= slack * expected.abs().amax((0, 2))).all()):
            return False
    return True


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
