"""Names and numbers as they are recorded: safe names of layers, and numbers that the training loop passes."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.record.layout import USER

LONGEST = 80
"""Largest number of characters of a name: two of them must fit into the name of a scalar."""


def safe(name: str) -> str:
    """Return a name with `_` for every character that cannot be recorded; the root module is `root`."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "root"
    plain = re.sub(r"^[.-]", "_", plain)
    plain = re.sub(r"\.$", "_", plain)
    if len(plain) <= LONGEST:
        return plain
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    # the end of a long name identifies the layer better than its beginning
    return f"{mark}_{plain[len(mark) + 1 - LONGEST :]}"


def safe_path(name: str) -> str:
    """Return a name of the user, made safe part by part between slashes."""
    return "/".join(safe(part) for part in name.split("/"))


class Names(dict[str, str]):
    """Layer name -> the unique name under which it is recorded."""

    def __missing__(self, name: str) -> str:
        unique, number, taken = safe(name), 1, set(self.values())
        while unique in taken:
            number += 1
            unique = f"{safe(name)[: LONGEST - 5]}_{number}"
        self[name] = unique
        return unique


class UserNumbers:
    """Numbers of the user. Those of every step are averaged; others are recorded at once.

    Tensors are summed on their device and read only when a line is written.
    """

    def __init__(self) -> None:
        self.taken: set[str] = set()
        """Names under which quantities of the user are recorded."""
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._latest: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        """Add one number to a mean."""
        number = _detached(name, value)
        if name in self._sums:
            self._sums[name] = self._sums[name] + number
            self._counts[name] += 1
        else:
            # A copy: the training loop may change its loss in place.
            self._sums[name] = number.clone() if isinstance(number, Tensor) else number
            self._counts[name] = 1

    def add_step(self, step: int, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Add the numbers of one step to their means; return those that the step before did not have."""
        rare = {}
        for name, value in self.named(numbers).items():
            if self._latest.get(name) == step - 1:
                self.add(name, value)
            else:
                rare[name] = value
            self._latest[name] = step
        return floats(rare)

    def named(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers under the names in which they are recorded."""
        named = {USER + safe_path(name): value for name, value in numbers.items()}
        if taken := sorted(self.taken & named.keys()):
            raise InputValueError(
                f"{taken[0].removeprefix(USER)!r} is passed as a number of a step, but one of your quantities records "
                "a number of that name; rename one of them"
            )
        return named

    def means(self) -> dict[str, float]:
        """Return the mean of each number since the last call."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means


def floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values as floats."""
    return {name: float(_detached(name, value)) for name, value in values.items()}


def _detached(name: str, value: Any) -> Any:
    """Return the number as a float, or as a detached tensor if it is on another device."""
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
