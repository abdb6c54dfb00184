"""Learning curves: reference values, the implicit equation in many digits, real kernel ridge regressions."""

import itertools

import matplotlib
import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.theory import transfer

matplotlib.use("Agg")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


REFERENCE = {
    (20, 60, 1.0, 0.75, 0.0): (0.5087172256852662, 40.50312487793922, 0.33469329519740987),
    (20, 60, 10.0, 0.75, 0.0): (0.3270003771623211, 41.58988901172163, 0.3464385899559176),
    (30, 100, 4.0, 1.0, 0.5): (0.15042233162913804, 72.00568337654047, 0.3006524600562777),
}


@pytest.mark.parametrize("case", REFERENCE)
def test_reference_values(case: tuple[float, ...]):
    samples, dimension, spike, overlap, ridge = case
    values, coefficients = transfer.transfer_spectrum(dimension, spike, overlap)
    assert float(coefficients.square().sum()) == pytest.approx(1.0, rel=1e-15)
    for found in (
        transfer.learning_curve(samples, dimension, spike, overlap, ridge),
        transfer.learning_curve_general(samples, values, coefficients, ridge),
    ):
        expected = REFERENCE[case]
        assert float(found.error) == pytest.approx(expected[0], rel=1e-13)
        assert float(found.effective_ridge) == pytest.approx(expected[1], rel=1e-13)
        assert float(found.variance_share) == pytest.approx(expected[2], rel=1e-13)


def test_reference_values_over_the_spike():
    spikes = vector(0.0, 1.0, 3.0, 10.0, 30.0)
    same = transfer.learning_curve(20, 60, spikes, 1.0).error
    np.testing.assert_allclose(same, [0.6667, 0.3805, 0.1737, 0.0387, 0.0062], atol=5e-5)
    other = transfer.learning_curve(20, 60, spikes, 0.0).error
    assert bool((same.diff() < 0).all())
    assert bool((other.diff() > 0).all())
    opposite = transfer.learning_curve(20, 60, spikes, -1.0).error
    np.testing.assert_allclose(opposite, same, rtol=1e-14)


def solved(samples: float, values: list[float], powers: list[float], ridge: float, noise: float) -> tuple[float, float]:
    """Error and kappa with 40 digits, from the equations as they stand."""
    with mpmath.workdps(40):
        P, lam = mpmath.mpf(samples), [mpmath.mpf(v) for v in values]

        def excess(log: mpmath.mpf) -> mpmath.mpf:
            kappa = mpmath.exp(log)
            return mpmath.mpf(ridge) + kappa * sum(v / (v * P + kappa) for v in lam) - kappa

        # only the positive root: kappa = 0 solves it too where there is no ridge
        low, high = mpmath.log(max(ridge, 1e-25)) - 1, mpmath.log(ridge + sum(lam)) + 1
        for _ in range(140):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        kappa = mpmath.exp(low)
        gamma = P * sum(v**2 / (v * P + kappa) ** 2 for v in lam)
        wrong = kappa**2 * sum(a / (v * P + kappa) ** 2 for a, v in zip(powers, lam, strict=True))
        return float((wrong + noise * gamma) / (1 - gamma)), float(kappa)


