"""Per-sample gradients of a parameter, as sums of outer products or dense.

A flattened parameter is viewed as (blocks, first, second). `Factors` represents, for every sample p and output
direction k, the gradient sum_t first[p, t] (x) second[p, t]. One of the two factors (the rows multiplied by the weight)
does not depend on the direction. `Dense` holds the gradient itself.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from featlearn.contraction.windows import Windows

SCRATCH = 2**26
"""Largest size of temporaries of a squared norm, in bytes."""


@dataclass(frozen=True)
class Factor:
    """Outer products of rows and gradients, with rows on the same side."""

    held: Tensor | Windows
    """Rows (samples, positions, blocks, n); or integers (samples, positions), as one-hot rows of size n; or windows of
    images."""
    grads: Tensor
    """(directions, samples, positions, blocks, m)"""
    rows_first: bool
    row_size: int

    @property
    def rows(self) -> Tensor:
        """Rows, with windows unfolded."""
        return self.held.rows() if isinstance(self.held, Windows) else self.held

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.grads.shape[1]

    @property
    def positions(self) -> int:
        """Number of positions that share the weight."""
        return self.grads.shape[2]

    @property
    def indexed(self) -> bool:
        """Whether rows are one-hot rows, stored as integers."""
        return not isinstance(self.held, Windows) and not self.held.is_floating_point()

    def take(self, samples: slice | Tensor) -> "Factor":
        """Select samples."""
        held = self.held.take(samples) if isinstance(self.held, Windows) else self.held[samples]
        return replace(self, held=held, grads=self.grads[:, samples])

    def with_positions(self, count: int) -> "Factor":
        """Pad to `count` positions; new positions contribute zero."""
        extra = count - self.positions
        if extra == 0:
            return self
        ends = (0, extra) if self.indexed else (0, 0, 0, 0, 0, extra)
        grads = functional.pad(self.grads, (0, 0, 0, 0, 0, extra))
        return replace(self, held=functional.pad(self.rows, ends), grads=grads)


@dataclass(frozen=True)
class Factors:
    """Per-sample gradient of a parameter as a sum of outer products over all parts."""

    parts: tuple[Factor, ...]
    blocks: int
    first: int
    second: int
    view: Hashable = ()
    """Name of the order of the parameter's entries in (blocks, first, second); () is the original order."""
    order: Tensor | None = None
    """Index of each parameter entry in that view; None for the original order."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.parts[0].samples

    @property
    def directions(self) -> int:
        """Number of output directions."""
        return self.parts[0].grads.shape[0]

    @property
    def frame(self) -> tuple[Hashable, ...]:
        """Key: factors with equal frames can be multiplied."""
        return (self.blocks, self.first, self.second, self.view)

    def tensor(self) -> Tensor:
        """Return the dense gradient, (samples, directions, size), in the order of the parameter."""
        return as_dense(self).gradient

    def squared_norms(self, scratch: int = SCRATCH) -> Tensor:
        """Return squared norms of all gradients, (samples, directions); `scratch` bounds temporaries in bytes."""
        if len(self.parts) == 1 and not self.parts[0].indexed:
            (part,) = self.parts
            # positions^2 (n + m) for the Grams of rows and gradients against positions n m for the gradient itself
            n, m = part.row_size, part.grads.shape[-1]
            if part.positions * (n + m) <= n * m:
                return _by_grams(part, scratch)
        size = self.blocks * self.first * self.second * self.directions
        step = max(1, scratch // (2 * size * self.parts[0].grads.element_size()))
        pieces = [self.take(slice(i, i + step)) for i in range(0, self.samples, step)]
        return torch.cat([as_dense(piece).squared_norms() for piece in pieces])

    def take(self, samples: slice | Tensor) -> "Factors":
        """Select samples."""
        if isinstance(samples, slice) and samples == slice(0, self.samples):
            return self
        return replace(self, parts=tuple(part.take(samples) for part in self.parts))


@dataclass(frozen=True)
class Dense:
    """Dense per-sample gradient of a parameter, in its order: (samples, directions, size)."""

    gradient: Tensor

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.gradient.shape[0]

    @property
    def directions(self) -> int:
        """Number of output directions."""
        return self.gradient.shape[1]

    def tensor(self) -> Tensor:
        """Return the gradient."""
        return self.gradient

    def squared_norms(self, scratch: int = SCRATCH) -> Tensor:
        """Return squared norms of all gradients, (samples, directions)."""
        return self.gradient.square().sum(2)

    def take(self, samples: slice | Tensor) -> "Dense":
        """Select samples."""
        if isinstance(samples, slice) and samples == slice(0, self.samples):
            return self
        return Dense(self.gradient[samples])


Gradients = Factors | Dense


def in_type(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Detach and convert to a dtype; skip ops that are not needed."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


class Reused:
    """Reusable buffer; new memory is slow, because the system clears it page by page."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialized tensor of this shape, which overwrites the previous one."""
        size = math.prod(shape)
        if self._held is None or self._held.numel() < size:
            self._held = None  # free before allocating
            self._held = like.new_empty(size)
        return (self._held if self._held.numel() == size else self._held[:size]).view(shape)


