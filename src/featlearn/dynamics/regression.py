"""Kernel regression: the limit of frozen-kernel training."""

import torch
from torch import Tensor

from featlearn.dynamics.form import eigenbasis, outputs_at_start, problem
from featlearn.dynamics.rate import checked_rate
from featlearn.errors import InputValueError
from featlearn.linalg.conjugate_gradients import solution
from featlearn.linalg.stored_kernel import StoredKernel, stored_square
from featlearn.shapes import checked_finite, checked_number, checked_targets
from featlearn.signatures import name_keywords


@name_keywords()
def kernel_regression(
    K: Tensor | StoredKernel,
    y: Tensor,
    K_test: Tensor | StoredKernel,
    *,
    f0: Tensor | None = None,
    f0_test: Tensor | None = None,
    ridge: float = 0.0,
    tolerance: float = 1e-6,
) -> Tensor:
    """Compute f(x) = f0(x) + k(x) (K + ridge I)^-1 (y - f0), the limit of kernel descent.

    See Atanasov et al. 2022, Theorem 1, Eq. 2, 29, 30, with f0.

    The print has y in place of y - f0. A singular K is inverted by its pseudo-inverse: as in the flow, directions in
    its null space are not learned. The null space depends on the precision of K: eigenvalues below 1.2e-7 of the
    largest are rounding in a float32 kernel, below 1e-12 in a float64 one. Pass the kernel in the dtype it was measured
    in: converted to float64, the rounding errors of a float32 kernel would count as signal.

    Kernels are (P, P), (C, P, P) or (P, P, C, C), with `K_test` (P2, P), (C, P2, P) or (P2, P, C, C) and y (P,) or
    (P, C). Returns (P2,) or (P2, C).

    A stored kernel is read by blocks, about once for every step of conjugate gradients. The weights w have the residual
    |(K + ridge I) w - (y - f0)| <= `tolerance` |y - f0| for every output; an error says what was reached otherwise.
    `K_test` is then a tensor (P2, P) or a stored kernel.
    """
    ridge = checked_rate(ridge, "ridge")
    if isinstance(K, StoredKernel):
        return _stored_regression(K, y, K_test, f0, f0_test, ridge, checked_number(tolerance, "tolerance"))
    kernel_problem = problem(K, y, f0, K_test, f0_test)
    if kernel_problem.test_kernel is None or kernel_problem.test_start is None:
        raise InputValueError("K_test is None, expected the kernel of test points with training points")
    values, vectors, cutoff = eigenbasis(kernel_problem)
    shifted = values + ridge
    # a ridge below the cutoff does not restore eigenvalues that were set to 0
    inverse = torch.where(shifted.abs() <= cutoff, 0.0, 1 / shifted)
    weights = vectors @ (inverse[..., None] * (vectors.mT @ (kernel_problem.targets - kernel_problem.start)))
    return kernel_problem.back(kernel_problem.test_start + kernel_problem.test_kernel @ weights)


def _stored_regression(
    kernel: StoredKernel,
    y: Tensor,
    K_test: Tensor | StoredKernel,
    f0: Tensor | None,
    f0_test: Tensor | None,
    ridge: float,
    tolerance: float,
) -> Tensor:
    checked_finite(y, "y")
    targets = checked_targets(y, stored_square(kernel))
    test = K_test if isinstance(K_test, StoredKernel) else checked_finite(K_test, "K_test").cpu()
    if len(test.shape) != 2 or test.shape[1] != len(kernel):
        raise InputValueError(f"K_test has shape {tuple(test.shape)}, expected (P2, P) = (P2, {len(kernel)})")
    single, outputs = y.dim() == 1, targets.shape[1]
    start = outputs_at_start(f0, "f0", len(kernel), outputs, single, targets)
    test_start = outputs_at_start(f0_test, "f0_test", test.shape[0], outputs, single, targets)
    weights = solution(kernel.__matmul__, targets - start, ridge, tolerance, kernel.precision)
    result: Tensor = test_start + test @ weights
    return result[:, 0] if single else result
