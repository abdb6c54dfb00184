"""How products are cut: gradients into slices that stay in the cache, kernels into panels of one triangle."""

import math
from collections.abc import Iterator

from torch import Tensor

from featlearn.contraction.factors import Factors
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
