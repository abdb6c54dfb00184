"""The lower triangle of a Gram matrix in equal tiles, all of them in one product.

A GPU is then busy to the end of it, and computes less of the upper triangle than in panels.
"""

import torch
from torch import Tensor

SIDE = 1024
"""Rows and columns of a tile."""
LEAST = 4
"""How many of them a side of the matrix has at least, for it to be worth while."""


def on_gpu(tensor: Tensor) -> bool:
    """Whether tiles are worth while there."""
    return tensor.is_cuda


def tiled_gram(rows: Tensor) -> Tensor:
    """Inner products of rows (P, n) in tiles (pairs, SIDE, SIDE), one diagonal after the other, the main one first.

    Rows beyond the last whole tile are left out.
    """
    count = len(rows) // SIDE
    tiles = rows[: count * SIDE].reshape(count, SIDE, -1)
    left = torch.cat([tiles[away:] for away in range(count)])
    right = torch.cat([tiles[: count - away] for away in range(count)])
    return torch.bmm(left, right.mT)


def add_tiled_products(out: Tensor, rows: Tensor, grads: Tensor, scale: float, first: Tensor | None = None) -> None:
    """out (P, P) += scale * rows rows^T * grads grads^T, elementwise, on and below the diagonal (and near it above).

    `first`: inner products of the rows in tiles, if they are known.
    """
    count = len(rows) // SIDE
    first, second = tiled_gram(rows) if first is None else first, tiled_gram(grads)
    (down, along), begin = out.stride(), 0
    for away in range(count):
        # Tiles of one diagonal follow each other at equal distances.
        tiles = out.as_strided(
            (count - away, SIDE, SIDE), (SIDE * (down + along), down, along),
            out.storage_offset() + away * SIDE * down,
        )  # fmt: skip
        some = slice(begin, begin + count - away)
        tiles.addcmul_(first[some], second[some], value=scale)
        begin = some.stop
    rest = slice(count * SIDE, len(rows))
    if rest.start < rest.stop:
        out[rest].addcmul_(rows[rest] @ rows.T, grads[rest] @ grads.T, value=scale)


def tiles_ahead(x: Tensor, scratch: int) -> Tensor | None:
    """Inner products of inputs in tiles, if a first layer may need them: a GPU has something to begin with.

    `scratch` bounds the bytes of temporaries.
    """
    worth = on_gpu(x) and x.dim() == 2 and x.is_floating_point() and x.element_size() >= 4
    if not worth or len(x) < LEAST * SIDE or bytes_of_tiles(len(x), x.shape[1], x.element_size()) >= scratch // 2:
        return None
    return tiled_gram(x)


def bytes_of_tiles(samples: int, width: int, itemsize: int) -> int:
    """Bytes of tiles and of what they are made from, `width` numbers for each sample on both sides together."""
    count = samples // SIDE
    return count * (count + 1) * SIDE * (SIDE + width) * itemsize
