"""Weights that are too large to copy: an op that would write to them is refused before it runs."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import UnsupportedModelError
from featlearn.network.fingerprint import fingerprint
from featlearn.torch_internals import DispatchMode, dispatching


class LargeWeights:
    """Weights without a copy. A fingerprint shows what was written to past the guard, which cannot be put back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.has_refused = False
        """Whether an op was about to write to a weight."""
        self._places = [tensor.data for tensor in tensors]
        self._fingerprints = [fingerprint(place) for place in self._places]
        self._storages = {weight.untyped_storage().data_ptr() for weight in tensors}

    def put_in_place(self) -> list[Tensor]:
        """Give weights the memory they had. Return those that held something else in another one."""
        moved = []
        for tensor, place, number in zip(self.tensors, self._places, self._fingerprints, strict=True):
            if (tensor.data_ptr(), tensor.stride()) != (place.data_ptr(), place.stride()):
                if tensor.shape != place.shape or int(fingerprint(tensor)) != int(number):
                    moved.append(tensor)
                tensor.data = place
        return moved

    def restore(self) -> list[Tensor]:
        """Return the weights whose memory holds something else than it did."""
        rows = zip(self.tensors, self._places, self._fingerprints, strict=True)
        return [tensor for tensor, place, number in rows if int(fingerprint(place)) != int(number)]

    def watching(self) -> AbstractContextManager[object]:
        """Return a context that refuses ops which are about to write to any of the weights."""
        return _WriteGuard(self)

    def check(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise if an op with these arguments writes to a weight."""
        for place, name in _written(function):
            argument = args[place] if place < len(args) else kwargs.get(name)
            for tensor in argument if isinstance(argument, list | tuple) else [argument]:
                if isinstance(tensor, Tensor) and self._holds(tensor):
                    self.has_refused = True
                    raise UnsupportedModelError(
                        f"a forward pass in eval mode rewrites weights (by {function}), expected a model that only "
                        "reads them; nothing was written"
                    )

    def _holds(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or tensor.is_meta:
            return False
        return tensor.untyped_storage().data_ptr() in self._storages


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of the arguments that an op writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write)


class _WriteGuard(DispatchMode):
    """Asks before every op."""

    supports_higher_order_operators = True

    def __init__(self, weights: LargeWeights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights


def _dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    self._weights.check(func, args, kwargs or {})
    return func(*args, **(kwargs or {}))


dispatching(_WriteGuard, _dispatch)
