"""Sketches of gradients: every route gives the sum over entries that the tables say, and products have no bias."""

import math

import pytest
import torch

from featlearn.contraction.factors import Dense, Factor, Factors, as_dense
from featlearn.contraction.tensor_sketch import (
    Sketch,
    SketchRoute,
    SketchTables,
    View,
    add_sketch,
    route_costs,
)
from featlearn.errors import InputTypeError, InputValueError

CPU = torch.device("cpu")


def tables(view: View, directions: int = 1, *, k: int = 23, repeats: int = 3, seed: int = 5) -> SketchTables:
    return SketchTables.drawn(view, "w", Sketch(k, repeats), seed, directions, torch.float64, CPU)


def sketched(gradients, found: SketchTables, scratch: int = 2**20, route=None) -> torch.Tensor:
    out = torch.zeros(found.repeats, gradients.samples, found.k, dtype=torch.float64)
    add_sketch(out, gradients, found, scratch, route)
    return out


def one_by_one(gradients, found: SketchTables) -> torch.Tensor:
    """Each entry of the formed gradient, added to its bin by hand."""
    view, dense = found.view, as_dense(gradients).gradient
    out = torch.zeros(found.repeats, dense.shape[0], found.k, dtype=torch.float64)
    for j in range(view.size):
        place = j if view.order is None else int(view.order[j])
        block, rest = divmod(place, view.first * view.second)
        u, v = divmod(rest, view.second)
        for r in range(found.repeats):
            for d in range(dense.shape[1]):
                (h, g), (s, t) = ((one[0][r, d, block, u], one[1][r, d, block, v]) for one in (found.bins, found.signs))
                out[r, :, int(h + g) % found.k] += s * t * dense[:, d, j]
    return out


def factors(*, rows_first=True, blocks=1, directions=1, samples=4, positions=3, n=5, m=7, indexed=False) -> Factors:
    generator = torch.Generator().manual_seed(blocks + directions + 10 * rows_first)
    rows = torch.randn(samples, positions, blocks, n, generator=generator, dtype=torch.float64)
    if indexed:
        rows = torch.randint(n, (samples, positions), generator=generator)
    grads = torch.randn(directions, samples, positions, blocks, m, generator=generator, dtype=torch.float64)
    first, second = (n, m) if rows_first else (m, n)
    return Factors((Factor(rows, grads, rows_first, n),), blocks, first, second)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("scratch", [1, 2**20])
def test_both_routes_add_every_entry_to_its_bin(blocks, rows_first, directions, scratch):
    found = factors(rows_first=rows_first, blocks=blocks, directions=directions)
    own = tables(View(blocks, found.first, found.second), directions)
    expected = one_by_one(found, own)
    for route in (SketchRoute.FACTORS, SketchRoute.SLICES):
        assert torch.allclose(sketched(found, own, scratch, route), expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(sketched(as_dense(found), own, scratch), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("scratch", [1, 2**20])
def test_an_embedding_has_few_entries_and_a_tied_one_two_parts(rows_first, scratch):
    embedding = factors(rows_first=rows_first, indexed=True, directions=2)
    own = tables(View(1, embedding.first, embedding.second), 2)
    expected = one_by_one(embedding, own)
    assert torch.allclose(sketched(embedding, own, scratch), expected, rtol=1e-12, atol=1e-12)
    readout = factors(rows_first=not rows_first, n=7, m=5, positions=4, directions=2)
    tied = Factors((*embedding.parts, *readout.parts), 1, embedding.first, embedding.second)
    assert torch.allclose(sketched(tied, own, scratch), one_by_one(tied, own), rtol=1e-12, atol=1e-12)


def test_gradients_in_another_view_have_the_same_bins():
    """The parameter's own entries, in a view that rearranges them."""
    generator = torch.Generator().manual_seed(3)
    found = factors()
    order = torch.randperm(35, generator=generator)
    turned = Factors(found.parts, 1, 5, 7, ("turned",), order)
    own = tables(View(1, 5, 7, ("turned",), order))
    expected = one_by_one(turned, own)
    assert not torch.allclose(as_dense(turned).gradient, as_dense(found).gradient)
    for given in (turned, as_dense(turned)):
        assert torch.allclose(sketched(given, own), expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(sketched(given, own, 1), expected, rtol=1e-12, atol=1e-12)


def test_positions_that_nothing_reaches_add_nothing():
    found = factors(positions=0)
    assert not sketched(found, tables(View(1, 5, 7))).any()


def test_products_have_no_bias_and_the_error_that_is_stated():
    """Over 4000 sketches: the mean within its own error, the spread about 1 / sqrt(k) of the lengths."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3, 2, 60, generator=generator, dtype=torch.float64)
    k, repeats = 32, 4000
    found = sketched(Dense(gradient), tables(View(1, 6, 10), 2, k=k, repeats=repeats))
    products = torch.einsum("rik,rjk->rij", found, found)
    exact = torch.einsum("idn,jdn->ij", gradient, gradient)
    error = products.std(0) / math.sqrt(repeats)
    assert ((products.mean(0) - exact).abs() < 4 * error).all()
    lengths = exact.diagonal().sqrt()
    relative = products.std(0) / (lengths[:, None] * lengths) * math.sqrt(k)
    off = ~torch.eye(3, dtype=torch.bool)
    assert (relative[off] - 1).abs().max() < 0.25
    assert (relative.diagonal() - math.sqrt(2)).abs().max() < 0.35


def test_outer_products_of_like_vectors_have_the_largest_error():
    """a a^T of one sample: a spread of sqrt(6 / k) of its square; entries of a row, or a column, collide together."""
    a = torch.randn(1, 1, 1, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outer = Factors((Factor(a, a[None], True, 40),), 1, 40, 40)
    k = 64
    found = sketched(outer, tables(View(1, 40, 40), k=k, repeats=2000))[:, 0]
    spread = found.square().sum(1).std() / a.square().sum() ** 2 * math.sqrt(k)
    assert 0.85 * math.sqrt(6) < spread < 1.05 * math.sqrt(6)


def test_the_tables_follow_from_seed_and_name_alone():
    first, again = (tables(View(1, 5, 7)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.bins + first.signs, again.bins + again.signs, strict=True))
    other = SketchTables.drawn(View(1, 5, 7), "v", Sketch(23, 3), 5, 1, torch.float64, CPU)
    assert not torch.equal(first.bins[0], other.bins[0])
    assert not torch.equal(first.bins[0], tables(View(1, 5, 7), seed=6).bins[0])


def test_few_positions_take_factors_and_many_take_slices():
    def best(positions, n, m, **more):
        costs = route_costs(positions, n, m, 1, (1024, 4), CPU, **more)
        return min(costs, key=costs.__getitem__)

    assert best(1, 784, 512) is SketchRoute.FACTORS
    assert best(1024, 27, 64) is SketchRoute.SLICES
    assert best(128, 50257, 768, indexed=True) is SketchRoute.ENTRIES


@pytest.mark.parametrize("wrong", [{"k": 1}, {"k": 2.0}, {"repeats": 1}, {"repeats": True}])
def test_sizes_that_make_no_sense_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(InputValueError, match=f"Sketch got {name}="):
        Sketch(**wrong)


def test_a_generator_makes_another_draw_each_time():
    assert Sketch().seed() == Sketch().seed() == 0
    generator = torch.Generator().manual_seed(0)
    assert Sketch(generator=generator).seed() != Sketch(generator=generator).seed()
    with pytest.raises(InputTypeError, match=r"expected a torch\.Generator"):
        Sketch(generator=3)  # type: ignore[arg-type]
