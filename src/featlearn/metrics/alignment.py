"""How a kernel is aligned with a task, output by output and between outputs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.linalg.correlation import Kind
from featlearn.linalg.correlation import correlation as correlation_over
from featlearn.shapes import centered, checked_kernel, checked_targets, checked_tensor, deviations, ratio, scaled


def alignment(K: Tensor, y: Tensor) -> Tensor:
    """Kernel-task alignment A = y^T K y / (|K|_F |y|^2), raw (Shan & Bordelon 2021a, Eq. 4; 2021b, Eq. 3).

    For y of shape (P, C) the task kernel is Y Y^T: A = <K, Y Y^T> / (|K|_F |Y Y^T|_F), which the papers do not define.
    In [0, 1] for a positive kernel; 1 exactly where K is proportional to y y^T; A(I) = 1 / sqrt(P) for one
    target. nan where K or y vanishes.

    On one-hot targets and ReLU kernels the raw value measures mostly the constant mode; see `centered_alignment`.
    """
    kernel = checked_kernel(K)
    return _alignment(kernel, checked_targets(y, kernel))


def centered_alignment(K: Tensor, y: Tensor) -> Tensor:
    """`alignment` of H K H with H y, both centered, H = I - 1 1^T / P (Cortes et al.). nan for a constant y or K."""
    kernel = checked_kernel(K)
    return _alignment(centered(kernel), deviations(checked_targets(y, kernel), (0,)))


def _alignment(kernel: Tensor, targets: Tensor) -> Tensor:
    kernel, targets = scaled(kernel, (-2, -1))[0], scaled(targets, (0, 1))[0]
    overlap = (targets * (kernel @ targets)).sum((-2, -1))  # trace of Y^T K Y
    task = (targets.T @ targets).norm()  # |Y Y^T|_F, from the smaller of the two Gram matrices
    return ratio(overlap, torch.linalg.matrix_norm(kernel) * task)


def class_alignment(K_each: Tensor, Y: Tensor, centered: bool = False) -> Tensor:
    """A(K^cc, y^d) for every kernel c (rows) and every target d (columns): (..., C, C).

    `K_each` is (..., C, P, P) as `fl.ntk(outputs="each")` gives it, `Y` is (P, C). `centered` centers both.
    """
    kernels, targets = _each(K_each, Y, centered)
    kernels, targets = scaled(kernels, (-2, -1))[0], scaled(targets, (0,))[0]
    overlap = (targets * (kernels @ targets)).sum(-2)
    return ratio(overlap, torch.linalg.matrix_norm(kernels)[..., None] * targets.square().sum(0))


def specialization(K_each: Tensor, Y: Tensor, centered: bool = False) -> Tensor:
    """Kernel specialization matrix: A(K^cc, y^d) / mean over c of A(K^cc, y^d).

    See Shan & Bordelon 2021a, Eq. 16; 2021b, Eq. 9.

    Rows are kernels, columns are targets; every column averages to 1. All ones where the kernels are equal.
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
    """How much outputs share a kernel, and how much their own kernels differ in size."""

    off_diagonal_share: Tensor
    """sum over c != c' of |K^cc'|_F^2, as a share of the sum over all pairs: 0 where outputs do not interfere."""
    diagonal_spread: Tensor
    """Standard deviation over c of |K^cc|_F, divided by its mean."""


def interference(K_full: Tensor) -> Interference:
    """Interference between outputs in a full kernel (..., P, P2, C, C) as `fl.ntk(outputs="full")` gives it."""
    full = checked_tensor(K_full, "K_full")
    if full.dim() < 4 or full.shape[-1] != full.shape[-2] or full.numel() == 0:
        raise InputValueError(
            f"K_full has shape {tuple(full.shape)}, expected (..., P, P2, C, C); measure it with fl.ntk(outputs='full')"
        )
    squares = scaled(full, (-4, -3, -2, -1))[0].square().sum((-4, -3))
    own = squares.diagonal(dim1=-2, dim2=-1)
    total = squares.sum((-2, -1))
    sizes = own.sqrt()
    spread = ratio(sizes.std(-1, correction=0), sizes.mean(-1))
    return Interference(ratio(total - own.sum(-1), total), spread)


def correlation(A: Tensor, B: Tensor, kind: Kind = "cosine") -> Tensor:
    """Cosine <A, B> / (|A| |B|) of two arrays of equal shape, or Pearson's correlation of their entries.

    nan where an array vanishes, or for Pearson is constant. On the device of A.
    """
    a, b = checked_tensor(A, "A"), checked_tensor(B, "B")
    if a.shape != b.shape or a.numel() == 0:
        raise InputValueError(f"A has shape {tuple(a.shape)} and B {tuple(b.shape)}, expected equal shapes, not empty")
    return correlation_over(a.flatten(), b.flatten(), kind, (-1,))
