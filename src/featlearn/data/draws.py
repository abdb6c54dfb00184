"""Check the arguments of data sets, and draw their random numbers."""

from typing import Any

import torch

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_tensor


def checked_count(value: Any, name: str) -> int:
    """Return a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(f"{name} is {value!r}, expected a whole number >= 1")
    if value < 1:
        raise InputValueError(f"{name} is {value}, expected a whole number >= 1")
    return value


def checked_generator(generator: Any) -> torch.Generator:
    """Return the generator, or a new one with seed 0. The global generator is never used."""
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise InputTypeError(
            f"generator is {generator!r}, expected a torch.Generator; pass torch.Generator().manual_seed({generator!r})"
            if isinstance(generator, int)
            else f"generator is {type(generator).__name__}, expected a torch.Generator"
        )
    return generator


def standard_normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Draw from N(0, 1) in float64, on the generator's device."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator, device=generator.device)


def checked_spectrum(spectrum: torch.Tensor | None, dimension: int) -> torch.Tensor:
    """Return variances of the coordinates, shape (d,), float64. Ones by default."""
    if spectrum is None:
        return torch.ones(dimension, dtype=torch.float64)
    variances = checked_tensor(spectrum, "spectrum")
    if variances.shape != (dimension,) or not (variances >= 0).all():
        raise InputValueError(
            f"spectrum has shape {tuple(variances.shape)} and minimum {float(variances.amin()):.3g}, expected "
            f"variances >= 0 of shape (d,) = ({dimension},)"
        )
    return variances


def checked_nonnegative(value: Any, name: str) -> float:
    """Return a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise InputTypeError(f"{name} is {value!r}, expected a number >= 0")
    if not 0 <= value < float("inf"):
        raise InputValueError(f"{name} is {value!r}, expected a number >= 0")
    return float(value)
