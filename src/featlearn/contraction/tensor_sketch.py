"""Sketches of per-sample gradients: k numbers whose inner products are unbiased estimates of those of gradients.

Entry (block, first, second) of a parameter is added to bin h(block, first) + g(block, second) modulo k, with the sign
s(block, first) r(block, second), with random h, g, s, r. This is a TensorSketch (Pham and Pagh 2013): the sketch of an
outer product is the convolution of the count sketches of both factors. Three routes give the same numbers:

- *factors*: count sketches of rows and gradients at every position, multiplied in Fourier space and summed there;
  nothing of the parameter's size is formed;
- *slices*: the gradient is formed slice by slice, and each entry added to its bin;
- *entries*: rows of an identity matrix (an embedding's) have one entry at each position.

All parameters and output directions, each with separate tables, are added into the same k bins: a count sketch of the
full gradient. Separate projections of both sides (Kronecker) would be cheaper, but their error only falls as k^-1/4.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from featlearn.contraction.factors import Factor, Factors, Gradients, as_dense, dense_slice
from featlearn.contraction.hardware import elementwise_cost
from featlearn.errors import InputTypeError, InputValueError

# Cost of adding a number to a bin, and of a Fourier transform per number of a sketch, in elementwise products. Measured
# on a CPU; for a GPU, the second is estimated from moved bytes.
BINNED = 14
TRANSFORMED = {"cpu": 14, "cuda": 3}
# Temporaries per number of a count sketch: both sides, their transforms, and the product.
HELD = 8


@dataclass(frozen=True)
class Sketch:
    """Settings of sketches of gradients: `fl.ntk(..., sketch=fl.Sketch(k=4096, repeats=4))`.

    An entry of the kernel has an error of about sqrt(K_ii K_jj / (k repeats)), up to 2.8 times that if gradients are
    outer products of similar vectors. Time and memory are proportional to `k repeats`. Repeats are independent, and
    their spread gives the standard error, which is widened by its uncertainty: 7 times for two repeats, 1.65 times for
    four, 1.21 times for eight.

    Args:
        k: Size of the sketch of a gradient; powers of two are fastest.
        repeats: Number of independent sketches, at least 2.
        generator: Source of the seed. By default the seed is fixed, and no random generator is used.
    """

    k: int = 4096
    repeats: int = 4
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name, least in (("k", 2), ("repeats", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputValueError(f"Sketch got {name}={value!r}, expected a whole number >= {least}")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise InputTypeError(
                f"Sketch got generator={self.generator!r}, expected a torch.Generator; "
                "write torch.Generator().manual_seed(0)"
            )

    def seed(self) -> int:
        """Return the seed of all tables, which changes at every call if there is a generator."""
        if self.generator is None:
            return 0
        return int(torch.randint(2**62, (1,), generator=self.generator, device=self.generator.device))


class SketchRoute(Enum):
    """Computation of the sketch of a part of a parameter's gradient."""

    FACTORS = "factors"
    SLICES = "slices"
    ENTRIES = "entries"


@dataclass(frozen=True)
class View:
    """View of a parameter as (blocks, first, second)."""

    blocks: int
    first: int
    second: int
    name: object = ()
    """Name of the view, as in `Factors.view`."""
    order: Tensor | None = None
    """Index of each parameter entry in the view; None for the original order."""

    @property
    def size(self) -> int:
        """Number of entries of the parameter."""
        return self.blocks * self.first * self.second

    def holds(self, factors: Factors) -> bool:
        """Return whether factors have this view."""
        return factors.frame == (self.blocks, self.first, self.second, self.name)


