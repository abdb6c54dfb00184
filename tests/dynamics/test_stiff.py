"""Flows with modes of very different speed: which method integrates them, how well, and which are refused."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import featlearn as fl
from featlearn import dynamics
from featlearn.dynamics import descent, evolving
from featlearn.dynamics.flow import QUICK, Velocity, integrated, largest_rate, method


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_quicker_method_is_taken():
    assert method(10.0, 10**6, 1e9) == "DOP853"
    assert method(QUICK, 20, 1e3) == "DOP853"
    assert method(1e3 * QUICK, 20, 1e3) == "LSODA"
    # a thousand unknowns are soon solved for; four thousand take longer than some steps more
    assert method(2 * QUICK, 1000, 2e7) == "LSODA"
    assert method(2 * QUICK, 4000, 2e7) == "DOP853"
    # too many for a dense Jacobian
    assert method(10 * QUICK, 20_000, 1e7) == "DOP853"
    with pytest.raises(fl.FeatlearnError, match=r"time = 1e\+08 for 20000 outputs.*expected .* less stiff"):
        method(1e8, 20_000, 1e7)
    with pytest.raises(fl.FeatlearnError, match="less stiff"):
        method(1e8, 6000, 1e7)


def test_what_would_take_hours_is_refused_before_it_begins():
    K = drawn(600, 5) @ drawn(600, 5).T
    y = torch.eye(10)[torch.arange(600) % 10]
    with pytest.raises(fl.FeatlearnError, match="less stiff"):
        dynamics.kernel_descent(K, y, times=[1e9], loss="cross-entropy")


def test_the_speed_of_the_fastest_mode_is_bounded():
    for seed in range(10):
        rows = drawn(3, 12, 1 + seed, seed=seed) + seed
        K = rows @ rows.mT
        largest = torch.linalg.eigvalsh(K)[:, -1]
        bound = largest_rate(K)
        assert bool((bound >= largest * (1 - 1e-12)).all())
        assert bool((bound <= 3.5 * largest).all())  # sqrt(12)


@pytest.mark.parametrize("outputs", [None, 3])
@pytest.mark.parametrize("rate", [1.0, 1e4, 1e7])
def test_stiff_kernels_that_commute_have_a_closed_form(rate: float, outputs: int | None):
    """K(t) = (1 + t) K0: residuals fall as exp(-rate (t + t^2 / 2) lambda), test points follow as in the regression."""
    rows = drawn(9, 7)
    values = 10.0 ** -torch.arange(6, dtype=torch.float64)
    vectors = torch.linalg.qr(drawn(6, 6, seed=1))[0]
    K0, cross = vectors * values @ vectors.T, rows[6:, :6] @ (vectors * values.sqrt()).T
    times = torch.tensor([0.0, 0.3, 1.0, 2.5], dtype=torch.float64)
    shape = () if outputs is None else (outputs,)
    y, f0, f0_test = drawn(6, *shape, seed=2), drawn(6, *shape, seed=3), drawn(3, *shape, seed=4)
    growth = (1 + times)[:, None, None]
    path = dynamics.evolving_kernel_descent(
        growth * K0, times, y, rate=rate, f0=f0, kernels_test=growth * cross, f0_test=f0_test
    )
    assert path.test_outputs is not None
    for i, t in enumerate(times.tolist()):
        decay = (vectors * torch.exp(-rate * (t + t * t / 2) * values)) @ vectors.T
        expected = y + decay @ (f0 - y)
        np.testing.assert_allclose(path.outputs[i], expected, atol=1e-8)
        moved = cross @ torch.linalg.solve(K0, expected - f0)
        np.testing.assert_allclose(path.test_outputs[i] - f0_test, moved, atol=1e-6)


@pytest.mark.parametrize("outputs", [None, 3])
def test_both_methods_agree_on_kernels_that_do_not_commute(outputs: int | None, monkeypatch: pytest.MonkeyPatch):
    rows = drawn(3, 8, 9)
    kernels = (rows @ rows.mT / 9)[:, :, :5]
    times = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    shape = () if outputs is None else (outputs,)
    y, f0, f0_test = drawn(5, *shape, seed=2), drawn(5, *shape, seed=3), drawn(3, *shape, seed=4)
    found = []
    for chosen in ("DOP853", "LSODA"):
        monkeypatch.setattr(evolving, "method", lambda *_, chosen=chosen: chosen)
        path = dynamics.evolving_kernel_descent(
            kernels[:, :5], times, y, kernels_test=kernels[:, 5:], rate=20.0, f0=f0, f0_test=f0_test
        )
        found.append(torch.cat([path.outputs, path.test_outputs], 1))
    np.testing.assert_allclose(found[1], found[0], atol=1e-8)
    assert float((found[0][1:] - found[0][:-1]).abs().max()) > 0.1


def problem(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, K_test, and the same with all pairs of outputs, (P C, P C) and (P2 C, P C); P = 5, P2 = 2, C = 3."""
    if kind == "full":
        rows = drawn(7, 3, 24)
        joint = torch.einsum("pcr,qdr->pqcd", rows, rows[:5]) / 24
        K, K_test = joint[:5], joint[5:]
    else:
        rows = drawn(3, 7, 8) if kind == "each" else drawn(1, 7, 8).expand(3, 7, 8)
        each = rows @ rows[:, :5].mT / 8
        joint = torch.einsum("cpq,cd->pqcd", each, torch.eye(3, dtype=torch.float64))
        K, K_test = (each[:, :5], each[:, 5:]) if kind == "each" else (each[0, :5], each[0, 5:])
    return K, K_test, *(part.permute(0, 2, 1, 3).reshape(-1, 15) for part in (joint[:5], joint[5:]))


