"""Per-sample gradients of one parameter, as sums of outer products or outright.

A parameter, flattened, is seen as (blocks, first, second). `Factors` holds, for every sample p and every output
direction k, the gradient sum_t first[p, t] (x) second[p, t]; one of the two factors (the rows that met the weight)
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
"""Bytes that temporaries of a squared norm may take."""


@dataclass(frozen=True)
class Factor:
    """Outer products of rows and gradients that share the sides on which they stand."""

    held: Tensor | Windows
    """The rows: (samples, positions, blocks, n), or integer (samples, positions): rows of an identity matrix of size n;
    or the images whose windows they are."""
    grads: Tensor
    """(directions, samples, positions, blocks, m)"""
    rows_first: bool
    row_size: int

    @property
    def rows(self) -> Tensor:
        """The rows written out."""
        return self.held.rows() if isinstance(self.held, Windows) else self.held

    @property
    def samples(self) -> int:
        """How many samples."""
        return self.grads.shape[1]

    @property
    def positions(self) -> int:
        """How many positions share the weight."""
        return self.grads.shape[2]

    @property
    def indexed(self) -> bool:
        """Whether the rows are rows of an identity matrix, kept as integers."""
        return not isinstance(self.held, Windows) and not self.held.is_floating_point()

    def take(self, samples: slice | Tensor) -> "Factor":
        """Some of the samples."""
        held = self.held.take(samples) if isinstance(self.held, Windows) else self.held[samples]
        return replace(self, held=held, grads=self.grads[:, samples])

    def with_positions(self, count: int) -> "Factor":
        """Padded to `count` positions; the new ones contribute nothing."""
        extra = count - self.positions
        if extra == 0:
            return self
        ends = (0, extra) if self.indexed else (0, 0, 0, 0, 0, extra)
        grads = functional.pad(self.grads, (0, 0, 0, 0, 0, extra))
        return replace(self, held=functional.pad(self.rows, ends), grads=grads)


@dataclass(frozen=True)
class Factors:
    """The whole per-sample gradient of one parameter as outer products: cross terms between all parts count."""

    parts: tuple[Factor, ...]
    blocks: int
    first: int
    second: int
    view: Hashable = ()
    """Names the order in which (blocks, first, second) holds the parameter's entries; () is the parameter's own."""
    order: Tensor | None = None
    """Where each entry of the parameter stands in that view; None for its own order."""

    @property
    def samples(self) -> int:
        """How many samples."""
        return self.parts[0].samples

    @property
    def directions(self) -> int:
        """How many output directions."""
        return self.parts[0].grads.shape[0]

    @property
    def frame(self) -> tuple[Hashable, ...]:
        """Factors can be multiplied with each other where this is equal."""
        return (self.blocks, self.first, self.second, self.view)

    def tensor(self) -> Tensor:
        """The gradient itself, (samples, directions, size), entries in the parameter's own order."""
        return as_dense(self).gradient

    def squared_norms(self, scratch: int = SCRATCH) -> Tensor:
        """(samples, directions): squared norm of every gradient. `scratch` bounds the bytes of temporaries."""
        return squared_norms(self, scratch)

    def take(self, samples: slice | Tensor) -> "Factors":
        """Some of the samples."""
        if isinstance(samples, slice) and samples == slice(0, self.samples):
            return self
        return replace(self, parts=tuple(part.take(samples) for part in self.parts))


@dataclass(frozen=True)
class Dense:
    """The per-sample gradient of one parameter, entries in its own order: (samples, directions, size)."""

    gradient: Tensor

    @property
    def samples(self) -> int:
        """How many samples."""
        return self.gradient.shape[0]

    @property
    def directions(self) -> int:
        """How many output directions."""
        return self.gradient.shape[1]

    def tensor(self) -> Tensor:
        """The gradient itself."""
        return self.gradient

    def squared_norms(self, scratch: int = SCRATCH) -> Tensor:
        """(samples, directions): squared norm of every gradient."""
        return squared_norms(self, scratch)

    def take(self, samples: slice | Tensor) -> "Dense":
        """Some of the samples."""
        if isinstance(samples, slice) and samples == slice(0, self.samples):
            return self
        return Dense(self.gradient[samples])


Gradients = Factors | Dense


