"""Tensors and per-sample gradients from rank to rank."""

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
    """What a rank must know of a tensor to receive it: axes in their order in memory, those that repeat one entry."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    repeated: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        """The kind of a tensor."""
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        repeated = {axis for axis, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[axis] > 1}
        return cls(tuple(tensor.shape), tensor.dtype, tuple(order), frozenset(repeated))

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Sizes of what is sent, axes in their order in memory."""
        return tuple(1 if axis in self.repeated else self.shape[axis] for axis in self.order)

    def sent(self, tensor: Tensor) -> Tensor:
        """What is sent of a tensor of this kind."""
        once = tuple(slice(0, 1) if axis in self.repeated else slice(None) for axis in range(len(self.shape)))
        return tensor.detach()[once].permute(self.order).contiguous()

    def received(self, sent: Tensor) -> Tensor:
        """The tensor again."""
        return sent.permute([self.order.index(axis) for axis in range(len(self.shape))]).expand(self.shape)


def mapped(gradients: Gradients, change: Callable[[Tensor], Any]) -> Any:
    """Gradients with something else in the places of their tensors; where entries stand is left out."""
    if isinstance(gradients, Dense):
        return Dense(change(gradients.gradient))

    def part(one: Factor) -> Factor:
        held = one.held
        rows = replace(held, image=change(held.image)) if isinstance(held, Windows) else change(held)
        return replace(one, held=rows, grads=change(one.grads))

    return replace(gradients, parts=tuple(part(one) for one in gradients.parts), order=None)


def kinds(gradients: Gradients) -> Any:
    """Gradients with the kinds of their tensors in the places of these: what others must know to receive them."""
    return mapped(gradients, TensorKind.of)


def contents(gradients: Any) -> list[Any]:
    """The tensors of gradients, or what stands in their places, in the order in which they are sent."""
    found: list[Any] = []
    mapped(gradients, found.append)
    return found


def swapped(
    group: RankGroup,
    outgoing: Mapping[int, Sequence[Tensor]],
    expected: Mapping[int, Sequence[TensorKind]],
    device: torch.device,
) -> dict[int, list[Tensor]]:
    """Send tensors to some ranks and receive those of others; `expected`: the kinds that each of them sends."""
    with group.together():
        swap = Swap(group, outgoing, expected, device)
    swap.begin()
    return swap.received()


class Swap:
    """Tensors on their way between ranks, so that this rank can work meanwhile.

    Memory is taken when it is made, which may fail on one rank alone: all of them agree before they `begin`.
    """

    def __init__(
        self,
        group: RankGroup,
        outgoing: Mapping[int, Sequence[Tensor]],
        expected: Mapping[int, Sequence[TensorKind]],
        device: torch.device,
    ) -> None:
        group.settle()
        home = device if group.sends_from(device) else group.device
        self._expected, self._device = expected, device
        self._sent = {
            rank: [TensorKind.of(one).sent(one).to(home) for one in several] for rank, several in outgoing.items()
        }
        self._found = {
            rank: [torch.empty(kind.sent_shape, dtype=kind.dtype, device=home) for kind in several]
            for rank, several in expected.items()
        }
        self._group = group
        self._works: list[Any] = []

    def begin(self) -> None:
        """Send, and expect the others."""
        operations = []
        for act, messages in ((dist.isend, self._sent), (dist.irecv, self._found)):
            for rank, several in messages.items():
                operations += [
                    dist.P2POp(act, one, group=self._group.process_group, group_peer=rank)
                    for one in several
                    if one.numel()
                ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def received(self) -> dict[int, list[Tensor]]:
        """What the others have sent; waits for it."""
        for work in self._works:
            work.wait()
        return {
            rank: [kind.received(one.to(self._device)) for kind, one in zip(self._expected[rank], several, strict=True)]
            for rank, several in self._found.items()
        }


def refilled(skeleton: Any, tensors: Sequence[Tensor], order: Tensor | None) -> Gradients:
    """The gradients of another rank from what it has sent; entries stand where they stand in those of this one."""
    given = iter(tensors)
    whole: Gradients = mapped(skeleton, lambda _: next(given))
    return whole if isinstance(whole, Dense) else replace(whole, order=order)
