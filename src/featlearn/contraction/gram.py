"""Gram matrices of per-sample gradients, by the cheaper of two contractions:

- *pairs*: Gram of the rows times Gram of the gradients, summed over pairs of positions:
  samples^2 positions^2 (n + m) operations; nothing of the parameter's size is formed. For windows of images, the Gram
  matrix of pixels is shifted and summed instead if that is cheaper; n is then the number of channels.
- *gradients*: form the per-sample gradients by slices, and multiply: samples positions n m + samples^2 n m.
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
    """Contraction of a Gram matrix of factors."""

    PAIRS = "pairs"
    GRADIENTS = "gradients"


class Extent(NamedTuple):
    """Sizes of a side of the contraction, which determine the route."""

    samples: int
    directions: int
    blocks: int
    first: int
    second: int
    parts: tuple[tuple[int, int, int], ...]
    """(positions, row width, gradient width) per part. The row width is 1 for integers, and the width of equal cost for
    windows."""


def extent(factors: Factors, elementwise: float) -> Extent:
    """Return the sizes of these factors."""
    parts = tuple((part.positions, _row_cost(part, elementwise), part.grads.shape[-1]) for part in factors.parts)
    return Extent(factors.samples, factors.directions, factors.blocks, factors.first, factors.second, parts)


def window_cost(kernel: int, row_size: int, pixels: int, positions: int, elementwise: float) -> int:
    """Return the multiply-adds of an inner product of two windows: direct, or from inner products of pixels."""
    shifted = pixels**2 * (row_size // kernel) / positions**2 + elementwise * kernel
    return min(row_size, int(shifted) + 1)


def _row_cost(part: Factor, elementwise: float) -> int:
    if isinstance(part.held, Windows):
        pixels = part.held.image.shape[2:].numel()
        return window_cost(math.prod(part.held.kernel), part.row_size, pixels, part.positions, elementwise)
    return 1 if part.indexed else part.row_size


def costs(left: Extent, right: Extent, mode: Mode, elementwise: float) -> dict[Route, float]:
    """Return the multiply-adds of both routes.

    `elementwise` is the cost of an element in an elementwise product of Gram matrices, in multiply-adds.
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
    """Return the multiply-adds of the cheaper route."""
    return min(costs(left, right, mode, elementwise).values())


