"""The papers' steps, approximations and formulas of optimal feature evolution."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.theory import ofe

K0 = torch.tensor([[2.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def descended(K: Tensor, y: Tensor, gamma: float, rate: float, steps: int, convention: str = "ode") -> ofe.DiscreteStep:
    state = ofe.DiscreteStep(torch.linalg.cholesky(K).T, -y)
    for _ in range(steps):
        state = ofe.step(*state, gamma, rate, convention)
    return state


def test_reference_values_of_ten_steps():
    features, residual = descended(K0, Y, 0.7, 0.05, 10)
    np.testing.assert_allclose(residual, [-0.2823235553038372, 0.5890931678262051, -0.28419051130670303], rtol=1e-13)
    expected = [
        [2.615565872078459, -0.067937864262258, 0.48363877695966195],
        [-0.067937864262258, 1.463092337343591, -0.13256313388852228],
        [0.48363877695966195, -0.13256313388852228, 0.6168025961214874],
    ]
    np.testing.assert_allclose(features.T @ features, expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
@pytest.mark.parametrize(
    ("convention", "multiple"),
    [
        ("ode", 0.6 / 4),
        ("000-eq5", 0.6),
        ("001-eq5", 0.6),
        ("000-eq21a", 0.6 * 0.03),
        ("001-eq26", 0.6 * 0.03),
        ("000-eq21b", 0.6 * 0.03 / 2),
        ("001-eq27", 0.6 * 0.03 / 2),
    ],
)
def test_a_step_descends_the_next_loss(convention: str, multiple: float, shape: tuple[int, ...]):
    psi, delta = drawn(5, 4).requires_grad_(), drawn(*shape, seed=1)
    following = delta - 0.03 * psi.T @ psi @ delta
    (slope,) = torch.autograd.grad(following.square().sum(), psi)
    found = ofe.step(psi, delta, 0.6, 0.03, convention)
    np.testing.assert_allclose(found.features, (psi - multiple * slope).detach(), rtol=1e-13)
    np.testing.assert_allclose(found.residual, following.detach(), rtol=1e-13)
    assert ofe.ode_rate(0.6, 0.03, convention) == pytest.approx(4 * multiple, rel=1e-14)


@pytest.mark.parametrize("convention", ["ode", "000-eq5", "000-eq21a", "000-eq21b"])
def test_small_steps_follow_the_flow(convention: str):
    """The same flow from every convention, once gamma is translated; the error is of first order."""
    errors = []
    for rate, steps in ((1e-2, 200), (1e-3, 2000)):
        gamma = 0.7 / ofe.ode_rate(1.0, rate, convention)
        features, _ = descended(K0, Y, gamma, rate, steps, convention)
        flow = ofe.solve(K0, Y, ofe.ode_rate(gamma, rate, convention), steps, rate=rate)
        errors.append(float((features.T @ features - flow.kernel(float(steps))).norm()))
    assert errors[1] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


def test_a_step_moves_the_conserved_matrix_by_the_stated_amount():
    psi, delta, gamma = drawn(5, 4), drawn(4, seed=1), 0.6
    K, D = psi.T @ psi, torch.outer(delta, delta)
    drift = gamma**2 * float(delta @ K @ delta) * D - gamma / 2 * (K @ K @ D + D @ K @ K)
    left = []
    for rate in (1e-3, 1e-4):
        after = ofe.step(psi, delta, gamma, rate)
        moved = after.features.T @ after.features + gamma * torch.outer(after.residual, after.residual) - K - gamma * D
        left.append(float((moved - rate**2 * drift).norm()))
        assert left[-1] < 30 * rate * float((rate**2 * drift).norm())
    assert left[0] / left[1] == pytest.approx(1000, rel=0.1)


def test_scalar_reference_values():
    found = ofe.scalar(1.7, 0.3, 1.2, 0.8)
    assert float(found.conserved) == pytest.approx(1.242, rel=1e-15)
    assert float(found.residual_square) == pytest.approx(0.24525992193434099, rel=1e-14)
    assert float(found.feature_square) == pytest.approx(1.0457920624525272, rel=1e-14)
    assert float(ofe.isotropic_half_time(0.5, 40.0, 2.25)) == pytest.approx(0.028751418160645276, rel=1e-14)


def test_the_scalar_case_is_the_general_one():
    times = torch.tensor([0.0, 0.3, 5.0, 1e6], dtype=torch.float64)
    for psi0, delta0, gamma in ((0.3, -1.2, 0.8), (2.0, 0.1, 0.0), (1e-8, 1.0, 3.0), (0.0, 1.0, 2.0)):
        found = ofe.scalar(times, psi0, delta0, gamma, rate=0.7)
        general = ofe.solve(
            torch.tensor([[psi0**2]], dtype=torch.float64),
            torch.tensor([-delta0], dtype=torch.float64),
            gamma,
            times,
            rate=0.7,
        )
        np.testing.assert_allclose(found.residual_square, general.loss, rtol=1e-13)
        np.testing.assert_allclose(found.feature_square, general.kernel_norm, rtol=1e-13)


def test_the_scalar_case_broadcasts_and_does_not_overflow():
    gammas = torch.tensor([[0.0], [1.0], [1e9]], dtype=torch.float64)
    found = ofe.scalar(torch.tensor([0.0, 1.0, 1e6], dtype=torch.float64), 1e-8, -1.0, gammas)
    for values in found:
        assert values.shape == (3, 3)
        assert bool(values.isfinite().all())
    assert float(found.residual_square[1, 1]) == pytest.approx(1.0, rel=1e-14)
    assert float(found.residual_square[1, 2]) == 0.0


def test_an_isotropic_kernel_halves_its_loss_in_time():
    y = drawn(6)
    for gamma in (0.0, 0.3, 5e4):
        t = ofe.isotropic_half_time(0.5, gamma, float(y @ y), rate=0.2)
        loss = ofe.solve(0.5 * torch.eye(6), y, gamma, [0.0, float(t)], rate=0.2).loss
        assert float(loss[1] / loss[0]) == pytest.approx(0.5, rel=1e-12)


def test_reference_values_of_the_diagonal_approximation():
    """Wrong early, right late: 0.7296 against the exact 0.4089."""
    found = ofe.diagonal_approximation(K0, Y, 0.7, [0.0, 0.5, 3.0, 1e6])
    np.testing.assert_allclose(found.alignment[:2], [0.7296, 0.7586], atol=5e-5)
    assert float(found.alignment[2]) == pytest.approx(0.757853, abs=5e-7)
    exact = ofe.solve(K0, Y, 0.7, [0.0, 0.5, 3.0, 1e6])
    assert abs(float(found.alignment[0] - exact.alignment[0])) > 0.3
    assert float(found.alignment[3]) == pytest.approx(float(exact.alignment[3]), rel=1e-12)


def test_the_diagonal_approximation_is_the_papers_formulas():
    """000 Eq. 31 integrated, Eq. 33 and 34 as they stand, with the corrected norm of y y^T."""
    K, y, gamma = drawn(5, 5) @ drawn(5, 5).T, drawn(5, seed=1), 0.4
    values, V = torch.linalg.eigh(K + gamma * torch.outer(y, y))
    times = torch.linspace(0, 0.6, 6001, dtype=torch.float64)
    A = (V.T @ K @ V).diagonal().clone()
    start = A.clone()
    step = float(times[1])

    def slope(a: Tensor) -> Tensor:
        return 2 * 0.9 * (a * values - a.square())

    for _ in range(6000):  # Heun
        first = slope(A)
        A = A + step / 2 * (first + slope(A + step * first))
    found = ofe.diagonal_approximation(K, y, gamma, times[[0, -1]], rate=0.9)
    np.testing.assert_allclose(found.modes[0].flip(0), start, rtol=1e-10)
    np.testing.assert_allclose(found.modes[1].flip(0), A, rtol=1e-5)
    alignment = ((values - start) * A).sum() / (gamma * (y @ y) * A.norm())
    assert float(found.alignment[1]) == pytest.approx(float(alignment), rel=1e-5)
    loss = ((V.T @ y).square() * torch.exp(-2 * 0.9 * values * 0.6)).sum()
    assert float(found.loss[1]) == pytest.approx(float(loss), rel=1e-10)


def test_a_mode_without_task_and_kernel_stays_empty_in_the_approximation():
    K = torch.diag(torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))
    found = ofe.diagonal_approximation(K, torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64), 0.3, [0.0, 2.0])
    assert found.modes[:, 2].tolist() == [0.0, 0.0]
    assert bool(found.alignment.isfinite().all())


@pytest.mark.parametrize(
    ("a", "b", "gamma", "task", "loss"),
    [(2.0, 2.0, 5.0, 4.0, 1.0), (2.2, 1.8, 3.0, 3.4, 1.0), (3.5, 1.5, 5.0, 3.5, 5 / 3)],
)
def test_power_law_exponents(a: float, b: float, gamma: float, task: float, loss: float):
    """Against the spectrum and the loss of 500 modes: finite size bends both by some percent."""
    exponents = ofe.power_law_exponents(a, b)
    assert exponents == pytest.approx((b, task, loss))
    k = torch.arange(1, 501, dtype=torch.float64)
    K, y = torch.diag(k**-b), k ** (-a / 2)
    spectrum = ofe.spike(K, y, gamma)
    assert fl.metrics.power_law(spectrum.eigenvalues, 20, 120).exponent == pytest.approx(b, rel=0.02)
    assert fl.metrics.power_law(spectrum.overlaps, 20, 120).exponent == pytest.approx(task, rel=0.05)
    times = torch.logspace(1, 2, 11, dtype=torch.float64)
    losses = ofe.solve(K, y, gamma, times, rank_tolerance=0.0).loss
    slope = float((losses[-1] / losses[0]).log() / (times[-1] / times[0]).log())
    assert -slope == pytest.approx(loss, rel=0.08)


@pytest.mark.parametrize(
    ("a", "b", "gamma", "t", "tolerance"),
    [
        (2.0, 2.0, 5.0, 30.0, 0.02),
        (2.0, 2.0, 0.0, 1e3, 0.01),
        (6.0, 2.0, 3.0, 1e4, 2e-3),
        (3.5, 1.5, 5.0, 3e2, 0.04),
        (3.0, 2.0, 1.0, 1e3, 0.05),
    ],
)
def test_power_law_losses(a: float, b: float, gamma: float, t: float, tolerance: float):
    k = torch.arange(1, 501, dtype=torch.float64)
    found = float(ofe.solve(torch.diag(k**-b), k ** (-a / 2), gamma, t / 0.3, rate=0.3, rank_tolerance=0.0).loss)
    # modes beyond 500 have not begun to learn
    tail = 500 ** (1 - a) / (a - 1) if gamma == 0 else 0.0
    assert found + tail == pytest.approx(float(ofe.power_law_loss(t / 0.3, a, b, gamma, rate=0.3)), rel=tolerance)


def test_power_law_reference_value():
    assert float(ofe.power_law_loss(1000.0, 2.0, 1.5, 0.0)) == pytest.approx(0.005686938986411977, rel=1e-14)


@pytest.mark.parametrize(("a", "b", "gamma"), [(2.0, 2.0, 5.0), (6.0, 2.0, 3.0), (3.0, 2.0, 1.0)])
def test_power_law_losses_of_infinitely_many_modes(a: float, b: float, gamma: float):
    """D by numerical inversion of its Laplace transform, at times where no finite matrix would do."""
    t = 1e14

    def transform(p: mpmath.mpf) -> mpmath.mpf:
        # sum_k k^-a / (p + k^-b), its first terms and the integral of the rest with the first correction
        def term(x: mpmath.mpf) -> mpmath.mpf:
            return x**-a / (p + x**-b)

        first = sum(term(mpmath.mpf(k)) for k in range(1, 40))
        rest = mpmath.quad(lambda u: term(mpmath.exp(u)) * mpmath.exp(u), [mpmath.log(40), 8, 16, 24, 48, 100])
        return 1 / (p * (1 + gamma * (first + rest + term(mpmath.mpf(40)) / 2)))

    with mpmath.workdps(16):
        grid = [2 * t * (1 + h) for h in (-0.05, 0.05)]
        logs = [mpmath.log(mpmath.invertlaplace(transform, x, method="talbot", degree=12)) for x in grid]
    slope = float((logs[1] - logs[0]) / (grid[1] - grid[0]))
    expected = float(ofe.power_law_loss(t, a, b, gamma))
    assert -slope / gamma == pytest.approx(expected, rel=5e-3)


def test_power_laws_say_nothing_at_the_start():
    found = ofe.power_law_loss([0.0, 1e6], 2.0, 1.5, 1.0)
    assert math.isnan(found[0])
    assert float(found[1]) == pytest.approx((1 - 2 / 3) / 2e6)


BAD = {
    "an unknown convention": lambda: ofe.step(K0, Y, 1.0, 0.1, "002-eq5"),
    "features of other samples": lambda: ofe.step(torch.ones(3, 2), Y, 1.0, 0.1),
    "a negative step": lambda: ofe.step(K0, Y, 1.0, -0.1),
    "a task without end": lambda: ofe.power_law_loss(1.0, 1.0, 1.0, 1.0),
    "a flat spectrum": lambda: ofe.power_law_exponents(2.0, 0.0),
    "no kernel": lambda: ofe.isotropic_half_time(0.0, 1.0, 1.0),
    "negative gamma": lambda: ofe.scalar(1.0, 1.0, 1.0, -1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
