"""Argument checks of the theories: numbers, times, counts, rows, vectors, and generators."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_finite, checked_tensor

Numbers = float | Sequence[float] | NDArray[Any] | Tensor
"""A number, or numbers of any shape."""

_SEED = 7_305_849_120_463


class Bounds(TypedDict, total=False):
    """Bounds on numbers, which must not be nan."""

    above: float
    """all are larger"""
    least: float
    """none is smaller"""
    most: float
    """none is larger"""
    infinite: bool
    """whether infinity is one of them; not by default"""
    hint: str
    """what to do about a wrong one, for the message"""


def checked_numbers(value: Any, name: str, **bounds: Unpack[Bounds]) -> Tensor:
    """Real numbers of any shape, in double; one number has no axes.

    Numbers of Python or numpy, lists of them, arrays and tensors; no truth values, and never nan.
    """
    return _checked(value, name, "numbers", **bounds)


def checked_number(value: Any, name: str, **bounds: Unpack[Bounds]) -> float:
    """One real number, given as for `checked_numbers`; also in axes of length one."""
    numbers = _checked(value, name, "one number", **bounds)
    if numbers.numel() != 1:
        raise InputValueError(f"{name} has shape {tuple(numbers.shape)}, {_expected('one number', **bounds)}")
    return float(numbers)


def checked_times(value: Any, name: str = "times", *, infinite: bool = False) -> Tensor:
    """Times >= 0 of any shape; infinity, the end of training, for theories that have one."""
    return checked_numbers(value, name, least=0.0, infinite=infinite)


def checked_time_axis(value: Any, name: str = "times", *, infinite: bool = False, increasing: bool = False) -> Tensor:
    """Times (T,) >= 0, T >= 1; one number is one time."""
    times = checked_times(value, name, infinite=infinite)
    if times.dim() > 1 or times.numel() == 0:
        raise InputValueError(f"{name} of shape {tuple(times.shape)}, expected one time or (T,) with T >= 1")
    times = times.reshape(-1)
    if increasing and bool((times.diff() < 0).any()):
        raise InputValueError(f"{name} of shape {tuple(times.shape)} go back, expected increasing order; sort them")
    return times


def checked_count(value: Any, name: str, least: int = 1, most: int | None = None, *, hint: str = "") -> int:
    """Return a number of things: an integer of Python or numpy from `least` to `most`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        range_text = f">= {least}" if most is None else f"from {least} to {most}"
        raise InputValueError(f"{name}={value!r}, expected an integer {range_text}{hint and f'; {hint}'}")
    return int(value)


def checked_rows(value: Any, name: str = "X", columns: int | None = None) -> Tensor:
    """Return a finite matrix in double, one row per sample; `columns` fixes its second axis."""
    rows = checked_finite(value, name)
    if rows.dim() != 2 or 0 in rows.shape or (columns is not None and rows.shape[1] != columns):
        shape = "(samples, features)" if columns is None else f"(samples, {columns})"
        raise InputValueError(
            f"{name} has shape {tuple(rows.shape)}, expected {shape}, one row per sample; transpose or flatten it"
        )
    return rows


def checked_vector(value: Any, name: str, length: int | None = None) -> Tensor:
    """Return a finite vector in double, of the given length."""
    vector = checked_finite(value, name)
    if vector.dim() != 1 or len(vector) == 0 or (length is not None and len(vector) != length):
        shape = "one axis" if length is None else f"({length},)"
        raise InputValueError(f"{name} has shape {tuple(vector.shape)}, expected {shape}; one vector at a time")
    return vector


def checked_generator(value: Any, seed: int = _SEED) -> torch.Generator:
    """Return the generator given, or one that makes the same draws at every call and touches no other.

    The default seed is not 0 or another that data are made with: weights drawn from the numbers of the data are not
    independent of them.
    """
    if value is None:
        return torch.Generator("cpu").manual_seed(seed)
    if not isinstance(value, torch.Generator):
        raise InputTypeError(
            f"generator is {type(value).__name__}, expected a torch.Generator or None; torch.Generator().manual_seed(0)"
        )
    return value


def _checked(value: Any, name: str, kind: str, **bounds: Unpack[Bounds]) -> Tensor:
    tensor = _tensor(value)
    if tensor is None:
        way = "; pass one, a list, an array or a tensor of them" if kind == "numbers" else ""
        raise InputTypeError(f"{name} is {type(value).__name__}, {_expected(kind, **bounds)}{way}")
    numbers = checked_tensor(tensor, name)
    wrong = numbers.isnan() if bounds.get("infinite") else ~numbers.isfinite()
    if (above := bounds.get("above")) is not None:
        wrong |= numbers <= above
    if (least := bounds.get("least")) is not None:
        wrong |= numbers < least
    if (most := bounds.get("most")) is not None:
        wrong |= numbers > most
    if bool(wrong.any()):
        first = float(numbers[wrong][0])
        shown = f"{name}={first}" if numbers.numel() == 1 else f"{name} of shape {tuple(numbers.shape)} has {first}"
        raise InputValueError(f"{shown}, {_expected(kind, **bounds)}")
    return numbers


def _tensor(value: Any) -> Tensor | None:
    """A tensor of what is numbers, None of what is not; lists may nest, and hold numbers of all kinds."""
    if isinstance(value, Tensor):
        return None if value.dtype == torch.bool else value
    if isinstance(value, numpy.ndarray):
        return torch.tensor(value.astype(numpy.float64)) if value.dtype.kind in "iuf" else None
    if _is_number(value):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    if all(map(_is_number, value)):
        return torch.tensor([float(item) for item in value], dtype=torch.float64)
    parts = [_tensor(item) for item in value]
    tensors = [part.double() for part in parts if part is not None]
    equal_shapes = len(tensors) == len(parts) and len({part.shape for part in tensors}) == 1
    return torch.stack([part.to(tensors[0].device) for part in tensors]) if equal_shapes else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _expected(kind: str, **bounds: Unpack[Bounds]) -> str:
    signs = {"above": ">", "least": ">=", "most": "<="}
    limits = [f"{sign} {bound:g}" for key, sign in signs.items() if isinstance(bound := bounds.get(key), float | int)]
    kind_text = kind if bounds.get("infinite") else kind.replace("number", "finite number")
    hint = bounds.get("hint", "")
    return f"expected {' '.join([kind_text, ' and '.join(limits)]).strip()}{hint and f'; {hint}'}"
