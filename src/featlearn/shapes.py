"""Checks of kernels and targets at the public interface."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError

# Relative rounding error of a constant minus its mean, in float64.
REMAINDER = 1e-14


def describe(thing: Any) -> str:
    """Return type, shapes and entries of a value in a few words."""
    if isinstance(thing, Tensor):
        return f"a {str(thing.dtype).removeprefix('torch.')} tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, Mapping):
        inside = ", ".join(f"{key}: {describe(value)}" for key, value in thing.items())
        return f"a mapping {{{inside}}}"
    if isinstance(thing, tuple) and type(thing) is tuple:
        return f"a tuple ({', '.join(map(describe, thing))})"
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


def checked_tensor(value: Any, name: str) -> Tensor:
    """Convert a real tensor to float64."""
    if not isinstance(value, Tensor):
        remedy = "convert it with torch.as_tensor"
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            remedy = f"stack them: torch.stack({name})"
        elif isinstance(value, dict):
            remedy = f"choose one of its entries, such as {name}[{next(iter(value), 'name')!r}]"
        elif type(value).__name__ == "StoredKernel":
            remedy = f"this function does not read blocks of a file: read it into memory, {name}[:]"
        raise InputTypeError(f"{name} is {type(value).__name__}, expected a tensor; {remedy}")
    if value.is_complex():
        raise InputTypeError(f"{name} is complex, expected real numbers")
    return value.detach().double()


def checked_finite(value: Any, name: str) -> Tensor:
    """Convert a finite real tensor to float64."""
    numbers = checked_tensor(value, name)
    if numbers.device.type == "meta":
        raise InputValueError(f"{name} is on the meta device, expected a tensor with data")
    count = int((~torch.isfinite(numbers)).sum())
    if count:
        raise InputValueError(
            f"{name} of shape {tuple(numbers.shape)} has {count} entries that are nan or infinite, expected finite "
            "numbers; check whether the run diverged"
        )
    return numbers


def checked_number(value: Any, name: str) -> float:
    """Convert a Python or numpy number, or a tensor with a single entry, to a finite float."""
    try:
        number = math.nan if isinstance(value, str) else float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        error = InputValueError if isinstance(value, float | int | Tensor) else InputTypeError
        raise error(f"{name}={value!r}, expected one finite number")
    return number


def checked_kernel(value: Any, name: str = "K") -> Tensor:
    """Convert a kernel or a stack of kernels, (..., P, P), to float64."""
    kernel = checked_tensor(value, name)
    if kernel.dim() < 2 or kernel.shape[-1] != kernel.shape[-2] or kernel.numel() == 0:
        raise InputValueError(
            f"{name} has shape {tuple(kernel.shape)}, expected a kernel (P, P) or a stack (..., P, P)"
        )
    return kernel


def symmetric(kernel: Tensor, name: str = "K") -> Tensor:
    """Symmetrize kernels (..., P, P); raise unless each is symmetric up to rounding."""
    checked_finite(kernel, name)
    gap, size = (part.abs().amax((-2, -1)) for part in (kernel - kernel.mT, kernel))
    if bool((gap > 1e-4 * size).any()):
        raise InputValueError(
            f"{name} of shape {tuple(kernel.shape)} is not symmetric, expected the kernel of a single probe: "
            "fl.ntk(model, x) without x2"
        )
    return kernel / 2 + kernel.mT / 2


def checked_targets(value: Any, kernel: Any, name: str = "y", columns: int | None = None) -> Tensor:
    """Convert targets (P,) or (P, C) to (P, C), in float64 on the kernel's device; `columns` fixes C."""
    targets = checked_tensor(value, name).to(kernel.device)
    samples = kernel.shape[-1]
    if targets.dim() == 2 and kernel.shape[-4:] == (len(targets), len(targets), *[targets.shape[1]] * 2):
        raise InputValueError(
            f"K has shape {tuple(kernel.shape)}, (P, P, C, C) for all pairs of outputs, expected (..., P, P); measure "
            "it with fl.ntk(outputs='mean') or outputs='each'"
        )
    if targets.dim() not in (1, 2) or len(targets) != samples or (columns is not None and targets.dim() != 2):
        expected = f"(P,) = ({samples},) or (P, C) = ({samples}, C)"
        if columns is not None:
            expected = f"(P, C) = ({samples}, {columns}); pass one-hot targets"
        raise InputValueError(f"{name} has shape {tuple(targets.shape)}, expected {expected}")
    refuse_labels(value, name)
    targets = targets if targets.dim() == 2 else targets[:, None]
    if targets.shape[1] == 0 or (columns is not None and targets.shape[1] != columns):
        raise InputValueError(
            f"{name} has shape {tuple(targets.shape)}, expected (P, C) = ({samples}, {columns or 'C'}): one column per "
            f"{'output' if columns is None else 'kernel'}"
        )
    return targets


def refuse_labels(value: Tensor, name: str) -> None:
    """Raise for integers 0, 1, 2 ... in a single column: they are class labels, not regression targets."""
    is_integer = value.dtype != torch.bool and not value.is_floating_point()
    is_single_column = value.dim() == 1 or (value.dim() == 2 and value.shape[1] == 1)
    if is_integer and is_single_column and value.numel() and int(value.min()) >= 0 and int(value.max()) >= 2:
        raise InputValueError(
            f"{name} are integers from {int(value.min())} to {int(value.max())}, expected targets (P, C): pass one-hot "
            f"rows, torch.nn.functional.one_hot({name}), if they are classes, or {name}.double() if they are numbers"
        )


def checked_probabilities(value: Tensor, targets: Tensor, name: str = "y") -> None:
    """Raise unless rows (P, C) are class probabilities, C > 1, up to rounding in the dtype of `value`."""
    classes = targets.shape[1]
    tolerance = 1e-6 + classes * rounding(value)
    deviation = float((targets.sum(1) - 1).abs().max())
    if classes < 2 or float(targets.min()) < -tolerance or deviation > tolerance:
        raise InputValueError(
            f"{name} has entries from {float(targets.min()):.3g} to {float(targets.max()):.3g} and rows (P, C) of "
            f"{classes} that miss the sum 1 by up to {deviation:.3g}, expected one-hot rows or probabilities of C > 1 "
            "classes for cross-entropy"
        )


def rounding(value: Tensor) -> float:
    """Return the relative rounding error in the dtype of `value`, for example 1.2e-7 for float32."""
    return float(torch.finfo(value.dtype if value.is_floating_point() else torch.float64).eps)


def scaled(values: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Divide values by the largest over some axes, to avoid overflow of squares; also return the largest."""
    largest = values.abs().amax(axes, keepdim=True)
    return values / torch.where(largest == 0, 1.0, largest), largest


def deviations(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Subtract the mean over some axes; values that are constant up to rounding give 0."""
    moved = values - values.mean(axes, keepdim=True)
    return _without_remainder(moved, values, axes)


def centered(kernel: Tensor) -> Tensor:
    """Compute H K H with H = I - 1 1^T / P; 0 for a constant kernel."""
    rows = kernel - kernel.mean(-1, keepdim=True)
    return _without_remainder(rows - rows.mean(-2, keepdim=True), kernel, (-2, -1))


def _without_remainder(differences: Tensor, values: Tensor, axes: tuple[int, ...]) -> Tensor:
    remainder_size, size = (part.abs().amax(axes, keepdim=True) for part in (differences, values))
    return torch.where(remainder_size <= REMAINDER * size, 0.0, differences)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, with nan where the denominator is 0."""
    undefined = torch.full_like(denominator, torch.nan)
    return torch.where(denominator == 0, undefined, numerator / denominator)
