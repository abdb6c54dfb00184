"""The boundary checks shared by optimal feature evolution."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, checked_kernel, checked_targets
from featlearn.theory.arguments import checked_number


@dataclass(frozen=True)
class KernelProblem:
    """A kernel in its eigenbasis and a task."""

    kernel: Tensor
    """(P, P), symmetric."""
    targets: Tensor
    """(P, C)"""
    residual: Tensor
    """(P, C): Delta_0 = f0 - y."""
    single: bool
    """Whether y has no output axis."""
    values: Tensor
    """(P,), ascending; what rounding makes of zero is zero."""
    vectors: Tensor
    """(P, P), columns in the same order."""


def checked_problem(K0: Any, y: Any, f0: Any = None, rank_tolerance: Any = None) -> KernelProblem:
    """One positive semi-definite kernel (P, P) with targets, and outputs to start from, (P,) or (P, C)."""
    kernel = checked_kernel(K0, "K0")
    if kernel.dim() != 2:
        raise InputValueError(f"K0 has shape {tuple(kernel.shape)}, expected one kernel (P, P); loop over a stack")
    targets = checked_targets(y, kernel)
    start = torch.zeros_like(targets) if f0 is None else checked_targets(f0, kernel, "f0")
    if f0 is not None and tuple(f0.shape) != tuple(y.shape):
        raise InputValueError(f"f0 has shape {tuple(f0.shape)}, expected {tuple(y.shape)}, as y has")
    for name, part in (("K0", kernel), ("y", targets), ("f0", start)):
        checked_finite(part, name)
    values, vectors = _eigenbasis(kernel, rank_tolerance)
    return KernelProblem((kernel + kernel.T) / 2, targets, start - targets, y.dim() == 1, values, vectors)


def checked_task(K0: Any, y: Any) -> KernelProblem:
    """Return a kernel and one target (P,) that is not zero."""
    problem = checked_problem(K0, y)
    if not problem.single:
        raise InputValueError(f"y has shape {tuple(y.shape)}, expected (P,): one column at a time")
    if not bool((problem.targets != 0).any()):
        raise InputValueError("y is zero everywhere, expected a task")
    return problem


def _eigenbasis(kernel: Tensor, rank_tolerance: Any) -> tuple[Tensor, Tensor]:
    size = float(kernel.abs().max())
    if float((kernel - kernel.T).abs().max()) > 1e-6 * size:
        raise InputValueError(f"K0 of shape {tuple(kernel.shape)} is not symmetric, expected the kernel of one probe")
    values, vectors = torch.linalg.eigh((kernel + kernel.T) / 2)
    largest = float(values.abs().max())
    if float(values.min()) < -1e-6 * largest:
        raise InputValueError(
            f"K0 has the eigenvalue {float(values.min()):.3g} beside {largest:.3g}, expected a positive semi-definite "
            "kernel, as K0 = Psi^T Psi is"
        )
    default = len(kernel) * torch.finfo(torch.float64).eps
    share = default if rank_tolerance is None else checked_number(rank_tolerance, "rank_tolerance", least=0.0)
    return torch.where(values <= share * largest, 0.0, values), vectors
