"""Kernel regression: where frozen-kernel training ends."""

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
    """f(x) = f0(x) + k(x) (K + ridge I)^-1 (y - f0), the end of kernel descent.

    See Atanasov et al. 2022, Theorem 1, with f0.

    The print has y where y - f0 belongs. A singular K takes its pseudo-inverse, as the flow does: directions in its
    null space are not learned. The null space depends on the precision of K: eigenvalues below 1.2e-7 of the largest
    are rounding in a float32 kernel, below 1e-12 in a float64 one. Pass a kernel as it was measured; converted
    to double, the rounding of a float32 kernel would count as real.

    Kernels are (P, P), (C, P, P) or (P, P, C, C), with `K_test` (P2, P), (C, P2, P) or (P2, P, C, C) and y (P,) or
    (P, C). Returns (P2,) or (P2, C).
    """
    ridge = checked_rate(ridge, "ridge")
    given = problem(K, y, f0, K_test, f0_test)
    if given.test_kernel is None or given.test_start is None:
        raise InputValueError("K_test is None, expected the kernel of test points with training points")
    values, vectors, cutoff = eigenbasis(given)
    shifted = values + ridge
    # a ridge that is lost in the rounding of K does not bring back what was cut off
    inverse = torch.where(shifted.abs() <= cutoff, 0.0, 1 / shifted)
    weights = vectors @ (inverse[..., None] * (vectors.mT @ (given.targets - given.start)))
    return given.back(given.test_start + given.test_kernel @ weights)
