"""Both contractions, in every mode and tiling, against the formed gradients multiplied out."""

import itertools

import pytest
import torch
from torch import Tensor

from featlearn.contraction import blocking, gram
from featlearn.contraction.blocking import RowGrams
from featlearn.contraction.factors import Dense, Factor, Factors, as_dense, concatenate
from featlearn.contraction.gram import Route, add_gram, cheaper_route, costs, extent, mirror

MODES = ("sum", "each", "full")


def factor(
    samples: int,
    positions: int,
    blocks: int,
    n: int,
    m: int,
    *,
    directions: int,
    rows_first: bool,
    indexed: bool,
    seed: int,
) -> Factor:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = (
        torch.randint(n, (samples, positions), generator=generator) if indexed else draw(samples, positions, blocks, n)
    )
    return Factor(rows, draw(directions, samples, positions, blocks, m), rows_first, n)


def factors(
    samples: int,
    positions: int,
    *,
    sides: tuple[tuple[bool, bool], ...],
    blocks: int = 1,
    first: int = 3,
    second: int = 4,
    directions: int = 2,
    seed: int = 0,
) -> Factors:
    parts = [
        factor(
            samples,
            positions + i,
            blocks,
            *((first, second) if rows_first else (second, first)),
            directions=directions,
            rows_first=rows_first,
            indexed=indexed,
            seed=seed + i,
        )
        for i, (rows_first, indexed) in enumerate(sides)
    ]
    return Factors(tuple(parts), blocks, first, second)


def slow_gradient(given: Factors) -> Tensor:
    """(samples, directions, blocks, first, second) by loops."""
    total = torch.zeros(given.samples, given.directions, given.blocks, given.first, given.second, dtype=torch.float64)
    for part in given.parts:
        rows = torch.eye(part.row_size, dtype=torch.float64)[part.rows][:, :, None] if part.indexed else part.rows
        for p, k, t, b in itertools.product(
            *map(range, (part.samples, given.directions, part.positions, given.blocks))
        ):
            row, grad = rows[p, t, b], part.grads[k, p, t, b]
            total[p, k, b] += torch.outer(row, grad) if part.rows_first else torch.outer(grad, row)
    return total


def slow_gram(left: Tensor, right: Tensor, mode: str) -> Tensor:
    full = torch.einsum("pkbfs,qlbfs->pqkl", left, right)
    if mode == "full":
        return full
    each = torch.einsum("pqkk->kpq", full)
    return each if mode == "each" else each.sum(0)


SIDES = {
    "linear": ((False, False),),
    "transposed": ((True, False),),
    "lookup": ((True, True),),
    "lookup on the second axis": ((False, True),),
    "both sides": ((False, False), (True, False)),
    "tied embedding": ((False, False), (True, True)),
    "everything": ((False, False), (False, True), (True, False), (True, True)),
}
BLOCKED = {name: sides for name, sides in SIDES.items() if not any(indexed for _, indexed in sides)}
CASES = [(name, 1) for name in SIDES] + [(name, 3) for name in BLOCKED]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize(("sides", "blocks"), CASES)
def test_routes_equal_the_formed_gradients(sides: str, blocks: int, route: Route, mode: str):
    left = factors(5, 2, sides=SIDES[sides], blocks=blocks)
    right = factors(4, 3, sides=SIDES[sides], blocks=blocks, seed=10)
    expected = slow_gram(slow_gradient(left), slow_gradient(right), mode)
    out = torch.zeros_like(expected)
    add_gram(out, left, right, mode, symmetric=False, scratch=10**9, route=route)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("scratch", [1, 500, 3000])
def test_small_tiles_and_slices_change_nothing(route: Route, mode: str, scratch: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocking, "PANEL", 2)
    monkeypatch.setattr(gram, "MIRRORED", 2)
    left = factors(7, 2, sides=SIDES["everything"])
    expected = slow_gram(slow_gradient(left), slow_gradient(left), mode)
    out = torch.zeros_like(expected)
    add_gram(out, left, left, mode, symmetric=True, scratch=scratch, route=route)
    mirror(out, mode)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dense = torch.zeros_like(expected)
    add_gram(dense, as_dense(left), as_dense(left), mode, symmetric=True, scratch=scratch)
    mirror(dense, mode)
    torch.testing.assert_close(dense, expected, rtol=1e-12, atol=1e-12)


