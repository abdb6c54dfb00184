"""How products are cut: gradients into slices that stay in the cache, kernels into panels of one triangle.

Factors with one position and one block, as in a perceptron, are plain matrices (`Matrices`). Many samples on a GPU go
in equal tiles of the lower triangle, all of them in one product: it is then busy to the end, and computes less of the
upper triangle than in panels.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.contraction.factors import Factors, some_of
from featlearn.contraction.hardware import cache_bytes
from featlearn.contraction.windows import Windows


def slices(left: Factors, right: Factors, symmetric: bool, scratch: int, out: Tensor) -> Iterator[tuple[slice, slice]]:
    """Ranges of both axes of a parameter whose gradients are formed together: one axis whole, the other cut.

    What is formed is multiplied while it is in the cache; where the gradients at the outputs, which are read again for
    every slice, are larger than the cache, slices are as large as they. Rows are cut, so that windows are written out
    once; gradients where all the rows stand first.
    """
    cut, whole = (left.first, left.second) if left.parts[0].rows_first else (left.second, left.first)
    samples = left.samples + (0 if symmetric else right.samples)
    each = samples * left.directions * left.blocks * whole * out.element_size()
    read = sum(part.grads.numel() * part.grads.element_size() for part in left.parts)
    step = max((CUDA_FORMED if out.is_cuda else max(formed_bytes(), read)) // max(each, 1), LEAST)
    held = left.parts[0].held
    unit = math.prod(held.kernel) if isinstance(held, Windows) else 1  # whole channels
    step = max(step - step % unit, unit)
    # A slice is formed part by part and summed: twice its size while that happens.
    step = max(1, min(step, cut, scratch // (2 * max(each, 1))))
    if out.is_cuda and unit < step < cut:
        step = min(range(step - step % unit, step // 2, -unit), key=lambda width: _tiled(cut, width))
    elif step < cut:
        step = _even(cut, step, unit)
    for begin in range(0, cut, step):
        chosen = slice(begin, min(begin + step, cut))
        yield (chosen, slice(None)) if left.parts[0].rows_first else (slice(None), chosen)


def _even(columns: int, largest: int, unit: int) -> int:
    """The width of as few slices as there can be, about equal: in whole units, and in a multiple of UNIT if it fits."""
    width = -(-columns // -(-columns // largest))
    widths = [-(-width // multiple) * multiple for multiple in (math.lcm(unit, UNIT), unit, 1)]
    return next(one for one in widths if one <= largest)


def _tiled(columns: int, step: int) -> int:
    """Columns that a GPU computes for slices of this width, in whole tiles; and something for every slice."""
    full, rest = divmod(columns, step)
    return full * -(-step // TILE) * TILE + -(-rest // TILE) * TILE + 16 * full


# Bytes of gradients formed at a time on a GPU, how many columns it computes together, and how many there are at least
# for the sake of the products.
CUDA_FORMED = 2**29
TILE = 128
LEAST = 32


def formed_bytes() -> int:
    """Bytes of gradients formed at a time on a CPU, at least: they fit into its last cache."""
    return cache_bytes(3) * 7 // 8


# At least this many rows in a panel, more where there are many, so that a product keeps its speed; more panels spare
# more of the triangle. Numbers of rows that are no multiple of UNIT cost a processor up to 40 %. A GPU needs larger
# panels to be busy.
PANEL, WIDE, CUDA_PANEL = 32, 128, 128
UNIT = 16
PANELS = 10
CUDA_WORK = 2 * 10**10


def panels(
    rows: int, columns: int, largest: int, symmetric: bool, depth: int, cuda: bool = False
) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most `largest` entries: some rows and, if they fit, all columns (those below the diagonal).

    `depth`: multiply-adds for one entry. A GPU gets enough to do at a time that starting it costs little.
    """
    if cuda:
        step = _cuda_panel(rows, CUDA_WORK // (columns * max(depth, 1)))
    else:
        step = max(PANEL, min(WIDE, _in_units(rows / 4)), _in_units(rows / PANELS))
    step = max(1, min(rows, step, max(1, largest)))
    if step * columns > largest:  # then nearly square, for the sake of the products
        step = max(1, min(step, int(largest**0.5)))
    wide = max(1, min(columns, largest // step))
    for i in range(0, rows, step):
        stop = min(i + step, rows)
        for j in range(0, stop if symmetric else columns, wide):
            yield slice(i, stop), slice(j, min(j + wide, stop if symmetric else columns))


def _in_units(rows: float) -> int:
    return UNIT * round(rows / UNIT)


def _cuda_panel(rows: int, busy: int) -> int:
    """Rows in a panel on a GPU: all, if fewer would not keep it `busy`; otherwise a power of two, at most a quarter."""
    if busy >= rows:
        return rows
    return max(CUDA_PANEL, 1 << round(math.log2(max(1, min(busy, rows // 4)))))


SIDE = 1024
"""Rows and columns of a tile."""
TILES_LEAST = 4
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
    if not on_gpu(out) or out.dim() > 2 or samples < TILES_LEAST * SIDE or both.constant:
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