def some_of(tensor: Tensor, axis: int, indices: slice) -> Tensor:
    """Select entries along an axis, without an op if all are selected."""
    size = tensor.shape[axis]
    if not indices.start and (indices.stop is None or indices.stop == size):
        return tensor
    begin, end, _ = indices.indices(size)
    return tensor if end - begin == size else tensor.narrow(axis, begin, max(end - begin, 0))


def dense_slice(
    factors: Factors, first: slice, second: slice, room: int = 2**28, memory: Reused | None = None
) -> Tensor:
    """Form gradient entries in ranges of both indices: (samples, directions, blocks, some first, some second).

    `room` bounds the bytes of unfolded windows. The result may be stored in `memory`.
    """
    total: Tensor | None = None
    for part in factors.parts:
        rows, grads = (first, second) if part.rows_first else (second, first)
        term = _formed(part, rows, grads, room, memory if memory is not None and total is None else Reused())
        term = term.transpose(-1, -2) if part.rows_first else term
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def _formed(part: Factor, rows: slice, grads: slice, room: int, memory: Reused) -> Tensor:
    """Form (samples, directions, blocks, some entries of the gradients, some of the rows)."""
    selected = some_of(part.grads, -1, grads)
    if part.indexed:
        return _scattered(replace(part, grads=selected), rows).transpose(-1, -2)
    directions, samples, positions, blocks, width = selected.shape
    left = selected.permute(1, 3, 0, 4, 2)  # (samples, blocks, directions, m, positions)
    if isinstance(part.held, Windows):
        windows, entries = part.held.channels(rows)
        size = entries.stop - entries.start
        result = memory.empty(selected, samples, blocks, directions * width, size)
        for piece in windows.pieces(selected.element_size(), room):  # unfold a few images at a time
            columns = windows.take(piece).columns()[:, :, entries].flatten(0, 1)
            flat = left[piece].reshape(-1, directions * width, positions)
            torch.bmm(flat, columns.mT, out=result[piece].view(-1, directions * width, size))
    else:
        right = some_of(part.rows, -1, rows).transpose(1, 2)  # (samples, blocks, positions, n)
        size = right.shape[-1]
        count = samples * blocks  # without positions, -1 would be ambiguous
        result = memory.empty(selected, count, directions * width, size)
        flat = left.reshape(count, directions * width, positions)
        multiply = torch.mul if positions == 1 else torch.bmm  # mul is three times as fast for a column times a row
        multiply(flat, right.reshape(count, positions, size), out=result)
    return result.view(samples, blocks, directions, width, size).transpose(1, 2)