@lru_cache(maxsize=4096)
def cheaper_route(left: Extent, right: Extent, mode: Mode, elementwise: float) -> Route:
    """Return the route with fewer operations."""
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
    grams: RowGrams | None = None,
) -> None:
    """Add left right^T to out.

    With `symmetric`, both sides are the same samples, and only entries on and below the diagonal are added; `mirror`
    completes the result. `scratch` bounds the bytes of temporaries. With `deferred`, that products of entries neither
    underflow nor overflow becomes a deferred check. `grams` caches inner products of rows, for calls with other
    directions of the same samples.
    """
    if isinstance(left, Factors) and isinstance(right, Factors) and (left is right or left.frame == right.frame):
        if (route or _route(left, right, mode, out.device)) is Route.PAIRS:
            _add_pairs(out, left, right, mode, symmetric, scratch, deferred, grams)
            return
        memory = Reused(), Reused()
        for first, second in slices(left, right, symmetric, scratch, out):
            a = dense_slice(left, first, second, scratch // 4, memory[0])
            b = a if symmetric else dense_slice(right, first, second, scratch // 4, memory[1])
            transposed = a.stride(-1) != 1  # memory order, equal for both sides
            flat = (a.mT if transposed else a).flatten(2)
            other = flat if b is a else (b.mT if transposed else b).flatten(2)
            _add_dense(out, flat, other, mode, symmetric, scratch)
        return
    _add_dense(out, as_dense(left).gradient, as_dense(right).gradient, mode, symmetric, scratch)


def _route(left: Factors, right: Factors, mode: Mode, device: torch.device) -> Route:
    weight = elementwise_cost(device)
    left_extent = extent(left, weight)
    return cheaper_route(left_extent, left_extent if left is right else extent(right, weight), mode, weight)


# Rows mirrored at a time: they fit in the cache of a CPU; a GPU needs more.
MIRRORED, CUDA_MIRRORED = 128, 2048


def mirror(out: Tensor, mode: Mode) -> None:
    """Complete a symmetric kernel from its lower triangle."""
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
    """Fill pairs of samples above the diagonal of (P, P, K, K) from those below, with directions swapped."""
    count = square.shape[0]
    below = torch.ones(count, count, dtype=torch.bool, device=square.device).tril()[:, :, None, None]
    return torch.where(below, square, square.permute(1, 0, 3, 2))


def _part(out: Tensor, rows: slice, columns: slice, mode: Mode) -> Tensor:
    first = 1 if mode == "each" else 0
    return some_of(some_of(out, first, rows), first + 1, columns)


def _add_dense(out: Tensor, left: Tensor, right: Tensor, mode: Mode, symmetric: bool, scratch: int) -> None:
    """Add the Gram matrix of left (P, K, N) and right (P2, K, N)."""
    directions = left.shape[1]
    entry_bytes = out.element_size() * (directions**2 if mode == "full" else 1)
    depth = directions * left.shape[2] * (directions if mode == "full" else 1)
    if mode == "sum":
        same, left = left is right, left.flatten(1)
        right = left if same else right.flatten(1)
    for rows, columns in panels(left.shape[0], right.shape[0], scratch // entry_bytes, symmetric, depth, out.is_cuda):
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
    row_grams: RowGrams | None,
) -> None:
    directions = left.directions
    same, originals = left is right, (left, right)
    left, left_scale = _rescale(left, deferred, rows_checked=bool(row_grams))
    right, right_scale = (left, left_scale) if same else _rescale(right, deferred, rows_checked=bool(row_grams))
    if left is not originals[0] or right is not originals[1]:
        row_grams = None  # rows were rescaled for these directions only
    # Kernels that overflow are infinite, which the caller reports; products of rescaled factors are about 1.
    factor = left_scale * right_scale
    if factor > 1.0 and factor > torch.finfo(out.dtype).max:
        factor = math.inf
    first = matrices(left, joined=mode == "sum") if mode != "full" else None
    if first is not None and same and symmetric and worth_tiles(out, first, scratch):
        add_in_tiles(out, first, factor)
        return
    grams = directions**2 if mode == "full" else 1
    longest = 1 if first is not None and same else max(map(_pair_size, left.parts)) * max(map(_pair_size, right.parts))
    pair_bytes = out.element_size() * left.blocks * longest * (2 + 2 * grams)
    depth = max([part.positions**2 * (part.row_size + grams * part.grads.shape[-1]) for part in left.parts])
    pieces = panels(left.samples, right.samples, scratch // pair_bytes, symmetric, depth, out.is_cuda)
    second = first if same or first is None else matrices(right, joined=mode == "sum")
    if first is not None and second is not None and left.parts[0].rows_first == right.parts[0].rows_first:
        add_in_panels(out, first, second, pieces, factor, row_grams)
        return
    for rows, columns in pieces:
        part = _part(out, rows, columns, mode)
        for i, a in enumerate(left.take(rows).parts):
            for j, b in enumerate(right.take(columns).parts):
                shared = None
                if row_grams is not None and a.rows_first == b.rows_first:
                    key = (rows.start, columns.start, i, j)
                    shared = row_grams[key] if key in row_grams else row_grams.setdefault(key, _row_gram(a, b))
                _add_pair(part, a, b, mode, factor, shared)


def _pair_size(part: Factor) -> int:
    """Return the number of positions or pixels, of which all pairs are stored."""
    if isinstance(part.held, Windows):
        return max(part.positions, part.held.image.shape[2:].numel())
    return max(1, part.positions)


def _rescale(factors: Factors, deferred: DeferredChecks | None, *, rows_checked: bool) -> tuple[Factors, float]:
    """Rescale rows and gradients so that their Gram matrices neither underflow nor overflow; also return the factor.

    With rows of 1e-22 and gradients of 1e18, the product is of usual size, but the Gram matrix of the rows underflows.
    The factor is a power of two, so nothing is rounded. `rows_checked` skips the check of rows.
    """
    parts_with_positions = [part for part in factors.parts if part.positions]
    if deferred is not None:
        tensors = [part.grads for part in parts_with_positions] if rows_checked else _tensors(parts_with_positions)
        deferred.expect_sizes(_is_ordinary, [in_memory_order(tensor) for tensor in tensors])
        return factors, 1.0
    sizes = _largest_pairs(parts_with_positions)
    if all(_is_ordinary(size) for pair in sizes for size in pair):
        return factors, 1.0
    product = max(rows * grads for rows, grads in sizes)
    common_scale = 2.0 ** round(math.log2(product)) if 0.0 < product < math.inf else 1.0
    parts, sizes_iterator = [], iter(sizes)
    for part in factors.parts:
        rows = next(sizes_iterator)[0] if part.positions else 1.0
        scale = 2.0 ** -round(math.log2(rows)) if 0.0 < rows < math.inf else 1.0
        # rows * scale is about 1, and grads / scale / shared at most about 1.
        scaled = part.held
        if isinstance(scaled, Windows):
            scaled = replace(scaled, image=scaled.image * scale)
        elif not part.indexed:
            scaled = scaled * scale
        parts.append(replace(part, held=scaled, grads=part.grads / scale / common_scale))
    return replace(factors, parts=tuple(parts)), common_scale


def _largest_pairs(parts: Sequence[Factor]) -> list[tuple[float, float]]:
    """Return the largest entries of rows and gradients, with a single GPU synchronization."""
    tensors = [tensor for part in parts for tensor in (_row_tensor(part), part.grads)]
    # aminmax takes a single pass; the infinity norm takes 20 times as long.
    ends = [end for tensor in tensors for end in in_memory_order(tensor).aminmax()]
    values = torch.stack(ends).tolist() if ends else []
    largest = [max(-low, high) for low, high in zip(values[::2], values[1::2], strict=True)]
    return [
        (1.0 if part.indexed else rows, grads)
        for part, rows, grads in zip(parts, largest[::2], largest[1::2], strict=True)
    ]


def _row_tensor(part: Factor) -> Tensor:
    return part.held.image if isinstance(part.held, Windows) else part.held


def _tensors(parts: Sequence[Factor]) -> list[Tensor]:
    """Return gradients, and rows that are not integers."""
    return [tensor for part in parts for tensor in (*(() if part.indexed else (_row_tensor(part),)), part.grads)]


def _is_ordinary(size: float) -> bool:
    return size == 0.0 or 1e-9 < size < 1e9


def in_memory_order(tensor: Tensor) -> Tensor:
    """Permute axes by decreasing stride, which makes reductions five times as fast, without a copy."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))


def _add_pair(out: Tensor, a: Factor, b: Factor, mode: Mode, scale: float, shared: Tensor | None) -> None:
    """Add scale times the products of two parts, summed over pairs of positions, to out (a panel).

    `shared` are the inner products of their rows, if known.
    """
    if mode == "full":
        _add_full_pair(out, a, b, scale)
    elif a.rows_first != b.rows_first:  # tied embeddings: rows of a use are on the side of the other's gradients
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
    """Add the products of two parts to out (P, P2, K, K)."""
    directions = len(a.grads)
    if a.rows_first == b.rows_first and a.positions == b.positions == 1 and a.grads.shape[3] == 1:
        # A single product for all pairs of directions, multiplied by row products (P, P2).
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
    """Compute inner products of rows for all pairs of positions: (blocks, P T, P2 T2)."""
    if isinstance(a.held, Windows) and isinstance(b.held, Windows) and a.held.geometry == b.held.geometry:
        if _row_cost(a, elementwise_cost(a.grads.device)) < a.row_size:
            return a.held.inner(b.held)
        left, right = (part.held.columns().permute(1, 0, 3, 2).flatten(1, 2) for part in (a, b))  # type: ignore[union-attr]
        return torch.bmm(left, right.mT)
    return _inner(a.rows, b.rows)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Compute inner products for all pairs of positions: (blocks, P T, P2 T2); integers are one-hot rows."""
    if not a.is_floating_point() and not b.is_floating_point():
        return (a.reshape(-1, 1) == b.reshape(1, -1))[None]
    if not a.is_floating_point():
        return b.reshape(-1, b.shape[-1]).T[a.reshape(-1)][None]
    if not b.is_floating_point():
        return a.reshape(-1, a.shape[-1])[:, b.reshape(-1)][None]
    left, right = (t.flatten(0, 1).transpose(0, 1) for t in (a, b))
    return torch.bmm(left, right.mT)


def _add_products(out: Tensor, first: Tensor, second: Tensor, a: Factor, b: Factor, scale: float) -> None:
    """Add scale * first * second, (blocks, P T, P2 T2), summed over blocks and positions, to out (P, P2)."""
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
