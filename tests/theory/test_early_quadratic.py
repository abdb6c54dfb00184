"""The quadratic network of 003: Prop. 8, finite-size traces, moments and free probability, each by another route."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import featlearn as fl
from featlearn.theory import early

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def symmetric(size: int, seed: int) -> Tensor:
    matrix = drawn(size, size, seed=seed)
    return matrix + matrix.T


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


A = torch.diag(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
B = torch.tensor([[2.0, 1, 0, 0], [1, 2, 0, 0], [0, 0, 1, 0], [0, 0, 0, 3]], dtype=torch.float64)
X = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)


def hermite(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of E over a standard normal number, exact to degree 2 nodes - 1."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return points, weights / weights.sum()


def all_networks(width: int, dimension: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """W (m, k, d), a (m, k) and their weights (m,): sums over them are exact expectations of polynomials."""
    points, weights = hermite(nodes)
    count = width * dimension + width
    grid = torch.tensor(np.array(list(itertools.product(points, repeat=count))))
    chance = torch.tensor(np.array([math.prod(w) for w in itertools.product(weights, repeat=count)]))
    W = grid[:, : width * dimension].reshape(-1, width, dimension) / math.sqrt(width)
    return W, grid[:, width * dimension :], chance


def weights_matrix(W: Tensor, a: Tensor) -> Tensor:
    """R = W^T diag(a^2) W"""
    return W.mT @ (a.square()[..., None] * W)


# Proposition 8


def test_reference_proposition_8():
    means = early.quadratic_means(X, Y, 3)
    np.testing.assert_allclose(means.nfm, [[16, 16], [16, 32]], rtol=1e-14)
    expected = [[1301.3333333333335, 1642.666666666667], [1642.6666666666667, 2773.3333333333335]]
    np.testing.assert_allclose(means.agop, expected, rtol=1e-14)


def test_proposition_8_by_exact_quadrature():
    """Width 2 and two inputs: six Gaussian numbers, five nodes each."""
    W, a, chance = all_networks(2, 2, 5)
    J = 2 * (X @ W.mT) * a[:, None]  # df/dh of f = a^T h^2
    calK = J @ J.mT
    velocity = -J.mT @ torch.diag(Y) @ X
    means = early.quadratic_means(X, Y, 2)
    averages = {
        "nfm": velocity.mT @ velocity,
        "agop": velocity.mT @ (J.mT @ J) @ velocity,
        "ptk": calK,
        "squared_ptk": calK @ calK,
    }
    for name, values in averages.items():
        expected = torch.einsum("m,mij->ij", chance, values)
        np.testing.assert_allclose(getattr(means, name), expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(means.agop, X.T @ torch.diag(Y) @ means.squared_ptk @ torch.diag(Y) @ X, rtol=1e-12)
    assert float(means.correlation) == pytest.approx(cosine(means.nfm, means.agop), rel=1e-12)


def test_wide_networks_reach_the_mean_term_and_not_the_printed_one():
    """Sheet 2.2: the print is near 1 at every width."""
    x, y, width = drawn(9, 6), drawn(9, seed=1) - 0.5, 65536
    means = early.quadratic_means(x, y, width)
    C, gram = x.T @ torch.diag(y) @ x, x.T @ x
    printed = cosine(C @ C, 3 * gram.trace() * C @ C + 6 * C @ gram @ C)
    observed = []
    for seed in range(8):
        W, a = drawn(width, 6, seed=10 + seed) / math.sqrt(width), drawn(width, seed=50 + seed)
        J = 2 * (x @ W.T) * a
        observed.append(float(early.derivative_correlation(x, y, J @ J.T)))
    error = np.std(observed, ddof=1) / math.sqrt(8)
    assert abs(np.mean(observed) - float(means.correlation)) < 4 * error
    assert abs(np.mean(observed) - printed) > 20 * error
    assert float(means.limit_correlation) == pytest.approx(cosine(C @ C, C @ gram @ C), rel=1e-12)
    assert float(means.limit_correlation) == pytest.approx(float(means.correlation), rel=1e-4)
    assert abs(float(early.quadratic_means(x, y, 6).correlation - means.limit_correlation)) > 1e-3


def test_the_data_matrices():
    fourth, second = early.data_matrices(X, Y)
    C = sum(y * torch.outer(x, x) for x, y in zip(X, Y, strict=True))
    np.testing.assert_allclose(fourth, C @ C, rtol=1e-13)
    np.testing.assert_allclose(second, sum(torch.outer(x, x) for x in X), rtol=1e-13)


# traces at finite size


def test_reference_exact_traces():
    traces = early.exact_word_traces(A, B, 4)
    assert (traces.numerator, traces.den1, traces.den2) == pytest.approx((5063.25, 220.5, 204337.40625), rel=1e-14)
    assert traces.correlation == pytest.approx(5063.25 / math.sqrt(220.5 * 204337.40625), rel=1e-14)


def test_nothing_to_correlate_is_nan():
    assert math.isnan(early.exact_word_traces(0 * A, B, 4).correlation)
    assert math.isnan(early.free_probability(A, 0 * B, torch.ones(4)).correlation)
    assert math.isnan(early.quadratic_means(X, 0 * Y, 3).correlation)


def words(first: Tensor, second: Tensor, R: Tensor) -> list[Tensor]:
    a, b = first @ R, second @ R
    return [part.diagonal(dim1=-2, dim2=-1).sum(-1) for part in (a @ a @ b, a @ a, a @ b @ a @ b)]


def test_exact_traces_by_exact_quadrature():
    first, second = symmetric(2, 1), symmetric(2, 2)
    W, a, chance = all_networks(2, 2, 5)
    expected = [float(chance @ values) for values in words(first, second, weights_matrix(W, a))]
    traces = early.exact_word_traces(first, second, 2)
    assert [traces.numerator, traces.den1, traces.den2] == pytest.approx(expected, rel=1e-11)


def test_four_different_factors_by_exact_quadrature():
    factors = [symmetric(2, seed) for seed in range(4)]
    W, a, chance = all_networks(2, 2, 5)
    R = weights_matrix(W, a)
    product = torch.eye(2, dtype=torch.float64)
    for length, factor in enumerate(factors, 1):
        product = product @ factor @ R
        expected = float(chance @ product.diagonal(dim1=-2, dim2=-1).sum(-1))
        assert early.exact_trace(factors[:length], 2) == pytest.approx(expected, rel=1e-11)


def test_exact_traces_by_simulation():
    first, second, width, networks = symmetric(5, 3) @ symmetric(5, 3), symmetric(5, 4), 11, 20000
    R = weights_matrix(drawn(networks, width, 5) / math.sqrt(width), drawn(networks, width, seed=1))
    traces = early.exact_word_traces(first, second, width)
    for values, expected in zip(words(first, second, R), (traces.numerator, traces.den1, traces.den2), strict=True):
        assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / math.sqrt(networks)


@pytest.mark.parametrize("width", [1, 3, 50])
def test_two_factors_in_closed_form(width: int):
    """Sheet 2.3"""
    matrix = symmetric(4, 0)
    square, trace = float((matrix @ matrix).trace()), float(matrix.trace())
    expected = (1 + 5 / width) * square + 3 / width * trace**2
    assert early.exact_trace([matrix, matrix], width) == pytest.approx(expected, rel=1e-13)
    assert early.exact_trace([matrix], width) == pytest.approx(trace, rel=1e-13)


def sum_moments(terms: Sequence[float], count: int, order: int) -> float:
    """E of a power of a sum of independent copies, from the moments 1, t1, t2 ... of one, adding them one by one."""
    total = [1.0] + [0.0] * order
    for _ in range(count):
        total = [sum(math.comb(n, j) * total[n - j] * terms[j] for j in range(n + 1)) for n in range(order + 1)]
    return total[order]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("order", [1, 2, 3, 4, 5, 6])
def test_one_input_is_a_sum_of_independent_numbers(width: int, order: int):
    """R = sum of a^2 w^2, of which E[(a^2 w^2)^j] = ((2j - 1)!!)^2 / k^j."""
    terms = [math.prod(range(1, 2 * j, 2)) ** 2 / width**j for j in range(order + 1)]
    expected = sum_moments(terms, width, order)
    factors = [torch.full((1, 1), value) for value in (0.5, -2.0, 3.0, 1.5, 1.0, -1.0)[:order]]
    scale = math.prod(float(factor) for factor in factors)
    assert early.exact_trace(factors, width) == pytest.approx(scale * expected, rel=1e-12)
    moments = early.quadratic_moments(width, 1, order, kind="exact")
    assert float(moments[-1]) == pytest.approx(expected, rel=1e-12)


@QUICK
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 999), st.integers(0, 4))
def test_exact_traces_turn_around(length: int, dimension: int, width: int, seed: int, by: int):
    factors = [symmetric(dimension, seed + i) for i in range(length)]
    value = early.exact_trace(factors, width)
    turned = early.exact_trace(factors[by % length :] + factors[: by % length], width)
    mirrored = early.exact_trace(factors[::-1], width)
    size = math.prod(float(f.norm()) for f in factors) * 1e3
    assert turned == pytest.approx(value, rel=1e-9, abs=1e-12 * size)
    assert mirrored == pytest.approx(value, rel=1e-9, abs=1e-12 * size)


@QUICK
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.integers(0, 999))
def test_finite_correlations_are_correlations(samples: int, dimension: int, width: int, seed: int):
    x, y = drawn(samples, dimension, seed=seed), drawn(samples, seed=seed + 1)
    rho = early.exact_word_traces(*early.data_matrices(x, y), width).correlation
    assert 0 < rho <= 1 + 1e-12


# moments


@pytest.mark.parametrize(
    ("width", "dimension", "expected"),
    [(7, 7, (1, 4, 25, 202)), (8, 4, (1, 2.5, 9.25, 42.625)), (3, 6, (1, 7, 79, 1189))],
)
def test_reference_limit_moments(width: int, dimension: int, expected: tuple[float, ...]):
    np.testing.assert_allclose(early.quadratic_moments(width, dimension, 4), expected, rtol=1e-14)


def test_reference_exact_moments():
    moments = early.quadratic_moments(400, 400, 4, kind="exact")
    np.testing.assert_allclose(moments[:3], [1, 4.0125, 25.24065], rtol=1e-12)
    assert float(moments[3]) == pytest.approx(206.072, abs=5e-4)


def set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for partition in set_partitions(items[1:]):
        yield [[items[0]], *partition]
        for i in range(len(partition)):
            yield [[items[0], *part] if i == j else part for j, part in enumerate(partition)]


def non_crossing(size: int) -> Iterator[list[list[int]]]:
    for partition in set_partitions(list(range(size))):
        home = {item: i for i, part in enumerate(partition) for item in part}
        if not any(home[a] == home[c] != home[b] == home[d] for a, b, c, d in itertools.combinations(range(size), 4)):
            yield partition


def from_cumulants(cumulants: Sequence[float], order: int) -> float:
    return sum(math.prod(cumulants[len(part) - 1] for part in partition) for partition in non_crossing(order))


def test_limit_moments_are_sums_over_non_crossing_partitions():
    width, dimension, order = 7, 4, 6
    ratio = width / dimension
    cumulants = [ratio ** (1 - m) * math.prod(range(1, 2 * m, 2)) for m in range(1, order + 1)]
    expected = [from_cumulants(cumulants, m) for m in range(1, order + 1)]
    np.testing.assert_allclose(early.quadratic_moments(width, dimension, order), expected, rtol=1e-12)


@pytest.mark.parametrize("ratio", [(1, 1), (2, 1), (1, 3)])
def test_exact_moments_reach_the_limit_as_the_inverse_size(ratio: tuple[int, int]):
    limit = early.quadratic_moments(*ratio, 6)
    gaps = [early.quadratic_moments(ratio[0] * n, ratio[1] * n, 6, kind="exact") - limit for n in (2000, 4000)]
    assert float(gaps[0][0]) == pytest.approx(0, abs=1e-12)  # the first moment has no correction
    np.testing.assert_allclose(gaps[0][1:] / gaps[1][1:], 2, rtol=0.02)


def test_exact_moments_by_exact_quadrature():
    W, a, chance = all_networks(2, 2, 5)
    R = weights_matrix(W, a)
    powers = [torch.linalg.matrix_power(R, m) for m in (1, 2, 3, 4)]
    expected = [float(chance @ power.diagonal(dim1=-2, dim2=-1).sum(-1)) / 2 for power in powers]
    np.testing.assert_allclose(early.quadratic_moments(2, 2, 4, kind="exact"), expected, rtol=1e-11)


@pytest.mark.parametrize(("width", "dimension"), [(9, 5), (5, 9)])
def test_sampled_moments(width: int, dimension: int):
    estimate = early.sampled_quadratic_moments(
        width, dimension, 3, samples=4000, generator=torch.Generator().manual_seed(0)
    )
    exact = early.quadratic_moments(width, dimension, 3, kind="exact")
    assert estimate.samples == 4000
    assert float(((estimate.value - exact).abs() / estimate.stderr).max()) < 4
    assert float((estimate.stderr / exact).max()) < 0.15


def test_sampled_moments_repeat_themselves_and_touch_nothing():
    state = torch.get_rng_state()
    once, again = (early.sampled_quadratic_moments(6, 4, 2, samples=3) for _ in range(2))
    assert torch.equal(once.value, again.value)
    assert torch.equal(torch.get_rng_state(), state)
    other = early.sampled_quadratic_moments(6, 4, 2, samples=3, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(once.value, other.value)


# free probability


def printed_second_denominator(first: Tensor, second: Tensor, r: Sequence[float]) -> float:
    """Eq. 26 as printed, with its last term tr[Ab]^2 tr[B^2] r2^2 = 0."""
    d = len(first)
    a = first - first.trace() / d * torch.eye(d, dtype=first.dtype)
    corrected = early.free_probability(first, second, torch.tensor(r)).den2
    return corrected - float((second.trace() / d) ** 2 * (a @ a).trace() / d) * r[1] ** 2


def test_reference_free_probability():
    r = (1.0, 4.0, 25.0, 202.0)
    traces = early.free_probability(A, B, torch.tensor(r))
    assert (traces.numerator, traces.den1, traces.den2) == pytest.approx((498.25, 39.5, 8132.625), rel=1e-14)
    assert traces.correlation == pytest.approx(0.879090093421683, rel=1e-13)
    wrong = traces.numerator / math.sqrt(traces.den1 * printed_second_denominator(A, B, r))
    assert wrong == pytest.approx(0.8914526245326045, rel=1e-12)


def free_trace(factors: Sequence[Tensor], r: Sequence[float]) -> float:
    """tr(C_1 R C_2 R ...) for R free from the C's: free cumulants of R over non-crossing partitions, times the traces
    of the C's over the Kreweras complement."""
    cumulants: list[float] = []
    for order in range(1, len(factors) + 1):
        cumulants.append(0.0)
        cumulants[-1] = r[order - 1] - from_cumulants(cumulants, order)
    total, count, d = 0.0, len(factors), len(factors[0])
    for partition in non_crossing(count):
        # C_i and C_j (i < j) may share a trace where the R's between them, i ... j - 1, are whole parts
        parts: list[list[int]] = []
        for j in range(count):
            for part in parts:
                between = set(range(part[-1], j))
                if all(set(block) <= between or not set(block) & between for block in partition):
                    part.append(j)
                    break
            else:
                parts.append([j])
        products = [functools.reduce(torch.matmul, [factors[i] for i in part]) for part in parts]
        traces = [float(product.trace()) / d for product in products]
        total += math.prod(cumulants[len(block) - 1] for block in partition) * math.prod(traces)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_free_probability_by_non_crossing_partitions(seed: int):
    first, second = symmetric(5, seed), symmetric(5, seed + 10)
    r = [0.7, 2.0, 9.0, 60.0]
    traces = early.free_probability(first, second, torch.tensor(r, dtype=torch.float64))
    expected = [free_trace(word, r) for word in ([first, first, second], [first] * 2, [first, second] * 2)]
    assert [traces.numerator, traces.den1, traces.den2] == pytest.approx(expected, rel=1e-11)


