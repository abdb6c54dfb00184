"""Checks that are asked for as they arise and answered together: a GPU would be waited for each time."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor


class Later:
    """Numbers on their way, and what is expected of them."""

    def __init__(self) -> None:
        self._expected: list[tuple[Callable[..., bool], tuple[Tensor, ...]]] = []
        self._doubted = False

    def expect(self, test: Callable[..., bool], *numbers: Tensor) -> None:
        """The test of these few numbers is to hold; it is given all of them as floats, one after the other."""
        self._expected.append((test, numbers))

    def doubt(self) -> None:
        """Something is known not to hold already."""
        self._doubted = True

    def hold(self) -> bool:
        """Whether all that was expected is so."""
        if self._doubted:
            return False
        tensors = {id(tensor): tensor for _, several in self._expected for tensor in several}
        kinds: dict[object, list[Tensor]] = defaultdict(list)
        for tensor in tensors.values():
            kinds[tensor.dtype, tensor.device].append(tensor.detach().reshape(-1))
        found: dict[object, list[float]] = {kind: torch.cat(same).tolist() for kind, same in kinds.items()}
        places: dict[int, list[float]] = {}
        filled: dict[object, int] = defaultdict(int)
        for key, tensor in tensors.items():
            kind = (tensor.dtype, tensor.device)
            begin, filled[kind] = filled[kind], filled[kind] + tensor.numel()
            places[key] = found[kind][begin : filled[kind]]
        return all(test(*(n for tensor in several for n in places[id(tensor)])) for test, several in self._expected)
