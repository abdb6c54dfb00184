"""The latent-variable model against integration, arithmetic of 80 digits, autograd and gradient descent."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import latent


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Problem:
    """Arguments of `solve`, drawn: unequal sizes and rates, both signs of target and scale."""

    def __init__(self, seed: int, d: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.d, self.d0 = d or int(rng.integers(1, 7)), int(rng.integers(1, 5))
        size = 10.0 ** rng.uniform(-1, 0.3)
        self.u, self.W = size * rng.normal(size=self.d), size * rng.normal(size=(self.d, self.d0))
        self.x, self.y = rng.normal(size=self.d0), rng.normal() * 2
        self.rate_u, self.rate_w = 10 ** rng.uniform(-1.3, 0.3, 2)
        self.scale = rng.choice([-1, 1]) * rng.uniform(0.3, 1.2)

    @property
    def settings(self) -> dict[str, float]:
        return {"scale": float(self.scale), "rate_u": float(self.rate_u), "rate_w": float(self.rate_w)}

    def solve(self, times: object) -> latent.Latent:
        arrays = tensor(self.u), tensor(self.W), tensor(self.x)
        return latent.solve(*arrays, float(self.y), times=times, **self.settings)

    def velocity(self, state: np.ndarray) -> np.ndarray:
        """The gradients, written out."""
        u, W = state[: self.d], state[self.d :].reshape(self.d, self.d0)
        residual = self.scale * u @ W @ self.x - self.y
        du = -self.rate_u * 2 * residual * self.scale * W @ self.x
        dW = -self.rate_w * 2 * residual * self.scale * np.outer(u, self.x)
        return np.concatenate([du, dW.ravel()])

    def integrated(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first = np.concatenate([self.u, np.ravel(self.W)])
        path = solve_ivp(
            lambda _, state: self.velocity(state),
            (0, times[-1]),
            first,
            method="DOP853",
            t_eval=times,
            rtol=1e-13,
            atol=1e-15,
        )
        return path.y.T[:, : self.d], path.y.T[:, self.d :].reshape(-1, self.d, self.d0)


def special(p: list[float], q: list[float], y: float, **settings: float) -> Problem:
    """A problem with x = 1 and rates 1 that starts exactly at these p and q."""
    problem = Problem(0)
    problem.d, problem.d0 = len(p), 1
    problem.u, problem.W = np.array(p) - np.array(q), (np.array(p) + np.array(q))[:, None]
    problem.x, problem.y = np.ones(1), y
    problem.rate_u = problem.rate_w = 1.0
    problem.scale = settings.get("scale", 0.6)
    return problem


def assert_integrates(problem: Problem, times: np.ndarray, tolerance: float = 1e-8) -> latent.Latent:
    """Weights and everything that follows from them, against integrated weights."""
    path = problem.solve(times.tolist())
    u, W = problem.integrated(times)
    hidden = W @ problem.x
    rho2 = problem.x @ problem.x
    output = problem.scale * np.einsum("ti,ti->t", u, hidden)
    norms = np.linalg.norm(u, axis=1), np.linalg.norm(hidden, axis=1)
    kernel = problem.scale**2 * (problem.rate_u * norms[1] ** 2 + problem.rate_w * rho2 * norms[0] ** 2)
    expected = {
        "u": (path.u, u),
        "W": (path.W, W),
        "output": (path.output, output),
        "loss": (path.loss, (output - problem.y) ** 2),
        "ntk": (path.ntk, kernel),
        "|u|": (path.norms.u, norms[0]),
        "|Wx|": (path.norms.Wx, norms[1]),
        "|W|": (path.norms.W, np.linalg.norm(W, axis=(1, 2))),
    }
    for name, (value, reference) in expected.items():
        scale = max(1e-3, np.abs(reference).max())
        assert value.isfinite().all()
        np.testing.assert_allclose(value.numpy() / scale, reference / scale, atol=tolerance, rtol=0, err_msg=name)
    visible = (norms[0] > 1e-5) & (norms[1] > 1e-5)
    cosine = np.einsum("ti,ti->t", u, hidden)[visible] / (norms[0] * norms[1])[visible]
    np.testing.assert_allclose(path.layer_alignment.numpy()[visible], cosine, atol=1e-7, rtol=0)
    return path


@pytest.mark.parametrize("seed", range(30))
def test_random_problems_against_integration(seed: int):
    problem = Problem(seed)
    t_c = float(problem.solve([0.0]).time_scale)
    path = assert_integrates(problem, t_c * np.array([0, 0.03, 0.1, 0.3, 1, 3]))
    assert float(path.final.ntk) == pytest.approx(2 / t_c, rel=1e-13)  # the kernel of the end is exactly 2 / t_c
    assert float(path.final.output) == pytest.approx(problem.y, rel=1e-13)
    end = problem.solve([60 * t_c])
    torch.testing.assert_close(end.u[0], path.final.u, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(end.W[0], path.final.W, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(end.alpha[0], path.alpha_plus, rtol=1e-12, atol=0)


SPECIAL: dict[str, Callable[[], Problem]] = {
    "P = 0, into the saddle": lambda: special([0, 0, 0], [0.5, -0.4, 0.2], 1.5),
    "P = 0, away from it": lambda: special([0, 0, 0], [0.5, -0.4, 0.2], -1.5),
    "P = 0, negative scale": lambda: special([0, 0, 0], [0.5, -0.4, 0.2], -1.5, scale=-0.6),
    "P = 0, y = 0": lambda: special([0, 0, 0], [0.5, -0.4, 0.2], 0.0),
    "P = 0, f(0) = y": lambda: special([0, 0, 0], [0.5, 0.5, 0.5], -0.45),
    "Q = 0, away from the saddle": lambda: special([0.5, -0.4, 0.2], [0, 0, 0], 1.5),
    "Q = 0, into the saddle": lambda: special([0.5, -0.4, 0.2], [0, 0, 0], -1.5),
    "Q = 0, y = 0": lambda: special([0.5, -0.4, 0.2], [0, 0, 0], 0.0),
    "P = Q = 0": lambda: special([0, 0], [0, 0], 1.5),
    "P = Q = 0, y = 0": lambda: special([0, 0], [0, 0], 0.0),
    "y = 0": lambda: special([0.5, -0.4], [0.1, 0.7], 0.0),
    "one unit": lambda: special([0.5], [0.1], -1.0),
    "no readout": lambda: special([0.5, 0.2], [0.5, 0.2], 1.0),
    "no hidden layer": lambda: special([0.5, 0.2], [-0.5, -0.2], 1.0),
    "near the saddle": lambda: special([1e-4, -2e-4, 0], [0.5, -0.4, 0.2], 1.5),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_starts_against_integration(name: str):
    assert_integrates(SPECIAL[name](), np.array([0, 0.1, 0.7, 2.0, 5.0]))


@pytest.mark.parametrize("frozen", [("rate_u",), ("rate_w",), ("rate_u", "rate_w")])
@pytest.mark.parametrize("seed", range(4))
def test_learning_rates_of_zero(seed: int, frozen: tuple[str, ...]):
    problem = Problem(seed)
    for name in frozen:
        setattr(problem, name, 0.0)
    path = assert_integrates(problem, np.array([0, 0.1, 0.7, 3.0]))
    np.testing.assert_allclose(path.alpha, 1, rtol=1e-14)
    omega = 1 / float(path.time_scale)
    decayed = (problem.scale * problem.u @ problem.W @ problem.x - problem.y) ** 2 * np.exp(-8 * omega * 0.7)
    np.testing.assert_allclose(path.loss[2], decayed, rtol=1e-12)
    assert bool(path.feature_share == 0) or len(frozen) == 2


def test_a_scale_of_zero_moves_nothing():
    problem = Problem(3)
    problem.scale = 0.0
    path = problem.solve([0.0, 2.0, math.inf])
    np.testing.assert_array_equal(path.u, np.tile(problem.u, (3, 1)))
    np.testing.assert_array_equal(path.W, np.tile(problem.W, (3, 1, 1)))
    np.testing.assert_allclose(path.loss, problem.y**2, rtol=1e-14)
    assert (path.mechanism, path.rescaling) == ("stationary", "unchanged")


def precise(p: float, q: float, y: float, t: float) -> tuple[float, float, float, float]:
    """p(t), q(t), output and loss for units (p, 0), (-p, 0), (0, q), by the textbook form of Theorem 1 in 1000 digits.

    With the xi that the package avoids; rates, scale and x are 1.
    """
    with mpmath.workdps(1000):
        P, Q = 2 * mpmath.mpf(p) ** 2 / 3, mpmath.mpf(q) ** 2 / 3
        y, t = mpmath.mpf(y), mpmath.mpf(t)
        speed = mpmath.sqrt(y**2 + 36 * P * Q)
        plus, minus = (speed + y) / (6 * P), (speed - y) / (6 * P)
        xi = (1 - plus) / (1 + minus) * mpmath.exp(-4 * t * speed)
        alpha = (plus + xi * minus) / (1 - xi)
        root = mpmath.sqrt(alpha)
        output = 3 * (alpha * P - Q / alpha)
        return float(p * root), float(q / root), float(output), float((output - y) ** 2)


@pytest.mark.parametrize("y", [1.3, -0.7])
@pytest.mark.parametrize("size", [1e-2, 1e-6, 1e-9, 1e-12, 1e-18, 1e-80, 1e-200])
def test_nothing_is_lost_near_the_saddle(size: float, y: float):
    u, W = tensor([size, -size, -0.5]), tensor([[size], [-size], [0.5]])  # p and q are exact numbers
    for t in (0.1, 3.0, 9.0, 40.0, 100.0, 1e6):
        path = latent.solve(u, W, tensor([1.0]), y, times=[t])
        p, q, output, loss = precise(size, 0.5, y, t)
        # exp(-4 Omega t) is only as good as its argument, as long as it matters
        rounding = 1e-15 * (10 + 8 * abs(y) * min(t, 300))
        np.testing.assert_allclose(path.u[0], [p, -p, -q], rtol=rounding, atol=0)
        # W is the start plus a change, with the rounding of the start
        np.testing.assert_allclose(path.W[0, :, 0], [p, -p, q], rtol=rounding, atol=2e-16)
        np.testing.assert_allclose(path.norms.Wx[0], math.hypot(p, p, q), rtol=rounding, atol=0)
        assert float(path.output[0]) == pytest.approx(output, rel=10 * rounding)
        assert float(path.loss[0]) == pytest.approx(loss, rel=10 * rounding, abs=1e-300)
        assert float(path.ntk[0]) == pytest.approx(4 * p**2 + 2 * q**2, rel=10 * rounding)


@pytest.mark.parametrize("P", [1e-2, 1e-6, 1e-18, 1e-60, 1e-300])
def test_scales_of_a_start_given_by_numbers(P: float):
    times, Q, y = tensor([0.0, 0.5, 4.0, 50.0]), 0.2, tensor([[1.3], [-0.4]])
    numbers = latent.scales(times, P, Q, y, width=3, rho=0.8, scale=1.1, rate_u=0.4, rate_w=0.9)
    assert numbers.alpha.shape == (2, 4)
    with mpmath.workdps(700):
        for i, target in enumerate(y[:, 0].tolist()):
            a, b = (mpmath.mpf(1.1) ** 2 * mpmath.mpf(0.8) ** 2 * 3 * mpmath.mpf(part) for part in (P, Q))
            s = mpmath.mpf(1.1) * mpmath.mpf(0.8) * mpmath.sqrt(mpmath.mpf(0.4) * mpmath.mpf(0.9)) * target
            omega = mpmath.sqrt(s**2 + 4 * a * b)
            plus, minus = (omega + s) / (2 * a), (omega - s) / (2 * a)
            for j, t in enumerate(times.tolist()):
                xi = (1 - plus) / (1 + minus) * mpmath.exp(-4 * t * omega)
                alpha = (plus + xi * minus) / (1 - xi)
                assert float(numbers.alpha[i, j]) == pytest.approx(float(alpha), rel=1e-13)
                assert float(numbers.ntk[i, j]) == pytest.approx(float(2 * (a * alpha + b / alpha)), rel=1e-13)
            assert float(numbers.alpha_plus[i, 0]) == pytest.approx(float(plus), rel=1e-14)
            assert float(numbers.time_scale[i, 0]) == pytest.approx(float(1 / omega), rel=1e-14)
            assert float(numbers.final_ntk[i, 0]) == pytest.approx(float(2 * omega), rel=1e-14)
            assert float(numbers.feature_share[i, 0]) == pytest.approx(float(s**2 / omega**2), rel=1e-14)


def test_far_into_the_saddle():
    problem = SPECIAL["P = 0, into the saddle"]()
    path = problem.solve([1.0, 150.0, 1e6, math.inf])
    # q^2 / q(0)^2 = 1 / (exp(4 s t) + (b / s)(exp(4 s t) - 1)) (Eq. 32)
    s, b = 0.6 * 1.5, 0.36 * 0.45
    shrunk = [1 / (math.exp(2 * s * t) * math.sqrt(1 + b / s * -math.expm1(-4 * s * t))) for t in (1.0, 150.0)]
    np.testing.assert_allclose(path.u[:2], np.outer(shrunk, problem.u), rtol=1e-13)
    assert bool((path.u[2:] == 0).all())
    np.testing.assert_allclose(path.loss[1:], 2.25, rtol=1e-15)
    assert float(path.output[1]) == pytest.approx(-0.6 * 0.45 * shrunk[1] ** 2, rel=1e-12)
    np.testing.assert_allclose(path.layer_alignment[:2], -1, rtol=4e-16)
    assert bool(path.layer_alignment[2:].isnan().all())  # nothing is left that could have a direction
    assert path.saddle
    assert not SPECIAL["P = 0, away from it"]().solve([1.0]).saddle


@pytest.mark.parametrize("size", [1e-8, 1e-100, 1e8, 1e60])
def test_extreme_sizes_are_finite_and_right(size: float):
    """Balanced layers: |u|^2 obeys the logistic equation, whatever the size of the start."""
    direction = tensor([0.6, 0.0, -0.8])
    path = latent.solve(
        size * direction, size * direction[:, None], tensor([1.0]), 2.0, times=[0.0, 1e-6, 1.0, 20.0, 1e6]
    )
    for value in path.curves().values():
        assert bool(value.isfinite().all())
    with mpmath.workdps(400):  # c' = 4 c (y - c), c = |u|^2
        c0, y = mpmath.mpf(size) ** 2, mpmath.mpf(2)
        for i, t in enumerate(path.times.tolist()):
            c = y * c0 / (c0 + (y - c0) * mpmath.exp(-4 * y * mpmath.mpf(t)))
            assert float(path.norms.u[i]) == pytest.approx(float(mpmath.sqrt(c)), rel=1e-13)
            assert float(path.loss[i]) == pytest.approx(float((c - y) ** 2), rel=1e-12, abs=1e-300)


def test_the_kernel_of_other_inputs_is_that_of_autograd_and_of_fl_ntk():
    problem = Problem(5, d=4)
    rng = np.random.default_rng(1)
    x1, x2 = tensor(rng.normal(size=(3, problem.d0))), tensor(rng.normal(size=(5, problem.d0)))
    times = [0.3, 0.0, 1.1]
    path = problem.solve(times)
    kernels = path.kernel(times, x1, x2)
    assert kernels.shape == (3, 3, 5)
    for i, t in enumerate(times):
        model = nn.Sequential(nn.Linear(problem.d0, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
        model[0].weight.data, model[1].weight.data = path.W[i], problem.scale * path.u[i][None]
        # the readout carries the scale: its rate is that of scale * u
        groups = [
            {"params": model[0].parameters(), "lr": problem.rate_w},
            {"params": model[1].parameters(), "lr": problem.rate_u * problem.scale**2},
        ]
        measured = fl.ntk(model, x1, x2=x2, optimizer=torch.optim.SGD(groups), dtype=torch.float64)
        torch.testing.assert_close(kernels[i], measured, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(path.kernel(t, x1, x2), kernels[i], rtol=1e-14, atol=0)
        torch.testing.assert_close(path.kernel(t, x1[0], x2), kernels[i, 0], rtol=1e-14, atol=0)
        torch.testing.assert_close(path.kernel(tensor(t), x1, x2[2]), kernels[i, :, 2], rtol=1e-14, atol=0)
    torch.testing.assert_close(path.kernel(times, tensor(problem.x)), path.ntk, rtol=1e-13, atol=0)


def test_the_output_follows_its_kernel():
    """df/dt = -2 K (f - y)."""
    problem = Problem(11)
    step = 1e-5 * float(problem.solve([0.0]).time_scale)
    for t in (0.05, 0.4):
        path = problem.solve([t - step, t, t + step])
        slope = (path.output[2] - path.output[0]) / (2 * step)
        assert float(slope) == pytest.approx(float(-2 * path.ntk[1] * (path.output[1] - problem.y)), rel=1e-7)


def test_small_steps_of_gradient_descent_come_near():
    problem, lr = Problem(2, d=5), 1e-4
    model = nn.Sequential(nn.Linear(problem.d0, 5, bias=False), nn.Linear(5, 1, bias=False)).double()
    model[0].weight.data, model[1].weight.data = tensor(problem.W), tensor(problem.u)[None]
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": lr * problem.rate_w},
            {"params": model[1].parameters(), "lr": lr * problem.rate_u},
        ]
    )
    losses = []
    for _ in range(2001):
        optimizer.zero_grad()
        loss = (problem.scale * model(tensor(problem.x)) - problem.y).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    steps = [0, 100, 500, 2000]
    path = problem.solve([lr * step for step in steps])
    np.testing.assert_allclose([losses[step] for step in steps], path.loss, rtol=5e-3)
    assert losses[2000] < 0.8 * losses[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_conserved_and_what_is_monotone(seed: int):
    problem = Problem(seed)
    t_c = float(problem.solve([0.0]).time_scale)
    path = problem.solve([0.0, *(t_c * np.geomspace(1e-3, 8, 60)).tolist()])
    x, rho = problem.x, np.linalg.norm(problem.x)
    u, W = path.u.numpy(), path.W.numpy()
    size = max(1.0, float(np.abs(u).max()), float(np.abs(W).max())) ** 2
    balance = problem.rate_u * (W @ x) ** 2 / rho**2 - problem.rate_w * u**2  # 4 p_i q_i
    np.testing.assert_allclose(balance, np.broadcast_to(balance[0], balance.shape), atol=1e-13 * size)
    across = W - np.einsum("ti,j->tij", W @ x, x) / rho**2
    np.testing.assert_allclose(across, np.broadcast_to(across[0], across.shape), atol=1e-13 * size)
    # zeta is monotone, toward the sign of scale (y - f(0)): Eq. 13 says no more than that
    turning = np.sign(problem.scale * (problem.y - float(path.output[0])))
    assert bool((turning * path.layer_alignment.diff() > -4e-16).all())
    assert bool((turning * path.alpha.diff() > -1e-14).all())
    assert (float(path.alpha_plus) > 1) == (turning > 0)
    # Eq. 11, with the sum over p q taken as it stands
    p, q = path.start.p, path.start.q
    c, grown = 2 * (p * q).mean(), path.alpha
    under = ((grown * path.P + path.Q / grown).square() - c.square()).sqrt()
    if problem.d > 1 and float(under.min()) > 1e-3:
        torch.testing.assert_close(
            path.layer_alignment, (grown * path.P - path.Q / grown) / under, rtol=1e-9, atol=1e-9
        )


def by_alpha(path: latent.Latent) -> str:
    """The four cases of Sec. 3.3 in the order in which they have to be asked, by alpha_+ and alpha*."""
    plus, star = float(path.alpha_plus), math.sqrt(float(path.Q / path.P))
    if plus == 1:
        return "unchanged"
    if (plus - 1) * (1 - star) >= 0:
        return "increase"
    return "decrease" if (plus - star) * (1 - star) >= 0 else "decrease then increase"


def test_rescaling_is_what_the_norms_do():
    seen = set()
    for seed in range(150):
        problem = Problem(seed)
        t_c = float(problem.solve([0.0]).time_scale)
        path = problem.solve([0.0, *(t_c * np.geomspace(1e-4, 8, 400)).tolist(), math.inf])
        for norm in (path.norms.u, path.norms.Wx, path.norms.W):
            steps = norm.diff()
            tolerance = 1e-13 * float(norm.max())
            rises, falls = bool((steps > tolerance).any()), bool((steps < -tolerance).any())
            found = "decrease then increase" if rises and falls else "increase" if rises else "decrease"
            if found != path.rescaling:  # a turn that is too short for the sampled times
                assert path.rescaling == "decrease then increase"
                assert float(path.output[0] * path.output[-1]) < 0
        assert path.rescaling == by_alpha(path)
        seen.add(path.rescaling)
    assert seen == {"increase", "decrease", "decrease then increase"}


def test_balanced_rates_decide_the_size_but_not_the_direction_of_turning():
    problem = Problem(7, d=4)
    classes, distances = set(), []
    for share in (1e-8, 1e-6, 1e-4, 1.0, 1e4):
        problem.rate_u, problem.rate_w = 1.0, share
        path = problem.solve([0.0])
        classes.add(path.mechanism)
        distances.append(abs(float(path.alpha_plus) - 1))
    assert len(classes) == 1
    # sqrt(rate_w / rate_u), not linear in it
    np.testing.assert_allclose([distances[1] / distances[0], distances[2] / distances[1]], 10, rtol=0.2)


def test_equal_rates_only_set_the_clock():
    problem = Problem(9)
    problem.rate_u = problem.rate_w = 1.0
    slow = problem.solve([0.2, 0.9])
    problem.rate_u = problem.rate_w = 0.25
    torch.testing.assert_close(problem.solve([0.8, 3.6]).layer_alignment, slow.layer_alignment, rtol=1e-13, atol=0)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 7.0])
def test_orthogonal_layers_of_equal_size_end_at_a_known_angle(ratio: float):
    """P = Q, c = 0: zeta(inf) = K / sqrt(1 + K^2), K = s / (2 a), above the bound of the paper (a lower one)."""
    u, W = tensor([1.0, 0.0]), tensor([[0.0], [1.0]])  # P = Q = 1/4, a = scale^2 / 2
    path = latent.solve(u, W, tensor([1.0]), 0.5 * ratio, times=[0.0], scale=0.5)
    exact = ratio / math.sqrt(1 + ratio**2)
    assert float(path.final.layer_alignment) == pytest.approx(exact, rel=1e-14)
    assert ((ratio + 1) ** 2 - 1) / ((ratio + 1) ** 2 + 1) < exact
    assert float(path.feature_share) == pytest.approx(ratio**2 / (1 + ratio**2), rel=1e-14)


@pytest.mark.parametrize(
    ("u", "w", "y", "expected"),
    [
        ((1.0, 2.0), (1.3, 1.6), 5.0, "alignment"),  # f(0) = 4.5
        ((1.0, 2.0), (1.3, 1.6), 4.0, "disalignment"),
        ((1.0, 2.0), (1.3, 1.6), -4.0, "alignment"),  # the sign is wrong: zeta turns to -1
        ((1.0, 2.0), (1.3, 1.6), 0.0, "disalignment"),
        ((1.0, 2.0), (1.3, 1.6), 4.5, "stationary"),
        ((1.0, 2.0), (0.3, 0.6), 5.0, "rescaling"),
        ((1.0, 2.0), (-0.3, -0.6), 5.0, "rescaling"),
        ((0.0, 0.0), (0.3, 0.6), 5.0, "rescaling"),
        ((0.0, 0.0), (0.0, 0.0), 5.0, "stationary"),
        ((0.7,), (0.3,), 5.0, "rescaling"),
    ],
)
def test_mechanisms(u: tuple[float, ...], w: tuple[float, ...], y: float, expected: str):
    for scale in (1.0, -1.0):  # the scale cancels where the readout carries its sign
        path = latent.solve(scale * tensor(u), tensor(w)[:, None], tensor([1.0]), y, times=[0.0], scale=scale)
        assert path.mechanism == expected
    if expected == "stationary":
        assert path.rescaling == "unchanged"


def test_a_solved_start_is_found_through_rounding():
    stirred = 0
    for seed in range(40):
        problem = Problem(seed)
        problem.y = float(problem.scale * np.sum(problem.u[:, None] * problem.W * problem.x))
        path = problem.solve([0.0, 1.0])
        stirred += float(path.start.residual) != 0
        assert (path.mechanism, path.rescaling) == ("stationary", "unchanged")
        np.testing.assert_allclose(path.u[1], problem.u, rtol=1e-12, atol=1e-15)
    assert stirred > 10  # two orders of the same sum differ


def test_parallel_layers_are_found_through_rounding():
    rng = np.random.default_rng(0)
    W, x = rng.normal(size=(200, 30)), rng.normal(size=30)
    path = latent.solve(tensor(0.1 * W @ x), tensor(W), tensor(x), 2.0, times=[0.0], rate_u=0.3)
    assert path.mechanism == "rescaling"
    assert path.rescaling == "decrease"


def test_the_output_is_attributed_to_lengths_and_angle():
    kept = 0
    for seed in range(40):
        path = Problem(seed).solve([0.0])
        parts = path.attribution
        assert float(parts.ntk) == pytest.approx(float(path.final.ntk / path.ntk[0]), rel=1e-14)
        change = path.final.layer_alignment - path.layer_alignment[0]
        assert float(parts.layer_alignment) == pytest.approx(float(change), abs=1e-15)
        if float(path.output[0] * path.final.output) > 0:
            kept += 1
            total = parts.log_u + parts.log_Wx + parts.log_layer_alignment
            assert float(total) == pytest.approx(math.log(float(path.final.output / path.output[0])), abs=1e-12)
            assert float(parts.log_output) == pytest.approx(float(total), abs=1e-12)
        else:
            assert all(bool(part.isnan()) for part in parts[:4])
    assert 10 < kept < 35


def test_random_starts_have_the_mean_and_variance_of_the_theory():
    width, draws, rng = 40, 4000, np.random.default_rng(0)
    variance_u, variance_w, rate_u, rate_w = 1.5, 0.4, 0.5, 2.0
    u = math.sqrt(variance_u) * rng.normal(size=(draws, width))
    W = math.sqrt(variance_w) * rng.normal(size=(draws, width, 3))
    x = np.array([0.5, -1.0, 2.0])
    v = W @ x / np.linalg.norm(x)
    P = ((math.sqrt(rate_u) * v + math.sqrt(rate_w) * u) ** 2).mean(1) / 4
    expected = latent.initial_statistics(width, variance_u, variance_w, rate_u=rate_u, rate_w=rate_w)
    z = (P.mean() - float(expected.mean)) / (P.std() / math.sqrt(draws))
    assert abs(z) < 4
    spread = ((P - P.mean()) ** 2).std() / math.sqrt(draws)
    assert abs((P.var() - float(expected.variance)) / spread) < 4
    path = latent.solve(tensor(u[0]), tensor(W[0]), tensor(x), 1.0, times=[0.0], rate_u=rate_u, rate_w=rate_w)
    assert float(path.P) == pytest.approx(P[0], rel=1e-12)


def line(seed: int, samples: int = 50) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    axis = rng.normal(size=4)
    return tensor(np.outer(rng.normal(size=samples) + 0.3, axis)), tensor(rng.normal(size=samples) - 1)


def test_samples_on_a_line_train_like_one():
    X, y = line(0)
    reduced = latent.reduce_line(X, y)
    rng = np.random.default_rng(1)
    u = tensor(rng.normal(size=3)).requires_grad_()
    W = tensor(rng.normal(size=(3, 4))).requires_grad_()
    every = (0.7 * X @ W.T @ u - y).square().mean()
    single = (0.7 * u @ W @ reduced.x - reduced.y).square()
    assert every.item() == pytest.approx((single + reduced.floor).item(), rel=1e-13)
    for a, b in zip(torch.autograd.grad(every, (u, W)), torch.autograd.grad(single, (u, W)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.outer(reduced.positions, reduced.x / reduced.x.norm()), X, rtol=1e-12, atol=1e-13)


def test_a_reduced_line_gives_the_path_of_all_samples():
    X, y = line(2)
    reduced = latent.reduce_line(X, y)
    rng = np.random.default_rng(3)
    u, W = tensor(rng.normal(size=5)), tensor(rng.normal(size=(5, 4)))
    settings = {"times": [0.4, 0.0, 0.05], "scale": -0.5, "rate_u": 0.3, "rate_w": 1.1}
    exact = latent.solve(u, W, reduced.x, reduced.y, **settings)
    flow = latent.integrate(u, W, X, y, **settings)
    torch.testing.assert_close(exact.u, flow.u, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(exact.W, flow.W, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(exact.loss + reduced.floor, flow.loss, rtol=1e-9, atol=1e-10)
    outputs = exact.output[:, None] * reduced.positions / reduced.x.norm()
    torch.testing.assert_close(outputs, flow.outputs, rtol=1e-9, atol=1e-10)


def test_a_line_has_one_sample_whichever_way_it_points():
    X, y = line(4, samples=3)
    there, back = latent.reduce_line(X, y), latent.reduce_line(-X, y)
    torch.testing.assert_close(torch.outer(there.x, there.y[None]), -torch.outer(back.x, back.y[None]))
    exact = latent.reduce_line(X[:1], y[:1])  # one sample is itself
    torch.testing.assert_close(exact.x, X[0])
    assert float(exact.y) == pytest.approx(float(y[0]), rel=1e-14)
    assert float(exact.floor) == pytest.approx(0, abs=1e-28)


def test_integration_off_a_line_follows_the_gradient():
    rng = np.random.default_rng(5)
    u, W = tensor(rng.normal(size=3)), tensor(rng.normal(size=(3, 2)))
    X, y = tensor(rng.normal(size=(6, 2))), tensor(rng.normal(size=6))
    step = 1e-5
    flow = latent.integrate(u, W, X, y, times=[0.5 - step, 0.5, 0.5 + step], scale=0.8, rate_u=0.4, rate_w=1.5)
    a, V = flow.u[1].clone().requires_grad_(), flow.W[1].clone().requires_grad_()
    loss = (0.8 * X @ V.T @ a - y).square().mean()
    assert float(flow.loss[1]) == pytest.approx(loss.item(), rel=1e-13)
    gradients = torch.autograd.grad(loss, (a, V))
    torch.testing.assert_close((flow.u[2] - flow.u[0]) / (2 * step), -0.4 * gradients[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close((flow.W[2] - flow.W[0]) / (2 * step), -1.5 * gradients[1], rtol=1e-6, atol=1e-7)
    assert set(flow.curves()) == {"loss", "layers/first_norm", "layers/second_norm"}


def test_a_path_is_laid_over_measured_points():
    import matplotlib

    matplotlib.use("Agg")
    problem = Problem(1)
    path = problem.solve(np.linspace(0, 1, 20).tolist())
    flow = latent.integrate(
        tensor(problem.u), tensor(problem.W), tensor(problem.x), float(problem.y), times=[0.1, 0.5], **problem.settings
    )
    axes = path.overlay(flow)
    assert [axis.get_ylabel() for axis in axes] == [
        fl.theory.prediction.NAMES[name] for name in path.curves() if name in flow.curves()
    ]
    assert set(path.curves()) <= set(fl.theory.prediction.NAMES)
    for curve in path.curves().values():
        assert curve.shape == (20,)


def test_numbers_may_be_tensors_and_integers():
    u, W, x = tensor([1.0, 2.0]), tensor([[1.3], [1.6]]), tensor([1.0])
    expected = latent.solve(u, W, x, 1.0, times=[0.2]).output
    for y in (1, tensor(1.0), torch.tensor([1])):
        assert bool(latent.solve(u, W, x, y, times=tensor([0.2]), scale=1, rate_u=torch.ones(1)).output == expected)
    for times in (0.2, tensor(0.2), (0.2,)):
        assert bool(latent.solve(u, W, x, 1.0, times=times).output == expected)
    single = latent.solve(u.float(), W.float(), x.float(), 1.0, times=[0.2])
    assert single.output.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"u": tensor([[1.0, 2.0]])}, r"u has shape \(1, 2\) .* expected \(d,\) and \(d, d0\)"),
        ({"W": tensor([1.3, 1.6])}, r"W \(2,\), expected"),
        ({"x": tensor([1.0, 1.0])}, r"x has shape \(2,\), expected \(d0,\) = \(1,\)"),
        ({"x": tensor([[1.0], [2.0]])}, "become one by reduce_line"),
        ({"x": tensor([0.0])}, "x is zero"),
        ({"y": math.nan}, "y=nan"),
        ({"y": tensor([1.0, 2.0])}, r"y has shape \(2,\), expected one finite number"),
        ({"u": tensor([math.inf, 1.0])}, "u of shape .* nan or infinite"),
        ({"u": [1.0, 2.0]}, "u is list, expected a tensor"),
        ({"rate_u": -1.0}, "rate_u=-1.0, expected one finite number >= 0"),
        ({"scale": True}, "scale is bool"),
        ({"times": [-1.0]}, "times=-1.0, expected numbers >= 0"),
        ({"times": tensor([[1.0]])}, r"times of shape \(1, 1\), expected one time or \(T,\)"),
        ({"u": tensor([1e200, 1.0])}, "beyond the range of numbers"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, object], message: str):
    arguments = {"u": tensor([1.0, 2.0]), "W": tensor([[1.3], [1.6]]), "x": tensor([1.0]), "y": 1.0, "times": [0.0]}
    with pytest.raises(fl.FeatlearnError, match=message):
        latent.solve(**(arguments | change))


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (tensor([[1.0, 0.0], [0.0, 1.0]]), tensor([1.0, 1.0]), "away from a line through the origin"),
        (tensor([[0.0, 0.0]]), tensor([1.0]), "all samples are zero"),
        (tensor([[1.0], [2.0]]), tensor([[1.0], [2.0]]), "targets that are vectors"),
        (tensor([1.0, 2.0]), tensor([1.0, 2.0]), r"X has shape \(2,\)"),
    ],
)
def test_what_is_no_line_is_refused(X: Tensor, y: Tensor, message: str):
    with pytest.raises(fl.FeatlearnError, match=message):
        latent.reduce_line(X, y)


def test_integration_refuses_what_does_not_fit():
    arguments = tensor([1.0]), tensor([[1.0]]), tensor([[1.0], [2.0]])
    with pytest.raises(fl.FeatlearnError, match=r"y has shape \(3,\), expected \(N,\) = \(2,\)"):
        latent.integrate(*arguments, torch.zeros(3), times=[1.0])
    with pytest.raises(fl.FeatlearnError, match="times=inf, expected finite numbers"):
        latent.integrate(*arguments, torch.zeros(2), times=[math.inf])
