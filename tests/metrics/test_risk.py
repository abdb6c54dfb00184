"""Predicted test errors against regressions with a sample left out, closed forms, and designs of known risk."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.kernel_ridge import KernelRidge
from torch import Tensor

import featlearn as fl
from featlearn import metrics

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kernel(samples: int, rank: int, seed: int = 0) -> Tensor:
    features = drawn(samples, rank, seed=seed)
    return features @ features.T / rank


EYE = torch.eye(13, dtype=torch.float64)
K, Y = kernel(13, 20), drawn(13, 3, seed=1)


def left_out(K: Tensor, Y: Tensor, ridge: float) -> Tensor:
    """(P,): squared errors of regressions on all samples but one, by scikit-learn."""
    errors = []
    for i in range(len(K)):
        rest = [j for j in range(len(K)) if j != i]
        fit = KernelRidge(alpha=ridge, kernel="precomputed").fit(K[rest][:, rest].numpy(), Y[rest].numpy())
        errors.append(float(np.square(fit.predict(K[i : i + 1, rest].numpy()) - Y[i].numpy()).mean()))
    return torch.tensor(errors)


@pytest.mark.parametrize("ridge", [0.03, 2.0])
def test_leaving_one_out_is_regression_on_the_others(ridge: float):
    errors, found = left_out(K, Y, ridge), metrics.predicted_risk(K, Y, ridge).leave_one_out
    assert float(found) == pytest.approx(float(errors.mean()), rel=1e-6)
    assert found.samples == 13
    without = [[j for j in range(13) if j != k] for k in range(13)]  # the jackknife
    rest = torch.stack([left_out(K[rows][:, rows], Y[rows], ridge).mean() for rows in without])
    assert float(found.stderr) == pytest.approx(math.sqrt(12 * float(rest.var(correction=0))), rel=1e-6)


def test_leaving_one_out_without_a_ridge_is_kernel_regression_on_the_others():
    """Also for a kernel of rank 4, whose pseudo-inverse counts."""
    for matrix in (K, kernel(13, 4)):
        slow = []
        for i in range(13):
            rest = [j for j in range(13) if j != i]
            f = fl.dynamics.kernel_regression(matrix[rest][:, rest], Y[rest], matrix[i : i + 1, rest])
            slow.append(float((f[0] - Y[i]).square().mean()))
        found = float(metrics.predicted_risk(matrix, Y, 0.0).leave_one_out)
        assert found == pytest.approx(sum(slow) / 13, rel=1e-6)


@pytest.mark.parametrize("ridge", [0.03, 2.0])
def test_generalized_cross_validation_and_the_alignment_estimator_as_they_are_printed(ridge: float):
    """Golub et al. 1979 by the hat matrix, Jacot et al. 2020 with their kernel divided by P."""
    P = len(K)
    hat = K @ torch.linalg.inv(K + ridge * EYE)
    gcv = (Y - hat @ Y).square().mean() / (1 - hat.trace() / P) ** 2
    inverse = torch.linalg.inv(K / P + ridge / P * EYE)
    kare = (Y * (inverse @ inverse @ Y)).sum() / Y.numel() / (inverse.trace() / P) ** 2
    found = metrics.predicted_risk(K, Y, ridge)
    assert float(found.gcv) == pytest.approx(float(gcv), rel=1e-10)
    assert float(found.kare) == pytest.approx(float(kare), rel=1e-10)
    assert float(found.effective_dimension) == pytest.approx(float(hat.trace()), rel=1e-10)
    assert float(found.ridge) == ridge


@pytest.mark.parametrize("ridge", [0.0, 0.5, None])
def test_a_white_kernel_predicts_nothing(ridge: float | None):
    """Every sample is new to it: the error is that of the prediction 0."""
    found = metrics.predicted_risk(3 * EYE[:7, :7], Y[:7], ridge)
    expected = float(Y[:7].square().mean())
    assert float(found.leave_one_out) == pytest.approx(expected, rel=1e-12)
    assert float(found.gcv) == pytest.approx(expected, rel=1e-12)


def test_a_constant_kernel_predicts_the_mean_of_the_others():
    """[P / (P - 1)]^2 times the variance, for both estimates."""
    found = metrics.predicted_risk(torch.ones(7, 7, dtype=torch.float64), Y[:7], 0.0)
    expected = (7 / 6) ** 2 * float(Y[:7].var(0, correction=0).mean())
    assert float(found.leave_one_out) == pytest.approx(expected, rel=1e-9)
    assert float(found.gcv) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 0.3, 40.0])
def test_effective_dimension_is_the_trace_of_the_hat_matrix(ridge: float):
    matrix = kernel(13, 4)
    hat = torch.linalg.pinv(matrix + ridge * EYE, rtol=1e-11) @ matrix
    assert float(metrics.effective_dimension(matrix, ridge)) == pytest.approx(float(hat.trace()), rel=1e-9)
    assert float(metrics.effective_dimension(2 * EYE[:5, :5], ridge)) == pytest.approx(5 * 2 / (2 + ridge), rel=1e-12)


# --- designs whose risk is known: independent normal features, for which the error on new samples is |a - a_hat|^2 ----

MODES = torch.arange(1, 401, dtype=torch.float64)
VALUES, COEFFICIENTS, NOISE = MODES**-1.5, MODES**-1.0, 0.05


def design(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = drawn(samples, len(MODES), seed=seed)
    return (x * VALUES) @ x.T, x @ COEFFICIENTS + math.sqrt(NOISE) * drawn(samples, seed=seed + 1000)


@pytest.mark.parametrize("ridge", [0.02, 1.0])
def test_estimates_are_the_risk_of_a_normal_design(ridge: float):
    """Against simulated regressions and against the theory, noise of new labels included."""
    risks = [metrics.predicted_risk(*design(80, seed), ridge) for seed in range(60)]
    simulated = fl.theory.transfer.simulate(80, VALUES, COEFFICIENTS, ridge, NOISE, draws=200)
    theory = fl.theory.transfer.learning_curve_general(80, VALUES, COEFFICIENTS, ridge, NOISE)
    for found in (
        fl.Estimate.from_samples(torch.stack([torch.as_tensor(risk.leave_one_out.value) for risk in risks])),
        fl.Estimate.from_samples(torch.stack([risk.gcv for risk in risks])),
    ):
        assert float(found.stderr) < 0.03 * float(found)
        off = math.hypot(float(found.stderr), float(simulated.stderr))
        assert float(found) == pytest.approx(float(simulated) + NOISE, abs=3 * off)
        assert float(found) == pytest.approx(float(theory.error) + NOISE, rel=0.08)


@pytest.mark.parametrize("ridge", [0.0, 0.02, 1.0])
def test_stated_errors_hold_the_spread_of_repeated_designs(ridge: float):
    """And are at most twice as large; squared errors taken as independent would say 0.5 of it without a ridge."""
    designs = [design(80, seed) for seed in range(60)]
    curves = [metrics.learning_curve(*drawn, [20, 50, 80], ridge) for drawn in designs]
    error, stated = (torch.stack([getattr(curve, name) for curve in curves]) for name in ("error", "stderr"))
    times = stated.mean(0) / error.std(0)
    assert bool(((times > 0.95) & (times < 2)).all())
    alone = torch.stack(
        [torch.as_tensor(metrics.predicted_risk(*drawn, ridge).leave_one_out.stderr) for drawn in designs]
    )
    np.testing.assert_allclose(alone, stated[:, 2], rtol=1e-6)


def test_the_suggested_ridge_has_the_least_error():
    """Of a search with slow regressions, and near the least risk by the theory; none at all costs much more."""
    matrix, y = design(35, seed=3)
    y = y + math.sqrt(1 - NOISE) * drawn(35, seed=4)
    tried = torch.logspace(-3, 2, 21, dtype=torch.float64)
    slow = torch.stack([left_out(matrix, y[:, None], float(ridge)).mean() for ridge in tried])
    assert float(slow[0]) > 1.2 * float(slow.min()) < float(slow[-1]) / 1.02
    report = metrics.condition(matrix, y)
    at = left_out(matrix, y[:, None], float(report.suggested_ridge)).mean()
    assert float(slow.min()) * 0.99 < float(at) < float(slow.min()) * 1.0011
    theory = [
        fl.theory.transfer.learning_curve_general(35, VALUES, COEFFICIENTS, r, 1.0).error
        for r in (tried, float(report.suggested_ridge))
    ]
    assert float(theory[1]) < 1.1 * float(theory[0].min())
    chosen = metrics.predicted_risk(matrix, y)
    assert float(chosen.ridge) == float(report.suggested_ridge)
    assert float(chosen.leave_one_out) == pytest.approx(float(at), rel=1e-6)


def test_of_ridges_as_good_as_each_other_the_largest_is_suggested():
    """A white kernel predicts nothing, whatever the ridge."""
    assert float(metrics.condition(2 * EYE, Y).suggested_ridge) == pytest.approx(20)


def test_condition_of_known_kernels():
    report = metrics.condition(torch.diag(torch.tensor([8.0, 4.0, 0.5], dtype=torch.float64)))
    assert (int(report.rank), float(report.number), float(report.largest)) == (3, 16.0, 8.0)
    assert float(report.least_ridge) == pytest.approx(8e-12)
    assert report.suggested_ridge is None
    assert str(report) == "rank 3 of 3, condition number 16, no ridge below 8e-12 has an effect"
    single = metrics.condition(kernel(13, 4).float(), Y)
    assert (int(single.rank), float(single.number)) == (4, math.inf)
    assert float(single.least_ridge) == pytest.approx(1.19e-7 * float(single.largest), rel=1e-2)
    assert "suggested ridge" in str(single)
    assert str(metrics.condition(torch.stack([K, K]))) == "conditions of 2 kernels of 13 samples"


def numbers(K: Tensor, y: Tensor, ridge: float | None) -> dict[str, Tensor]:
    risk, curve = metrics.predicted_risk(K, y, ridge), metrics.learning_curve(K, y, [1, 2, 5, 9, 30], ridge, draws=3)
    return {
        "left out": torch.as_tensor(risk.leave_one_out.value),
        "its error": torch.as_tensor(risk.leave_one_out.stderr),
        "gcv": risk.gcv,
        "dimension": risk.effective_dimension,
        "ridge": risk.ridge,
        "curve": curve.error,
        "its errors": curve.stderr,
        "number": risk.condition.number,
    }


def test_a_stack_is_each_of_its_kernels():
    stack = torch.stack([kernel(9, 30, s) * 10.0**s for s in range(6)]).unflatten(0, (2, 3))
    for ridge in (0.4, None):
        found = numbers(stack, Y[:9], ridge)
        for i, j in [(0, 2), (1, 1)]:
            for name, value in numbers(stack[i, j], Y[:9], ridge).items():
                np.testing.assert_allclose(found[name][i, j], value, rtol=1e-8, err_msg=name)


@QUICK
@given(
    st.integers(1, 9),
    st.integers(0, 12),
    st.sampled_from([1e-300, 1e-30, 1.0, 1e30, 1e200]),
    st.sampled_from([0.0, 1e-300, 1e-3, 1.0, 1e300, None]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.sampled_from([0.0, 1e-160, 1.0, 1e150]),
)
def test_never_nan(samples: int, rank: int, size: float, ridge: Any, dtype: torch.dtype, twice: bool, target: float):
    """Zero kernels, ranks below P, duplicates, sizes whose squares overflow, single precision."""
    features = drawn(samples, rank, seed=samples + 10 * rank) if rank else torch.zeros(samples, 1, dtype=torch.float64)
    features = torch.cat([features, features]) if twice else features
    matrix = (features @ features.T).to(dtype) * (min(size, 1e30) if dtype == torch.float32 else size)
    for name, value in numbers(matrix, target * drawn(len(features), 2), ridge).items():
        assert not value.isnan().any(), name
        assert bool((value >= 0).all()), name


@pytest.mark.parametrize("size", [1e-250, 1e-20, 1e20, 1e250])
def test_sizes_scale_what_they_should(size: float):
    one, other = numbers(K, Y, 0.1), numbers(size * K, 1e-100 * Y, 0.1 * size)
    for name in ("left out", "gcv", "curve"):
        np.testing.assert_allclose(1e100 * (1e100 * other[name]), one[name], rtol=1e-9)
    np.testing.assert_allclose(other["dimension"], one["dimension"], rtol=1e-9)
    suggested = (metrics.condition(matrix, Y).suggested_ridge for matrix in (K, size * K))
    np.testing.assert_allclose(float(next(suggested)), float(next(suggested)) / size, rtol=1e-6)


WRONG = {
    "a negative ridge": (lambda: metrics.predicted_risk(K, Y, -1.0), "ridge=-1.0, expected a number >= 0"),
    "no kernel": (lambda: metrics.predicted_risk(K - 3 * EYE, Y), "expected none below 0"),
    "nan targets": (lambda: metrics.predicted_risk(K, Y * math.nan), "nan or infinite"),
    "labels": (lambda: metrics.predicted_risk(K, torch.arange(13)), "one-hot"),
    "other samples": (lambda: metrics.condition(K, Y[:5]), "expected"),
    "a ridge of words": (lambda: metrics.effective_dimension(K, "small"), "ridge='small'"),
    "no sizes": (lambda: metrics.learning_curve(K, Y, []), "sizes="),
    "one size": (lambda: metrics.learning_curve(K, Y, 5), "sizes=5, expected a sequence"),
    "size 0": (lambda: metrics.learning_curve(K, Y, [4, 0]), "sizes: 0, expected a whole number >= 1"),
    "half a sample": (lambda: metrics.learning_curve(K, Y, [2.5]), "sizes: 2.5, expected a whole"),
    "no draws": (lambda: metrics.learning_curve(K, Y, [4], draws=0), "draws: 0, expected a whole"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused(name: str):
    call, words = WRONG[name]
    with pytest.raises(fl.FeatlearnError, match=words):
        call()
