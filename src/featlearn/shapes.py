"""The boundary check of kernels and targets: what may come in, and that it fits together."""

import math
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError

# What is left of a constant after its mean is taken off, relative to the constant: the rounding of sums in double.
REMAINDER = 1e-14


def checked_tensor(value: Any, name: str) -> Tensor:
    """A tensor of real numbers, in double."""
    if not isinstance(value, Tensor):
        remedy = "convert it with torch.as_tensor"
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            remedy = f"stack them: torch.stack({name})"
        elif isinstance(value, dict):
            remedy = f"choose one of its entries, {name}[{next(iter(value), 'name')!r}] for example"
        raise InputTypeError(f"{name} is {type(value).__name__}, expected a tensor; {remedy}")
    if value.is_complex():
        raise InputTypeError(f"{name} is complex, expected real numbers")
    return value.detach().double()


def checked_finite(value: Any, name: str) -> Tensor:
    """A tensor of real numbers without nan and infinity, in double."""
    numbers = checked_tensor(value, name)
    if numbers.device.type == "meta":
        raise InputValueError(f"{name} is on the meta device and holds no numbers, expected a tensor that does")
    wrong = int((~torch.isfinite(numbers)).sum())
    if wrong:
        raise InputValueError(
            f"{name} of shape {tuple(numbers.shape)} has {wrong} entries that are nan or infinite, expected finite "
            "numbers; find where they come from, a run that diverged for example"
        )
    return numbers


def checked_number(value: Any, name: str) -> float:
    """One finite number: of Python, of numpy, or a tensor with one entry on any device."""
    try:
        number = math.nan if isinstance(value, str) else float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        error = InputValueError if isinstance(value, float | int | Tensor) else InputTypeError
        raise error(f"{name}={value!r}, expected one finite number")
    return number


def checked_kernel(value: Any, name: str = "K") -> Tensor:
    """A square kernel or a stack of them, (..., P, P), in double."""
    kernel = checked_tensor(value, name)
    if kernel.dim() < 2 or kernel.shape[-1] != kernel.shape[-2] or kernel.numel() == 0:
        raise InputValueError(f"{name} has shape {tuple(kernel.shape)}, expected (..., P, P), one kernel or a stack")
    return kernel


def symmetric(kernel: Tensor, name: str = "K") -> Tensor:
    """Kernels (..., P, P) with the rounding of their two halves averaged; each must be symmetric, by its own size."""
    checked_finite(kernel, name)
    gap, size = (part.abs().amax((-2, -1)) for part in (kernel - kernel.mT, kernel))
    if bool((gap > 1e-4 * size).any()):
        raise InputValueError(
            f"{name} of shape {tuple(kernel.shape)} is not symmetric, expected the kernel of one probe: "
            "fl.ntk(model, x) without x2"
        )
    return kernel / 2 + kernel.mT / 2


def checked_targets(value: Any, kernel: Tensor, name: str = "y", columns: int | None = None) -> Tensor:
    """Targets (P,) or (P, C) as (P, C), in double, on the kernel's device; `columns` fixes C."""
    targets = checked_tensor(value, name).to(kernel.device)
    samples = kernel.shape[-1]
    if targets.dim() == 2 and kernel.shape[-4:] == (len(targets), len(targets), *[targets.shape[1]] * 2):
        raise InputValueError(
            f"K has shape {tuple(kernel.shape)}, (P, P, C, C): every pair of outputs; expected (..., P, P): measure it "
            "with fl.ntk(outputs='mean') or outputs='each'"
        )
    if targets.dim() not in (1, 2) or len(targets) != samples or (columns is not None and targets.dim() != 2):
        wanted = f"(P,) = ({samples},) or (P, C) = ({samples}, C)"
        if columns is not None:
            wanted = f"(P, C) = ({samples}, {columns}); pass one-hot targets"
        raise InputValueError(f"{name} has shape {tuple(targets.shape)}, expected {wanted}")
    refuse_labels(value, name)
    targets = targets if targets.dim() == 2 else targets[:, None]
    if targets.shape[1] == 0 or (columns is not None and targets.shape[1] != columns):
        raise InputValueError(
            f"{name} has shape {tuple(targets.shape)}, expected (P, C) = ({samples}, {columns or 'C'}): one column per "
            f"{'output' if columns is None else 'kernel'}"
        )
    return targets


def refuse_labels(value: Tensor, name: str) -> None:
    """Integers 0, 1, 2 ... in one column are the names of classes, not numbers to be predicted."""
    counted = value.dtype != torch.bool and not value.is_floating_point()
    one_column = value.dim() == 1 or (value.dim() == 2 and value.shape[1] == 1)
    if counted and one_column and value.numel() and int(value.min()) >= 0 and int(value.max()) >= 2:
        raise InputValueError(
            f"{name} are integers from {int(value.min())} to {int(value.max())}, expected targets (P, C): pass one-hot "
            f"rows, torch.nn.functional.one_hot({name}), if they are classes, or {name}.double() if they are numbers"
        )


def checked_probabilities(value: Tensor, targets: Tensor, name: str = "y") -> None:
    """Rows (P, C) of class probabilities, C > 1, up to the rounding of the format in which `value` came."""
    classes = targets.shape[1]
    near = 1e-6 + classes * rounding(value)
    off = float((targets.sum(1) - 1).abs().max())
    if classes < 2 or float(targets.min()) < -near or off > near:
        raise InputValueError(
            f"{name} has entries from {float(targets.min()):.3g} to {float(targets.max()):.3g} and rows (P, C) of "
            f"{classes} that miss the sum 1 by up to {off:.3g}, expected one-hot rows or probabilities of C > 1 "
            "classes for cross-entropy"
        )


def rounding(value: Tensor) -> float:
    """Relative rounding of the numbers as they were given: 1.2e-7 in float32, whatever they are computed in later."""
    return float(torch.finfo(value.dtype if value.is_floating_point() else torch.float64).eps)


def scaled(values: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Values divided by the largest over some axes, whose squares neither overflow nor vanish, and that largest one."""
    largest = values.abs().amax(axes, keepdim=True)
    return values / torch.where(largest == 0, 1.0, largest), largest


def deviations(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Values less their mean over some axes; 0 where the values are constant, up to rounding."""
    moved = values - values.mean(axes, keepdim=True)
    return _without_remainder(moved, values, axes)


def centered(kernel: Tensor) -> Tensor:
    """H K H with H = I - 1 1^T / P; 0 for a constant kernel."""
    rows = kernel - kernel.mean(-1, keepdim=True)
    return _without_remainder(rows - rows.mean(-2, keepdim=True), kernel, (-2, -1))


def _without_remainder(moved: Tensor, values: Tensor, axes: tuple[int, ...]) -> Tensor:
    left, size = (part.abs().amax(axes, keepdim=True) for part in (moved, values))
    return torch.where(left <= REMAINDER * size, 0.0, moved)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, nan where the denominator vanishes."""
    undefined = torch.full_like(denominator, torch.nan)
    return torch.where(denominator == 0, undefined, numerator / denominator)
