"""Block sizes: slices of gradients that fit in the cache, and panels of one triangle of a kernel.

Factors with a single position and block, as in an MLP, are plain matrices (`Matrices`). On a GPU, many samples are
computed in equal tiles of the lower triangle by a single batched product. This keeps the GPU busy, and computes less of
the upper triangle than panels.
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
    """Yield ranges of both axes of a parameter whose gradients are formed together: one full axis, the other sliced.

    Slices fit in the cache. If the output gradients, which are read for every slice, are larger than the cache, slices
    are as large as these gradients. The row axis is sliced, so that windows are unfolded once.
    """
    cut, full = (left.first, left.second) if left.parts[0].rows_first else (left.second, left.first)
    samples = left.samples + (0 if symmetric else right.samples)
    slice_bytes = samples * left.directions * left.blocks * full * out.element_size()
    grad_bytes = sum(part.grads.numel() * part.grads.element_size() for part in left.parts)
    step = max((CUDA_FORMED if out.is_cuda else max(formed_bytes(), grad_bytes)) // max(slice_bytes, 1), LEAST)
    rows = left.parts[0].held
    unit = math.prod(rows.kernel) if isinstance(rows, Windows) else 1  # full channels
    step = max(step - step % unit, unit)
    # Summing parts takes twice the memory of a slice.
    step = max(1, min(step, cut, scratch // (2 * max(slice_bytes, 1))))
    if out.is_cuda and unit < step < cut:
        step = min(range(step - step % unit, step // 2, -unit), key=lambda width: _tiled(cut, width))
    elif step < cut:
        step = _even(cut, step, unit)
    for begin in range(0, cut, step):
        indices = slice(begin, min(begin + step, cut))
        yield (indices, slice(None)) if left.parts[0].rows_first else (slice(None), indices)


def _even(columns: int, largest: int, unit: int) -> int:
    """Return the width of the fewest, about equal slices: a multiple of `unit`, and of UNIT if possible."""
    width = -(-columns // -(-columns // largest))
    widths = [-(-width // multiple) * multiple for multiple in (math.lcm(unit, UNIT), unit, 1)]
    return next(candidate for candidate in widths if candidate <= largest)


def _tiled(columns: int, step: int) -> int:
    """Return the columns a GPU computes for slices of this width, in full tiles, plus an overhead per slice."""
    full, rest = divmod(columns, step)
    return full * -(-step // TILE) * TILE + -(-rest // TILE) * TILE + 16 * full


# On a GPU: bytes of gradients formed at a time, columns per tile, and least columns for efficient products.
CUDA_FORMED = 2**29
TILE = 128
LEAST = 32


def formed_bytes() -> int:
    """Return the bytes of gradients formed at a time on a CPU, which fit in its last cache."""
    return cache_bytes(3) * 7 // 8


# Bounds on the rows of a panel. Large panels keep products fast, small panels skip more of the triangle. On a CPU, rows
# that are not a multiple of UNIT cost up to 40%. A GPU needs larger panels.
PANEL, WIDE, CUDA_PANEL = 32, 128, 128
UNIT = 16
PANELS = 10
CUDA_WORK = 2 * 10**10


def panels(
    rows: int, columns: int, largest: int, symmetric: bool, depth: int, cuda: bool = False
) -> Iterator[tuple[slice, slice]]:
    """Yield panels of at most `largest` entries: some rows and, if they fit, all columns (below the diagonal).

    `depth` is the number of multiply-adds per entry. GPU panels are large enough to amortize kernel launches.
    """
    if cuda:
        step = _cuda_panel(rows, CUDA_WORK // (columns * max(depth, 1)))
    else:
        step = max(PANEL, min(WIDE, _in_units(rows / 4)), _in_units(rows / PANELS))
    step = max(1, min(rows, step, max(1, largest)))
    if step * columns > largest:  # nearly square panels for efficient products
        step = max(1, min(step, int(largest**0.5)))
    wide = max(1, min(columns, largest // step))
    for i in range(0, rows, step):
        stop = min(i + step, rows)
        for j in range(0, stop if symmetric else columns, wide):
            yield slice(i, stop), slice(j, min(j + wide, stop if symmetric else columns))


def _in_units(rows: float) -> int:
    return UNIT * round(rows / UNIT)


def _cuda_panel(rows: int, busy: int) -> int:
    """Return the rows of a GPU panel: all, if at most `busy`; otherwise a power of two, at most a quarter."""
    if busy >= rows:
        return rows
    return max(CUDA_PANEL, 1 << round(math.log2(max(1, min(busy, rows // 4)))))


SIDE = 1024
"""Rows and columns of a tile."""
TILES_LEAST = 4
"""Least number of tiles per side for which tiles are faster."""

RowGrams = dict[tuple[int, ...], Tensor]
"""Start of a panel, and indices of parts -> inner products of their rows."""


class Matrices(NamedTuple):
    """Rows and gradients of all samples."""

    rows: Tensor
    """(P, n)"""
    grads: tuple[Tensor, ...]
    """(P, m) for each direction, or a single matrix with directions side by side."""

    @property
    def constant(self) -> bool:
        """Whether gradients are equal for all samples (stride 0), as at the last layer."""
        return not any(grads.stride(0) for grads in self.grads)


def matrices(factors: Factors, *, joined: bool) -> Matrices | None:
    """Return factors as matrices, or None if they are not; `joined` puts directions side by side."""
    part = factors.parts[0]
    if len(factors.parts) > 1 or factors.blocks > 1 or part.positions != 1 or isinstance(part.held, Windows):
        return None
    if part.indexed:
        return None
    grads = part.grads.squeeze((2, 3))
    by_direction = grads.unbind() if not joined or grads.shape[0] == 1 else (grads.transpose(0, 1).flatten(1),)
    return Matrices(part.held.squeeze((1, 2)), by_direction)


def add_in_panels(
    out: Tensor,
    left: Matrices,
    right: Matrices,
    panels: Iterable[tuple[slice, slice]],
    scale: float,
    row_grams: RowGrams | None,
) -> None:
    """Add scale * (rows rows^T) * (grads grads^T), elementwise, to out (P, P2), or to out per direction, by panels.

    `row_grams` caches inner products of rows.
    """
    constant = left.constant and right.constant
    for rows, columns in panels:
        key = (rows.start, columns.start)
        first = row_grams.get(key) if row_grams is not None else None
        if first is None:
            first = torch.mm(some_of(left.rows, 0, rows), some_of(right.rows, 0, columns).T)
            if row_grams is not None:
                row_grams[key] = first
        for k, (a, b) in enumerate(zip(left.grads, right.grads, strict=True)):
            target = some_of(some_of(out if out.dim() == 2 else out[k], 0, rows), 1, columns)
            second = torch.mm(a[:1], b[:1].T) if constant else torch.mm(some_of(a, 0, rows), some_of(b, 0, columns).T)
            target.addcmul_(first, second, value=scale)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether tiles are used for this tensor."""
    return tensor.is_cuda