SPECTRA = {
    "flat": [1.0] * 12,
    "power law": [float(k) ** -2 for k in range(1, 13)],
    "graded": [10.0**-k for k in range(12)],
    "spikes": [1e6, 1e3] + [1.0] * 5 + [1e-6] * 5,
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_implicit_equation_is_solved_everywhere(name: str):
    values = vector(*SPECTRA[name])
    coefficients = drawn(12, seed=1)
    powers = coefficients.square().tolist()
    cases = itertools.product((0.5, 5, 11.999, 12.0, 500), (0.0, 1e-20, 1e-3, 10.0), (0.0, 0.3))
    for samples, ridge, noise in cases:
        if ridge == 0.0 and samples >= 12:
            continue  # kappa = 0
        found = transfer.learning_curve_general(samples, values, coefficients, ridge, noise)
        error, kappa = solved(samples, values.tolist(), powers, ridge, noise)
        assert float(found.effective_ridge) == pytest.approx(kappa, rel=2e-12)
        assert float(found.error) == pytest.approx(error, rel=2e-12)


def test_without_a_ridge_enough_samples_learn_everything_but_noise():
    for samples in (60, 61, 1000):
        found = transfer.learning_curve(samples, 60, 3.0, 0.4)
        assert float(found.error) == float(found.effective_ridge) == 0.0
        noisy = float(transfer.learning_curve(samples, 60, 3.0, 0.4, noise=0.2).error)
        assert noisy == (torch.inf if samples == 60 else pytest.approx(0.2 * 60 / (samples - 60), rel=1e-14))
    # a ridge that goes to zero joins it
    for samples, noise in ((61, 0.2), (1000, 0.2)):
        limit = float(transfer.learning_curve(samples, 60, 3.0, 0.4, noise=noise).error)
        for ridge in (1e-12, 1e-300):
            near = float(transfer.learning_curve(samples, 60, 3.0, 0.4, ridge, noise).error)
            assert near == pytest.approx(limit, rel=1e-8 if ridge > 1e-100 else 5e-15)


def test_without_samples_nothing_is_learned():
    found = transfer.learning_curve(0, 50, 2.0, 0.3, 0.7, 5.0)
    assert float(found.error) == pytest.approx(1.0, rel=1e-14)
    assert float(found.effective_ridge) == pytest.approx(0.7 + 52, rel=1e-14)
    assert float(found.variance_share) == 0.0
    heavy = transfer.learning_curve(100, 50, 2.0, 0.3, 1e12, 5.0)
    assert float(heavy.error) == pytest.approx(1.0, rel=1e-9)


def test_modes_without_an_eigenvalue_act_as_noise():
    values, coefficients = vector(1.0, 1.0, 1.0, 0.0), vector(0.5, -1.0, 0.2, 0.6)
    found = transfer.learning_curve_general(10, values, coefficients)
    # of 10 samples for 3 modes, 0.36 can not be fitted: 0.36 + 0.36 * 3 / (10 - 3)
    assert float(found.error) == pytest.approx(0.36 * 10 / 7, rel=1e-14)
    nothing = transfer.learning_curve_general(10, vector(0.0), vector(2.0), noise=1.0)
    assert float(nothing.error) == pytest.approx(4.0, rel=1e-14)


def test_levels_stand_for_many_modes():
    values, counts, coefficients = vector(5.0, 1.0, 0.1), vector(1, 40, 1000), vector(0.3, -1.0, 2.0)
    spread = torch.repeat_interleave(coefficients / counts.sqrt(), counts.long())
    every = torch.repeat_interleave(values, counts.long())
    samples = vector(0, 3, 50, 700, 1041, 1500)
    short = transfer.learning_curve_general(samples, values, coefficients, 0.2, 0.1, counts=counts)
    long = transfer.learning_curve_general(samples, every, spread, 0.2, 0.1)
    np.testing.assert_allclose(short.error, long.error, rtol=1e-11)
    huge = transfer.learning_curve(10, 10**12, 1e12, 1.0)
    # the spike is as strong as all else; with kappa = 1e12 q: 1 = 1 / (10 + q) + 1 / q
    q = 26**0.5 - 4
    assert float(huge.effective_ridge) == pytest.approx(q * 1e12, rel=1e-10)
    assert float(huge.error) == pytest.approx((q / (10 + q)) ** 2 / (1 - 10 / (10 + q) ** 2), rel=1e-10)


def test_arguments_broadcast():
    found = transfer.learning_curve(vector(5, 20, 80), 60, vector(0.0, 4.0)[:, None], 0.5, 0.1, 0.2)
    assert found.error.shape == found.samples.shape == found.effective_ridge.shape == (2, 3)
    one = transfer.learning_curve(20, 60, 4.0, 0.5, 0.1, 0.2)
    assert float(found.error[1, 1]) == pytest.approx(float(one.error), rel=1e-15)
    general = transfer.learning_curve_general([5, 20], vector(2, 1, 1), vector(1, 1, 0), vector(0.1, 0.2)[:, None])
    assert general.error.shape == (2, 2)


def regressed(x: Tensor, y: Tensor, x_test: Tensor, values: Tensor, ridge: float) -> Tensor:
    """Kernel ridge regression as it stands."""
    K = x * values @ x.T + ridge * torch.eye(len(x), dtype=torch.float64)
    return x_test * values @ x.T @ torch.linalg.solve(K, y)


def test_the_simulation_is_kernel_regression():
    values, coefficients = vector(3.0, 1.0, 1.0, 0.5, 0.2), drawn(5)
    generator = torch.Generator().manual_seed(3)
    found = transfer.simulate(7, values, coefficients, 0.4, 0.3, draws=3, generator=generator)
    generator = torch.Generator().manual_seed(3)
    errors = []
    for _ in range(3):
        both = torch.randn(7, 6, dtype=torch.float64, generator=generator)
        x, y = both[:, :-1], both[:, :-1] @ coefficients + 0.3**0.5 * both[:, -1]
        # the error over new inputs is the mean of a square of a linear function: exact on the coordinate axes
        axes = torch.eye(5, dtype=torch.float64)
        errors.append(float((regressed(x, y, axes, values, 0.4) - coefficients).square().sum()))
    assert float(found) == pytest.approx(np.mean(errors), rel=1e-10)
    assert found.samples == 3
    assert found.stderr == pytest.approx(np.std(errors, ddof=1) / 3**0.5, rel=1e-9)


@pytest.mark.parametrize(
    ("samples", "dimension", "noise", "expected"),
    [
        (15, 40, 0.0, 1 - 15 / 40),  # a random projection
        (60, 20, 0.5, 0.5 * 20 / (60 - 20 - 1)),  # least squares: trace of an inverse Wishart matrix
        (15, 40, 0.5, 1 - 15 / 40 + 0.5 * 15 / (40 - 15 - 1)),
    ],
)
def test_the_simulation_where_finite_size_is_known_exactly(samples: int, dimension: int, noise: float, expected: float):
    values, coefficients = transfer.transfer_spectrum(dimension, 0.0, 0.3)
    found = transfer.simulate(samples, values, coefficients, 0.0, noise, draws=400)
    assert abs(float(found) - expected) < 4 * found.stderr
    assert found.stderr < 0.04 * expected


MEASURED = [
    # samples, dimension, spike, overlap, ridge, noise
    (80, 240, 2.0, 0.6, 0.0, 0.0),
    (80, 240, 2.0, 0.0, 3.0, 0.2),
    (300, 200, 2.0, 0.6, 0.0, 0.2),
    (200, 240, 1.0, -0.5, 30.0, 0.5),
    (120, 240, 5.0, 0.3, 1.0, 0.1),
]


@pytest.mark.parametrize(("samples", "dimension", "spike", "overlap", "ridge", "noise"), MEASURED)
def test_real_regressions_come_near(
    samples: int, dimension: int, spike: float, overlap: float, ridge: float, noise: float
):
    """At 240 dimensions the limit of large size is good to about two percent."""
    values, coefficients = transfer.transfer_spectrum(dimension, spike, overlap)
    found = transfer.simulate(samples, values, coefficients, ridge, noise, draws=30)
    expected = float(transfer.learning_curve(samples, dimension, spike, overlap, ridge, noise).error)
    assert abs(float(found) - expected) < 3.5 * found.stderr + 0.02 * expected
    assert found.stderr < 0.03 * expected


def test_real_regressions_on_a_power_law_come_near():
    k = torch.arange(1, 401, dtype=torch.float64)
    values, coefficients = k**-1.5, k**-0.8
    for samples, ridge, noise in ((30, 0.0, 0.0), (100, 0.05, 0.3)):
        found = transfer.simulate(samples, values, coefficients, ridge, noise, draws=60)
        expected = float(transfer.learning_curve_general(samples, values, coefficients, ridge, noise).error)
        assert abs(float(found) - expected) < 3.5 * found.stderr + 0.03 * expected


def test_the_limit_is_approached_with_size():
    """Noise beyond P = D: D / (P - D - 1) against D / (P - D), an error of order 1 / D."""
    for dimension in (20, 80):
        exact = 0.5 * dimension / (3 * dimension - dimension - 1)
        limit = float(transfer.learning_curve(3 * dimension, dimension, 1.0, 0.5, 0.0, 0.5).error)
        assert exact / limit - 1 == pytest.approx(1 / (2 * dimension - 1), rel=1e-9)


def test_curves_are_drawn_over_measurements():
    samples = vector(5, 10, 20, 40)
    curve = transfer.learning_curve(samples, 60, 2.0, 0.7)
    ax = curve.overlay((samples, curve.error, 0.1 * curve.error))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), curve.error)
    assert curve.overlay((samples, curve.error), ax=ax) is ax
    with pytest.raises(fl.FeatlearnError, match="one line at a time"):
        transfer.learning_curve(5, 60, 2.0, 0.7).overlay()