@dataclass(frozen=True)
class SketchTables:
    """Bins and signs of a parameter, each (repeats, directions, blocks, first or second)."""

    view: View
    k: int
    bins: tuple[Tensor, Tensor]
    signs: tuple[Tensor, Tensor]

    @classmethod
    def drawn(
        cls, view: View, name: str, sketch: Sketch, seed: int, directions: int, dtype: torch.dtype, device: torch.device
    ) -> "SketchTables":
        """Draw tables that depend only on the seed, the parameter's name, and the sizes."""
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
        bins, signs = [], []
        for size in (view.first, view.second):
            shape = (sketch.repeats, directions, view.blocks, size)
            bins.append(torch.randint(sketch.k, shape, generator=generator, device="cpu").to(device))
            drawn = torch.randint(2, shape, generator=generator, dtype=torch.int8, device="cpu")
            signs.append((2 * drawn - 1).to(device, dtype))
        return cls(view, sketch.k, (bins[0], bins[1]), (signs[0], signs[1]))

    @property
    def repeats(self) -> int:
        """Number of independent sketches."""
        return self.bins[0].shape[0]

    def entries(self, repeat: int, direction: int, first: slice) -> tuple[Tensor, Tensor]:
        """Return bins and signs of entries in a range of first indices, (blocks, some first, second)."""
        h, g = (table[repeat, direction] for table in self.bins)
        s, r = (table[repeat, direction] for table in self.signs)
        return (h[:, first, None] + g[:, None]) % self.k, s[:, first, None] * r[:, None]


def add_sketch(
    out: Tensor, gradients: Gradients, tables: SketchTables, scratch: int, route: SketchRoute | None = None
) -> None:
    """Add the sketches of these gradients, summed over directions, to out (repeats, samples, k).

    `scratch` bounds the bytes of temporaries. Without a `route`, each part uses the cheapest.
    """
    if isinstance(gradients, Factors) and tables.view.holds(gradients):
        for part in (part for part in gradients.parts if part.positions):
            single_part = replace(gradients, parts=(part,))
            part_route = _route(part, tables) if route is None else route
            if part_route is SketchRoute.ENTRIES:
                _add_entries(out, part, tables, scratch)
            elif part_route is SketchRoute.FACTORS:
                _add_factors(out, part, tables, scratch)
            else:
                _add_slices(out, single_part, tables, scratch)
        return
    _add_formed(out, as_dense(gradients).gradient, tables, scratch)


def route_costs(
    positions: int,
    row_size: int,
    grad_size: int,
    blocks: int,
    sketch: tuple[int, int],
    device: torch.device,
    *,
    indexed: bool = False,
) -> dict[SketchRoute, float]:
    """Return the multiply-adds of every route per sample and direction; `sketch` is (k, repeats)."""
    k, repeats = sketch
    weight = elementwise_cost(device)
    binned, transformed = BINNED * weight, TRANSFORMED.get(device.type, TRANSFORMED["cpu"]) * weight
    size = blocks * row_size * grad_size
    if indexed:
        return {SketchRoute.ENTRIES: repeats * positions * grad_size * binned}
    count_sketch = (row_size + grad_size) * binned + 2 * k * transformed
    return {
        SketchRoute.FACTORS: repeats * positions * blocks * count_sketch,
        SketchRoute.SLICES: positions * size + repeats * size * binned,
    }


def sample_bytes(
    route: SketchRoute, positions: int, row_size: int, grad_size: int, blocks: int, k: int, directions: int, item: int
) -> int:
    """Return the bytes of temporaries per sample."""
    if route is SketchRoute.ENTRIES:
        return positions * grad_size * (3 * item + 16)
    if route is SketchRoute.FACTORS:
        return positions * (HELD * k + 3 * (row_size + grad_size)) * item
    return 4 * directions * blocks * row_size * grad_size * item


def formed_cost(size: int, repeats: int, device: torch.device) -> float:
    """Return the multiply-adds per sample and direction of dense gradients."""
    return repeats * size * BINNED * elementwise_cost(device)


def _route(part: Factor, tables: SketchTables) -> SketchRoute:
    costs = route_costs(
        part.positions,
        part.row_size,
        part.grads.shape[-1],
        tables.view.blocks,
        (tables.k, tables.repeats),
        part.grads.device,
        indexed=part.indexed,
    )
    return min(costs, key=costs.__getitem__)