@pytest.mark.parametrize("rate", [1.0, 1e6])
@pytest.mark.parametrize("kind", ["shared", "each", "full"])
def test_stiff_cross_entropy_follows_its_equation(kind: str, rate: float, monkeypatch: pytest.MonkeyPatch):
    """Against another implicit method of lower order; soft targets, which keep all modes alive."""
    K, K_test, whole, cross = problem(kind)
    y, f0 = drawn(5, 3, seed=1).softmax(1), drawn(5, 3, seed=2)
    both = torch.cat([whole, cross])
    calls = []

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        f = torch.from_numpy(flat[:15]).reshape(5, 3)
        return (-rate * both @ (f.softmax(1) - y).flatten()).numpy()

    def recorded(*args: object) -> str:
        calls.append(method(*args))
        return "LSODA"

    def slope(_: float, flat: np.ndarray) -> np.ndarray:
        f = torch.from_numpy(flat[:15]).reshape(5, 3)
        blocks = torch.block_diag(*(torch.diag(p) - torch.outer(p, p) for p in f.softmax(1)))
        return np.pad((-rate * both @ blocks).numpy(), ((0, 0), (0, 6)))

    times = [0.01, 1.0]
    begin = np.concatenate([f0.flatten(), np.zeros(6)])
    solved = solve_ivp(velocity, (0, 1), begin, "Radau", times, jac=slope, rtol=1e-9, atol=1e-10).y.T
    monkeypatch.setattr(descent, "method", recorded)
    path = dynamics.kernel_descent(K, y, times=times, rate=rate, f0=f0, loss="cross-entropy", K_test=K_test)
    assert calls == ["LSODA" if rate > 1 else "DOP853"]
    np.testing.assert_allclose(path.outputs.reshape(2, 15), solved[:, :15], atol=1e-6)
    assert path.test_outputs is not None
    np.testing.assert_allclose(path.test_outputs.reshape(2, 6), solved[:, 15:], atol=1e-6)


@pytest.mark.parametrize("kind", ["shared", "each", "full", "evolving"])
def test_jacobians_are_derivatives(kind: str, monkeypatch: pytest.MonkeyPatch):
    """A wrong one would only cost time."""
    module, compared = (evolving if kind == "evolving" else descent), []

    def checked(velocity: Velocity, jacobian: Velocity, start: Tensor, times: Tensor, method: str) -> Tensor:
        moment, state = float(times.mean()), start + drawn(*start.shape, seed=len(compared))
        expected = torch.autograd.functional.jacobian(lambda f: velocity(moment, f), state)
        compared.append(moment)
        np.testing.assert_allclose(jacobian(moment, state), expected.reshape(start.numel(), -1), atol=1e-12)
        return integrated(velocity, jacobian, start, times, method)

    monkeypatch.setattr(module, "integrated", checked)
    monkeypatch.setattr(module, "method", lambda *_: "LSODA")
    y = drawn(5, 3, seed=1).softmax(1)
    if kind == "evolving":
        rows = drawn(2, 7, 8)
        kernels, times = rows @ rows[:, :5].mT, torch.tensor([0.5, 2.0])
        dynamics.evolving_kernel_descent(kernels[:, :5], times, y, kernels_test=kernels[:, 5:], rate=0.3)
    else:
        K, K_test, *_ = problem(kind)
        dynamics.kernel_descent(K, y, times=[1.0], rate=0.3, loss="cross-entropy", K_test=K_test)
    assert len(compared) == (3 if kind == "evolving" else 1)
