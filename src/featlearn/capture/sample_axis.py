"""Where the samples lie in a node's output.

Backward passes are linear in their cotangent. Scale the cotangent of sample i by a power of two of its own: every
element of a gradient that belongs to sample i alone is scaled by exactly that factor, bit for bit, whatever the
network; an element that several samples share is not. The split (before, samples, after) of the output's elements
under which each slice shows its own factor is the sample axis. No such split: the value does not belong to samples one
by one (a weight, a table, rows picked by routing), and nothing is assumed of it.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from featlearn.ops.form import Layout


def sample_codes(samples: int, dtypes: Collection[torch.dtype], generator: torch.Generator) -> list[Tensor]:
    """Powers of two that tell every sample from every other: one for each, or one for each digit of its number.

    `dtypes` are the floating types on the way, whose exponents say how far codes may go. They go further up than down,
    because gradients vanish more often than they explode.
    """
    ranges = [_EXPONENTS.get(torch.empty((), dtype=dtype).real.dtype, (-8, 72)) for dtype in dtypes]
    low, high = max(low for low, _ in ranges), min(high for _, high in ranges)
    base = high - low + 1
    numbers = torch.randperm(samples, generator=generator, device="cpu")
    codes = [torch.exp2((numbers % base + low).double())]
    while samples > base:
        numbers, samples = numbers // base, -(-samples // base)
        codes.append(torch.exp2((numbers % base + low).double()))
    return codes


_EXPONENTS = {torch.float16: (-3, 3), torch.float64: (-200, 600)}  # single and bfloat16 share theirs


def sample_layout(
    plain: Tensor | None, coded: Sequence[Tensor | None], codes: Sequence[Tensor], shape: torch.Size
) -> Layout | None:
    """The sample axis of a value, from its gradients under the plain and under each coded cotangent."""
    candidates = splits(shape, len(codes[0]))
    if plain is None:  # the outputs do not depend on this value
        return next(candidates, None)
    return next((layout for layout in candidates if _shows(plain, coded, codes, layout)), None)


def is_certain(
    plain: Tensor | None, coded: Sequence[Tensor | None], codes: Sequence[Tensor], shape: torch.Size, layout: Layout
) -> bool:
    """Whether this is the only split that shows the codes, and shows them for every sample: zeros show any code."""
    if plain is None:
        return False
    size, place = (
        plain.detach().reshape(layout.before, layout.samples, layout.after).abs().transpose(0, 1).flatten(1).max(1)
    )
    if not bool((size > 0).all()):
        return False
    # One entry of each sample, where it is largest: a split that ascribes any of them to another sample is out.
    samples = torch.arange(layout.samples, device=place.device)
    entries = (place // layout.after * layout.samples + samples) * layout.after + place % layout.after
    others = [split for split in splits(shape, layout.samples) if split != layout]
    left = [split for split in others if torch.equal(entries // split.after % split.samples, samples)]
    return not any(_shows(plain, coded, codes, other) for other in left)


def _shows(plain: Tensor, coded: Sequence[Tensor | None], codes: Sequence[Tensor], layout: Layout) -> bool:
    """Whether every slice of this layout shows its own code in every digit."""
    split = (layout.before, layout.samples, layout.after)
    # Rounding differs between the passes only where a device sums in no fixed order.
    slack = 64 * torch.finfo(plain.dtype).eps
    for gradient, code in zip(coded, codes, strict=True):
        expected = plain.detach().reshape(split) * code.to(plain.device, plain.real.dtype)[:, None]
        found = torch.zeros_like(expected) if gradient is None else gradient.detach().reshape(split)
        difference, size = (found - expected).abs().amax((0, 2)), expected.abs().amax((0, 2))
        # A code that underflows or overflows is no evidence.
        dim = (size < 1024 * torch.finfo(plain.dtype).tiny) & (plain.detach().reshape(split).abs().amax((0, 2)) > 0)
        if bool(dim.any()) or not bool((difference <= slack * size).all()):
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
