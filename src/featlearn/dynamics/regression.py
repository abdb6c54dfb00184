"""Kernel regression: the limit of frozen-kernel training."""

import torch
from torch import Tensor

from featlearn.dynamics.form import eigenbasis, problem
from featlearn.dynamics.rate import checked_rate
from featlearn.errors import InputValueError
from featlearn.signatures import name_keywords


@name_keywords()
def kernel_regression(
    K: Tensor, y: Tensor, K_test: Tensor, *, f0: Tensor | None = None, f0_test: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    """Compute f(x) = f0(x) + k(x) (K + ridge I)^-1 (y - f0), the limit of kernel descent.

    See Atanasov et al. 2022, Theorem 1, Eq. 2, 29, 30, with f0.

    The print has y in place of y - f0. A singular K is inverted by its pseudo-inverse: as in the flow, directions in
    its null space are not learned. The null space depends on the precision of K: eigenvalues below 1.2e-7 of the
    largest are rounding in a float32 kernel, below 1e-12 in a float64 one. Pass the kernel in the dtype it was measured
    in: converted to float64, the rounding errors of a float32 kernel would count as signal.

    Kernels are (P, P), (C, P, P) or (P, P, C, C), with `K_test` (P2, P), (C, P2, P) or (P2, P, C, C) and y (P,) or
    (P, C). Returns (P2,) or (P2, C).
    """
    ridge = checked_rate(ridge, "ridge")
    kernel_problem = problem(K, y, f0, K_test, f0_test)
    if kernel_problem.test_kernel is None or kernel_problem.test_start is None:
        raise InputValueError("K_test is None, expected the kernel of test points with training points")
    values, vectors, cutoff = eigenbasis(kernel_problem)
    shifted = values + ridge
    # a ridge below the cutoff does not restore eigenvalues that were set to 0
    inverse = torch.where(shifted.abs() <= cutoff, 0.0, 1 / shifted)
    weights = vectors @ (inverse[..., None] * (vectors.mT @ (kernel_problem.targets - kernel_problem.start)))
    return kernel_problem.back(kernel_problem.test_start + kernel_problem.test_kernel @ weights)
