"""Deferred assertions, evaluated in one device sync."""

import math
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from featlearn.torch_internals import norms


class DeferredChecks:
    """Numbers that a device has not computed yet, with the tests they must pass."""

    def __init__(self) -> None:
        self._expected: list[tuple[Callable[..., bool], tuple[Tensor, ...]]] = []
        self._sizes: list[tuple[Callable[..., bool], Tensor]] = []
        """Tensors on a GPU: one kernel launch serves all."""
        self._failed = False

    def expect(self, test: Callable[..., bool], *numbers: Tensor) -> None:
        """Require that the test of these numbers passes; it gets all of them as floats, one after the other."""
        self._expected.append((test, numbers))

    def expect_sizes(self, test: Callable[..., bool], tensors: Sequence[Tensor]) -> None:
        """Require that the test of the largest entry of each of these tensors passes."""
        for tensor in tensors:
            if tensor.is_cuda:
                self._sizes.append((test, _once(tensor)))
            else:
                low, high = tensor.aminmax()
                self.expect(lambda low, high: test(max(-low, high)), low, high)

    def fail(self) -> None:
        """One check has failed already."""
        self._failed = True

    def hold(self) -> bool:
        """Evaluate all tests; whether every one passes."""
        if self._failed:
            return False
        if self._sizes:
            sizes = norms([tensor for _, tensor in self._sizes], math.inf)
            self._expected += [(test, (size,)) for (test, _), size in zip(self._sizes, sizes, strict=True)]
            self._sizes.clear()
        found = iter(_fetched([tensor for _, several in self._expected for tensor in several]))
        counted = [(test, sum([tensor.numel() for tensor in several])) for test, several in self._expected]
        return all(test(*islice(found, count)) for test, count in counted)


def _once(tensor: Tensor) -> Tensor:
    """One of the entries that stand for many: the norms of tensors that repeat entries take a launch each."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple([slice(0, 1) if step == 0 else slice(None) for step in tensor.stride()])]


def _fetched(tensors: Sequence[Tensor]) -> list[float]:
    """All their numbers, one after the other; those of one type and device are waited for together."""
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        waiting = {kind: iter(_fetched([one for one in tensors if (one.dtype, one.device) == kind])) for kind in kinds}
        return [n for one in tensors for n in islice(waiting[one.dtype, one.device], one.numel())]
    if not tensors:
        return []
    scalar = not any(tensor.dim() for tensor in tensors)
    found: list[float] = (torch.stack([*tensors]) if scalar else torch.cat([t.reshape(-1) for t in tensors])).tolist()
    return found
