"""Kernels of balanced linear networks: along training and at its end.

See Atanasov et al. 2022, Sec. 4, App. E, H; Shan & Bordelon 2021b, Sec. 5.

Small weights become balanced: W^l W^lT = W^(l+1)T W^(l+1). With one output all layers are then rank one,
W^l = u r_(l+1) r_l^T, and the tangent kernel is x^T M x' with M = u^(2L-2) [(L-1) r_1 r_1^T + 1]. L is the number of
weight matrices (Atanasov et al. 2022); Shan & Bordelon 2021b count L - 1 hidden layers. X is (P, D), one row per
sample.
"""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.arguments import checked_count, checked_numbers, checked_rows
from featlearn.theory.deep_linear.linear_network import checked_depth, checked_direction, checked_outputs
from featlearn.theory.deep_linear.minimum_norm import modes, teacher


def balanced_ntk(X: Tensor, beta: Tensor, c: Any, weight_layers: int, *, X2: Tensor | None = None) -> Tensor:
    """NTK of a balanced network of strength c along beta: u^(2L-2) x^T [(L-1) beta beta^T + 1] x', u^L = c.

    See Atanasov et al. 2022, Eq. 10, 58; Shan & Bordelon 2021b, Eq. 11, 23 to 25.

    `X` (P, D), `X2` (P2, D), by default X; `beta` (D,) a unit vector; `c` a number or a tensor, for example
    `strength(times, ...)`. Returns (..., P, P2), the first axes those of c.

    Errata: Atanasov et al. 2022, Eq. 58 has (L-1) 1 + r r^T; Shan & Bordelon 2021b, Eq. 11, 23-25 have u^(2L-2) for L
    *hidden* layers, where it is u^(2L).
    """
    depth = checked_depth(weight_layers)
    left = checked_rows(X)
    right = left if X2 is None else checked_rows(X2, "X2", left.shape[1]).to(left.device)
    direction = checked_direction(beta, left.shape[1]).to(left.device)
    size = checked_numbers(c, "c").to(left.device).abs() ** (2 - 2 / depth)
    kernel = (depth - 1) * torch.outer(left @ direction, right @ direction) + left @ right.T
    return size[..., None, None] * kernel


def final_ntk(
    X: Tensor, y: Tensor, weight_layers: int, *, X1: Tensor | None = None, X2: Tensor | None = None
) -> Tensor:
    """NTK at the end of training from small weights: s^(2-2/L) x^T [(L-1) beta beta^T + 1] x'.

    See Atanasov et al. 2022, Eq. 63 (corrected); Shan & Bordelon 2021b, Eq. 12.

    `X` (P, D) and `y` (P,) or (P, C) are the training set; s beta = `minimum_norm(X, y)`, on any data. The kernel is
    that of `X1` with `X2`, by default of the training inputs: (P1, P2), or (P1, P2, C, C) for y (P, C), axes as
    `fl.ntk(outputs="full")` (`balanced_subkernels`).

    On the training set and for y a linear function of X it is s^(2-2/L) [(L-1)/s^2 y y^T + X X^T].

    Errata: Atanasov et al. 2022, Eq. 63 has s^(2L-2); Shan & Bordelon 2021b, Eq. 12 and Atanasov et al. 2022, Fig. E.3
    have L y y^T + K0, without 1/s^2.
    """
    depth = checked_depth(weight_layers)
    rows = checked_rows(X)
    weights = teacher(rows, checked_outputs(y, rows))
    left = rows if X1 is None else checked_rows(X1, "X1", rows.shape[1]).to(rows.device)
    right = left if X2 is None else checked_rows(X2, "X2", rows.shape[1]).to(rows.device)
    if weights.dim() == 2:
        return torch.einsum("ia,cdab,jb->ijcd", left, balanced_subkernels(weights, depth), right)
    size = weights.norm()
    direction = weights if size == 0 else weights / size
    return balanced_ntk(left, direction, size, depth, X2=right) if size > 0 else size * (left @ right.T)


