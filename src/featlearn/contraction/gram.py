"""Gram matrices of per-sample gradients, by the cheaper of two contractions.

- *pairs*: Gram of the rows times Gram of the gradients, summed over pairs of positions:
  samples^2 positions^2 (n + m) operations; nothing of the parameter's size is formed. Rows that are windows of images
  take the Gram of the pixels instead, shifted and summed: the channels stand for n where that is less;
- *gradients*: form the per-sample gradients, slice by slice, and multiply: samples positions n m + samples^2 n m.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.contraction.blocking import RowGrams, add_in_panels, add_in_tiles, matrices, panels, slices, worth_tiles
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Factor, Factors, Gradients, Reused, as_dense, dense_slice, some_of
from featlearn.contraction.hardware import elementwise_cost
from featlearn.contraction.windows import Windows

Mode = Literal["sum", "each", "full"]
"""sum: trace over directions, (P, P2); each: (K, P, P2); full: (P, P2, K, K)."""


class Route(Enum):
    """How a Gram matrix of factors is contracted."""

    PAIRS = "pairs"
    GRADIENTS = "gradients"


class Extent(NamedTuple):
    """Sizes that decide the route: one side of the contraction."""

    samples: int
    directions: int
    blocks: int
    first: int
    second: int
    parts: tuple[tuple[int, int, int], ...]
    """(positions, width of the rows, 1 for integers, width of the gradients) of each part; for windows of images the
    width at which their inner products cost as much."""


def extent(factors: Factors, elementwise: float) -> Extent:
    """The sizes of these factors."""
    parts = tuple((part.positions, _row_cost(part, elementwise), part.grads.shape[-1]) for part in factors.parts)
    return Extent(factors.samples, factors.directions, factors.blocks, factors.first, factors.second, parts)


def window_cost(kernel: int, row_size: int, pixels: int, positions: int, elementwise: float) -> int:
    """Multiply-adds for the inner product of two windows: directly, or from the inner products of pixels."""
    shifted = pixels**2 * (row_size // kernel) / positions**2 + elementwise * kernel
    return min(row_size, int(shifted) + 1)


def _row_cost(part: Factor, elementwise: float) -> int:
    if isinstance(part.held, Windows):
        pixels = part.held.image.shape[2:].numel()
        return window_cost(math.prod(part.held.kernel), part.row_size, pixels, part.positions, elementwise)
    return 1 if part.indexed else part.row_size


def costs(left: Extent, right: Extent, mode: Mode, elementwise: float) -> dict[Route, float]:
    """Multiply-adds of both routes.

    `elementwise`: how many of them one element costs where two Gram matrices are multiplied, which moves memory.
    """
    samples, directions = left.samples * right.samples, left.directions
    grams = directions**2 if mode == "full" else directions
    pairs = 0.0
    for positions, rows, grads in left.parts:
        for positions2, _, _ in right.parts:
            held = 1 if mode == "sum" else grams
            pairs += samples * left.blocks * positions * positions2 * (rows + grams * grads + elementwise * held)
    size = left.blocks * left.first * left.second
    formed = sum(side.samples * side.directions * size * sum(t for t, _, _ in side.parts) for side in (left, right))
    gradients = formed + grams * samples * size
    return {Route.PAIRS: pairs, Route.GRADIENTS: float(gradients)}


def cheapest(left: Extent, right: Extent, mode: Mode, elementwise: float) -> float:
    """Multiply-adds of the better route."""
    return min(costs(left, right, mode, elementwise).values())


@lru_cache(maxsize=4096)
def cheaper_route(left: Extent, right: Extent, mode: Mode, elementwise: float) -> Route:
    """The route with fewer operations."""
    cost = costs(left, right, mode, elementwise)
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
    deferred: DeferredChecks | None = None,
    kept: RowGrams | None = None,
) -> None:
    """out += left right^T.

    `symmetric` promises that both sides are the same samples: only what lies on and below the diagonal is added; after
    everything has been added, `mirror` completes it. `scratch` bounds the bytes of temporaries. With `deferred`,
    entries are assumed to be of a size whose products this precision can hold, which becomes a deferred check. `kept`:
    inner products of rows, put there by a first call and reused by calls with other directions of the same samples.
    """
    if isinstance(left, Factors) and isinstance(right, Factors) and (left is right or left.frame == right.frame):
        if (route or _route(left, right, mode, out.device)) is Route.PAIRS:
            _add_pairs(out, left, right, mode, symmetric, scratch, deferred, kept)
            return
        memory = Reused(), Reused()
        for first, second in slices(left, right, symmetric, scratch, out):
            a = dense_slice(left, first, second, scratch // 4, memory[0])
            b = a if symmetric else dense_slice(right, first, second, scratch // 4, memory[1])
            turned = a.stride(-1) != 1  # in the order of memory, the same for both sides
            flat = (a.mT if turned else a).flatten(2)
            other = flat if b is a else (b.mT if turned else b).flatten(2)
            _add_dense(out, flat, other, mode, symmetric, scratch)
        return
    _add_dense(out, as_dense(left).gradient, as_dense(right).gradient, mode, symmetric, scratch)


def _route(left: Factors, right: Factors, mode: Mode, device: torch.device) -> Route:
    weight = elementwise_cost(device)
    mine = extent(left, weight)
    return cheaper_route(mine, mine if left is right else extent(right, weight), mode, weight)


# Rows that are mirrored together: on a CPU they stay in the cache, a GPU needs more to do at a time.
MIRRORED, CUDA_MIRRORED = 128, 2048


def mirror(out: Tensor, mode: Mode) -> None:
    """Complete a symmetric kernel of which only the lower triangle was added to."""
    size = out.shape[1]
    step = min(size, CUDA_MIRRORED if out.is_cuda else MIRRORED)
    for i in range(0, size, step):
        stop = min(i + step, size)
        if mode == "each":
            out[:, :i, i:stop] = out[:, i:stop, :i].mT
            _mirror_square(out[:, i:stop, i:stop])
        elif mode == "sum":
            if i:
                out[:i, i:stop] = out[i:stop, :i].T
            _mirror_square(out[i:stop, i:stop])
        else:
            out[:i, i:stop] = out[i:stop, :i].permute(1, 0, 3, 2)
            out[i:stop, i:stop] = _mirrored_samples(out[i:stop, i:stop])


def _mirror_square(square: Tensor) -> None:
    square.tril_().add_(square.tril(-1).mT)


def _mirrored_samples(square: Tensor) -> Tensor:
    """(P, P, K, K): pairs of samples above the diagonal from those below it, directions exchanged."""
    count = square.shape[0]
    below = torch.ones(count, count, dtype=torch.bool, device=square.device).tril()[:, :, None, None]
    return torch.where(below, square, square.permute(1, 0, 3, 2))


def _part(out: Tensor, rows: slice, columns: slice, mode: Mode) -> Tensor:
    first = 1 if mode == "each" else 0
    return some_of(some_of(out, first, rows), first + 1, columns)


def _add_dense(out: Tensor, left: Tensor, right: Tensor, mode: Mode, symmetric: bool, scratch: int) -> None:
    """left (P, K, N), right (P2, K, N)."""
    directions = left.shape[1]
    held = out.element_size() * (directions**2 if mode == "full" else 1)
    depth = directions * left.shape[2] * (directions if mode == "full" else 1)
    if mode == "sum":
        same, left = left is right, left.flatten(1)
        right = left if same else right.flatten(1)
    for rows, columns in panels(left.shape[0], right.shape[0], scratch // held, symmetric, depth, out.is_cuda):
        a, b, part = some_of(left, 0, rows), some_of(right, 0, columns), _part(out, rows, columns, mode)
        if mode == "sum":
            part.addmm_(a, b.T)
        elif mode == "each":
            for k in range(directions):
                part[k].addmm_(a[:, k], b[:, k].T)
        else:
            flat = a.flatten(0, 1) @ b.flatten(0, 1).T
            part += flat.view(len(a), directions, len(b), directions).transpose(1, 2)


def _add_pairs(
    out: Tensor,
    left: Factors,
    right: Factors,
    mode: Mode,
    symmetric: bool,
    scratch: int,
    deferred: DeferredChecks | None,
    kept: RowGrams | None,
) -> None:
    directions = left.directions
    same, given = left is right, (left, right)
    left, up = _ordinary(left, deferred, rows_are=bool(kept))
    right, up2 = (left, up) if same else _ordinary(right, deferred, rows_are=bool(kept))
    if left is not given[0] or right is not given[1]:
        kept = None  # rows of these directions alone were rescaled
    # A kernel that this precision cannot hold is infinite, which the caller reports; the product of factors is about 1.
    factor = up * up2
    if factor > 1.0 and factor > torch.finfo(out.dtype).max:
        factor = math.inf
    mine = matrices(left, joined=mode == "sum") if mode != "full" else None
    if mine is not None and same and symmetric and worth_tiles(out, mine, scratch):
        add_in_tiles(out, mine, factor)
        return
    grams = directions**2 if mode == "full" else 1
    longest = 1 if mine is not None and same else max(map(_pair_size, left.parts)) * max(map(_pair_size, right.parts))
    held = out.element_size() * left.blocks * longest * (2 + 2 * grams)
    depth = max([part.positions**2 * (part.row_size + grams * part.grads.shape[-1]) for part in left.parts])
    pieces = panels(left.samples, right.samples, scratch // held, symmetric, depth, out.is_cuda)
    yours = mine if same or mine is None else matrices(right, joined=mode == "sum")
    if mine is not None and yours is not None and left.parts[0].rows_first == right.parts[0].rows_first:
        add_in_panels(out, mine, yours, pieces, factor, kept)
        return
    for rows, columns in pieces:
        part = _part(out, rows, columns, mode)
        for i, a in enumerate(left.take(rows).parts):
            for j, b in enumerate(right.take(columns).parts):
                shared = None
                if kept is not None and a.rows_first == b.rows_first:
                    place = (rows.start, columns.start, i, j)
                    shared = kept[place] if place in kept else kept.setdefault(place, _row_gram(a, b))
                _add_pair(part, a, b, mode, factor, shared)


def _pair_size(part: Factor) -> int:
    """Positions or pixels, of which all pairs are held."""
    if isinstance(part.held, Windows):
        return max(part.positions, part.held.image.shape[2:].numel())
    return max(1, part.positions)


def _ordinary(factors: Factors, deferred: DeferredChecks | None, *, rows_are: bool) -> tuple[Factors, float]:
    """The same gradients from rows and gradients of ordinary size, whose Grams cannot under- or overflow, and a factor.

    Rows of 1e-22 may meet gradients of 1e18: the product is ordinary, the Gram matrix of the rows is not a number. The
    factor is a power of two, so nothing is rounded. `rows_are`: of the rows it is known.
    """
    held = [part for part in factors.parts if part.positions]
    if deferred is not None:
        asked = [part.grads for part in held] if rows_are else _tensors(held)
        deferred.expect_sizes(_is_ordinary, [in_memory_order(tensor) for tensor in asked])
        return factors, 1.0
    sizes = _largest_pairs(held)
    if all(_is_ordinary(size) for pair in sizes for size in pair):
        return factors, 1.0
    product = max(rows * grads for rows, grads in sizes)
    shared = 2.0 ** round(math.log2(product)) if 0.0 < product < math.inf else 1.0
    parts, known = [], iter(sizes)
    for part in factors.parts:
        rows = next(known)[0] if part.positions else 1.0
        scale = 2.0 ** -round(math.log2(rows)) if 0.0 < rows < math.inf else 1.0
        # rows * scale is about 1, and grads / scale / shared at most about 1.
        scaled = part.held
        if isinstance(scaled, Windows):
            scaled = replace(scaled, image=scaled.image * scale)
        elif not part.indexed:
            scaled = scaled * scale
        parts.append(replace(part, held=scaled, grads=part.grads / scale / shared))
    return replace(factors, parts=tuple(parts)), shared


def _largest_pairs(parts: Sequence[Factor]) -> list[tuple[float, float]]:
    """The largest entries of rows and of gradients; all at once, because a GPU would be waited for each time."""
    tensors = [tensor for part in parts for tensor in (_held(part), part.grads)]
    # One pass for both ends; the infinity norm takes twenty times as long.
    ends = [end for tensor in tensors for end in in_memory_order(tensor).aminmax()]
    found = torch.stack(ends).tolist() if ends else []
    largest = [max(-low, high) for low, high in zip(found[::2], found[1::2], strict=True)]
    return [
        (1.0 if part.indexed else rows, grads)
        for part, rows, grads in zip(parts, largest[::2], largest[1::2], strict=True)
    ]


def _held(part: Factor) -> Tensor:
    return part.held.image if isinstance(part.held, Windows) else part.held


def _tensors(parts: Sequence[Factor]) -> list[Tensor]:
    """Rows that are no integers, and gradients."""
    return [tensor for part in parts for tensor in (*(() if part.indexed else (_held(part),)), part.grads)]


def _is_ordinary(size: float) -> bool:
    return size == 0.0 or 1e-9 < size < 1e9


def in_memory_order(tensor: Tensor) -> Tensor:
    """Axes from the longest stride to the shortest: reductions are five times as fast, and make no copy."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))


