"""Kernel regression: where frozen-kernel training ends."""

import torch
from torch import Tensor

from featlearn.dynamics.form import eigenbasis, problem
from featlearn.errors import InputValueError


def kernel_regression(
    K: Tensor, y: Tensor, K_test: Tensor, *, f0: Tensor | None = None, f0_test: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    """f(x) = f0(x) + k(x) (K + ridge I)^-1 (y - f0), the end of kernel descent (002 Theorem 1 with f0).

    The print has y where y - f0 belongs. A singular K takes its pseudo-inverse, as the flow does: directions it does
    not see are not learned. Kernels are (P, P), (C, P, P) or (P, P, C, C), with `K_test` (P2, P), (C, P2, P) or
    (P2, P, C, C) and y (P,) or (P, C). Returns (P2,) or (P2, C).
    """
    if not ridge >= 0:
        raise InputValueError(f"ridge={ridge!r}, expected a number >= 0")
    given = problem(K, y, f0, K_test, f0_test)
    if given.test_kernel is None or given.test_start is None:
        raise InputValueError("K_test is None, expected the kernel of test points with training points")
    values, vectors = eigenbasis(given.kernel)
    shifted = values + ridge
    inverse = torch.where(shifted == 0, 0.0, 1 / torch.where(shifted == 0, 1.0, shifted))
    weights = vectors @ (inverse[..., None] * (vectors.mT @ (given.targets - given.start)))
    return given.back(given.test_start + given.test_kernel @ weights)
