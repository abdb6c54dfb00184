"""Windows of images: written out, multiplied, compared, against loops over every window."""

import itertools

import pytest
import torch
from torch import Tensor

from featlearn.contraction import blocking, gram, windows
from featlearn.contraction.factors import Factor, Factors, Gathered, as_dense, concatenate
from featlearn.contraction.gram import Route, add_gram, mirror
from featlearn.contraction.windows import Windows

# kernel, stride, dilation, padding, space, blocks
GEOMETRIES = {
    "plain": ((3, 2), (1, 1), (1, 1), (0, 0), (5, 4), 1),
    "padded": ((3, 3), (1, 1), (1, 1), (1, 2), (4, 3), 1),
    "strided": ((3, 3), (2, 3), (1, 1), (1, 1), (6, 7), 1),
    "dilated": ((2, 3), (1, 2), (2, 2), (2, 1), (5, 6), 1),
    "grouped": ((3, 2), (2, 1), (1, 1), (1, 0), (4, 5), 2),
    "line": ((4,), (3,), (2,), (5,), (9,), 1),
    "volume": ((2, 1, 3), (1, 2, 1), (1, 1, 2), (0, 1, 2), (3, 2, 4), 1),
    "more padding than image": ((5, 5), (3, 3), (1, 1), (4, 4), (2, 1), 1),
}


def drawn(samples: int, name: str, seed: int = 0) -> Windows:
    kernel, stride, dilation, padding, space, blocks = GEOMETRIES[name]
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(samples, 2 * blocks, *space, generator=generator, dtype=torch.float64)
    reach = zip(space, padding, dilation, kernel, stride, strict=True)
    count = tuple((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in reach)
    return Windows(image, blocks, kernel, stride, dilation, padding, count)


def slow_rows(given: Windows) -> Tensor:
    """(samples, positions, blocks, row size), pixel by pixel."""
    channels = given.image.shape[1] // given.blocks
    rows = torch.zeros(given.samples, given.positions, given.blocks, given.row_size, dtype=torch.float64)
    places = list(itertools.product(*map(range, given.count)))
    taps = list(itertools.product(range(channels), *map(range, given.kernel)))
    for (t, place), (n, (channel, *tap)), block in itertools.product(
        enumerate(places), enumerate(taps), range(given.blocks)
    ):
        pixel = [
            i * s + d * j - p
            for i, s, d, j, p in zip(place, given.stride, given.dilation, tap, given.padding, strict=True)
        ]
        if all(0 <= at < size for at, size in zip(pixel, given.image.shape[2:], strict=True)):
            rows[:, t, block, n] = given.image[(slice(None), block * channels + channel, *pixel)]
    return rows


@pytest.mark.parametrize("name", GEOMETRIES)
def test_windows_written_out(name: str):
    given = drawn(3, name)
    rows = slow_rows(given)
    assert torch.equal(given.rows(), rows)
    torch.testing.assert_close(given.lengths(), rows.norm(dim=-1))
    assert torch.equal(given.take(torch.tensor([2, 0])).rows(), rows[[2, 0]])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_inner_products_from_shifted_pixels(name: str):
    left, right = drawn(3, name), drawn(2, name, seed=1)
    a, b = (slow_rows(one).flatten(0, 1).transpose(0, 1) for one in (left, right))
    torch.testing.assert_close(left.inner(right), a @ b.mT, rtol=1e-12, atol=1e-12)


def factors(
    samples: int, name: str, *, windowed: bool, rows_first: bool = False, directions: int = 3, seed: int = 0
) -> Factors:
    held = drawn(samples, name, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    grads = torch.randn(directions, samples, held.positions, held.blocks, 4, generator=generator, dtype=torch.float64)
    part = Factor(held if windowed else slow_rows(held), grads, rows_first, held.row_size)
    first, second = (held.row_size, 4) if rows_first else (4, held.row_size)
    return Factors((part,), held.blocks, first, second)


@pytest.mark.parametrize("mode", ["sum", "each", "full"])
@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_route_gives_what_written_out_rows_give(
    name: str, shifted: bool, route: Route, mode: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gram, "elementwise_cost", lambda device: -1e6 if shifted else 1e6)
    monkeypatch.setattr(blocking, "PANEL", 2)
    monkeypatch.setattr(gram, "MIRRORED", 2)
    shape = {"sum": (5, 5), "each": (3, 5, 5), "full": (5, 5, 3, 3)}[mode]
    expected, found = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    gradient = as_dense(factors(5, name, windowed=False))
    add_gram(expected, gradient, gradient, mode, symmetric=True, scratch=10**8)
    given = factors(5, name, windowed=True)
    add_gram(found, given, given, mode, symmetric=True, scratch=20_000, route=route)
    mirror(expected, mode)
    mirror(found, mode)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("cached", [1, 10**9])
def test_gradients_are_formed_from_a_few_images_at_a_time(
    rows_first: bool, cached: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(windows, "cached_bytes", lambda: cached)
    for name in GEOMETRIES:
        given, plain = (factors(5, name, windowed=flag, rows_first=rows_first) for flag in (True, False))
        torch.testing.assert_close(as_dense(given).gradient, as_dense(plain).gradient, rtol=1e-12, atol=1e-12)


def test_pieces_keep_their_images():
    pieces = [factors(2, "padded", windowed=True), factors(3, "padded", windowed=True, seed=7)]
    expected = torch.cat([as_dense(piece).gradient for piece in pieces])
    joined = concatenate(pieces)
    gathered = Gathered(5, pieces[0].directions)
    for piece in pieces:
        gathered.add(piece)
    for whole in (joined, gathered.whole()):
        assert isinstance(whole, Factors)
        assert isinstance(whole.parts[0].held, Windows)
        torch.testing.assert_close(as_dense(whole).gradient, expected)
