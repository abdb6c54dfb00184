"""The metrics against loops written from the formulas: many random cases of unequal sizes, and kernels of networks."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor, nn

import featlearn as fl
from tests.references.jacobian import dense_ntk

CASES = 25
CLOSE = 1e-8


def close(value: Tensor | float, expected: np.ndarray | float, tolerance: float = CLOSE) -> None:
    """Equal up to `tolerance`, absolute and relative, nan only where nan is expected; a float64 tensor or a float."""
    if isinstance(value, Tensor):
        assert value.dtype == torch.float64
        assert value.shape == np.shape(expected)
    np.testing.assert_allclose(np.asarray(value), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def cases(count: int = CASES) -> Iterator[np.random.Generator]:
    """Generators that no other test starts from."""
    for seed in range(count):
        yield np.random.default_rng([20240711, seed])


def sizes(random: np.random.Generator) -> tuple[int, int]:
    """(P, C), never equal."""
    samples, outputs = int(random.integers(4, 15)), int(random.integers(2, 6))
    return (samples, outputs) if samples != outputs else (samples + 1, outputs)


def kernel(random: np.random.Generator, samples: int, *stack: int) -> np.ndarray:
    """Positive kernels of random rank from 1 to P + 2, hence often singular, each of its own size."""
    rank = int(random.integers(1, samples + 3))
    rows = random.normal(size=(*stack, samples, rank)) + random.normal(size=(*stack, 1, 1))
    size = np.exp(random.normal(size=(*stack, 1, 1)) * 2)
    return size * (rows @ np.swapaxes(rows, -1, -2))


def targets(random: np.random.Generator, samples: int, outputs: int | None = None) -> np.ndarray:
    """Real targets of both signs that are not centered."""
    shape = (samples,) if outputs is None else (samples, outputs)
    return random.normal(size=shape) * 3 + random.normal()


def aligned(K: np.ndarray, y: np.ndarray, centered: bool = False) -> float:
    """Kernel-task alignment, entry by entry (sheet 2.1)."""
    samples = len(K)
    if centered:
        H = np.eye(samples) - np.ones((samples, samples)) / samples
        K, y = H @ K @ H, H @ y
    columns = y.reshape(samples, -1)
    inner, kernel_square, task_square = 0.0, 0.0, 0.0
    for a in range(samples):
        for b in range(samples):
            task = sum(columns[a, c] * columns[b, c] for c in range(columns.shape[1]))
            inner, kernel_square, task_square = (
                inner + K[a, b] * task,
                kernel_square + K[a, b] ** 2,
                task_square + task**2,
            )
    return inner / math.sqrt(kernel_square) / math.sqrt(task_square)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_alignments_are_those_of_the_loops(precision: torch.dtype, centered: bool):
    measured = fl.metrics.centered_alignment if centered else fl.metrics.alignment
    for random in cases():
        samples, outputs = sizes(random)
        for columns in (None, outputs):
            # what the function sees after rounding is what the loops see: sums in double owe nothing to the format
            K = torch.from_numpy(kernel(random, samples, 3, 2)).to(precision)
            y = torch.from_numpy(targets(random, samples, columns)).to(precision)
            expected = np.zeros((3, 2))
            for i in range(3):
                for j in range(2):
                    expected[i, j] = aligned(K[i, j].double().numpy(), y.double().numpy(), centered)
            close(measured(K, y), expected)
            close(measured(K[1, 0], y), expected[1, 0])


@pytest.mark.parametrize("centered", [False, True])
def test_classes_are_compared_pair_by_pair(centered: bool):
    for random in cases():
        samples, outputs = sizes(random)
        K, Y = kernel(random, samples, 2, outputs), targets(random, samples, outputs)
        expected = np.zeros((2, outputs, outputs))
        shares = np.zeros((2, outputs, outputs))
        for t in range(2):
            for c in range(outputs):
                for d in range(outputs):
                    expected[t, c, d] = aligned(K[t, c], Y[:, d], centered)
            for d in range(outputs):
                mean = sum(expected[t, c, d] for c in range(outputs)) / outputs
                shares[t, :, d] = expected[t, :, d] / mean
        stack, task = torch.from_numpy(K), torch.from_numpy(Y)
        close(fl.metrics.class_alignment(stack, task, centered=centered), expected)
        close(fl.metrics.specialization(stack, task, centered=centered), shares)
        close(fl.metrics.specialization(stack, task, centered=centered).mean(-2), np.ones((2, outputs)))
        close(fl.metrics.class_alignment(stack[1], task, centered), expected[1])


def test_interference_is_a_sum_over_blocks():
    for random in cases():
        samples, outputs = sizes(random)
        K = random.normal(size=(2, samples, samples + 3, outputs, outputs)) * np.exp(random.normal(size=outputs))
        shares, spreads = [], []
        for t in range(2):
            squares = np.zeros((outputs, outputs))
            for c in range(outputs):
                for d in range(outputs):
                    squares[c, d] = sum(v * v for v in K[t, :, :, c, d].flatten())
            shares.append(sum(squares[c, d] for c in range(outputs) for d in range(outputs) if c != d) / squares.sum())
            norms = [math.sqrt(squares[c, c]) for c in range(outputs)]
            mean = sum(norms) / outputs
            spreads.append(math.sqrt(sum((n - mean) ** 2 for n in norms) / outputs) / mean)
        found = fl.metrics.interference(torch.from_numpy(K))
        close(found.off_diagonal_share, np.array(shares))
        close(found.diagonal_spread, np.array(spreads))


def test_spectra_rebuild_the_kernel_and_carry_the_whole_task():
    for random in cases():
        samples, outputs = sizes(random)
        for columns in (None, outputs):
            K, y = kernel(random, samples, 2), targets(random, samples, columns)
            found = fl.metrics.spectrum(torch.from_numpy(K), torch.from_numpy(y))
            assert found.task_power is not None
            for t in range(2):
                values, vectors = scipy.linalg.eigh(K[t], driver="ev")
                size = values[-1]
                close(found.eigenvalues[t] / size, values[::-1] / size)
                U = found.eigenvectors[t].numpy()
                close(torch.from_numpy(U @ np.diag(found.eigenvalues[t].numpy()) @ U.T / size), K[t] / size)
                power = [np.sum((vectors[:, samples - 1 - k] @ y) ** 2) for k in range(samples)]
                seen = values[::-1] > 1e-9 * size
                # eigenvectors of the eigenvalue 0 are free to turn among themselves; only the sum of their power is not
                close(found.task_power[t][torch.from_numpy(seen)], np.array(power)[seen], 1e-6)
                close(found.task_power[t].sum(), np.sum(y**2))
                expected = [sum(power[: k + 1]) / np.sum(y**2) for k in range(int(seen.sum()))]
                close(found.cumulative_power[t][: len(expected)], np.array(expected), 1e-6)


@pytest.mark.parametrize("kind", ["entropy", "participation"])
def test_effective_ranks_count_modes(kind: str):
    for random in cases():
        samples, _ = sizes(random)
        K = kernel(random, samples, 3)
        expected = []
        for t in range(3):
            values = np.clip(scipy.linalg.eigvalsh(K[t]), 0, None)
            if kind == "entropy":
                shares = [v / values.sum() for v in values]
                expected.append(math.exp(-sum(s * math.log(s) for s in shares if s > 1e-14)))
            else:
                expected.append(np.trace(K[t]) ** 2 / sum(v * v for v in K[t].flatten()))
        close(fl.metrics.effective_rank(torch.from_numpy(K), kind), np.array(expected))


def test_power_laws_are_a_regression_of_logarithms():
    for random in cases():
        count = int(random.integers(12, 60))
        first = int(random.integers(1, 5))
        last = int(random.integers(first + 3, count + 1))
        values = np.exp(random.normal(size=count) * 0.3) * np.arange(1, count + 1) ** -random.uniform(0.2, 3)
        line = scipy.stats.linregress(np.log(np.arange(first, last + 1)), np.log(values[first - 1 : last]))
        found = fl.metrics.power_law(torch.from_numpy(values), first, last)
        close(found.exponent, -line.slope)
        close(found.stderr, line.stderr)
        close(found.prefactor, math.exp(line.intercept))
        assert (found.first, found.last) == (first, last)


def cosine(A: np.ndarray, B: np.ndarray) -> float:
    """<A, B> / (|A| |B|), entry by entry."""
    pairs = list(zip(A.flatten(), B.flatten(), strict=True))
    squares = sum(a * a for a, _ in pairs) * sum(b * b for _, b in pairs)
    return sum(a * b for a, b in pairs) / math.sqrt(squares)


def test_distances_and_velocities_compare_entry_by_entry():
    for random in cases():
        samples, _ = sizes(random)
        K, other = kernel(random, samples, 4), kernel(random, samples, 4)
        times = np.cumsum(random.uniform(0.1, 2, size=4))
        stack, second = torch.from_numpy(K), torch.from_numpy(other)
        close(fl.metrics.kernel_distance(stack, second), np.array([1 - cosine(K[t], other[t]) for t in range(4)]))
        close(fl.metrics.kernel_distance(stack, second[2]), np.array([1 - cosine(K[t], other[2]) for t in range(4)]))
        close(fl.metrics.kernel_distance(stack[0], second), np.array([1 - cosine(K[0], other[t]) for t in range(4)]))
        steps = [(1 - cosine(K[t], K[t + 1])) / (times[t + 1] - times[t]) for t in range(3)]
        close(fl.metrics.kernel_velocity(stack, torch.from_numpy(times)), np.array(steps))


def test_correlation_and_agreement_of_arrays():
    for random in cases():
        shape = tuple(random.integers(2, 6, size=int(random.integers(1, 4))))
        A, B = random.normal(size=shape) + 2, random.normal(size=shape) - 1
        a, b = torch.from_numpy(A), torch.from_numpy(B)
        close(fl.metrics.correlation(a, b), cosine(A, B))
        pearson = scipy.stats.pearsonr(A.flatten(), B.flatten()).statistic
        close(fl.metrics.correlation(a, b, "pearson"), pearson)
        found = fl.metrics.agreement(a, b)
        error = math.sqrt(sum((p - q) ** 2 for p, q in zip(A.flatten(), B.flatten(), strict=True)))
        close(found.relative_error, error / math.sqrt(sum(q * q for q in B.flatten())))
        close(found.correlation, pearson)


# --- the feature rate -----------------------------------------------------------------------------------------------


def rate_of(K0: np.ndarray, K1: np.ndarray, y: np.ndarray) -> float:
    """The root gamma of A(K0 + gamma y y^T) = A(K1), by search: alignment rises with gamma (sheet 2.8, 2.9)."""
    goal = aligned(K1, y)
    scale = np.linalg.norm(K0) / np.sum(y**2)

    def excess(gamma: float) -> float:
        return aligned(K0 + gamma * scale * np.outer(y, y), y) - goal

    # alignment is rising for gamma y^T y above -A0 |K0| and has crossed zero there, below every goal
    return scale * scipy.optimize.brentq(excess, -aligned(K0, y), 1e3, xtol=1e-14, rtol=1e-14)


def test_feature_rates_are_the_root_of_their_definition():
    found_negative = False
    for random in cases():
        samples, _ = sizes(random)
        K0, K1, y = kernel(random, samples, 2), kernel(random, samples, 2), targets(random, samples)
        K0, K1 = K0 + 0.05 * np.eye(samples), K1 + 0.3 * np.eye(samples)
        expected = np.array([rate_of(K0[t], K1[t], y) for t in range(2)])
        found_negative |= bool((expected < 0).any())
        first, second, task = torch.from_numpy(K0), torch.from_numpy(K1), torch.from_numpy(y)
        close(fl.metrics.feature_rate(first, second, task), expected, 1e-7)
        scale = np.array([np.sum(y**2) / np.linalg.norm(K0[t]) for t in range(2)])
        close(fl.metrics.feature_rate(first, second, task, normalized=True), expected * scale, 1e-7)
    assert found_negative


def test_feature_rates_of_several_classes_are_their_mean():
    for random in cases(10):
        samples, outputs = sizes(random)
        K0 = kernel(random, samples, 2, outputs) + 0.05 * np.eye(samples)
        K1 = kernel(random, samples, 2, outputs) + 0.3 * np.eye(samples)
        Y = targets(random, samples, outputs)
        raw, normalized = np.zeros(2), np.zeros(2)
        for t in range(2):
            for c in range(outputs):
                gamma = rate_of(K0[t, c], K1[t, c], Y[:, c])
                raw[t] += gamma / outputs
                normalized[t] += gamma * np.sum(Y[:, c] ** 2) / np.linalg.norm(K0[t, c]) / outputs
        first, second, task = torch.from_numpy(K0), torch.from_numpy(K1), torch.from_numpy(Y)
        close(fl.metrics.feature_rate(first, second, task), raw, 1e-7)
        close(fl.metrics.feature_rate(first, second, task, normalized=True), normalized, 1e-7)


# --- curves ---------------------------------------------------------------------------------------------------------


def first_time(times: np.ndarray, values: np.ndarray, level: float) -> float:
    """Walks along the polygon until it meets the level."""
    if values[0] == level:
        return times[0]
    for i in range(len(times) - 1):
        low, high = sorted((values[i], values[i + 1]))
        if low <= level <= high and low < high:
            return times[i] + (level - values[i]) / (values[i + 1] - values[i]) * (times[i + 1] - times[i])
    return math.nan


def test_event_times_are_where_the_polygon_meets_the_level():
    for random in cases(40):
        count = int(random.integers(3, 20))
        times = np.cumsum(random.uniform(0.1, 1, size=count)) - 3
        loss = np.exp(-np.cumsum(random.uniform(0, 0.5, size=count))) * random.uniform(0.5, 5)
        rising = 0.2 + np.cumsum(random.uniform(0, 1, size=count))
        fraction = float(random.uniform(0.2, 0.95))
        t = torch.from_numpy(times)
        level = fraction * loss[0]
        close(fl.metrics.time_to(t, torch.from_numpy(loss), fraction, of="initial"), first_time(times, loss, level))
        level = fraction * rising[-1]
        close(fl.metrics.time_to(t, torch.from_numpy(rising), fraction), first_time(times, rising, level))


def test_slopes_are_differences_of_logarithms():
    for random in cases():
        count = int(random.integers(4, 20))
        exponent, factor = random.uniform(0.1, 3), random.uniform(0.2, 5)
        uneven = np.cumsum(random.uniform(0.1, 2, size=count))
        law = torch.from_numpy(factor * uneven**-exponent)
        close(fl.metrics.log_slope(torch.from_numpy(uneven), law), np.full(count, -exponent))
        even = np.exp(np.arange(count) * 0.3 - 1)
        loss = np.exp(random.normal(size=count))
        # inner points only: at the ends a difference has one side
        expected = [(math.log(loss[i + 1]) - math.log(loss[i - 1])) / 0.6 for i in range(1, count - 1)]
        close(fl.metrics.log_slope(torch.from_numpy(even), torch.from_numpy(loss))[1:-1], np.array(expected))


# --- kernels of networks, on the samples of training and on others ---------------------------------------------------


def network(seed: int, features: int, outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, outputs)
        ).double()


def one_hot(random: np.random.Generator, samples: int, outputs: int) -> np.ndarray:
    return np.eye(outputs)[random.permutation(np.arange(samples) % outputs)]


def test_alignments_of_a_network_on_training_and_test_samples():
    """The same network on two probes: kernels by brute force, numbers by loops, no step in common with the library."""
    for seed, random in enumerate(cases(3)):
        model = network(seed, 5, 3)
        for samples in (9, 13):
            x = torch.from_numpy(random.normal(size=(samples, 5)))
            Y = one_hot(random, samples, 3)
            task = torch.from_numpy(Y)
            each = dense_ntk(model, x, outputs="each").numpy()
            mean = sum(each[c] for c in range(3)) / 3
            K = fl.ntk(model, x)
            close(fl.metrics.alignment(K, task), aligned(mean, Y))
            close(fl.metrics.centered_alignment(K, task), aligned(mean, Y, centered=True))
            close(fl.metrics.alignment(K, task[:, 1]), aligned(mean, Y[:, 1]))
            found = fl.metrics.class_alignment(fl.ntk(model, x, outputs="each"), task, centered=True)
            close(found, np.array([[aligned(each[c], Y[:, d], True) for d in range(3)] for c in range(3)]))


def test_interference_between_two_probes():
    """A full kernel of test with training samples is not square in the samples."""
    random = next(cases(1))
    model = network(5, 4, 3)
    x, other = (torch.from_numpy(random.normal(size=(samples, 4))) for samples in (6, 9))
    found = fl.metrics.interference(fl.ntk(model, other, x2=x, outputs="full"))
    K = dense_ntk(model, other, x, outputs="full").numpy()
    squares = np.array([[np.sum(K[:, :, c, d] ** 2) for d in range(3)] for c in range(3)])
    close(found.off_diagonal_share, 1 - np.trace(squares) / squares.sum())
    norms = np.sqrt(np.diag(squares))
    close(found.diagonal_spread, norms.std() / norms.mean())


# --- what any of them must survive -----------------------------------------------------------------------------------

SQUARE = {
    "alignment": lambda K, y: fl.metrics.alignment(K, y),
    "centered_alignment": lambda K, y: fl.metrics.centered_alignment(K, y),
    "eigenvalues": lambda K, y: fl.metrics.spectrum(K, y).eigenvalues,
    "cumulative_power": lambda K, y: fl.metrics.spectrum(K, y).cumulative_power,
    "effective_rank": lambda K, y: fl.metrics.effective_rank(K),
    "participation": lambda K, y: fl.metrics.effective_rank(K, "participation"),
    "kernel_distance": lambda K, y: fl.metrics.kernel_distance(K, K + torch.eye(len(y)).to(K)),
    "feature_rate": lambda K, y: fl.metrics.feature_rate(K, K + torch.eye(len(y)).to(K), y),
    "correlation": lambda K, y: fl.metrics.correlation(K, K + torch.eye(len(y)).to(K)),
}


@pytest.mark.parametrize("name", SQUARE)
def test_strides_gradients_and_formats_change_nothing(name: str):
    random = next(cases(1))
    measured = SQUARE[name]
    K, y = torch.from_numpy(kernel(random, 7) + np.eye(7)), torch.arange(7) - 2
    plain = measured(K, y.double())
    wide = torch.zeros(7, 2, 7, 3, dtype=torch.float64)
    wide[:, 1, :, 2] = K
    strided = wide[:, 1, :, 2]
    assert not strided.is_contiguous()
    long = torch.zeros(14, dtype=torch.float64)
    long[::2] = y.double()
    for kernels, task in ((strided, y.double()), (K, y), (K.clone().requires_grad_(), y.double()), (K, long[::2])):
        found = measured(kernels, task)
        assert not found.requires_grad
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
