"""Deferred assertions, evaluated in one device sync."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor


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
        distant = [tensor for tensor in tensors if tensor.is_cuda]
        self._sizes += [(test, _once(tensor)) for tensor in distant]
        for tensor in (tensor for tensor in tensors if not tensor.is_cuda):
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
            sizes = torch._foreach_norm([tensor for _, tensor in self._sizes], math.inf)
            self._expected += [(test, (size,)) for (test, _), size in zip(self._sizes, sizes, strict=True)]
            self._sizes.clear()
        numbers = [tensor for _, several in self._expected for tensor in several]
        found = iter(_fetched(numbers))
        counted = [(test, sum(tensor.numel() for tensor in several)) for test, several in self._expected]
        return all(test(*islice(found, count)) for test, count in counted)


def _once(tensor: Tensor) -> Tensor:
    """One of the entries that stand for many: the norms of tensors that repeat entries take a launch each."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple([slice(0, 1) if step == 0 else slice(None) for step in tensor.stride()])]


def _fetched(tensors: Sequence[Tensor]) -> list[float]:
    """All their numbers, one after the other; those of one type and device are waited for together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        kinds[tensor.dtype, tensor.device].append(place)
    found: dict[int, list[float]] = {}
    for places in kinds.values():
        some = [tensors[place] for place in places]
        if all(tensor.dim() == 0 for tensor in some):
            found |= {place: [number] for place, number in zip(places, torch.stack(some).tolist(), strict=True)}
            continue
        numbers = iter(torch.cat([tensor.reshape(-1) for tensor in some]).tolist())
        found |= {place: list(islice(numbers, tensors[place].numel())) for place in places}
    return [number for place in range(len(tensors)) for number in found[place]]