def test_finite_sizes_reach_free_probability_as_the_inverse_size():
    """The same data many times over, A x I: width 3 d / 2."""
    moments = early.quadratic_moments(3, 2, 4)
    limit = early.free_probability(A, B, moments)
    gaps = []
    for copies in (32, 64):
        identity = torch.eye(copies, dtype=torch.float64)
        exact = early.exact_word_traces(torch.kron(A, identity), torch.kron(B, identity), 6 * copies)
        names = ("numerator", "den1", "den2")
        gaps.append([getattr(exact, name) / (4 * copies) / getattr(limit, name) - 1 for name in names])
    np.testing.assert_allclose(np.array(gaps[0]) / np.array(gaps[1]), 2, rtol=0.05)
    assert np.abs(gaps[1]).max() < 0.1


def test_the_isotropic_case_of_the_main_text():
    """Sec. 4.2, X^T X = I"""
    matrix, r = symmetric(4, 0) @ symmetric(4, 0), (1.0, 4.0, 25.0, 202.0)
    identity = torch.eye(4, dtype=torch.float64)
    a = matrix.trace() / 4
    centered = matrix - a * identity
    expected = float(a**2 * r[2] + r[0] * r[1] * (centered @ centered).trace() / 4)
    assert early.free_probability(matrix, identity, torch.tensor(r)).numerator == pytest.approx(expected, rel=1e-12)