ONE = vector(1.0)
BAD = {
    "negative samples": lambda: transfer.learning_curve(-1, 60, 1.0, 0.5),
    "no dimension": lambda: transfer.learning_curve(10, 0, 1.0, 0.5),
    "a spike that kills": lambda: transfer.learning_curve(10, 60, -1.0, 0.5),
    "an overlap above 1": lambda: transfer.learning_curve(10, 60, 1.0, 1.5),
    "no other direction": lambda: transfer.learning_curve(10, 1, 1.0, 0.5),
    "a negative ridge": lambda: transfer.learning_curve(10, 60, 1.0, 0.5, -1.0),
    "negative noise": lambda: transfer.learning_curve_general(10, ONE, ONE, 0.0, -1.0),
    "a negative eigenvalue": lambda: transfer.learning_curve_general(10, -ONE, ONE),
    "other sizes": lambda: transfer.learning_curve_general(10, ONE, vector(1.0, 2.0)),
    "other counts": lambda: transfer.learning_curve_general(10, ONE, ONE, counts=vector(1.0, 2.0)),
    "words": lambda: transfer.learning_curve("10", 60, 1.0, 0.5),
    "half a sample": lambda: transfer.simulate(1.5, ONE, ONE),
    "no draws": lambda: transfer.simulate(2, ONE, ONE, draws=0),
    "a seed": lambda: transfer.simulate(2, ONE, ONE, generator=0),
    "simulated sizes": lambda: transfer.simulate(2, ONE, vector(1.0, 2.0)),
    "half a dimension": lambda: transfer.transfer_spectrum(1.5, 1.0, 1.0),
    "one dimension": lambda: transfer.transfer_spectrum(1, 1.0, 0.5),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
