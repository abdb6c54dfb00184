"""Solve (K + ridge I) W = Y for a positive kernel that is only multiplied."""

from collections.abc import Callable

import torch
from torch import Tensor

from featlearn.errors import InputValueError

RANK, PRODUCTS = 256, 500
"""Rank of the preconditioner, and the most products in a solution."""


def solution(
    product: Callable[[Tensor], Tensor], targets: Tensor, ridge: float, tolerance: float, precision: float
) -> Tensor:
    """Return W (P, C) with |(K + ridge I) W - Y| <= tolerance |Y| for every column; raise if it is not reached.

    Conjugate gradients share each product `K V` among all columns, and are preconditioned by a Nyström approximation
    of the kernel (Frangella, Tropp and Udell 2023, Algorithm 2.1 and Eq. 1.3). `precision`: relative rounding error of
    the kernel. The residual is computed anew at the end.
    """
    vectors, values = _nystrom(product, len(targets))
    shift = max(ridge, precision * float(values[0]))
    shrink = (values[-1] + shift) / (values + shift) - 1.0

    def preconditioned(v: Tensor) -> Tensor:
        return v + vectors @ (shrink[:, None] * (vectors.mT @ v))

    goal = tolerance * targets.norm(dim=0)
    weights, residual = torch.zeros_like(targets), targets
    step = direction = preconditioned(residual)
    power = (residual * step).sum(0)
    for _ in range(PRODUCTS):
        if bool((residual.norm(dim=0) <= goal / 2).all()):
            break
        image = product(direction) + ridge * direction
        curvature = (direction * image).sum(0)
        rate = torch.where(curvature > 0, power / curvature, 0.0)
        weights, residual = weights + rate * direction, residual - rate * image
        step = preconditioned(residual)
        before, power = power, (residual * step).sum(0)
        direction = step + torch.where(before > 0, power / before, 0.0) * direction
    residual = targets - product(weights) - ridge * weights
    if not bool((residual.norm(dim=0) <= goal).all()):
        reached = float((residual.norm(dim=0) / targets.norm(dim=0)).nan_to_num().max())
        raise InputValueError(
            f"conjugate gradients reached the residual {reached:.2g} |y|, expected {tolerance:.2g}; pass a larger "
            f"ridge= (now {ridge:.3g}, the largest eigenvalue is {float(values[0]):.3g}), or a larger tolerance="
        )
    return weights


def _nystrom(product: Callable[[Tensor], Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Return vectors (P, k) and values (k,), descending, of an approximation U diag(values) U^T from one product."""
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(size, min(size, RANK), generator=generator, dtype=torch.float64, device="cpu")
    basis = torch.linalg.qr(start)[0]
    image = product(basis)
    # A small shift keeps the Cholesky decomposition of a singular kernel stable.
    small = 1e-6 * float(image.norm()) / len(basis) ** 0.5
    image = image + small * basis
    inner = basis.mT @ image
    factor, failed = torch.linalg.cholesky_ex((inner + inner.mT) / 2)
    if int(failed):
        return basis[:, :1] * 0.0, torch.ones(1, dtype=torch.float64, device="cpu") * float(image.norm())
    roots = torch.linalg.solve_triangular(factor, image.mT, upper=False).mT
    vectors, singular, _ = torch.linalg.svd(roots, full_matrices=False)
    return vectors, (singular.square() - small).clamp_min(0.0)
