"""What a kernel says, against reference values, slow loops and properties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import featlearn as fl
from featlearn import metrics

K = torch.tensor([[2.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kernel(samples: int, rank: int, seed: int) -> Tensor:
    features = drawn(samples, rank, seed=seed)
    return features @ features.T


KERNELS = st.builds(kernel, st.integers(2, 7), st.integers(1, 9), st.integers(0, 10**6))


def test_reference_alignment():
    assert float(metrics.alignment(K, Y)) == pytest.approx(0.408855236238502, rel=1e-12)
    assert float(metrics.centered_alignment(K, Y)) == pytest.approx(0.6518829980561036, rel=1e-12)


def test_the_constant_mode_hides_in_the_raw_alignment():
    """Sheet 2.1: K = 1 1^T + 0.05 I, P = 200, raw 0.100224, centered 1 / sqrt(199)."""
    y = torch.nn.functional.one_hot(torch.arange(200) % 10, 10)[:, 0].double()
    matrix = torch.ones(200, 200, dtype=torch.float64) + 0.05 * torch.eye(200, dtype=torch.float64)
    assert float(metrics.alignment(matrix, y)) == pytest.approx(0.100224, abs=1e-6)
    assert float(metrics.centered_alignment(matrix, y)) == pytest.approx(1 / math.sqrt(199), rel=1e-9)


def test_several_columns_are_the_task_kernel():
    kernels, targets = torch.stack([kernel(5, 3, s) for s in range(4)]), drawn(5, 2)
    task = targets @ targets.T
    slow = [float((k * task).sum() / (k.norm() * task.norm())) for k in kernels]
    np.testing.assert_allclose(metrics.alignment(kernels, targets), slow, rtol=1e-12)
    H = torch.eye(5, dtype=torch.float64) - 0.2
    slow = [float((H @ k @ H * (H @ task @ H)).sum() / ((H @ k @ H).norm() * (H @ task @ H).norm())) for k in kernels]
    np.testing.assert_allclose(metrics.centered_alignment(kernels, targets), slow, rtol=1e-11)


@QUICK
@given(KERNELS, st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_alignment_is_a_cosine(matrix: Tensor, scale: float, seed: int):
    y = drawn(len(matrix), seed=seed)
    rotation = torch.linalg.qr(drawn(len(matrix), len(matrix), seed=seed + 1))[0]
    value = float(metrics.alignment(matrix, y))
    assert -1e-12 <= value <= 1 + 1e-12
    assert float(metrics.alignment(scale * matrix, -3 * y)) == pytest.approx(value, rel=1e-9)
    assert float(metrics.alignment(rotation @ matrix @ rotation.T, rotation @ y)) == pytest.approx(value, rel=1e-8)
    assert float(metrics.alignment(torch.outer(y, y), y)) == pytest.approx(1.0, rel=1e-12)
    if value > 1 - 1e-12:
        assert float((matrix / matrix.norm() - torch.outer(y, y) / y.norm() ** 2).norm()) < 1e-5


def test_identity_and_undefined_values():
    eye = torch.eye(9, dtype=torch.float64)
    assert float(metrics.alignment(eye, drawn(9))) == pytest.approx(1 / 3)
    assert metrics.alignment(0 * eye, drawn(9)).isnan()
    assert metrics.alignment(eye, torch.zeros(9)).isnan()
    assert metrics.centered_alignment(eye, torch.full((9,), 0.1)).isnan()
    assert metrics.effective_rank(0 * eye).isnan()


def test_single_precision_is_summed_in_double():
    matrix = (1e4 + kernel(300, 20, 0)).float()
    y = drawn(300).float()
    assert metrics.centered_alignment(matrix, y).dtype == torch.float64
    expected = float(metrics.centered_alignment(matrix.double(), y.double()))
    assert float(metrics.centered_alignment(matrix, y)) == pytest.approx(expected, rel=1e-12)


def test_reference_specialization():
    each = torch.tensor([[[2.0, 0.5], [0.5, 1.0]], [[1.0, -0.2], [-0.2, 3.0]]], dtype=torch.float64)
    targets = torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64).T
    aligned = [[0.42640143271122083, 0.5518136188027565], [0.6929348671835833, 0.8782115696390869]]
    special = [[0.7618826133866904, 0.7717537051274084], [1.2381173866133095, 1.2282462948725916]]
    np.testing.assert_allclose(metrics.class_alignment(each, targets), aligned, rtol=1e-12)
    np.testing.assert_allclose(metrics.specialization(each, targets), special, rtol=1e-12)


@pytest.mark.parametrize("centered", [False, True])
def test_specialization_of_a_stack(centered: bool):
    each = torch.stack([torch.stack([kernel(6, 4, 10 * t + c) for c in range(3)]) for t in range(2)])
    targets = drawn(6, 3)
    single = metrics.centered_alignment if centered else metrics.alignment
    aligned = metrics.class_alignment(each, targets, centered)
    assert aligned.shape == (2, 3, 3)
    for t, c, d in itertools.product(range(2), range(3), range(3)):
        assert float(aligned[t, c, d]) == pytest.approx(float(single(each[t, c], targets[:, d])), rel=1e-11)
    columns = metrics.specialization(each, targets, centered).mean(-2)
    np.testing.assert_allclose(columns, torch.ones(2, 3), rtol=1e-12)
    same = each[:, :1].expand(2, 3, 6, 6)
    np.testing.assert_allclose(metrics.specialization(same, targets, centered), torch.ones(2, 3, 3), rtol=1e-12)


def test_interference():
    own = torch.stack([kernel(4, 3, 0), 2 * kernel(4, 3, 0)])
    full = torch.zeros(4, 4, 2, 2, dtype=torch.float64)
    full[:, :, 0, 0], full[:, :, 1, 1] = own
    found = metrics.interference(full)
    assert float(found.off_diagonal_share) == 0.0
    assert float(found.diagonal_spread) == pytest.approx(0.5 / 1.5)
    full[:, :, 0, 1] = full[:, :, 1, 0] = own[0]
    assert float(metrics.interference(full).off_diagonal_share) == pytest.approx(2 / (1 + 4 + 2))
    assert metrics.interference(torch.stack([full, full])).off_diagonal_share.shape == (2,)


def test_reference_spectrum():
    found = metrics.spectrum(K, Y)
    np.testing.assert_allclose(
        found.eigenvalues, [2.235770551752477, 0.7936572742588666, 0.4705721739886557], rtol=1e-12
    )
    assert found.task_power is not None
    expected = [0.35842161046321075, 1.651352423043201, 0.24022596649358732]
    np.testing.assert_allclose(found.task_power, expected, rtol=1e-11)
    np.testing.assert_allclose(found.cumulative_power, np.cumsum(expected) / 2.25, rtol=1e-11)
    residual = K @ found.eigenvectors - found.eigenvectors * found.eigenvalues
    assert float(residual.abs().max()) < 1e-14


def test_spectrum_of_a_stack_with_several_columns():
    kernels, targets = torch.stack([kernel(5, 7, s) for s in range(3)]), drawn(5, 2)
    found = metrics.spectrum(kernels, targets)
    assert found.task_power is not None
    np.testing.assert_allclose(found.task_power.sum(-1), [float(targets.square().sum())] * 3)
    with pytest.raises(fl.FeatlearnError, match="no task"):
        _ = metrics.spectrum(kernels).cumulative_power


def test_power_laws_are_found_with_their_error():
    k = torch.arange(1, 401, dtype=torch.float64)
    exact = metrics.power_law(3 * k**-1.7, 10, 300)
    assert exact.exponent == pytest.approx(1.7, abs=1e-12)
    assert exact.prefactor == pytest.approx(3.0, rel=1e-10)
    assert exact.stderr < 1e-12
    noisy = metrics.power_law(k**-1.2 * (0.1 * drawn(400)).exp(), 1, 400)
    assert abs(noisy.exponent - 1.2) < 4 * noisy.stderr < 0.1
    slope, cov = np.polyfit(np.log(k[9:50]), np.log((k**-1.2 * (0.1 * drawn(400)).exp())[9:50]), 1, cov=True)
    window = metrics.power_law(k**-1.2 * (0.1 * drawn(400)).exp(), np.int64(10), torch.tensor(50))
    assert window.exponent == pytest.approx(-slope[0], rel=1e-9)
    assert window.stderr == pytest.approx(math.sqrt(cov[0, 0]), rel=1e-9)


def test_effective_rank():
    for kind in ("entropy", "participation"):
        assert float(metrics.effective_rank(torch.eye(7), kind)) == pytest.approx(7.0)
        assert float(metrics.effective_rank(torch.outer(Y, Y), kind)) == pytest.approx(1.0, abs=1e-9)
    shares = np.array([0.5, 0.3, 0.2])
    assert float(metrics.effective_rank(torch.diag(torch.tensor(shares)))) == pytest.approx(
        math.exp(-(shares * np.log(shares)).sum())
    )


def test_distance_and_velocity():
    a, b = kernel(5, 3, 0), kernel(5, 3, 1)
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    assert float(metrics.kernel_distance(a, 7 * b)) == pytest.approx(1 - cosine, rel=1e-12)
    assert float(metrics.kernel_distance(a, 3 * a)) < 1e-30
    tilted = metrics.kernel_distance(a, a + 1e-9 * b)
    sine = math.sqrt(1 - cosine**2) * float(b.norm() / a.norm()) * 1e-9
    assert float(tilted) == pytest.approx(sine**2 / 2, rel=1e-4)
    stack, times = torch.stack([a, b, b]), torch.tensor([0.0, 2.0, 5.0])
    np.testing.assert_allclose(metrics.kernel_velocity(stack, times), [(1 - cosine) / 2, 0.0], atol=1e-15)


def test_reference_feature_rates():
    """Alignments to gamma; the last case is K0 + 0.7 y y^T itself."""
    grown = K + 0.7 * torch.outer(Y, Y)
    assert float(metrics.feature_rate(K, grown, Y)) == pytest.approx(0.7, rel=1e-12)
    scaled = metrics.feature_rate(K, grown, Y, normalized=True)
    assert float(scaled) == pytest.approx(0.7 * 2.25 / float(K.norm()), rel=1e-12)
    for before, after, expected in (
        (0.1, 0.5, 0.47445626465380286),
        (0.1, 0.9, 1.9543919576822422),
        (0.3, 0.2, -0.1052779759075346),
    ):
        rates = metrics.feature_rate(with_alignment(before), with_alignment(after), torch.tensor([1.0, 0.0]))
        assert float(rates) == pytest.approx(expected, rel=1e-9)


def with_alignment(value: float) -> Tensor:
    """A matrix of norm 1 whose alignment with (1, 0) is `value`."""
    rest = math.sqrt(1 - value**2)
    return torch.tensor([[value, 0.0], [0.0, rest]], dtype=torch.float64)


@QUICK
@given(KERNELS, st.floats(0.01, 5.0), st.integers(0, 1000))
def test_feature_rates_are_recovered(matrix: Tensor, gamma: float, seed: int):
    y = drawn(len(matrix), seed=seed)
    if float(metrics.alignment(matrix, y)) > 0.999:
        return
    grown = matrix + gamma * torch.outer(y, y)
    assert float(metrics.feature_rate(matrix, grown, y)) == pytest.approx(gamma, rel=1e-6)


def test_feature_rates_of_classes_are_averaged():
    each, targets = torch.stack([kernel(5, 7, c) for c in range(3)]), drawn(5, 3)
    task = torch.einsum("pc,qc->cpq", targets, targets)
    grown = each + torch.tensor([0.5, 1.0, 3.0])[:, None, None] * task
    assert float(metrics.feature_rate(each, grown, targets)) == pytest.approx(1.5, rel=1e-9)
    stack = each + torch.tensor([1.0, 2.0])[:, None, None, None] * task
    np.testing.assert_allclose(metrics.feature_rate(each, stack, targets), [1.0, 2.0], rtol=1e-9)
    back = [float(metrics.feature_rate(one, each, targets)) for one in stack]
    np.testing.assert_allclose(metrics.feature_rate(stack, each, targets), back, rtol=1e-12)


def test_feature_rates_of_stacks_beside_one_kernel():
    later = torch.stack([K + gamma * torch.outer(Y, Y) for gamma in (0.2, 1.0, -0.1)])
    np.testing.assert_allclose(metrics.feature_rate(K, later, Y), [0.2, 1.0, -0.1], rtol=1e-12)
    for normalized in (False, True):
        back = [float(metrics.feature_rate(one, K, Y, normalized=normalized)) for one in later]
        np.testing.assert_allclose(metrics.feature_rate(later, K, Y, normalized=normalized), back, rtol=1e-12)
    assert metrics.feature_rate(later[:, None], later, Y).shape == (3, 3)


@pytest.mark.parametrize("gamma", [1e3, 1e6, 1e9])
def test_large_feature_rates_keep_their_digits(gamma: float):
    """Alignments within 1e-7 to 1e-19 of 1; what is lost is the rounding of K0 beside gamma y y^T."""
    for seed in range(5):
        matrix, y = kernel(6, 8, seed), drawn(6, seed=seed + 50)
        found = metrics.feature_rate(matrix, matrix + gamma * torch.outer(y, y), y)
        assert float(found) == pytest.approx(gamma, rel=1e-12 + 1e-15 * gamma)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_feature_rates_are_undefined_exactly_where_an_alignment_is_one(precision: torch.dtype):
    for seed in range(30):
        y, matrix = drawn(6, seed=seed).to(precision), kernel(6, 8, seed).to(precision)
        task = torch.outer(y, y)
        assert metrics.feature_rate(matrix, task, y).isnan()
        assert metrics.feature_rate(task, matrix, y).isnan()
        assert metrics.feature_rate(0 * matrix, matrix, y).isnan()
        assert metrics.feature_rate(matrix, matrix, 0 * y).isnan()
        near = task + 30 * torch.finfo(precision).eps ** 0.9 * matrix
        assert metrics.feature_rate(matrix, near, y).isfinite()
        assert metrics.feature_rate(near, matrix, y).isfinite()
    both = metrics.feature_rate(matrix, torch.stack([task, matrix]), y)
    np.testing.assert_allclose(both, [math.nan, 0.0], atol=1e-5)


def test_correlations():
    a, b = drawn(3, 4), drawn(3, 4, seed=1)
    assert float(metrics.correlation(a, b)) == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())))
    expected = np.corrcoef(a.flatten(), b.flatten())[0, 1]
    assert float(metrics.correlation(a, b, kind="pearson")) == pytest.approx(expected)
    assert metrics.correlation(a, 0 * b).isnan()


@pytest.mark.parametrize("count", [3, 6, 7, 13])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -math.pi, 1e9])
def test_constant_arrays_have_no_correlation(count: int, value: float):
    constant = torch.full((count,), value, dtype=torch.float64)
    for other in (drawn(count), constant + 1):
        assert metrics.correlation(constant, other, "pearson").isnan()
        assert metrics.correlation(other, constant, "pearson").isnan()
        assert metrics.agreement(constant, other).correlation.isnan()
        assert metrics.agreement(other, constant).correlation.isnan()
    assert metrics.centered_alignment(constant.expand(count, count), drawn(count)).isnan()
    moved = 1e3 + 1e-6 * drawn(count)
    assert float(metrics.correlation(moved, drawn(count), "pearson")) == pytest.approx(1.0, abs=1e-6)


def test_event_times():
    times = torch.tensor([0.0, 1.0, 3.0, 7.0])
    assert metrics.time_to(times, torch.tensor([0.0, 0.5, 0.9, 1.0]), 0.9) == pytest.approx(3.0)
    assert metrics.time_to(times.tolist(), [0.0, 0.5, 0.9, 1.0], 0.9) == pytest.approx(3.0)
    assert metrics.time_to(times, torch.tensor([0.0, 0.5, 1.0, 1.0]), 0.75) == pytest.approx(2.0)
    assert metrics.time_to(times, torch.tensor([4.0, 3.0, 1.0, 0.0]), 0.5, of="initial") == pytest.approx(2.0)
    assert math.isnan(metrics.time_to(times, torch.tensor([4.0, 3.0, 3.0, 3.0]), 0.5, of="initial"))
    assert metrics.time_to(times, torch.tensor([2.0, 3.0, 1.0, 2.0]), 1.0) == 0.0


def test_a_rising_curve_that_starts_above_the_level_has_no_event():
    """The kernel norm of a lazy run: never a tenth of what it is at the end; unless it falls back to it."""
    times = torch.tensor([0.0, 1.0, 3.0, 7.0])
    assert math.isnan(metrics.time_to(times, torch.tensor([5.0, 5.1, 5.2, 5.3]), 0.1))
    assert metrics.time_to(times, torch.tensor([1.0, 0.5, 0.7, 1.0]), 0.75) == pytest.approx(0.5)


def test_log_slopes():
    times = torch.logspace(0, 3, 200, dtype=torch.float64)
    np.testing.assert_allclose(metrics.log_slope(times, 5 * times**-1.3), -1.3 * np.ones(200), rtol=1e-9)
    bent = metrics.log_slope(torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 0.5, 0.25]))
    assert bent[0].isnan()
    np.testing.assert_allclose(bent[1:], [-1.0, -1.0, -1.0], rtol=1e-6)


def test_agreement_of_predictors():
    f, g = drawn(6, 2), drawn(6, 2, seed=1)
    found = metrics.agreement(f, g)
    assert float(found.relative_error) == pytest.approx(float((f - g).norm() / g.norm()))
    assert float(found.correlation) == pytest.approx(np.corrcoef(f.flatten(), g.flatten())[0, 1])
    assert float(metrics.agreement(g, g).relative_error) == 0.0


BAD = {
    "targets of other length": lambda: metrics.alignment(K, torch.ones(4)),
    "not square": lambda: metrics.alignment(torch.ones(3, 4), Y),
    "an array": lambda: metrics.alignment(K.numpy(), Y),
    "one kernel for classes": lambda: metrics.specialization(K, torch.ones(3, 2)),
    "labels for classes": lambda: metrics.specialization(torch.stack([K, K]), Y),
    "labels": lambda: metrics.alignment(K, torch.tensor([0, 2, 1])),
    "labels in a column": lambda: metrics.centered_alignment(K, torch.tensor([[0], [2], [1]])),
    "labels of a spectrum": lambda: metrics.spectrum(K, torch.tensor([3, 0, 3])),
    "labels for a rate": lambda: metrics.feature_rate(K, K, torch.tensor([0, 1, 2])),
    "no targets": lambda: metrics.alignment(K, torch.ones(3, 0)),
    "an empty stack": lambda: metrics.alignment(K[None][:0], Y),
    "an empty stack of a spectrum": lambda: metrics.spectrum(K[None][:0]),
    "a spectrum of nan": lambda: metrics.spectrum(K * math.nan),
    "a rank of nan": lambda: metrics.effective_rank(torch.stack([K, K * math.nan])),
    "a rank that is not symmetric": lambda: metrics.effective_rank(K.triu()),
    "a participation that is not symmetric": lambda: metrics.effective_rank(K.triu(), "participation"),
    "one of a stack that is not symmetric": lambda: metrics.spectrum(torch.stack([1e5 * K, K.triu()])),
    "one small rank that is not symmetric": lambda: metrics.effective_rank(torch.stack([1e5 * K, K.triu()])),
    "stacks of other length": lambda: metrics.kernel_distance(torch.stack([K] * 3), torch.stack([K] * 2)),
    "stacks of other length, rate": lambda: metrics.feature_rate(torch.stack([K] * 3), torch.stack([K] * 2), Y),
    "empty kernels": lambda: metrics.kernel_distance(K[:0], K[:0]),
    "empty arrays": lambda: metrics.correlation(K[:0], K[:0]),
    "empty predictions": lambda: metrics.agreement(K[:0], K[:0]),
    "no outputs": lambda: metrics.interference(torch.ones(3, 3, 0, 0)),
    "infinite values": lambda: metrics.power_law(torch.tensor([math.inf, 2.0, 1.0, 0.5]), 1, 4),
    "half a window": lambda: metrics.power_law(torch.ones(9), 1.5, 9),
    "no fraction": lambda: metrics.time_to(torch.arange(2.0), torch.ones(2), "half"),
    "a fraction of nan": lambda: metrics.time_to(torch.arange(2.0), torch.ones(2), math.nan),
    "not symmetric": lambda: metrics.spectrum(torch.tensor([[1.0, 2.0], [0.0, 1.0]])),
    "a window too small": lambda: metrics.power_law(torch.ones(9), 3, 4),
    "a window too large": lambda: metrics.power_law(torch.ones(9), 1, 10),
    "negative values": lambda: metrics.power_law(-torch.ones(9), 1, 9),
    "kernels of other size": lambda: metrics.kernel_distance(K, K[:2, :2]),
    "a share of an interference": lambda: metrics.interference(K),
    "times as words": lambda: metrics.time_to(["a", "b"], torch.ones(2), 0.5),
    "times out of order": lambda: metrics.time_to(torch.tensor([1.0, 0.0]), torch.ones(2), 0.5),
    "an unknown kind": lambda: metrics.correlation(K, K, kind="spearman"),
    "an unknown event": lambda: metrics.time_to(torch.arange(2.0), torch.ones(2), 0.5, of="best"),
    "classes without kernels": lambda: metrics.feature_rate(K, K, torch.ones(3, 2)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match=r"expected|choose"):
        BAD[name]()


def test_whole_numbers_that_are_no_labels_are_targets():
    """Two classes as 0 and 1, signs, and whatever the caller says are numbers."""
    for y in (torch.tensor([0, 1, 1]), torch.tensor([1, -1, 2]), torch.tensor([True, False, True])):
        assert float(metrics.alignment(K, y)) == pytest.approx(float(metrics.alignment(K, y.double())), rel=1e-14)
    assert metrics.alignment(K, torch.tensor([0, 1, 2]).double()).isfinite()
    assert metrics.alignment(K, torch.nn.functional.one_hot(torch.tensor([0, 1, 2]))).isfinite()
    with pytest.raises(
        fl.FeatlearnError, match=r"integers from 0 to 2.*one_hot\(y\).*y\.double\(\) if they are numbers"
    ):
        metrics.alignment(K, torch.tensor([0, 1, 2]))