def in_type(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Its values alone, in this type; what has both already is not touched, which takes as long as an op."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


class Reused:
    """Memory that is taken again and again: fresh memory is slow, because the system clears it page by page."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor of this shape, in the place of the one before."""
        size = math.prod(shape)
        if self._held is None or self._held.numel() < size:
            self._held = None  # before the next is there
            self._held = like.new_empty(size)
        return (self._held if self._held.numel() == size else self._held[:size]).view(shape)


def some_of(tensor: Tensor, axis: int, chosen: slice) -> Tensor:
    """Some entries along an axis; all of them without an op, which takes its time."""
    size = tensor.shape[axis]
    if not chosen.start and (chosen.stop is None or chosen.stop == size):
        return tensor
    begin, end, _ = chosen.indices(size)
    return tensor if end - begin == size else tensor.narrow(axis, begin, max(end - begin, 0))


def dense_slice(
    factors: Factors, first: slice, second: slice, room: int = 2**28, memory: Reused | None = None
) -> Tensor:
    """Gradient entries in these ranges of both indices: (samples, directions, blocks, some first, some second).

    `room`: bytes that windows may take while they are written out. The result may lie in `memory`.
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
    """(samples, directions, blocks, some entries of the gradients, some of the rows)"""
    chosen = some_of(part.grads, -1, grads)
    if part.indexed:
        return _scattered(replace(part, grads=chosen), rows).transpose(-1, -2)
    directions, samples, positions, blocks, width = chosen.shape
    left = chosen.permute(1, 3, 0, 4, 2)  # (samples, blocks, directions, m, positions)
    if isinstance(part.held, Windows):
        windows, entries = part.held.channels(rows)
        size = entries.stop - entries.start
        whole = memory.empty(chosen, samples, blocks, directions * width, size)
        for piece in windows.pieces(chosen.element_size(), room):  # a few images at a time are written out
            columns = windows.take(piece).columns()[:, :, entries].flatten(0, 1)
            flat = left[piece].reshape(-1, directions * width, positions)
            torch.bmm(flat, columns.mT, out=whole[piece].view(-1, directions * width, size))
    else:
        right = some_of(part.rows, -1, rows).transpose(1, 2)  # (samples, blocks, positions, n)
        size = right.shape[-1]
        count = samples * blocks  # there may be no positions at all, which leaves -1 open
        whole = memory.empty(chosen, count, directions * width, size)
        flat = left.reshape(count, directions * width, positions)
        multiply = torch.mul if positions == 1 else torch.bmm  # the first is three times as fast on a column and a row
        multiply(flat, right.reshape(count, positions, size), out=whole)
    return whole.view(samples, blocks, directions, width, size).transpose(1, 2)


def _scattered(part: Factor, rows: slice) -> Tensor:
    """Sum the gradients of equal indices: one-hot rows times gradients, without the one-hot matrix."""
    directions, samples, positions, _, width = part.grads.shape
    begin, end, _ = rows.indices(part.row_size)
    inside = (part.rows >= begin) & (part.rows < end)
    target = torch.where(inside, part.rows - begin, end - begin)  # one bin more, for what lies outside
    bins = part.grads.new_zeros(samples, directions, end - begin + 1, width)
    where = target[:, None, :, None].expand(samples, directions, positions, width)
    bins.scatter_add_(2, where, part.grads.squeeze(3).transpose(0, 1))
    return bins[:, :, None, :-1]


def as_dense(gradients: Gradients) -> Dense:
    """The gradient itself, entries in the parameter's own order."""
    if isinstance(gradients, Dense):
        return gradients
    whole = dense_slice(gradients, slice(None), slice(None)).flatten(2)
    return Dense(whole if gradients.order is None else whole[..., gradients.order])


def matrix_view(parameter: Tensor, factors: Factors) -> Tensor:
    """The entries of a parameter in the view of its factors: (blocks, first, second)."""
    own = parameter.flatten()
    if factors.order is not None:
        own = torch.empty_like(own).index_copy_(0, factors.order, own)
    return own.reshape(factors.blocks, factors.first, factors.second)


def concatenate(pieces: Sequence[Gradients]) -> Gradients:
    """The same parameter for several groups of samples, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    factors = [piece for piece in pieces if isinstance(piece, Factors)]
    if len(factors) < len(pieces) or any(_sides(piece) != _sides(factors[0]) for piece in factors):
        return Dense(torch.cat([as_dense(piece).gradient for piece in pieces]))
    parts = []
    for same in zip(*(piece.parts for piece in factors), strict=True):
        longest = max(part.positions for part in same)
        even = [part.with_positions(longest) for part in same]
        parts.append(replace(even[0], held=_joined(even), grads=torch.cat([part.grads for part in even], 1)))
    return replace(factors[0], parts=tuple(parts))


def _joined(parts: Sequence[Factor]) -> Tensor | Windows:
    """The rows of several groups of samples."""
    windows = [part.held for part in parts if isinstance(part.held, Windows)]
    if len(windows) == len(parts) and len({one.geometry for one in windows}) == 1:
        return replace(windows[0], image=torch.cat([one.image for one in windows]))
    return torch.cat([part.rows for part in parts])


class Gathered:
    """Pieces of one parameter for consecutive samples, written into one place as they come.

    Many small pieces held beside what is passing would leave the heap in shreds.
    """

    def __init__(self, samples: int, directions: int) -> None:
        self.directions = directions
        self._samples, self._filled = samples, 0
        self._whole: Gradients | None = None
        self._pieces: list[Gradients] = []

    def add(self, piece: Gradients) -> None:
        """Take the next piece; it is copied."""
        if self._filled == 0 and piece.samples < self._samples:
            self._whole = _empty_like(piece, self._samples)
        if self._whole is not None and _alike(self._whole, piece):
            place = slice(self._filled, self._filled + piece.samples)
            for target, source in zip(_tensors(self._whole.take(place)), _tensors(piece), strict=True):
                target.copy_(source)
        else:
            if self._whole is not None:  # pieces differ in kind: keep what is there, and the rest as it comes
                self._pieces = [self._whole.take(slice(0, self._filled))]
                self._whole = None
            self._pieces.append(piece)
        self._filled += piece.samples

    def whole(self) -> Gradients:
        """All of them together."""
        return concatenate(self._pieces) if self._whole is None else self._whole


def _tensors(gradients: Gradients) -> list[Tensor]:
    if isinstance(gradients, Dense):
        return [gradients.gradient]
    held = [part.held.image if isinstance(part.held, Windows) else part.held for part in gradients.parts]
    return [*held, *(part.grads for part in gradients.parts)]


def _alike(a: Gradients, b: Gradients) -> bool:
    """Whether pieces can be written into the same place."""
    if isinstance(a, Dense) or isinstance(b, Dense):
        return isinstance(a, Dense) and isinstance(b, Dense)
    return _sides(a) == _sides(b) and [_kept(part) for part in a.parts] == [_kept(part) for part in b.parts]


def _kept(part: Factor) -> tuple[object, ...]:
    """How the rows are kept."""
    return (part.positions, part.held.geometry if isinstance(part.held, Windows) else None)


def _empty_like(piece: Gradients, samples: int) -> Gradients:
    if isinstance(piece, Dense):
        return Dense(piece.gradient.new_empty(samples, *piece.gradient.shape[1:]))
    parts = tuple(
        replace(
            part,
            held=replace(part.held, image=_longer(part.held.image, 0, samples))
            if isinstance(part.held, Windows)
            else _longer(part.held, 0, samples),
            grads=_longer(part.grads, 1, samples),
        )
        for part in piece.parts
    )
    return replace(piece, parts=parts)


def _longer(tensor: Tensor, axis: int, size: int) -> Tensor:
    """An empty tensor of another size along one axis, its axes in the same order in memory."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    shape = [size if i == axis else tensor.shape[i] for i in order]
    return tensor.new_empty(shape).permute([order.index(i) for i in range(tensor.dim())])


def _sides(factors: Factors) -> tuple[object, ...]:
    sides = [(part.rows_first, part.indexed) for part in factors.parts]
    return (*factors.frame, *sides)


def merged(parts: Sequence[Factor]) -> tuple[Factor, ...]:
    """Parts on the same sides are one part with more positions, which is how uses get their cross terms cheaply."""
    if len(parts) == 1:
        return (parts[0],)
    groups: dict[tuple[bool, bool], list[Factor]] = {}
    for part in parts:
        groups.setdefault((part.rows_first, part.indexed), []).append(part)
    return tuple(
        same[0]
        if len(same) == 1
        else replace(
            same[0],
            held=torch.cat([part.rows for part in same], 1),
            grads=torch.cat([part.grads for part in same], 2),
        )
        for _, same in sorted(groups.items())
    )


def squared_norms(gradients: Gradients, scratch: int) -> Tensor:
    """(samples, directions): the squared norm of every gradient. `scratch` bounds the bytes of temporaries."""
    if isinstance(gradients, Dense):
        return gradients.gradient.square().sum(2)
    if len(gradients.parts) == 1 and not gradients.parts[0].indexed:
        (part,) = gradients.parts
        # positions^2 (n + m) for the Grams of rows and gradients against positions n m for the gradient itself
        n, m = part.row_size, part.grads.shape[-1]
        if part.positions * (n + m) <= n * m:
            return _by_grams(part, scratch)
    size = gradients.blocks * gradients.first * gradients.second * gradients.directions
    step = max(1, scratch // (2 * size * gradients.parts[0].grads.element_size()))
    pieces = [gradients.take(slice(i, i + step)) for i in range(0, gradients.samples, step)]
    return torch.cat([as_dense(piece).gradient.square().sum(2) for piece in pieces])


def _by_grams(part: Factor, scratch: int) -> Tensor:
    directions, samples, positions, blocks, _ = part.grads.shape
    size = blocks * positions * (part.row_size + positions * 3 * directions) * part.grads.element_size()
    step = max(1, scratch // max(1, size))  # a gate of zeros lets no gradient through: no positions
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
    """(samples, directions): sum_j weights_j gradient_j^2, weights one number or one for each entry."""
    if not isinstance(weights, Tensor):
        return squared_norms(gradients, scratch) * weights
    step = gradients.samples
    if isinstance(gradients, Factors):
        item = gradients.parts[0].grads.element_size()
        step = max(1, scratch // (3 * weights.numel() * gradients.directions * item))
    pieces = [as_dense(gradients.take(slice(i, i + step))).gradient for i in range(0, gradients.samples, step)]
    return torch.cat([piece.square() @ weights.flatten().to(piece) for piece in pieces])