def _add_pair(out: Tensor, a: Factor, b: Factor, mode: Mode, scale: float, shared: Tensor | None) -> None:
    """out (a panel) += scale times the products of two parts, summed over pairs of positions.

    `shared`: inner products of their rows, if they are known.
    """
    if mode == "full":
        _add_full_pair(out, a, b, scale)
    elif a.rows_first != b.rows_first:  # rows of one use stand where the gradients of the other do: a tied embedding
        for k, (left, right) in enumerate(zip(a.grads, b.grads, strict=True)):
            target = out[k] if mode == "each" else out
            _add_products(target, _inner(a.rows, right), _inner(left, b.rows), a, b, scale)
    else:
        rows = _row_gram(a, b) if shared is None else shared
        if mode == "sum":
            left, right = (part.grads.permute(1, 2, 3, 0, 4).flatten(3) for part in (a, b))
            _add_products(out, rows, _inner(left, right), a, b, scale)
            return
        for k, (left, right) in enumerate(zip(a.grads, b.grads, strict=True)):
            _add_products(out[k], rows, _inner(left, right), a, b, scale)


def _add_full_pair(out: Tensor, a: Factor, b: Factor, scale: float) -> None:
    """out (P, P2, K, K)"""
    directions = len(a.grads)
    if a.rows_first == b.rows_first and a.positions == b.positions == 1 and a.grads.shape[3] == 1:
        # One product for all pairs of directions; rows (P, P2) multiply each of them.
        left, right = (part.grads.transpose(0, 1).reshape(-1, part.grads.shape[-1]) for part in (a, b))
        flat = (left @ right.T).view(a.samples, directions, b.samples, directions)
        rows = _row_gram(a, b)[0]
        out.transpose(1, 2).addcmul_(flat, rows[:, None, :, None].to(flat), value=scale)
        return
    shared = _row_gram(a, b) if a.rows_first == b.rows_first else None
    for k, left in enumerate(a.grads):
        for k2, right in enumerate(b.grads):
            if shared is None:
                first, second = _inner(a.rows, right), _inner(left, b.rows)
            else:
                first, second = shared, _inner(left, right)
            _add_products(out[..., k, k2], first, second, a, b, scale)


