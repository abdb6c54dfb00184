"""Deferred assertions, evaluated in one device sync."""

import math
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from featlearn.torch_internals import norms


class DeferredChecks:
    """Tests of numbers that a device may not have computed yet."""

    def __init__(self) -> None:
        self._expected: list[tuple[Callable[..., bool], tuple[Tensor, ...]]] = []
        self._sizes: list[tuple[Callable[..., bool], Tensor]] = []
        """Tensors on a GPU: one kernel launch serves all."""
        self._failed = False

    def expect(self, test: Callable[..., bool], *numbers: Tensor) -> None:
        """Require that the test of these numbers, passed as floats, succeeds."""
        self._expected.append((test, numbers))

    def expect_sizes(self, test: Callable[..., bool], tensors: Sequence[Tensor]) -> None:
        """Require that the test of the largest absolute entry of each tensor succeeds."""
        for tensor in tensors:
            if tensor.is_cuda:
                self._sizes.append((test, _without_repeats(tensor)))
            else:
                low, high = tensor.aminmax()
                self.expect(lambda low, high: test(max(-low, high)), low, high)

    def fail(self) -> None:
        """Record that a check failed."""
        self._failed = True

    def hold(self) -> bool:
        """Evaluate all tests, and return whether all succeed."""
        if self._failed:
            return False
        if self._sizes:
            sizes = norms([tensor for _, tensor in self._sizes], math.inf)
            self._expected += [(test, (size,)) for (test, _), size in zip(self._sizes, sizes, strict=True)]
            self._sizes.clear()
        values = iter(_fetch([tensor for _, tensors in self._expected for tensor in tensors]))
        counts = [(test, sum([tensor.numel() for tensor in tensors])) for test, tensors in self._expected]
        return all(test(*islice(values, count)) for test, count in counts)


def _without_repeats(tensor: Tensor) -> Tensor:
    """Remove repeated entries of an expanded tensor, whose norm would take a separate kernel launch."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple([slice(0, 1) if step == 0 else slice(None) for step in tensor.stride()])]


def _fetch(tensors: Sequence[Tensor]) -> list[float]:
    """Return all numbers in order, with a single synchronization per dtype and device."""
    kinds = {(t.dtype, t.device) for t in tensors}
    if len(kinds) > 1:
        by_kind = {kind: iter(_fetch([t for t in tensors if (t.dtype, t.device) == kind])) for kind in kinds}
        return [n for t in tensors for n in islice(by_kind[t.dtype, t.device], t.numel())]
    if not tensors:
        return []
    scalar = not any(t.dim() for t in tensors)
    values: list[float] = (torch.stack([*tensors]) if scalar else torch.cat([t.reshape(-1) for t in tensors])).tolist()
    return values
