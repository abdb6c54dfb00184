"""The function that linear networks learn, and that all their kernels agree on (Atanasov et al. 2022, App. G)."""

from typing import Any

import torch
from torch import Tensor

from featlearn.theory.arguments import checked_numbers, checked_rows
from featlearn.theory.deep_linear.linear_network import checked_direction, checked_outputs


def minimum_norm(X: Tensor, y: Tensor) -> Tensor:
    """Return the interpolator of least norm, X^T (X X^T)^+ y: what networks with small weights learn.

    See Atanasov et al. 2022, Eq. 70, 73 to 78.

    `X` (P, D), one row per sample; `y` (P,) -> (D,), `y` (P, C) -> (C, D), rows as in nn.Linear. The pseudo-inverse
    where X is rank-deficient, the least-squares solution (of least norm) where y is not a linear function of X.

    Linear networks of any depth reach it from small weights, on any data (Atanasov et al. 2022, App. G.1). So does
    kernel regression with every kernel x^T [A v v^T + 1] x' with v in the span of the data, not only along the solution
    (`spiked_interpolator` with any A): the kernels along training all give the same function.
    """
    rows = checked_rows(X)
    return teacher(rows, checked_outputs(y, rows))


def spiked_interpolator(X: Tensor, y: Tensor, spike: Tensor, amplitude: float) -> Tensor:
    """Kernel regression with K = x^T [A v v^T + 1] x', as weights: M X^T (X M X^T)^+ y.

    See Atanasov et al. 2022, Eq. 71, App. G.

    `spike` (D,) is the unit vector v, `amplitude` is A >= 0; shapes as for `minimum_norm`, which it equals for every v
    in the span of the data, and not for others.
    """
    rows = checked_rows(X)
    targets = checked_outputs(y, rows)
    direction = checked_direction(spike, rows.shape[1], "spike").to(rows.device)
    size = checked_numbers(amplitude, "amplitude", least=0.0)
    # M^(1/2) = 1 + (sqrt(1 + A) - 1) v v^T: the least norm in the coordinates M^(-1/2) w
    stretched = rows + (torch.sqrt(1 + size) - 1) * torch.outer(rows @ direction, direction)
    weights = teacher(stretched, targets)
    along = (torch.sqrt(1 + size) - 1) * (weights @ direction)
    return weights + along[..., None] * direction


def rkhs_norm(weights: Tensor, spike: Tensor, amplitude: Any) -> Tensor:
    """Squared norm w^T [A v v^T + 1]^-1 w = |w|^2 - A / (1 + A) (v . w)^2 (Atanasov et al. 2022, Eq. 72).

    `weights` (..., D), `spike` (D,) the unit vector v, `amplitude` A >= 0, a number or a tensor that broadcasts with
    `weights` less its last axis. Along the solution s beta it is s^2 / (1 + A): the more aligned the kernel, the
    smaller.
    """
    vector = checked_numbers(weights, "weights")
    direction = checked_direction(spike, vector.shape[-1], "spike").to(vector.device)
    size = checked_numbers(amplitude, "amplitude", least=0.0).to(vector.device)
    along = vector @ direction
    across = vector - along[..., None] * direction
    return across.square().sum(-1) + along.square() / (1 + size)


def modes(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weights (C, D) = z diag(s) v, z (C, R), s (R,) descending, v (R, D), singular values of rounding set to 0.

    Kernels of deep networks take roots of them, and the fifth root of 1e-16 is not small.
    """
    z, s, v = torch.linalg.svd(weights, full_matrices=False)
    return z, torch.where(s > 1e-12 * s[0], s, torch.zeros_like(s)), v


def teacher(rows: Tensor, targets: Tensor) -> Tensor:
    """`minimum_norm` of tensors already checked."""
    weights: Tensor = torch.linalg.pinv(rows) @ targets
    return weights.T if targets.dim() == 2 else weights