def _scattered(part: Factor, rows: slice) -> Tensor:
    """Sum gradients of equal indices, that is, one-hot rows times gradients."""
    directions, samples, positions, _, width = part.grads.shape
    begin, end, _ = rows.indices(part.row_size)
    inside = (part.rows >= begin) & (part.rows < end)
    target = torch.where(inside, part.rows - begin, end - begin)  # an extra bin for other indices
    bins = part.grads.new_zeros(samples, directions, end - begin + 1, width)
    index = target[:, None, :, None].expand(samples, directions, positions, width)
    bins.scatter_add_(2, index, part.grads.squeeze(3).transpose(0, 1))
    return bins[:, :, None, :-1]


def as_dense(gradients: Gradients) -> Dense:
    """Convert to a dense gradient in the order of the parameter."""
    if isinstance(gradients, Dense):
        return gradients
    gradient = dense_slice(gradients, slice(None), slice(None)).flatten(2)
    return Dense(gradient if gradients.order is None else gradient[..., gradients.order])


def matrix_view(parameter: Tensor, factors: Factors) -> Tensor:
    """Return the entries of a parameter in the view of its factors: (blocks, first, second)."""
    entries = parameter.flatten()
    if factors.order is not None:
        entries = torch.empty_like(entries).index_copy_(0, factors.order, entries)
    return entries.reshape(factors.blocks, factors.first, factors.second)


def concatenate(pieces: Sequence[Gradients]) -> Gradients:
    """Concatenate gradients of the same parameter for several groups of samples."""
    if len(pieces) == 1:
        return pieces[0]
    factors = [piece for piece in pieces if isinstance(piece, Factors)]
    if len(factors) < len(pieces) or any(_sides(piece) != _sides(factors[0]) for piece in factors):
        return Dense(torch.cat([as_dense(piece).gradient for piece in pieces]))
    parts = []
    for group in zip(*(piece.parts for piece in factors), strict=True):
        longest = max(part.positions for part in group)
        even = [part.with_positions(longest) for part in group]
        parts.append(replace(even[0], held=_joined(even), grads=torch.cat([part.grads for part in even], 1)))
    return replace(factors[0], parts=tuple(parts))


def _joined(parts: Sequence[Factor]) -> Tensor | Windows:
    """Concatenate the rows of several groups of samples."""
    windows = [part.held for part in parts if isinstance(part.held, Windows)]
    if len(windows) == len(parts) and len({window.geometry for window in windows}) == 1:
        return replace(windows[0], image=torch.cat([window.image for window in windows]))
    return torch.cat([part.rows for part in parts])


class Gathered:
    """Gradients of a parameter for consecutive samples, copied into a preallocated tensor.

    Preallocation avoids memory fragmentation by many small pieces.
    """

    def __init__(self, samples: int, directions: int) -> None:
        self.directions = directions
        self._samples, self._filled = samples, 0
        self._whole: Gradients | None = None
        self._pieces: list[Gradients] = []

    def add(self, piece: Gradients) -> None:
        """Copy the next piece."""
        if self._filled == 0 and piece.samples < self._samples:
            self._whole = _empty_like(piece, self._samples)
        if self._whole is not None and _alike(self._whole, piece):
            place = slice(self._filled, self._filled + piece.samples)
            for target, source in zip(_tensors(self._whole.take(place)), _tensors(piece), strict=True):
                target.copy_(source)
        else:
            if self._whole is not None:  # pieces of different kinds: keep a list
                self._pieces = [self._whole.take(slice(0, self._filled))]
                self._whole = None
            self._pieces.append(piece)
        self._filled += piece.samples

    def whole(self) -> Gradients:
        """Return the gradients of all samples."""
        return concatenate(self._pieces) if self._whole is None else self._whole


def _tensors(gradients: Gradients) -> list[Tensor]:
    if isinstance(gradients, Dense):
        return [gradients.gradient]
    held = [part.held.image if isinstance(part.held, Windows) else part.held for part in gradients.parts]
    return [*held, *(part.grads for part in gradients.parts)]