def test_a_symmetric_product_computes_one_triangle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocking, "PANEL", 2)
    seen = list(blocking.panels(8, 8, 100, True, 1))
    assert [(rows.stop, columns.stop) for rows, columns in seen] == [(2, 2), (4, 4), (6, 6), (8, 8)]
    assert all(columns.start == 0 for _, columns in seen)


def test_it_adds_to_what_is_there():
    left = factors(3, 1, sides=SIDES["linear"])
    out = torch.ones(3, 3, dtype=torch.float64)
    add_gram(out, left, left, "sum", symmetric=True, scratch=10**9)
    mirror(out, "sum")
    expected = 1 + slow_gram(slow_gradient(left), slow_gradient(left), "sum")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_pieces_with_unequal_positions_are_padded():
    pieces = [factors(3, 1, sides=SIDES["tied embedding"]), factors(2, 4, sides=SIDES["tied embedding"], seed=5)]
    joined = concatenate(pieces)
    assert isinstance(joined, Factors)
    expected = torch.cat([slow_gradient(piece) for piece in pieces])
    torch.testing.assert_close(slow_gradient(joined), expected)
    torch.testing.assert_close(as_dense(joined).gradient, expected.flatten(2))


def test_a_formed_piece_makes_the_whole_formed():
    piece = factors(3, 2, sides=SIDES["linear"])
    joined = concatenate([piece, as_dense(piece)])
    assert isinstance(joined, Dense)
    torch.testing.assert_close(joined.gradient, torch.cat([slow_gradient(piece)] * 2).flatten(2))


def test_one_position_takes_pairs_and_many_positions_take_gradients():
    alone = factors(50, 1, sides=SIDES["linear"], first=30, second=40)
    spread = factors(50, 60, sides=SIDES["linear"], first=6, second=5)
    assert cheaper_route(extent(alone, 8.0), extent(alone, 8.0), "sum", 8.0) is Route.PAIRS
    assert cheaper_route(extent(spread, 8.0), extent(spread, 8.0), "sum", 8.0) is Route.GRADIENTS


def test_costs_grow_as_stated():
    """Pairs as positions^2 (n + m), gradients as n m."""
    short, long = (
        extent(factors(50, positions, sides=SIDES["linear"], first=300, second=400), 8.0) for positions in (10, 20)
    )
    ratio = costs(long, long, "sum", 8.0)[Route.PAIRS] / costs(short, short, "sum", 8.0)[Route.PAIRS]
    assert ratio == pytest.approx(4.0)
    wide = extent(factors(50, 10, sides=SIDES["linear"], first=600, second=800), 8.0)
    formed = [costs(one, one, "sum", 8.0)[Route.GRADIENTS] for one in (wide, short)]
    assert formed[0] / formed[1] == pytest.approx(4.0)


def test_views_in_different_order_are_multiplied_in_the_order_of_the_parameter():
    left, right = factors(5, 2, sides=SIDES["linear"]), factors(4, 3, sides=SIDES["linear"], seed=10)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = Factors(left.parts, 1, 3, 4, view=("permuted",), order=order)
    gradient = slow_gradient(left).flatten(2)[..., order]
    torch.testing.assert_close(as_dense(moved).gradient, gradient)
    expected = torch.einsum("pkn,qkn->pq", gradient, slow_gradient(right).flatten(2))
    out = torch.zeros_like(expected)
    add_gram(out, moved, right, "sum", symmetric=False, scratch=10**9)
    torch.testing.assert_close(out, expected)
    assert isinstance(concatenate([moved, right]), Dense)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("sizes", [(1.0, 1e-15), (1e-15, 1.0), (1e15, 1e-15), (1.0, 1e15)])
def test_products_of_rows_are_shared_by_directions_of_any_size(positions: int, sizes: tuple[float, float]):
    """Gradients that single precision cannot square have their rows rescaled; those of another direction are not."""
    generator = torch.Generator().manual_seed(0)
    rows = 100 * torch.randn(6, positions, 1, 5, generator=generator)
    kept: RowGrams = {}
    for size in sizes:
        grads = torch.randn(1, 6, positions, 1, 4, generator=generator) * size
        one = Factors((Factor(rows, grads, True, 5),), 1, 5, 4)
        out = torch.zeros(1, 6, 6)
        add_gram(out, one, one, "each", symmetric=False, scratch=2**20, route=Route.PAIRS, grams=kept)
        gradient = torch.einsum("ptbn,ptbm->pnm", rows.double(), grads[0].double() / size)
        expected = torch.einsum("pnm,qnm->pq", gradient, gradient)
        torch.testing.assert_close(out[0].double() / size / size, expected, rtol=1e-4, atol=1e-2)
