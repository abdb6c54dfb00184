"""Kernel-task alignment, by output and between outputs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.correlation import Kind
from featlearn.linalg.correlation import correlation as correlation_over
from featlearn.linalg.stored_kernel import StoredKernel, overlap_and_norm, stored_square
from featlearn.shapes import centered, checked_kernel, checked_targets, checked_tensor, deviations, ratio, scaled


def alignment(K: Tensor | StoredKernel, y: Tensor) -> Tensor:
    """Compute the kernel-task alignment A = y^T K y / (|K|_F |y|^2), uncentered.

    See Shan & Bordelon 2021a, Eq. 4; 2021b, Eq. 3.

    For y of shape (P, C) the task kernel is Y Y^T: A = <K, Y Y^T> / (|K|_F |Y Y^T|_F), which the papers do not define.
    A is in [0, 1] for a positive kernel, and 1 exactly if K is proportional to y y^T. A(I) = 1 / sqrt(P) for a single
    target. nan if K or y is zero.

    For one-hot targets and ReLU kernels this value is dominated by the constant mode: use `centered_alignment`.
    """
    if isinstance(K, StoredKernel):
        return _stored_alignment(K, checked_targets(y, stored_square(K)))
    kernel = checked_kernel(K)
    return _alignment(kernel, checked_targets(y, kernel))


def centered_alignment(K: Tensor | StoredKernel, y: Tensor) -> Tensor:
    """Compute `alignment` of H K H with H y, with H = I - 1 1^T / P (Cortes et al. 2012). nan for a constant y or K."""
    if isinstance(K, StoredKernel):
        return _stored_alignment(K, deviations(checked_targets(y, stored_square(K)), (0,)), centered=True)
    kernel = checked_kernel(K)
    return _alignment(centered(kernel), deviations(checked_targets(y, kernel), (0,)))


def _alignment(kernel: Tensor, targets: Tensor) -> Tensor:
    kernel, targets = scaled(kernel, (-2, -1))[0], scaled(targets, (0, 1))[0]
    overlap = (targets * (kernel @ targets)).sum((-2, -1))  # trace of Y^T K Y
    task = (targets.T @ targets).norm()  # |Y Y^T|_F, from the smaller of the two Gram matrices
    return ratio(overlap, torch.linalg.matrix_norm(kernel) * task)


def _stored_alignment(kernel: StoredKernel, targets: Tensor, *, centered: bool = False) -> Tensor:
    overlap, norm = overlap_and_norm(kernel, targets, centered=centered)
    return ratio(overlap, norm * (targets.T @ targets).norm())


def class_alignment(K_each: Tensor, Y: Tensor, centered: bool = False) -> Tensor:
    """Compute A(K^cc, y^d) for every kernel c (rows) and every target d (columns): (..., C, C).

    `K_each` is (..., C, P, P), as returned by `fl.ntk(outputs="each")`, and `Y` is (P, C). `centered` centers both.
    """
    kernels, targets = _each(K_each, Y, centered)
    kernels, targets = scaled(kernels, (-2, -1))[0], scaled(targets, (0,))[0]
    overlap = (targets * (kernels @ targets)).sum(-2)
    return ratio(overlap, torch.linalg.matrix_norm(kernels)[..., None] * targets.square().sum(0))


def specialization(K_each: Tensor, Y: Tensor, centered: bool = False) -> Tensor:
    """Compute the kernel specialization matrix, A(K^cc, y^d) / mean over c of A(K^cc, y^d).

    See Shan & Bordelon 2021a, Eq. 16; 2021b, Eq. 9.

    Rows are kernels, columns are targets. Every column averages to 1. Equal kernels give all ones.
    """
    aligned = class_alignment(K_each, Y, centered)
    return ratio(aligned, aligned.mean(-2, keepdim=True).expand_as(aligned))


def _each(K_each: Any, Y: Any, center: bool) -> tuple[Tensor, Tensor]:
    kernels = checked_kernel(K_each, "K_each")
    if kernels.dim() < 3:
        raise InputValueError(
            f"K_each has shape {tuple(kernels.shape)}, expected (..., C, P, P); measure it with fl.ntk(outputs='each')"
        )
    targets = checked_targets(Y, kernels, "Y", columns=kernels.shape[-3])
    return (centered(kernels), deviations(targets, (0,))) if center else (kernels, targets)


class Interference(NamedTuple):
    """Coupling between outputs, and the spread of kernel norms over outputs."""

    off_diagonal_share: Tensor
    """Sum over c != c' of |K^cc'|_F^2, divided by the sum over all pairs; 0 if outputs do not interfere."""
    diagonal_spread: Tensor
    """Standard deviation over c of |K^cc|_F, divided by its mean."""


def interference(K_full: Tensor) -> Interference:
    """Measure interference between outputs, in a full kernel (..., P, P2, C, C) from `fl.ntk(outputs="full")`."""
    full = checked_tensor(K_full, "K_full")
    if full.dim() < 4 or full.shape[-1] != full.shape[-2] or full.numel() == 0:
        raise InputValueError(
            f"K_full has shape {tuple(full.shape)}, expected (..., P, P2, C, C); measure it with fl.ntk(outputs='full')"
        )
    squares = scaled(full, (-4, -3, -2, -1))[0].square().sum((-4, -3))
    diagonal = squares.diagonal(dim1=-2, dim2=-1)
    total = squares.sum((-2, -1))
    norms = diagonal.sqrt()
    spread = ratio(norms.std(-1, correction=0), norms.mean(-1))
    return Interference(ratio(total - diagonal.sum(-1), total), spread)


def correlation(A: Tensor, B: Tensor, kind: Kind = "cosine") -> Tensor:
    """Compute the cosine <A, B> / (|A| |B|) of two arrays of equal shape, or Pearson's correlation of their entries.

    nan if an array is zero or, for Pearson, constant. The result is on the device of A.
    """
    a, b = checked_tensor(A, "A"), checked_tensor(B, "B")
    if a.shape != b.shape or a.numel() == 0:
        raise InputValueError(f"A has shape {tuple(a.shape)} and B {tuple(b.shape)}, expected equal, non-empty shapes")
    return correlation_over(a.flatten(), b.flatten(), kind, (-1,))
