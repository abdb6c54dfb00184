"""Sketches of per-sample gradients: k numbers whose inner products estimate those of the gradients, without bias.

Entry (block, first, second) of a parameter is added to bin h(block, first) + g(block, second) modulo k, with the sign
s(block, first) r(block, second); h, g, s and r are drawn at random. That is a TensorSketch (Pham and Pagh 2013): of an
outer product it is the convolution of the count sketches of both factors. Three ways give the same numbers:

- *factors*: count sketches of rows and gradients at every position, multiplied in Fourier space and summed there;
  nothing of the parameter's size is formed;
- *slices*: the gradient is formed slice by slice, and each entry added to its bin;
- *entries*: rows of an identity matrix (an embedding's) have one entry at each position.

All parameters and output directions, each with tables of its own, are added into the same k bins: a count sketch of
the whole gradient. Projections of both sides by matrices of their own (Kronecker) would cost less, and their error
falls as k^-1/4 only.
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

# What it costs to add a number to a bin, and to carry one number of a sketch through Fourier space, in elementwise
# products: as timed on a CPU. On a GPU the second follows from the bytes that are moved, and is not timed.
BINNED = 14
TRANSFORMED = {"cpu": 14, "cuda": 3}
# Numbers that are held for every number of a count sketch: both sides, their transforms, the product.
HELD = 8


@dataclass(frozen=True)
class Sketch:
    """How gradients are sketched: `fl.ntk(..., sketch=fl.Sketch(k=4096, repeats=4))`.

    An entry of the kernel has an error of about sqrt(K_ii K_jj / (k repeats)), up to 2.8 times that where gradients
    are outer products of vectors that are much alike. Time and memory are in proportion to `k repeats`. The repeats
    are independent, and their spread gives the standard error: two leave it so uncertain that it is widened 7 times,
    four 1.65 times, eight 1.21 times.

    Args:
        k: numbers that stand for the gradient of a sample; powers of two are fastest.
        repeats: independent sketches, two at least.
        generator: makes them another draw; without one they are the same at every call, and no random generator of
            yours is touched.
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
        """The number that all tables follow from; another at every call where there is a generator."""
        if self.generator is None:
            return 0
        return int(torch.randint(2**62, (1,), generator=self.generator, device=self.generator.device))


class SketchRoute(Enum):
    """How the sketch of one part of a parameter's gradient is made."""

    FACTORS = "factors"
    SLICES = "slices"
    ENTRIES = "entries"


@dataclass(frozen=True)
class View:
    """A parameter as (blocks, first, second): the one in which its uses are outer products, or any other."""

    blocks: int
    first: int
    second: int
    name: object = ()
    """That of `Factors.view`."""
    order: Tensor | None = None
    """Where each entry of the parameter stands in the view; None for its own order."""

    @property
    def size(self) -> int:
        """Entries of the parameter."""
        return self.blocks * self.first * self.second

    def holds(self, factors: Factors) -> bool:
        """Whether factors are of this view."""
        return factors.frame == (self.blocks, self.first, self.second, self.name)


@dataclass(frozen=True)
class SketchTables:
    """Bins and signs of one parameter: each (repeats, directions, blocks, first or second)."""

    view: View
    k: int
    bins: tuple[Tensor, Tensor]
    signs: tuple[Tensor, Tensor]

    @classmethod
    def drawn(
        cls, view: View, name: str, sketch: Sketch, seed: int, directions: int, dtype: torch.dtype, device: torch.device
    ) -> "SketchTables":
        """Tables that depend on the seed, the parameter's name and the sizes alone."""
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
        """How many independent sketches."""
        return self.bins[0].shape[0]

    def entries(self, repeat: int, direction: int, first: slice) -> tuple[Tensor, Tensor]:
        """Bins and signs of the entries in a range of first indices, (blocks, some first, second)."""
        h, g = (table[repeat, direction] for table in self.bins)
        s, r = (table[repeat, direction] for table in self.signs)
        return (h[:, first, None] + g[:, None]) % self.k, s[:, first, None] * r[:, None]


def add_sketch(
    out: Tensor, gradients: Gradients, tables: SketchTables, scratch: int, route: SketchRoute | None = None
) -> None:
    """out (repeats, samples, k) += the sketches of these gradients, summed over directions.

    `scratch` bounds the bytes of temporaries. Without a `route` each part takes the cheapest.
    """
    if isinstance(gradients, Factors) and tables.view.holds(gradients):
        for part in (part for part in gradients.parts if part.positions):
            alone = replace(gradients, parts=(part,))
            chosen = _route(part, tables) if route is None else route
            if chosen is SketchRoute.ENTRIES:
                _add_entries(out, part, tables, scratch)
            elif chosen is SketchRoute.FACTORS:
                _add_factors(out, part, tables, scratch)
            else:
                _add_slices(out, alone, tables, scratch)
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
    """Multiply-adds of every route for one sample and direction; `sketch` is (k, repeats)."""
    k, repeats = sketch
    weight = elementwise_cost(device)
    binned, transformed = BINNED * weight, TRANSFORMED.get(device.type, TRANSFORMED["cpu"]) * weight
    size = blocks * row_size * grad_size
    if indexed:
        return {SketchRoute.ENTRIES: repeats * positions * grad_size * binned}
    held = (row_size + grad_size) * binned + 2 * k * transformed
    return {
        SketchRoute.FACTORS: repeats * positions * blocks * held,
        SketchRoute.SLICES: positions * size + repeats * size * binned,
    }