def worth_tiles(out: Tensor, both: Matrices, scratch: int) -> bool:
    """Return whether the Gram matrix, with directions side by side, has enough samples and memory for tiles."""
    samples, width = len(out), both.rows.shape[1] + both.grads[0].shape[1]
    if not on_gpu(out) or out.dim() > 2 or samples < TILES_LEAST * SIDE or both.constant:
        return False
    return _bytes_of_tiles(samples, width, out.element_size()) < scratch


def add_in_tiles(out: Tensor, both: Matrices, scale: float) -> None:
    """Add as in `add_in_panels` for equal sides, on and below the diagonal (and partly above)."""
    rows, (grads,) = both.rows, both.grads
    count = len(rows) // SIDE
    first, second = tiled_gram(rows), tiled_gram(grads)
    (row_stride, column_stride), begin = out.stride(), 0
    for offset in range(count):
        # Tiles of a diagonal are equally spaced in memory.
        tiles = out.as_strided(
            (count - offset, SIDE, SIDE),
            (SIDE * (row_stride + column_stride), row_stride, column_stride),
            out.storage_offset() + offset * SIDE * row_stride,
        )
        pairs = slice(begin, begin + count - offset)
        tiles.addcmul_(first[pairs], second[pairs], value=scale)
        begin = pairs.stop
    rest = slice(count * SIDE, len(rows))
    if rest.start < rest.stop:
        out[rest].addcmul_(rows[rest] @ rows.T, grads[rest] @ grads.T, value=scale)


def tiled_gram(rows: Tensor) -> Tensor:
    """Compute inner products of rows (P, n) in tiles (pairs, SIDE, SIDE), by diagonals, the main diagonal first.

    Rows beyond the last full tile are omitted.
    """
    count = len(rows) // SIDE
    tiles = rows[: count * SIDE].reshape(count, SIDE, -1)
    left = torch.cat([tiles[offset:] for offset in range(count)])
    right = torch.cat([tiles[: count - offset] for offset in range(count)])
    return torch.bmm(left, right.mT)


def _bytes_of_tiles(samples: int, width: int, itemsize: int) -> int:
    """Return the bytes of tiles and their inputs, with `width` numbers per sample for both sides together."""
    count = samples // SIDE
    return count * (count + 1) * SIDE * (SIDE + width) * itemsize
