"""Samples and their gradients, divided among ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from featlearn.contraction.factors import Dense, Factors, Gradients, as_dense, dense_slice
from featlearn.distributed.exchange import Swap, TensorKind, contents, fill_gradients, swap_tensors
from featlearn.distributed.group import RankGroup
from featlearn.planning.plan import sample_blocks


@dataclass(frozen=True)
class SampleShares:
    """The samples of both sides of a kernel, and who has them."""

    ranks: RankGroup
    samples: tuple[int, int]
    symmetric: bool

    def places(self, side: int, rank: int | None = None) -> slice:
        """The samples of a rank, this one by default: its rows, and the columns whose gradients it captures."""
        return self.ranks.share(self.samples[side], rank)

    def computed(self, rank: int, distance: int) -> tuple[slice, slice]:
        """Rows and columns of the entries that a rank computes with the samples of the rank `distance` before it.

        Where the kernel is symmetric, two ranks that are half of all ranks apart meet twice: one of them takes the
        first half of its rows, the other all of its rows with the second half of these.
        """
        rows, columns = self.places(0, rank), self.places(1, (rank - distance) % self.ranks.size)
        if self.symmetric and distance and 2 * distance == self.ranks.size:
            if rank < distance:
                rows = slice(rows.start, (rows.start + rows.stop) // 2)
            else:
                columns = slice((columns.start + columns.stop) // 2, columns.stop)
        return rows, columns

    def blocks(self, side: int, size: int) -> list[list[slice]]:
        """For every block of samples that is captured at a time, those of each rank."""
        shares = self.ranks.shares(self.samples[side])
        return [
            [slice(min(s.start + b.start, s.stop), min(s.start + b.stop, s.stop)) for s in shares]
            for b in sample_blocks(shares[0].stop - shares[0].start, size)
        ]


@dataclass(frozen=True)
class DividedGradients:
    """The gradients of one parameter for a block of samples: those of this rank, and what is known of the others."""

    ranks: RankGroup
    own: Gradients | None
    kinds: Sequence[Any]
    """By rank, gradients with the kinds of tensors in their places; None where no sample uses the parameter."""
    places: Sequence[slice]

    @property
    def known(self) -> list[Any]:
        """Those of the ranks that have gradients."""
        return [one for one in self.kinds if one is not None]

    @property
    def directions(self) -> int:
        """How many output directions."""
        one = self.known[0]
        return int(one.gradient.shape[1] if isinstance(one, Dense) else one.parts[0].grads.shape[0])

    @property
    def size(self) -> int:
        """Entries of the parameter."""
        one = self.known[0]
        return int(one.gradient.shape[2] if isinstance(one, Dense) else one.blocks * one.first * one.second)

    @property
    def length(self) -> int:
        """Entries along the axis that slices divide."""
        one = self.known[0]
        return self.size if isinstance(one, Dense) else int(max(one.first, one.second))

    def dense(self, size: int) -> "DividedGradients":
        """With gradients that are formed, on every rank."""

        def formed(one: Any, place: slice) -> Any:
            if one is None:
                return None
            dtype = contents(one)[-1].dtype
            directions = replace(self, kinds=[one]).directions
            return Dense(TensorKind((place.stop - place.start, directions, size), dtype, (0, 1, 2)))  # type: ignore[arg-type]

        own = None if self.own is None else Dense(as_dense(self.own).gradient.contiguous())
        return replace(self, own=own, kinds=[formed(*each) for each in zip(self.kinds, self.places, strict=True)])

    def begin_exchange(
        self, distance: int, device: torch.device, order: Tensor | None
    ) -> Callable[[], Gradients | None]:
        """Begin to send the gradients of this rank `distance` places on; gives those of the rank as far before it.

        `order`: where the entries of the parameter stand, which is the same on every rank and not sent; a rank whose
        samples do not use the parameter may still receive gradients of it.
        """
        if distance == 0:
            return lambda: self.own
        to, source = ((self.ranks.rank + step) % self.ranks.size for step in (distance, -distance))
        there = self.kinds[source]
        outgoing = [] if self.own is None else contents(self.own)
        expected = [] if there is None else contents(there)
        with self.ranks.together():
            swap = Swap(self.ranks, {to: outgoing}, {source: expected}, device)
        swap.begin()

        def received() -> Gradients | None:
            found = swap.received()[source]
            return None if there is None else fill_gradients(there, found, order)

        return received

    def slice_of_all(self, number: int, passes: int, device: torch.device) -> Dense:
        """This rank's slice of the parameter, of those of one pass, for the samples of all ranks."""
        ranks = self.ranks
        with ranks.together():
            parts = [self._slice(passes * rank + number, passes * ranks.size) for rank in range(ranks.size)]
        mine = ranks.rank
        dtype = contents(self.known[0])[-1].dtype
        width = self._width(passes * mine + number, passes * ranks.size)
        kinds = [
            None if one is None else TensorKind((place.stop - place.start, self.directions, width), dtype, (0, 1, 2))
            for one, place in zip(self.kinds, self.places, strict=True)
        ]
        outgoing = {rank: [part] for rank, part in enumerate(parts) if part is not None and rank != mine}
        expected = {rank: [kind] for rank, kind in enumerate(kinds) if kind is not None and rank != mine}
        found: dict[int, list[Tensor]] = swap_tensors(ranks, outgoing, expected, device)
        if (own := parts[mine]) is not None:
            found[mine] = [own]
        return Dense(
            torch.cat(
                [
                    found[rank][0]
                    if rank in found
                    else torch.zeros(place.stop - place.start, self.directions, width, dtype=dtype, device=device)
                    for rank, place in enumerate(self.places)
                ]
            )
        )

    def _bounds(self, number: int, count: int) -> slice:
        return slice(self.length * number // count, self.length * (number + 1) // count)

    def _width(self, number: int, count: int) -> int:
        bounds = self._bounds(number, count)
        return int(bounds.stop - bounds.start) * (self.size // self.length)

    def _slice(self, number: int, count: int) -> Tensor | None:
        """One of `count` slices for the samples of this rank: (samples, directions, entries)."""
        own, here, every = self.own, self._bounds(number, count), slice(None)
        if own is None:
            return None
        if isinstance(own, Dense):
            return own.gradient[..., here].contiguous()
        if here.start == here.stop:  # more ranks than entries
            return own.parts[0].grads.new_zeros(own.samples, own.directions, 0)
        along = own.second >= own.first
        return dense_slice(own, *((every, here) if along else (here, every))).flatten(2).contiguous()


def alike(known: Sequence[Any]) -> bool:
    """Whether all have the same form, so that they can be multiplied, and sliced, as they are."""
    if all(isinstance(one, Dense) for one in known):
        return True
    return all(isinstance(one, Factors) for one in known) and len({one.frame for one in known}) == 1
