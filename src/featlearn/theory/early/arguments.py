"""The boundary checks shared by the early-time theory."""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_tensor

_SEED = 7_305_849_120_463


def checked_count(value: Any, name: str, least: int = 1) -> int:
    """A number of things: an integer >= `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputValueError(f"{name}={value!r}, expected an integer >= {least}")
    return value


def checked_inputs(value: Any, name: str = "X") -> Tensor:
    """Rows of inputs (n, d), in double."""
    rows = checked_tensor(value, name)
    if rows.dim() != 2 or 0 in rows.shape:
        raise InputValueError(f"{name} has shape {tuple(rows.shape)}, expected (n, d), one row per sample; flatten it")
    return rows


def checked_vector(value: Any, samples: Tensor, name: str = "y") -> Tensor:
    """One number per row of `samples`, (n,), in double."""
    vector = checked_tensor(value, name).to(samples.device)
    if vector.shape != samples.shape[:1]:
        raise InputValueError(
            f"{name} has shape {tuple(vector.shape)}, expected (n,) = ({len(samples)},): one number per row of X"
        )
    return vector


def checked_symmetric(value: Any, name: str) -> Tensor:
    """A symmetric matrix, in double, with the rounding of its two halves averaged."""
    matrix = checked_tensor(value, name)
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


def checked_generator(value: Any) -> torch.Generator:
    """The generator given, or one that makes the same draws at every call and touches no other."""
    if value is None:
        # not 0 or another seed that data are made with: weights drawn from the numbers of the data are not independent
        return torch.Generator("cpu").manual_seed(_SEED)
    if not isinstance(value, torch.Generator):
        raise InputTypeError(f"generator is {type(value).__name__}, expected a torch.Generator or None")
    return value


def gaussian(*shape: int, generator: torch.Generator, like: Tensor | None = None) -> Tensor:
    """Standard normal numbers in double, on the device of `like`, drawn where the generator lives."""
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64, device=generator.device)
    return numbers if like is None else numbers.to(like.device)
