"""Optimal feature evolution where eigenvalues are equal or zero, and where it ends."""

import numpy as np
import pytest
import torch
from torch import Tensor

from featlearn.theory import ofe


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


STRUCTURED = {
    "isotropic": (2 * torch.eye(4), [1.0, -1.0, 0.5, 0.0]),
    "isotropic, two outputs": (2 * torch.eye(4), [[1.0, 0.0], [-1.0, 0.5], [0.5, 1.0], [0.0, 0.0]]),
    "modes without a task": (torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])), [0.0, 1.0, -0.5, 0.0]),
    "outputs with one direction outside the range": (
        torch.tensor([[2.0, -2.0, -1.0, 0.0], [-2.0, 2.0, 1.0, 0.0], [-1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
        [[-1.0, -1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]],
    ),
    "equal outputs": (
        torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])),
        [[1.0, 1.0], [0.5, 0.5], [-1.0, -1.0], [2.0, 2.0]],
    ),
    "no kernel": (torch.zeros(4, 4), [[1.0, 0.0], [-1.0, 0.5], [0.5, 1.0], [0.0, 0.0]]),
}


@pytest.mark.parametrize("gamma", [3e-9, 0.7, 300.0])
@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_problems(name: str, gamma: float):
    """Equal eigenvalues, ranks that only rounding would lift, modes that nothing touches."""
    K, y = STRUCTURED[name][0].double(), torch.tensor(STRUCTURED[name][1], dtype=torch.float64)
    times = [0.0, 0.1, 1.0] if gamma < 100 else [0.0, 0.001, 0.01]
    found, path = ofe.solve(K, y, gamma, times), ofe.integrate(K, y, gamma, times)
    scale = float(path.kernels.abs().max())
    np.testing.assert_allclose(found.residual, path.residual, atol=1e-10)
    np.testing.assert_allclose(found.kernel(times), path.kernels, atol=1e-12 * scale + 1e-300)
    for curve, values in path.curves().items():
        np.testing.assert_allclose(found.curves()[curve], values, rtol=1e-10, err_msg=curve)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_the_end_is_the_limit(outputs: int):
    """Rates that differ by a few percent are still told apart."""
    K = torch.diag(torch.tensor([1.0, 1.05, 0.0, 0.0, 0.0], dtype=torch.float64))
    found = ofe.solve(K, drawn(5, outputs, seed=8), 0.9, [1e5])
    np.testing.assert_allclose(found.final_kernel, found.kernel(1e5), atol=1e-12)
    assert float(found.final_loss) == pytest.approx(float(found.loss), rel=1e-12)
    assert float(found.final_loss) > 0.1
    assert int(torch.linalg.matrix_rank(found.final_kernel)) == 2


def test_rates_close_to_each_other_are_told_apart_at_the_end():
    K, y = torch.diag(torch.tensor([0.0, 1.03], dtype=torch.float64)), torch.tensor([1.0, 0.05], dtype=torch.float64)
    found = ofe.solve(K, y, 1.0, 1e6)
    lowest = torch.linalg.eigvalsh(K + torch.outer(y, y))[0]
    assert float(found.final_loss) == pytest.approx(float(lowest), rel=1e-13)
    assert float(found.loss) == pytest.approx(float(lowest), rel=1e-13)


def test_nothing_moves_without_a_kernel_however_long():
    """c t is 1e18 here: what rounding leaves of it is far larger than the logarithms beside it."""
    y = torch.tensor([[1.0, -1.0, 0.0], [1.0, 0.0, -1.0]], dtype=torch.float64)
    found = ofe.solve(torch.zeros(2, 2), y, 1e-18, [0.0, 1e36])
    np.testing.assert_allclose(found.residual, -y.expand(2, 2, 3), atol=1e-14)
    np.testing.assert_allclose(found.loss, 4.0, rtol=1e-14)