@QUICK
@given(
    st.integers(1, 6),
    st.integers(0, 999),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=4),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_free_correlations_are_correlations(dimension: int, seed: int, points: list[float], masses: list[float]):
    """rho <= 1, which the printed Eq. 26 breaks, for the moments of any positive measure."""
    x, y = drawn(dimension + 1, dimension, seed=seed), drawn(dimension + 1, seed=seed + 1)
    weights = np.array(masses[: len(points)]) / sum(masses[: len(points)])
    moments = torch.tensor([float(weights @ np.array(points) ** m) for m in (1, 2, 3, 4)], dtype=torch.float64)
    assert 0 < early.free_probability(*early.data_matrices(x, y), moments).correlation <= 1 + 1e-9


def test_the_printed_formula_breaks_the_bound():
    """A dominant direction in A, isotropic inputs."""
    first = torch.diag(torch.tensor([50.0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float64))
    second = torch.eye(8, dtype=torch.float64)
    r = (1.0, 4.0, 25.0, 202.0)
    traces = early.free_probability(first, second, torch.tensor(r))
    printed = printed_second_denominator(first, second, r)
    assert traces.correlation <= 1
    assert traces.numerator / math.sqrt(traces.den1 * printed) > 1


def observed(x: Tensor, y: Tensor, width: int, seed: int) -> float:
    """Eq. 6 for one network, without the (n, n) kernel."""
    d = x.shape[1]
    rows = drawn(width, 1, seed=seed) * drawn(width, d, seed=seed + 1) / math.sqrt(width)
    C = x.T @ (y[:, None] * x)
    moved, features = rows @ C, rows @ x.T
    both = features.T @ moved
    return cosine(moved.T @ moved, both.T @ both)


def test_large_isotropic_data_against_networks():
    """Sheet 2.3, n = k = d = 512: observed 0.907 with a spread of 0.011, predicted 0.899, print 0.976."""
    size = 512
    x, y = drawn(size, size), drawn(size, seed=1)
    first, second = early.data_matrices(x, y)
    predicted = early.free_probability(first, second, early.quadratic_moments(size, size, 4))
    values = [observed(x, y, size, seed) for seed in range(10, 22, 2)]
    assert predicted.correlation == pytest.approx(0.899, abs=0.006)
    assert np.mean(values) == pytest.approx(0.907, abs=0.012)
    assert abs(np.mean(values) - predicted.correlation) < 0.02
    r = (1.0, 4.0, 25.0, 202.0)
    printed = predicted.numerator / math.sqrt(predicted.den1 * printed_second_denominator(first, second, r))
    assert printed > 0.95


def test_unequal_sizes_against_networks():
    """n, d, k all different: the trace is over d."""
    samples, dimension, width = 350, 200, 500
    x, y = drawn(samples, dimension), drawn(samples, seed=1)
    predicted = early.free_probability(*early.data_matrices(x, y), early.quadratic_moments(width, dimension, 4))
    values = [observed(x, y, width, seed) for seed in range(10, 26, 2)]
    assert abs(np.mean(values) - predicted.correlation) < 0.01
    exact = early.exact_word_traces(*early.data_matrices(x, y), width)
    assert exact.correlation == pytest.approx(predicted.correlation, abs=0.005)


def test_observed_is_equation_6():
    x, y, width = drawn(7, 4), drawn(7, seed=1), 5
    a, W = drawn(width, 1, seed=3), drawn(width, 4, seed=4) / math.sqrt(width)
    J = 2 * (x @ W.T) * a.T
    expected = float(early.derivative_correlation(x, y, J @ J.T))
    assert observed(x, y, width, 3) == pytest.approx(expected, rel=1e-12)


BAD: dict[str, Callable[[], object]] = {
    "images": lambda: early.quadratic_means(torch.ones(2, 3, 4), torch.ones(2), 3),
    "two outputs": lambda: early.quadratic_means(torch.ones(4, 3), torch.ones(4, 2), 3),
    "no width": lambda: early.quadratic_means(torch.ones(4, 3), torch.ones(4), 0),
    "a wide float": lambda: early.quadratic_means(torch.ones(4, 3), torch.ones(4), 3.0),
    "too few targets": lambda: early.data_matrices(torch.ones(4, 3), torch.ones(3)),
    "unequal sizes": lambda: early.free_probability(A, B[:3, :3], torch.ones(4)),
    "a skew matrix": lambda: early.free_probability(A, B.triu(), torch.ones(4)),
    "data for a matrix": lambda: early.free_probability(torch.ones(4, 3), B, torch.ones(4)),
    "three moments": lambda: early.free_probability(A, B, torch.ones(3)),
    "a list of moments": lambda: early.free_probability(A, B, [1.0, 4.0, 25.0, 202.0]),
    "no such width": lambda: early.exact_word_traces(A, B, -1),
    "no factors": lambda: early.exact_trace([], 3),
    "seven factors": lambda: early.exact_trace([A] * 7, 3),
    "factors of two sizes": lambda: early.exact_trace([A, B[:3, :3]], 3),
    "no order": lambda: early.quadratic_moments(3, 4, 0),
    "no dimension": lambda: early.quadratic_moments(3, 0, 4),
    "another kind": lambda: early.quadratic_moments(3, 4, 4, kind="sampled"),
    "seven exact moments": lambda: early.quadratic_moments(3, 4, 7, kind="exact"),
    "one network": lambda: early.sampled_quadratic_moments(3, 4, 4, samples=1),
    "a seed": lambda: early.sampled_quadratic_moments(3, 4, 4, generator=3),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