def _pieces(samples: int, item_bytes: int, scratch: int) -> Iterator[slice]:
    """Yield ranges of samples, at `item_bytes` per sample."""
    step = max(1, scratch // max(item_bytes, 1))
    for begin in range(0, samples, step):
        yield slice(begin, min(begin + step, samples))


def _add_entries(out: Tensor, part: Factor, tables: SketchTables, scratch: int) -> None:
    """Add gradients of one-hot rows: the gradient at a position goes to the bins of a single row."""
    rows, grads = (0, 1) if part.rows_first else (1, 0)
    sizes = (part.positions, part.row_size, part.grads.shape[-1])
    item_bytes = sample_bytes(SketchRoute.ENTRIES, *sizes, 1, tables.k, 1, out.element_size())
    for samples in _pieces(part.samples, item_bytes, scratch):
        piece = part.take(samples)
        for repeat in range(tables.repeats):
            for direction, values in enumerate(piece.grads[:, :, :, 0]):  # (samples, positions, m)
                h, s = (table[rows][repeat, direction, 0][piece.rows, None] for table in (tables.bins, tables.signs))
                g, r = (table[grads][repeat, direction, 0] for table in (tables.bins, tables.signs))
                bins = ((h + g) % tables.k).flatten(1)
                out[repeat, samples].scatter_add_(1, bins, (values * (s * r)).flatten(1))


def _add_factors(out: Tensor, part: Factor, tables: SketchTables, scratch: int) -> None:
    """Convolve the count sketches of both sides; sum positions and directions in Fourier space."""
    rows, grads = (0, 1) if part.rows_first else (1, 0)
    k, sizes = tables.k, (part.positions, part.row_size, part.grads.shape[-1])
    item_bytes = sample_bytes(SketchRoute.FACTORS, *sizes, 1, k, 1, out.element_size())
    for samples in _pieces(part.samples, item_bytes, scratch):
        piece = part.take(samples)
        row_values = piece.rows  # (samples, positions, blocks, n)
        for repeat in range(tables.repeats):
            total: Tensor | None = None
            for direction, grad_values in enumerate(piece.grads):
                for block in range(tables.view.blocks):
                    index = (repeat, direction, block)
                    left = _transformed(row_values[:, :, block], tables.bins[rows][index], tables.signs[rows][index], k)
                    right = _transformed(
                        grad_values[:, :, block], tables.bins[grads][index], tables.signs[grads][index], k
                    )
                    term = left.mul_(right).sum(1)
                    total = term if total is None else total.add_(term)
            if total is not None:
                out[repeat, samples] += torch.fft.irfft(total, n=k)


def _transformed(values: Tensor, bins: Tensor, signs: Tensor, k: int) -> Tensor:
    """Return the count sketch of every position in Fourier space: (samples, positions, k

    2 + 1)."""
    samples, positions, size = values.shape
    counted = values.new_zeros(samples * positions, k)
    counted.index_add_(1, bins, (values * signs).reshape(-1, size))
    transformed: Tensor = torch.fft.rfft(counted)
    return transformed.view(samples, positions, -1)


def _add_slices(out: Tensor, factors: Factors, tables: SketchTables, scratch: int) -> None:
    """Form the gradient for a range of first indices at a time, and add its entries to bins."""
    item = out.element_size()
    item_bytes = factors.directions * factors.blocks * factors.second * item
    for samples in _pieces(factors.samples, 4 * item_bytes, scratch):
        piece = factors.take(samples)
        for first in _pieces(factors.first, 4 * piece.samples * item_bytes, scratch):
            formed = dense_slice(piece, first, slice(None), scratch // 4)
            _bin(out[:, samples], formed, tables, first)


def _add_formed(out: Tensor, gradient: Tensor, tables: SketchTables, scratch: int) -> None:
    """Add dense gradients (samples, directions, size), in the order of the parameter."""
    view, (samples, directions, _) = tables.view, gradient.shape
    item_bytes = directions * view.blocks * view.second * out.element_size()
    for indices in _pieces(samples, 4 * view.first * item_bytes if view.order is not None else 4 * item_bytes, scratch):
        entries = gradient[indices]
        if view.order is not None:
            entries = torch.empty_like(entries).index_copy_(2, view.order, entries)
        viewed = entries.reshape(len(entries), directions, view.blocks, view.first, view.second)
        for first in _pieces(view.first, 4 * len(entries) * item_bytes, scratch):
            _bin(out[:, indices], viewed[:, :, :, first], tables, first)


def _bin(out: Tensor, formed: Tensor, tables: SketchTables, first: slice) -> None:
    """Add entries (samples, directions, blocks, some first, second) to their bins."""
    for repeat in range(tables.repeats):
        for direction in range(formed.shape[1]):
            bins, signs = tables.entries(repeat, direction, first)
            out[repeat].index_add_(1, bins.flatten(), (formed[:, direction] * signs).flatten(1))
