"""The boundary check of kernels and targets: what may come in, and that it fits together."""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError


def checked_tensor(value: Any, name: str) -> Tensor:
    """A tensor of real numbers, in double."""
    if not isinstance(value, Tensor):
        raise InputTypeError(f"{name} is {type(value).__name__}, expected a tensor; convert it with torch.as_tensor")
    if value.is_complex():
        raise InputTypeError(f"{name} is complex, expected real numbers")
    return value.detach().double()


def checked_kernel(value: Any, name: str = "K") -> Tensor:
    """A square kernel or a stack of them, (..., P, P), in double."""
    kernel = checked_tensor(value, name)
    if kernel.dim() < 2 or kernel.shape[-1] != kernel.shape[-2] or kernel.shape[-1] == 0:
        raise InputValueError(f"{name} has shape {tuple(kernel.shape)}, expected (..., P, P), one kernel or a stack")
    return kernel


def checked_targets(value: Any, kernel: Tensor, name: str = "y", columns: int | None = None) -> Tensor:
    """Targets (P,) or (P, C) as (P, C), in double, on the kernel's device; `columns` fixes C."""
    targets = checked_tensor(value, name).to(kernel.device)
    samples = kernel.shape[-1]
    if targets.dim() not in (1, 2) or len(targets) != samples or (columns is not None and targets.dim() != 2):
        wanted = f"(P,) = ({samples},) or (P, C) = ({samples}, C)"
        if columns is not None:
            wanted = f"(P, C) = ({samples}, {columns}); pass one-hot targets"
        raise InputValueError(f"{name} has shape {tuple(targets.shape)}, expected {wanted}")
    targets = targets if targets.dim() == 2 else targets[:, None]
    if columns is not None and targets.shape[1] != columns:
        raise InputValueError(
            f"{name} has shape {tuple(targets.shape)}, expected (P, C) = ({samples}, {columns}): one column per kernel"
        )
    return targets


def centered(kernel: Tensor) -> Tensor:
    """H K H with H = I - 1 1^T / P."""
    rows = kernel - kernel.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, nan where the denominator vanishes."""
    undefined = torch.full_like(denominator, torch.nan)
    return torch.where(denominator == 0, undefined, numerator / denominator)
