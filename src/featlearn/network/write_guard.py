"""Refuse ops that write to weights which are too large to copy, before they run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import UnsupportedModelError
from featlearn.torch_internals import DispatchMode, dispatching


class WriteGuard:
    """Raise where a model that runs under `watching` is about to write to any of the weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._addresses = {weight.untyped_storage().data_ptr() for weight in weights}
        self.has_refused = False
        """Whether an op was about to write to a weight."""
        self.on = True
        """Whether ops are watched. Some code fails where they are; fingerprints tell then what was written to."""

    def watching(self) -> AbstractContextManager[object]:
        """Return a context in which a model runs."""
        return _WriteGuardMode(self) if self.on else nullcontext()

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
        return tensor.untyped_storage().data_ptr() in self._addresses


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of the arguments that an op writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write)


class _WriteGuardMode(DispatchMode):
    """Asks the guard before every op."""

    supports_higher_order_operators = True

    def __init__(self, guard: WriteGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard


def _dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    self._guard.check(func, args, kwargs or {})
    return func(*args, **(kwargs or {}))


dispatching(_WriteGuardMode, _dispatch)