def _alike(a: Gradients, b: Gradients) -> bool:
    """Return whether pieces can be stored in the same tensor."""
    if isinstance(a, Dense) or isinstance(b, Dense):
        return isinstance(a, Dense) and isinstance(b, Dense)
    return _sides(a) == _sides(b) and [_row_layout(part) for part in a.parts] == [_row_layout(part) for part in b.parts]


def _row_layout(part: Factor) -> tuple[object, ...]:
    """Return a key of the storage of the rows."""
    return (part.positions, part.held.geometry if isinstance(part.held, Windows) else None)


def _empty_like(piece: Gradients, samples: int) -> Gradients:
    if isinstance(piece, Dense):
        return Dense(piece.gradient.new_empty(samples, *piece.gradient.shape[1:]))
    parts = tuple(
        replace(
            part,
            held=replace(part.held, image=_empty_resized(part.held.image, 0, samples))
            if isinstance(part.held, Windows)
            else _empty_resized(part.held, 0, samples),
            grads=_empty_resized(part.grads, 1, samples),
        )
        for part in piece.parts
    )
    return replace(piece, parts=parts)


def _empty_resized(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Return an empty tensor with another size along an axis, and the same memory order of axes."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    shape = [size if i == axis else tensor.shape[i] for i in order]
    return tensor.new_empty(shape).permute([order.index(i) for i in range(tensor.dim())])


def _sides(factors: Factors) -> tuple[object, ...]:
    sides = [(part.rows_first, part.indexed) for part in factors.parts]
    return (*factors.frame, *sides)


def merged(parts: Sequence[Factor]) -> tuple[Factor, ...]:
    """Merge parts with rows on the same side into a part with more positions, which includes cross terms cheaply."""
    if len(parts) == 1:
        return (parts[0],)
    groups: dict[tuple[bool, bool], list[Factor]] = {}
    for part in parts:
        groups.setdefault((part.rows_first, part.indexed), []).append(part)
    return tuple(
        group[0]
        if len(group) == 1
        else replace(
            group[0],
            held=torch.cat([part.rows for part in group], 1),
            grads=torch.cat([part.grads for part in group], 2),
        )
        for _, group in sorted(groups.items())
    )


def _by_grams(part: Factor, scratch: int) -> Tensor:
    directions, samples, positions, blocks, _ = part.grads.shape
    size = blocks * positions * (part.row_size + positions * 3 * directions) * part.grads.element_size()
    step = max(1, scratch // max(1, size))  # zero gates can leave no positions
    pieces = []
    for i in range(0, samples, step):
        piece = part.take(slice(i, i + step))
        rows, grads = piece.rows, piece.grads
        if positions == 1:
            pieces.append(torch.einsum("ptb,kptb->pk", rows.square().sum(-1), grads.square().sum(-1)))
        else:
            rows, grads = rows.transpose(1, 2), grads.transpose(2, 3)
            pieces.append(((rows @ rows.mT) * (grads @ grads.mT)).sum((2, 3, 4)).mT)
    return torch.cat(pieces)


def weighted_squared_norms(gradients: Gradients, weights: Tensor | float, scratch: int) -> Tensor:
    """Return sum_j weights_j gradient_j^2, (samples, directions), for a single weight or a weight per entry."""
    if not isinstance(weights, Tensor):
        return gradients.squared_norms(scratch) * weights
    step = gradients.samples
    if isinstance(gradients, Factors):
        item = gradients.parts[0].grads.element_size()
        step = max(1, scratch // (3 * weights.numel() * gradients.directions * item))
    pieces = [as_dense(gradients.take(slice(i, i + step))).gradient for i in range(0, gradients.samples, step)]
    return torch.cat([piece.square() @ weights.flatten().to(piece) for piece in pieces])
