"""Gram matrices of per-sample gradients, by the cheaper of two contractions.

- *pairs*: Gram of the rows times Gram of the gradients, summed over pairs of positions:
  samples^2 positions^2 (n + m) operations; nothing of the parameter's size is formed;
- *gradients*: form the per-sample gradients, slice by slice, and multiply: samples positions n m + samples^2 n m.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from featlearn.linalg.factors import Factor, Factors, Gradients, as_dense, dense_slice

Mode = Literal["sum", "each", "full"]
"""sum: trace over directions, (P, P2); each: (K, P, P2); full: (P, P2, K, K)."""


class Route(Enum):
    """How a Gram matrix of factors is contracted."""

    PAIRS = "pairs"
    GRADIENTS = "gradients"


@dataclass(frozen=True)
class Extent:
    """Sizes that decide the route: one side of the contraction."""

    samples: int
    directions: int
    blocks: int
    first: int
    second: int
    parts: tuple[tuple[int, int, int], ...]
    """(positions, width of the rows, 1 for integers, width of the gradients) of each part."""


def extent(factors: Factors) -> Extent:
    """The sizes of these factors."""
    parts = tuple(
        (part.positions, 1 if part.indexed else part.row_size, part.grads.shape[-1]) for part in factors.parts
    )
    return Extent(factors.samples, factors.directions, factors.blocks, factors.first, factors.second, parts)


# A product of two Gram matrices moves memory: each of its elements costs as much as about this many multiply-adds.
ELEMENTWISE = 8


def costs(left: Extent, right: Extent, mode: Mode) -> dict[Route, float]:
    """Multiply-adds of both routes."""
    samples, directions = left.samples * right.samples, left.directions
    grams = directions**2 if mode == "full" else directions
    pairs = 0.0
    for positions, rows, grads in left.parts:
        for positions2, _, _ in right.parts:
            held = 1 if mode == "sum" else grams
            pairs += samples * left.blocks * positions * positions2 * (rows + grams * grads + ELEMENTWISE * held)
    size = left.blocks * left.first * left.second
    formed = sum(side.samples * side.directions * size * sum(t for t, _, _ in side.parts) for side in (left, right))
    gradients = formed + grams * samples * size
    return {Route.PAIRS: pairs, Route.GRADIENTS: float(gradients)}


def cheaper_route(left: Extent, right: Extent, mode: Mode) -> Route:
    """The route with fewer operations."""
    cost = costs(left, right, mode)
    return min(cost, key=cost.__getitem__)


def add_gram(
    out: Tensor,
    left: Gradients,
    right: Gradients,
    mode: Mode,
    *,
    symmetric: bool,
    scratch: int,
    route: Route | None = None,
) -> None:
    """out += left right^T.

    `symmetric` promises that both sides are the same samples: one triangle of tiles is computed and mirrored.
    `scratch` bounds the bytes of temporaries.
    """
    if isinstance(left, Factors) and isinstance(right, Factors) and left.frame == right.frame:
        if (route or cheaper_route(extent(left), extent(right), mode)) is Route.PAIRS:
            _add_pairs(out, left, right, mode, symmetric, scratch)
            return
        for begin, end in _first_slices(left, right, scratch, out.element_size()):
            a = dense_slice(left, begin, end).flatten(2)
            b = a if symmetric else dense_slice(right, begin, end).flatten(2)
            _add_dense(out, a, b, mode, symmetric, scratch)
        return
    _add_dense(out, as_dense(left).gradient, as_dense(right).gradient, mode, symmetric, scratch)


def _first_slices(left: Factors, right: Factors, scratch: int, item: int) -> Iterator[tuple[int, int]]:
    """Ranges of the parameter's first axis whose gradients fit into the scratch space."""
    per_index = (left.samples + right.samples) * left.directions * left.blocks * left.second * item
    # A slice is formed part by part and summed: twice its size while that happens.
    step = max(1, min(left.first, scratch // (2 * per_index)))
    for begin in range(0, left.first, step):
        yield begin, min(begin + step, left.first)


# At least this many rows in a tile, so that a product keeps its speed; more tiles spare more of the triangle.
TILE = 256


def _tiles(rows: int, columns: int, largest: int, symmetric: bool) -> Iterator[tuple[slice, slice]]:
    step = max(1, min(largest, max(TILE, -(-max(rows, columns) // 8))))
    for i in range(0, rows, step):
        for j in range(0, i + 1 if symmetric else columns, step):
            yield slice(i, min(i + step, rows)), slice(j, min(j + step, columns))


def _add_tile(out: Tensor, tile: Tensor, rows: slice, columns: slice, mode: Mode, symmetric: bool) -> None:
    if mode == "each":
        out[:, rows, columns] += tile
    else:
        out[rows, columns] += tile
    if symmetric and rows != columns:
        if mode == "each":
            out[:, columns, rows] += tile.mT
        elif mode == "sum":
            out[columns, rows] += tile.T
        else:
            out[columns, rows] += tile.permute(1, 0, 3, 2)


def _add_dense(out: Tensor, left: Tensor, right: Tensor, mode: Mode, symmetric: bool, scratch: int) -> None:
    """left (P, K, N), right (P2, K, N)."""
    directions = left.shape[1]
    held = out.element_size() * (1 if mode == "sum" else directions if mode == "each" else directions**2)
    largest = max(1, int((scratch / held) ** 0.5))
    for rows, columns in _tiles(left.shape[0], right.shape[0], largest, symmetric):
        a, b = left[rows], right[columns]
        if mode == "sum":
            tile = a.flatten(1) @ b.flatten(1).T
        elif mode == "each":
            tile = torch.bmm(a.transpose(0, 1), b.permute(1, 2, 0))
        else:
            flat = a.flatten(0, 1) @ b.flatten(0, 1).T
            tile = flat.reshape(a.shape[0], directions, b.shape[0], directions).transpose(1, 2)
        _add_tile(out, tile, rows, columns, mode, symmetric)


def _add_pairs(out: Tensor, left: Factors, right: Factors, mode: Mode, symmetric: bool, scratch: int) -> None:
    directions = left.directions
    (left, up), (right, up2) = _ordinary(left), _ordinary(right)
    grams = {"sum": 1, "each": directions, "full": directions**2}[mode]
    longest = max(part.positions for part in left.parts) * max(part.positions for part in right.parts)
    held = out.element_size() * left.blocks * longest * (1 + 2 * grams)
    largest = max(1, int((scratch / held) ** 0.5))
    for rows, columns in _tiles(left.samples, right.samples, largest, symmetric):
        tile: Tensor | None = None
        for a in left.take(rows).parts:
            for b in right.take(columns).parts:
                term = _same_sides(a, b, mode) if a.rows_first == b.rows_first else _crossed_sides(a, b, mode)
                tile = term if tile is None else tile + term
        assert tile is not None
        _add_tile(out, tile if up * up2 == 1.0 else tile * up * up2, rows, columns, mode, symmetric)


def _ordinary(factors: Factors) -> tuple[Factors, float]:
    """The same gradients from rows and gradients of ordinary size, whose Grams cannot under- or overflow, and a factor.

    Rows of 1e-22 may meet gradients of 1e18: the product is ordinary, the Gram matrix of the rows is not a number. The
    factor is a power of two, so nothing is rounded.
    """
    sizes = [
        (1.0 if p.indexed else float(p.rows.abs().max()), float(p.grads.abs().max()))
        for p in factors.parts
        if p.positions
    ]
    if all(size == 0.0 or 1e-9 < size < 1e9 for pair in sizes for size in pair):
        return factors, 1.0
    product = max(rows * grads for rows, grads in sizes)
    shared = 2.0 ** round(math.log2(product)) if 0.0 < product < math.inf else 1.0
    parts = []
    for part in factors.parts:
        rows = 1.0 if part.indexed or not part.grads.numel() else float(part.rows.abs().max())
        scale = 2.0 ** -round(math.log2(rows)) if 0.0 < rows < math.inf else 1.0
        # rows * scale is about 1, and grads / scale / shared at most about 1.
        moved = part.rows if part.indexed else part.rows * scale
        parts.append(replace(part, rows=moved, grads=part.grads / scale / shared))
    return replace(factors, parts=tuple(parts)), shared


def _same_sides(a: Factor, b: Factor, mode: Mode) -> Tensor:
    rows = _inner(a.rows, b.rows)
    if mode == "sum":
        left, right = (part.grads.permute(1, 2, 3, 0, 4).flatten(3) for part in (a, b))
        return _over_positions(rows * _inner(left, right), a, b)
    if mode == "each":
        grads = zip(a.grads, b.grads, strict=True)
        return torch.stack([_over_positions(rows * _inner(left, right), a, b) for left, right in grads])
    lines = [
        torch.stack([_over_positions(rows * _inner(left, right), a, b) for right in b.grads], -1) for left in a.grads
    ]
    return torch.stack(lines, -2)


def _crossed_sides(a: Factor, b: Factor, mode: Mode) -> Tensor:
    """The rows of one use stand where the gradients of the other do (an embedding tied to the output layer)."""

    def term(left: Tensor, right: Tensor) -> Tensor:
        return _over_positions(_inner(a.rows, right) * _inner(left, b.rows), a, b)

    if mode == "full":
        lines = [torch.stack([term(left, right) for right in b.grads], -1) for left in a.grads]
        return torch.stack(lines, -2)
    terms = [term(left, right) for left, right in zip(a.grads, b.grads, strict=True)]
    return torch.stack(terms) if mode == "each" else torch.stack(terms).sum(0)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of all pairs of positions, block by block: (blocks, P T, P2 T2). Integers are one-hot rows."""
    if not a.is_floating_point() and not b.is_floating_point():
        return (a.reshape(-1, 1) == b.reshape(1, -1))[None]
    if not a.is_floating_point():
        return b.reshape(-1, b.shape[-1]).T[a.reshape(-1)][None]
    if not b.is_floating_point():
        return a.reshape(-1, a.shape[-1])[:, b.reshape(-1)][None]
    left, right = (t.flatten(0, 1).transpose(0, 1) for t in (a, b))
    return torch.bmm(left, right.mT)


def _over_positions(products: Tensor, a: Factor, b: Factor) -> Tensor:
    """Sum (blocks, P T, P2 T2) over blocks and both positions: (P, P2)."""
    shape = (products.shape[0], a.samples, a.positions, b.samples, b.positions)
    if products.shape[0] == a.positions == b.positions == 1:
        return products[0]
    return products.reshape(shape).sum((0, 2, 4))