def _row_gram(a: Factor, b: Factor) -> Tensor:
    """Inner products of the rows of all pairs of positions: (blocks, P T, P2 T2)."""
    if isinstance(a.held, Windows) and isinstance(b.held, Windows) and a.held.geometry == b.held.geometry:
        if _row_cost(a, elementwise_cost(a.grads.device)) < a.row_size:
            return a.held.inner(b.held)
        left, right = (part.held.columns().permute(1, 0, 3, 2).flatten(1, 2) for part in (a, b))  # type: ignore[union-attr]
        return torch.bmm(left, right.mT)
    return _inner(a.rows, b.rows)


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


def _add_products(out: Tensor, first: Tensor, second: Tensor, a: Factor, b: Factor, scale: float) -> None:
    """out (P, P2) += scale * first * second, both (blocks, P T, P2 T2), summed over blocks and both positions."""
    blocks = max(len(first), len(second))
    if blocks == a.positions == b.positions == 1:
        if first.is_floating_point() and second.is_floating_point():
            out.addcmul_(first[0], second[0], value=scale)
        else:
            out.add_((first * second)[0], alpha=scale)
        return
    shape = (blocks, a.samples, a.positions, b.samples, b.positions)
    products = second.mul_(first) if second.is_floating_point() and len(second) == blocks else first * second
    out.add_(products.reshape(shape).sum((0, 2, 4)), alpha=scale)
