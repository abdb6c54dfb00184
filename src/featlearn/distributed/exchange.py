"""Send tensors and per-sample gradients between ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from featlearn.contraction.factors import Dense, Factor, Gradients
from featlearn.contraction.windows import Windows
from featlearn.distributed.group import RankGroup


@dataclass(frozen=True)
class TensorKind:
    """Metadata to receive a tensor: shape, dtype, memory order of axes, and expanded axes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    repeated: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        """Return the kind of a tensor."""
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        repeated = {axis for axis, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[axis] > 1}
        return cls(tuple(tensor.shape), tensor.dtype, tuple(order), frozenset(repeated))

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the sent tensor, with axes in memory order."""
        return tuple(1 if axis in self.repeated else self.shape[axis] for axis in self.order)

    def sent(self, tensor: Tensor) -> Tensor:
        """Return the tensor to send, without repeated entries."""
        once = tuple(slice(0, 1) if axis in self.repeated else slice(None) for axis in range(len(self.shape)))
        return tensor.detach()[once].permute(self.order).contiguous()

    def received(self, sent: Tensor) -> Tensor:
        """Restore the tensor from the received one."""
        return sent.permute([self.order.index(axis) for axis in range(len(self.shape))]).expand(self.shape)


def map_tensors_of(gradients: Gradients, change: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in gradients by `change(tensor)`, and drop the order of entries."""
    if isinstance(gradients, Dense):
        return Dense(change(gradients.gradient))

    def part(factor: Factor) -> Factor:
        held = factor.held
        rows = replace(held, image=change(held.image)) if isinstance(held, Windows) else change(held)
        return replace(factor, held=rows, grads=change(factor.grads))

    return replace(gradients, parts=tuple(part(factor) for factor in gradients.parts), order=None)


def kinds(gradients: Gradients) -> Any:
    """Replace the tensors in gradients by their kinds, which other ranks need to receive them."""
    return map_tensors_of(gradients, TensorKind.of)


def contents(gradients: Any) -> list[Any]:
    """Return the tensors of gradients, or their replacements, in order of sending."""
    entries: list[Any] = []
    map_tensors_of(gradients, entries.append)
    return entries


def swap_tensors(
    group: RankGroup,
    outgoing: Mapping[int, Sequence[Tensor]],
    expected: Mapping[int, Sequence[TensorKind]],
    device: torch.device,
) -> dict[int, list[Tensor]]:
    """Send tensors to some ranks and receive tensors of the `expected` kinds from others."""
    with group.together():
        swap = Swap(group, outgoing, expected, device)
    swap.begin()
    return swap.received()


class Swap:
    """Asynchronous exchange of tensors between ranks.

    Memory is allocated on creation, which may fail on a single rank: all ranks agree before they `begin`.
    """

    def __init__(
        self,
        group: RankGroup,
        outgoing: Mapping[int, Sequence[Tensor]],
        expected: Mapping[int, Sequence[TensorKind]],
        device: torch.device,
    ) -> None:
        group.settle()
        transfer_device = device if group.sends_from(device) else group.device
        self._expected, self._device = expected, device
        self._sent = {
            rank: [TensorKind.of(tensor).sent(tensor).to(transfer_device) for tensor in items]
            for rank, items in outgoing.items()
        }
        self._buffers = {
            rank: [torch.empty(kind.sent_shape, dtype=kind.dtype, device=transfer_device) for kind in items]
            for rank, items in expected.items()
        }
        self._group = group
        self._works: list[Any] = []

    def begin(self) -> None:
        """Start sending and receiving."""
        operations = []
        for act, messages in ((dist.isend, self._sent), (dist.irecv, self._buffers)):
            for rank, tensors in messages.items():
                operations += [
                    dist.P2POp(act, tensor, group=self._group.process_group, group_peer=rank)
                    for tensor in tensors
                    if tensor.numel()
                ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def received(self) -> dict[int, list[Tensor]]:
        """Wait for and return the received tensors."""
        for work in self._works:
            work.wait()
        return {
            rank: [kind.received(raw.to(self._device)) for kind, raw in zip(self._expected[rank], buffers, strict=True)]
            for rank, buffers in self._buffers.items()
        }


def fill_gradients(skeleton: Any, tensors: Sequence[Tensor], order: Tensor | None) -> Gradients:
    """Rebuild the gradients of another rank from its tensors, with the order of entries of this rank."""
    remaining = iter(tensors)
    gradients: Gradients = map_tensors_of(skeleton, lambda _: next(remaining))
    return gradients if isinstance(gradients, Dense) else replace(gradients, order=order)
