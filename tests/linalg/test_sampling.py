"""Totals from items drawn by size: unbiased, with the variance of Rao, Hartley and Cochran, and a stated error."""

import warnings

import pytest
import torch
from scipy import stats
from torch import Tensor

from featlearn.errors import HeavyTailWarning
from featlearn.linalg.sampling import Draw, drawn_by_size, drawn_first, stated, widened

ITEMS, COUNT = 37, 8


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lognormal(size: int, spread: float, seed: int) -> Tensor:
    return (spread * torch.randn(size, generator=generator(seed), dtype=torch.float64)).exp()


SIZES = lognormal(ITEMS, 0.4, 1)  # so even that none is certain
VALUES = SIZES * (1 + 0.5 * torch.randn(ITEMS, generator=generator(2), dtype=torch.float64))


def plain_variance(draw: Draw, values: Tensor) -> float:
    """What the stated error is made from, before it is widened."""
    total = draw.total(values)
    return (2 * total.stderr / float(stats.t.ppf(stats.norm.cdf(2), total.freedom))) ** 2


def test_totals_are_unbiased_and_have_the_variance_of_the_scheme():
    """Var = (sum of n_g^2 - n) / (n (n - 1)) (sum of y^2 / p - Y^2): Cochran, Sampling Techniques, Eq. 9A.63."""
    source, trials = generator(), 4000
    draws = [drawn_by_size(SIZES, COUNT, source) for _ in range(trials)]
    found = torch.tensor([draw.total(VALUES[draw.places]).value for draw in draws], dtype=torch.float64)
    stated_variance = sum(plain_variance(draw, VALUES[draw.places]) for draw in draws) / trials
    p, n = SIZES / SIZES.sum(), ITEMS
    groups = [n // COUNT + (i < n % COUNT) for i in range(COUNT)]
    spread = float((VALUES.square() / p).sum() - VALUES.sum() ** 2)
    variance = (sum(g**2 for g in groups) - n) / (n * (n - 1)) * spread
    assert all(len(draw.certain) == 0 and len(set(draw.places.tolist())) == COUNT for draw in draws)
    assert abs(float(found.mean() - VALUES.sum())) < 3.5 * (variance / trials) ** 0.5
    assert float(found.var()) == pytest.approx(variance, rel=0.08)
    assert stated_variance == pytest.approx(variance, rel=0.08)


def test_equal_sizes_are_a_simple_random_sample():
    """N s sqrt((1 - m / N) / m), where all groups are equally large."""
    values = torch.randn(36, generator=generator(3), dtype=torch.float64)
    draw = drawn_by_size(torch.ones(36, dtype=torch.float64), 9, generator())
    seen = values[draw.places]
    assert draw.total(seen).value == pytest.approx(36 * float(seen.mean()), rel=1e-12)
    variance = 36**2 * float(seen.var()) * (1 - 9 / 36) / 9
    assert plain_variance(draw, seen) == pytest.approx(variance, rel=1e-12)


def test_values_in_proportion_to_sizes_leave_no_error():
    draw = drawn_by_size(SIZES, COUNT, generator())
    found = draw.total(3 * SIZES[draw.places])
    assert found.value == pytest.approx(3 * float(SIZES.sum()), rel=1e-12)
    assert found.stderr < 1e-10 * found.value


def test_large_items_are_always_seen():
    sizes = SIZES.clone()
    sizes[[4, 30]] = torch.tensor([500.0, 90.0], dtype=torch.float64)
    for seed in range(20):
        draw = drawn_by_size(sizes, COUNT, generator(seed))
        assert sorted(draw.certain.tolist()) == [4, 30]
        assert len(draw.drawn) == COUNT - 2
        assert not set(draw.drawn.tolist()) & {4, 30}


def test_half_of_the_draws_are_left_for_the_error():
    sizes = SIZES * torch.tensor([1e6] * 20 + [1.0] * 17, dtype=torch.float64)
    assert len(drawn_by_size(sizes, COUNT, generator()).certain) <= COUNT // 2


def test_items_without_size_are_never_seen_and_few_items_all_of_them():
    sizes = SIZES.clone()
    sizes[::3] = 0.0
    for seed in range(20):
        assert bool((sizes[drawn_by_size(sizes, COUNT, generator(seed)).places] > 0).all())
    everything = drawn_by_size(sizes, 30, generator())
    found = everything.total(VALUES[everything.places])
    assert found.value == pytest.approx(float(VALUES[sizes > 0].sum()), rel=1e-12)
    assert (found.stderr, found.draws) == (0.0, 0)


def test_the_first_draws_are_the_largest_and_others_by_size():
    sizes = lognormal(50, 1.0, 4)
    sizes[7] = 0.0
    largest = set(sizes.topk(3).indices.tolist())
    source = generator()
    draws = [drawn_first(sizes, 7, source).tolist() for _ in range(3000)]
    for draw in draws:
        assert largest <= set(draw)
        assert 7 not in draw
        assert draw == sorted(set(draw))
        assert len(draw) == 7
    others = sizes.clone()
    others[list(largest)] = 0.0
    one = int(others.argmax())
    single = [drawn_first(others, 1, source).item() for _ in range(3000)]
    expected = float(others[one] / others.sum())
    assert stats.binomtest(single.count(one), 3000, expected).pvalue > 0.002
    assert len(drawn_first(torch.tensor([0.0, 2.0, 0.0, 1.0]), 3, source)) == 2


@pytest.mark.parametrize("draws", [3, 6, 20])
def test_two_stated_errors_of_normal_numbers_hold_their_mean_in_95_of_100(draws):
    numbers = torch.randn(4000, draws, generator=generator(5), dtype=torch.float64)
    held = 0
    for row in numbers:
        error, freedom = widened((row - row.mean()).square(), 1 / (draws * (draws - 1)))
        assert 0 < freedom <= draws - 1
        held += abs(float(row.mean())) <= 2 * error
    assert 0.945 < held / 4000 < 0.985  # few draws with an outlier count for fewer, and the error is wider


def test_one_draw_shows_no_error():
    error, _ = widened(torch.ones(1, dtype=torch.float64), 1.0)
    assert error != error


def test_an_error_that_few_draws_carry_comes_with_a_warning():
    squares = torch.full((20,), 1e-3, dtype=torch.float64)
    squares[3] = 5.0
    error, freedom = widened(squares, 1 / 20)
    assert freedom < 4
    with pytest.warns(HeavyTailWarning, match=r"20 draws carry it.*take more probes") as caught:
        found = stated(1.0, error, 20, freedom, "the norm", "take more probes")
    assert caught[0].filename == __file__
    assert found.freedom == freedom
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stated(1.0, 1e-9, 20, freedom, "rounding", "")
        stated(1.0, 0.1, 20, 19.0, "the norm", "")
