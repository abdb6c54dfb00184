"""Kernels that do not see everything: their rounding, the end of time, and what a test point sees beyond them."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import featlearn as fl
from featlearn import dynamics


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def linear(precision: torch.dtype, samples: int = 60) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, K_test of a deep linear network, whose rank is at most that of its inputs, 6; targets, and the same exactly.

    In a network of one layer rounding would come with the rank it has; products of two make it rounding of any rank.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
    x, x_test = drawn(samples, 5).float(), drawn(7, 5, seed=1).float()
    K = fl.ntk(model, x, dtype=precision)
    K_test = fl.ntk(model, x_test, x2=x, dtype=precision)
    assert K.dtype == precision
    return K, K_test, drawn(samples, 3, seed=2).float(), x


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_regression_does_not_divide_by_the_rounding_of_a_float32_kernel():
    K, K_test, y, _ = linear(torch.float32)
    exact, exact_test, *_ = linear(torch.float64)
    values = torch.linalg.eigvalsh(K.double())
    # there is rounding to fall for, of both signs, above what counts as rounding in double
    assert float(values.min()) < -1e-11 * float(values.max())
    expected = exact_test @ torch.linalg.pinv(exact, rcond=1e-10, hermitian=True) @ y.double()
    assert relative(dynamics.kernel_regression(exact, y, exact_test), expected) < 1e-9
    assert relative(dynamics.kernel_regression(K, y, K_test), expected) < 1e-4
    # a ridge far below the rounding is none; one above it counts
    assert relative(dynamics.kernel_regression(K, y, K_test, ridge=1e-9), expected) < 1e-4
    solved = exact_test @ torch.linalg.solve(exact + 3.0 * torch.eye(60), y.double())
    assert relative(dynamics.kernel_regression(K, y, K_test, ridge=3.0), solved) < 1e-5


def test_the_flow_of_a_float32_kernel_stays_with_that_of_the_float64_one():
    """At every time: neither do negative eigenvalues blow up, nor does rounding carry test points away."""
    K, K_test, y, _ = linear(torch.float32)
    exact, exact_test, *_ = linear(torch.float64)
    times = [0.0, *(10.0**k for k in range(-3, 13)), math.inf]
    found = dynamics.kernel_descent(K, y, times=times, K_test=K_test)
    expected = dynamics.kernel_descent(exact, y, times=times, K_test=exact_test)
    assert float(found.loss.diff().max()) < 1e-9
    assert float((found.outputs - expected.outputs).abs().max()) < 1e-4
    assert found.test_outputs is not None
    assert expected.test_outputs is not None
    assert float((found.test_outputs - expected.test_outputs).abs().max()) < 1e-4
    np.testing.assert_allclose(found.test_outputs[-1], dynamics.kernel_regression(K, y, K_test), rtol=1e-9, atol=1e-12)


def test_whole_numbers_are_exact():
    """No rounding is to be expected in integers: only what double makes of them."""
    K = torch.tensor([[10**9, 0], [0, 1]])
    path = dynamics.kernel_descent(K, torch.ones(2), times=[50.0])
    np.testing.assert_allclose(path.outputs[0], [1.0, 1.0], rtol=1e-12)


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("kind", ["shared", "each", "full"])
def test_infinite_times_are_the_limit(kind: str, discrete: bool):
    """What the kernel sees is learned, what it does not see stays; test points end in the regression."""
    rows = drawn(3, 6, 2) if kind == "each" else drawn(1, 6, 2) if kind == "shared" else drawn(1, 6, 3, 4)
    if kind == "full":
        joint = torch.einsum("pcr,qdr->pqcd", rows[0], rows[0])
        K, K_test = joint[:4, :4], joint[4:, :4]
    else:
        joint = rows @ rows.mT
        K, K_test = joint[:, :4, :4], joint[:, 4:, :4]
        K, K_test = (K[0], K_test[0]) if kind == "shared" else (K, K_test)
    y, f0, f0_test = drawn(4, 3, seed=1), drawn(4, 3, seed=2), drawn(2, 3, seed=3)
    given = {"f0": f0, "f0_test": f0_test, "K_test": K_test}
    path = dynamics.kernel_descent(K, y, times=[1.0, math.inf], rate=0.01, discrete=discrete, **given)
    train = dynamics.kernel_regression(K, y, K, f0=f0, f0_test=f0)
    np.testing.assert_allclose(path.outputs[1], train, atol=1e-12)
    np.testing.assert_allclose(path.test_outputs[1], dynamics.kernel_regression(K, y, **given), atol=1e-12)
    assert 0.01 < float(path.loss[1]) < float(path.loss[0])
    still = dynamics.kernel_descent(K, y, times=[math.inf], rate=0.0, discrete=discrete, **given)
    assert torch.equal(still.outputs[0], f0)
    assert torch.equal(still.test_outputs[0], f0_test)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any op makes."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, tuple | list) else [made]:
            # what an op only looks at in another way holds the storage it had
            self.entries = max(self.entries, part.untyped_storage().nbytes() // 8 if isinstance(part, Tensor) else 0)
        return made


@pytest.mark.parametrize("kind", ["shared", "each"])
def test_kernels_are_not_copied_for_every_time(kind: str):
    rows = drawn(4, 35, 40)
    joint = rows @ rows.mT / 40
    K, K_test = (
        (joint[0, :20, :20], joint[0, 20:, :20]) if kind == "shared" else (joint[:, :20, :20], joint[:, 20:, :20])
    )
    y, times = drawn(20, 4, seed=1), torch.linspace(0, 1, 50)
    with Largest() as largest:
        path = dynamics.kernel_descent(K.contiguous(), y, times=times, K_test=K_test.contiguous())
    # outputs have 50 * 20 * 4 entries, the kernels 4 * 20 * 20, and 50 times that if copied
    assert largest.entries <= 4000
    for i in (3, 49):
        alone = dynamics.kernel_descent(K, y, times=times[i : i + 1], K_test=K_test)
        np.testing.assert_allclose(path.outputs[i], alone.outputs[0], atol=1e-12)
        np.testing.assert_allclose(path.test_outputs[i], alone.test_outputs[0], atol=1e-12)
