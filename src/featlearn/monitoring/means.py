"""Averages of the numbers of every step, without device synchronization."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError


class Means:
    """Sums by name. Tensors are summed on their device and read only when a line is written."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        """Add one number."""
        number = _detached(name, value)
        if name in self._sums:
            self._sums[name] = self._sums[name] + number
            self._counts[name] += 1
        else:
            # A copy: the training loop may change its loss in place.
            self._sums[name] = number.clone() if isinstance(number, Tensor) else number
            self._counts[name] = 1

    def taken(self) -> dict[str, float]:
        """The mean of each number since the last call."""
        found = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return found


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The values as floats."""
    means = Means()
    for name, value in values.items():
        means.add(name, value)
    return means.taken()


def _detached(name: str, value: Any) -> Any:
    """The number as a float, or as a detached tensor if it is on another device."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        if value.device.type == "cpu":
            return value.item()
        number = value.detach().reshape(())
        return number if number.dtype in (torch.float32, torch.float64) else number.float()
    if isinstance(value, Tensor):
        raise InputTypeError(f"{name} is a tensor of shape {tuple(value.shape)}, expected one number; take its mean")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"{name} is {str(value)[:80]!r}, expected one number") from error