def sample_bytes(
    route: SketchRoute, positions: int, row_size: int, grad_size: int, blocks: int, k: int, directions: int, item: int
) -> int:
    """Bytes of temporaries for one sample."""
    if route is SketchRoute.ENTRIES:
        return positions * grad_size * (3 * item + 16)
    if route is SketchRoute.FACTORS:
        return positions * (HELD * k + 3 * (row_size + grad_size)) * item
    return 4 * directions * blocks * row_size * grad_size * item


def formed_cost(size: int, repeats: int, device: torch.device) -> float:
    """Multiply-adds for one sample and direction of gradients that come formed."""
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


def _pieces(samples: int, each: int, scratch: int) -> Iterator[slice]:
    """Ranges of samples of which each takes so many bytes."""
    step = max(1, scratch // max(each, 1))
    for begin in range(0, samples, step):
        yield slice(begin, min(begin + step, samples))


def _add_entries(out: Tensor, part: Factor, tables: SketchTables, scratch: int) -> None:
    """Rows of an identity matrix: the gradient at a position goes to the bins of one row."""
    rows, grads = (0, 1) if part.rows_first else (1, 0)
    sizes = (part.positions, part.row_size, part.grads.shape[-1])
    each = sample_bytes(SketchRoute.ENTRIES, *sizes, 1, tables.k, 1, out.element_size())
    for chosen in _pieces(part.samples, each, scratch):
        piece = part.take(chosen)
        for repeat in range(tables.repeats):
            for direction, values in enumerate(piece.grads[:, :, :, 0]):  # (samples, positions, m)
                h, s = (table[rows][repeat, direction, 0][piece.rows, None] for table in (tables.bins, tables.signs))
                g, r = (table[grads][repeat, direction, 0] for table in (tables.bins, tables.signs))
                bins = ((h + g) % tables.k).flatten(1)
                out[repeat, chosen].scatter_add_(1, bins, (values * (s * r)).flatten(1))


def _add_factors(out: Tensor, part: Factor, tables: SketchTables, scratch: int) -> None:
    """Count sketches of both sides, convolved: positions and directions are added in Fourier space."""
    rows, grads = (0, 1) if part.rows_first else (1, 0)
    k, sizes = tables.k, (part.positions, part.row_size, part.grads.shape[-1])
    each = sample_bytes(SketchRoute.FACTORS, *sizes, 1, k, 1, out.element_size())
    for chosen in _pieces(part.samples, each, scratch):
        piece = part.take(chosen)
        seen = piece.rows  # (samples, positions, blocks, n)
        for repeat in range(tables.repeats):
            total: Tensor | None = None
            for direction, arrived in enumerate(piece.grads):
                for block in range(tables.view.blocks):
                    where = (repeat, direction, block)
                    left = _transformed(seen[:, :, block], tables.bins[rows][where], tables.signs[rows][where], k)
                    right = _transformed(arrived[:, :, block], tables.bins[grads][where], tables.signs[grads][where], k)
                    term = left.mul_(right).sum(1)
                    total = term if total is None else total.add_(term)
            if total is not None:
                out[repeat, chosen] += torch.fft.irfft(total, n=k)


def _transformed(values: Tensor, bins: Tensor, signs: Tensor, k: int) -> Tensor:
    """The count sketch of every position in Fourier space: (samples, positions, k // 2 + 1)."""
    samples, positions, size = values.shape
    counted = values.new_zeros(samples * positions, k)
    counted.index_add_(1, bins, (values * signs).reshape(-1, size))
    transformed: Tensor = torch.fft.rfft(counted)
    return transformed.view(samples, positions, -1)


def _add_slices(out: Tensor, factors: Factors, tables: SketchTables, scratch: int) -> None:
    """Form the gradient for some first indices at a time."""
    item = out.element_size()
    each = factors.directions * factors.blocks * factors.second * item
    for chosen in _pieces(factors.samples, 4 * each, scratch):
        piece = factors.take(chosen)
        for first in _pieces(factors.first, 4 * piece.samples * each, scratch):
            formed = dense_slice(piece, first, slice(None), scratch // 4)
            _bin(out[:, chosen], formed, tables, first)


def _add_formed(out: Tensor, gradient: Tensor, tables: SketchTables, scratch: int) -> None:
    """Gradients (samples, directions, size) that come formed, entries in the parameter's own order."""
    view, (samples, directions, _) = tables.view, gradient.shape
    each = directions * view.blocks * view.second * out.element_size()
    for chosen in _pieces(samples, 4 * view.first * each if view.order is not None else 4 * each, scratch):
        own = gradient[chosen]
        if view.order is not None:
            own = torch.empty_like(own).index_copy_(2, view.order, own)
        whole = own.reshape(len(own), directions, view.blocks, view.first, view.second)
        for first in _pieces(view.first, 4 * len(own) * each, scratch):
            _bin(out[:, chosen], whole[:, :, :, first], tables, first)


def _bin(out: Tensor, formed: Tensor, tables: SketchTables, first: slice) -> None:
    """Add entries (samples, directions, blocks, some first, second) to their bins."""
    for repeat in range(tables.repeats):
        for direction in range(formed.shape[1]):
            bins, signs = tables.entries(repeat, direction, first)
            out[repeat].index_add_(1, bins.flatten(), (formed[:, direction] * signs).flatten(1))
