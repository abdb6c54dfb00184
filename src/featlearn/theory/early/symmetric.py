"""The boundary checks shared by the early-time theory."""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite


def checked_symmetric(value: Any, name: str) -> Tensor:
    """Return a symmetric matrix, in double, with the rounding of its two halves averaged."""
    matrix = checked_finite(value, name)
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.numel() == 0:
        raise InputValueError(f"{name} has shape {tuple(matrix.shape)}, expected a square matrix")
    if float((matrix - matrix.T).abs().max()) > 1e-6 * float(matrix.abs().max()):
        raise InputValueError(f"{name} of shape {tuple(matrix.shape)} is not symmetric, expected {name} = {name}^T")
    return (matrix + matrix.T) / 2


def checked_data_matrices(A: Any, B: Any) -> tuple[Tensor, Tensor]:
    """Two symmetric matrices of one size, in double."""
    first, second = checked_symmetric(A, "A"), checked_symmetric(B, "B")
    if first.shape != second.shape:
        raise InputValueError(
            f"A has shape {tuple(first.shape)} and B {tuple(second.shape)}, expected both (d, d): data_matrices(X, y)"
        )
    return first, second.to(first.device)


def gaussian(*shape: int, generator: torch.Generator, like: Tensor | None = None) -> Tensor:
    """Standard normal numbers in double, on the device of `like`, drawn where the generator lives."""
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64, device=generator.device)
    return numbers if like is None else numbers.to(like.device)