def balanced_subkernels(weights: Tensor, weight_layers: int) -> Tensor:
    """M^cc' of the NTK K^cc' = x^T M^cc' x' of a balanced network with C outputs.

    See Atanasov et al. 2022, Eq. 79 (corrected).

    `weights` (C, D) is the product of the layers, beta = sum_a s_a z_a v_a^T; the result (C, C, D, D) is

        M^cc' = sum_l [(beta beta^T)^((L-l)/L)]_cc' (beta^T beta)^((l-1)/L),

    with the identity 1_D in place of the second factor for l = 1, and 1_C of the first for l = L. So the kernel is of
    rank C *plus* an isotropic part.

    Erratum: in the print also the l = 1 term has sum_b r_1 r_1^T, and the outer vectors are r_L (they are r_(L+1)).
    """
    depth = checked_depth(weight_layers)
    matrix = checked_rows(weights, "weights")
    outputs, inputs = matrix.shape
    z, s, v = modes(matrix)
    total = torch.zeros(outputs, outputs, inputs, inputs, dtype=matrix.dtype, device=matrix.device)
    for layer in range(1, depth + 1):
        after, before = (depth - layer) / depth, (layer - 1) / depth
        left = _eye(outputs, matrix) if layer == depth else (z * s ** (2 * after)) @ z.T
        right = _eye(inputs, matrix) if layer == 1 else (v.T * s ** (2 * before)) @ v
        total += left[:, :, None, None] * right
    return total


def final_nngp(X: Tensor, y: Tensor, layer: int, weight_layers: int) -> Tensor:
    """Gram matrix (P, P) of a layer's outputs at the end of training: X [beta^T beta]^(l/L) X^T.

    See Atanasov et al. 2022, Eq. 80.

    `layer` 0 is the input, X X^T; `weight_layers` is the output. For one output (Atanasov et al. 2022, Eq. 64) it is
    s^(2l/L) X beta beta^T X^T, and s^(2l/L - 2) y y^T where y is a linear function of X. Shapes as for `final_ntk`.

    Errata: Eq. 64 on the training set is printed (y y^T)^(l/L), right only for |X beta| = 1; the text to Eq. 80 takes
    X X^T from the formula for l = 0, which gives a projector of rank C: layer 0 is a case of its own.
    """
    depth = checked_depth(weight_layers)
    layer = checked_count(layer, "layer", 0, depth, hint="0 is the input, weight_layers the output")
    rows = checked_rows(X)
    weights = teacher(rows, checked_outputs(y, rows))
    if layer == 0:
        return rows @ rows.T
    _, s, v = modes(weights.reshape(-1, rows.shape[1]))
    features: Tensor = (rows @ v.T) * s ** (layer / depth)
    return features @ features.T


def feature_rate(X: Tensor, y: Tensor, weight_layers: int, kernel_scale: Any = 1.0) -> Tensor:
    """The OFE feature rate gamma that would end at the same kernel, up to scale: k0 (L-1) / s^2 for K0 = k0 X X^T.

    `kernel_scale` is k0 (a number or a tensor); y (P,). `theory.ofe` adds gamma y y^T to K0; `final_ntk` is
    proportional to K0 + gamma y y^T. inf for y = 0. The final kernel is that of Atanasov et al. 2022, Sec. 4; OFE is
    Shan & Bordelon 2021b, Sec. 4.1.
    """
    depth = checked_depth(weight_layers)
    rows = checked_rows(X)
    targets = checked_outputs(y, rows)
    if targets.dim() != 1:
        raise InputValueError(f"y has shape {tuple(targets.shape)}, expected (P,): one output, one rate")
    size = teacher(rows, targets).square().sum()
    return checked_numbers(kernel_scale, "kernel_scale", above=0.0).to(rows.device) * (depth - 1) / size


def _eye(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)
