"""Gradients of several output directions at one op: how they lie in memory, and which of them matter."""

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor


def in_type(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Its values alone, in this type; what has both already is not touched, which takes as long as an op."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


class StackedGradients(Sequence[Tensor | None]):
    """The gradients of all directions, one after the other in one tensor."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return self.whole.shape[0]

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor | None]: ...
    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor | None]:
        return list(self.whole[place]) if isinstance(place, slice) else self.whole[place]

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Tensor | None:
        """What `view` makes of each, as one tensor, if it only looks at them in another way; None if it copies."""
        whole = self.whole
        first = view(whole[0])
        if first.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return None
        return whole.as_strided(
            (whole.shape[0], *first.shape), (whole.stride(0), *first.stride()), first.storage_offset()
        )


def used_positions(grads: Sequence[Tensor]) -> Tensor | None:
    """Positions at which any gradient is not zero, if they are less than half: what is read from a sequence may be its
    last token alone. None on a GPU, which would have to be waited for."""
    positions = grads[0].shape[1]
    # The first sample tells it nearly always.
    if positions < 4 or grads[0].is_cuda or 2 * int((grads[0][0] != 0).flatten(1).any(1).sum()) >= positions:
        return None
    used = torch.zeros(positions, dtype=torch.bool, device=grads[0].device)
    for grad in grads:
        used |= (grad != 0).movedim(1, 0).flatten(1).any(1)
        if 2 * int(used.sum()) >= positions:
            return None
    return used.nonzero().flatten()


def stacked(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(directions, samples, positions, blocks, m), in memory sample by sample, then direction by direction, then as the
    op has it: what is multiplied together then lies together."""
    if len(grads) == 1:
        return in_type(grads[0], dtype)[None]
    if (whole := side_by_side(grads)) is not None and whole.dtype == dtype:
        return whole
    order = sorted((1, 2, 3), key=grads[0].stride().__getitem__, reverse=True)
    samples, inner = len(grads[0]), [grads[0].shape[axis] for axis in order]
    whole = torch.empty(samples, len(grads), *inner, dtype=dtype, device=grads[0].device)
    for k, grad in enumerate(grads):
        whole[:, k].copy_(grad.permute(0, *order))
    return whole.permute(1, 0, *(2 + order.index(axis) for axis in (1, 2, 3)))


def side_by_side(grads: Sequence[Tensor]) -> Tensor | None:
    """The same gradients as one tensor, if they already lie in one at equal distances."""
    first, step = grads[0], grads[1].storage_offset() - grads[0].storage_offset()
    same = all(
        grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and grad.storage_offset() == first.storage_offset() + k * step
        and (grad.shape, grad.stride(), grad.dtype) == (first.shape, first.stride(), first.dtype)
        for k, grad in enumerate(grads)
    )
    if not same or step <= 0:
        return None
    return first.as_strided((len(grads), *first.shape), (step, *first.stride()), first.storage_offset())
