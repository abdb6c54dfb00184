"""Products of factors with one position and one block, as in a perceptron: rows and gradients are plain matrices.

Many samples on a GPU go in equal tiles of the lower triangle, all of them in one product: it is then busy to the end,
and computes less of the upper triangle than in panels.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.contraction.factors import Factors, some_of
from featlearn.contraction.windows import Windows

SIDE = 1024
"""Rows and columns of a tile."""
LEAST = 4
"""How many of them a side of the matrix has at least, for it to be worth while."""

RowGrams = dict[tuple[int, ...], Tensor]
"""Where a panel begins, and which parts -> inner products of their rows."""


class Matrices(NamedTuple):
    """Rows and gradients of all samples."""

    rows: Tensor
    """(P, n)"""
    grads: tuple[Tensor, ...]
    """(P, m) for each direction, or one for all of them side by side."""

    @property
    def constant(self) -> bool:
        """Whether gradients are the same for every sample, which their strides tell: at the last layer they are."""
        return not any(grads.stride(0) for grads in self.grads)


def matrices(factors: Factors, *, joined: bool) -> Matrices | None:
    """The matrices of factors, if they are such; `joined`: directions side by side."""
    part = factors.parts[0]
    if len(factors.parts) > 1 or factors.blocks > 1 or part.positions != 1 or isinstance(part.held, Windows):
        return None
    if part.indexed:
        return None
    grads = part.grads.squeeze((2, 3))
    several = grads.unbind() if not joined or grads.shape[0] == 1 else (grads.transpose(0, 1).flatten(1),)
    return Matrices(part.held.squeeze((1, 2)), several)


def add_in_panels(
    out: Tensor,
    left: Matrices,
    right: Matrices,
    panels: Iterable[tuple[slice, slice]],
    scale: float,
    kept: RowGrams | None,
) -> None:
    """out (P, P2), or one for each direction, += scale * rows rows^T * grads grads^T, elementwise, panel by panel.

    `kept`: inner products of rows, which are put there or taken from there.
    """
    constant = left.constant and right.constant
    for rows, columns in panels:
        place = (rows.start, columns.start)
        first = kept.get(place) if kept is not None else None
        if first is None:
            first = torch.mm(some_of(left.rows, 0, rows), some_of(right.rows, 0, columns).T)
            if kept is not None:
                kept[place] = first
        for k, (a, b) in enumerate(zip(left.grads, right.grads, strict=True)):
            target = some_of(some_of(out if out.dim() == 2 else out[k], 0, rows), 1, columns)
            second = torch.mm(a[:1], b[:1].T) if constant else torch.mm(some_of(a, 0, rows), some_of(b, 0, columns).T)
            target.addcmul_(first, second, value=scale)


def on_gpu(tensor: Tensor) -> bool:
    """Whether tiles are worth while there."""
    return tensor.is_cuda


def worth_tiles(out: Tensor, both: Matrices, scratch: int) -> bool:
    """Whether their product with themselves, directions side by side, has enough samples for tiles, and memory."""
    samples, width = len(out), both.rows.shape[1] + both.grads[0].shape[1]
    if not on_gpu(out) or out.dim() > 2 or samples < LEAST * SIDE or both.constant:
        return False
    return _bytes_of_tiles(samples, width, out.element_size()) < scratch


def add_in_tiles(out: Tensor, both: Matrices, scale: float) -> None:
    """The same for one side with itself, on and below the diagonal (and near it above)."""
    rows, (grads,) = both.rows, both.grads
    count = len(rows) // SIDE
    first, second = tiled_gram(rows), tiled_gram(grads)
    (down, along), begin = out.stride(), 0
    for away in range(count):
        # Tiles of one diagonal follow each other at equal distances.
        tiles = out.as_strided(
            (count - away, SIDE, SIDE),
            (SIDE * (down + along), down, along),
            out.storage_offset() + away * SIDE * down,
        )
        some = slice(begin, begin + count - away)
        tiles.addcmul_(first[some], second[some], value=scale)
        begin = some.stop
    rest = slice(count * SIDE, len(rows))
    if rest.start < rest.stop:
        out[rest].addcmul_(rows[rest] @ rows.T, grads[rest] @ grads.T, value=scale)


def tiled_gram(rows: Tensor) -> Tensor:
    """Inner products of rows (P, n) in tiles (pairs, SIDE, SIDE), one diagonal after the other, the main one first.

    Rows beyond the last whole tile are left out.
    """
    count = len(rows) // SIDE
    tiles = rows[: count * SIDE].reshape(count, SIDE, -1)
    left = torch.cat([tiles[away:] for away in range(count)])
    right = torch.cat([tiles[: count - away] for away in range(count)])
    return torch.bmm(left, right.mT)


def _bytes_of_tiles(samples: int, width: int, itemsize: int) -> int:
    """Bytes of tiles and of what they are made from, `width` numbers for each sample on both sides together."""
    count = samples // SIDE
    return count * (count + 1) * SIDE * (SIDE + width) * itemsize
