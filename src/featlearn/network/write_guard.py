"""Weights of large models are copied when something is about to write to them, and not before."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class WriteGuard:
    """Sees every op of torch that a model runs, and has the weights copied that it is about to write to.

    `weights`: memory of the weights (the address of their storage) -> what copies them.
    """

    def __init__(self, weights: Mapping[int, list[Callable[[], None]]]) -> None:
        self._weights = weights
        self._all_copied = False

    def watching(self) -> AbstractContextManager[object]:
        """While a model runs."""
        return nullcontext() if self._all_copied else _WriteGuardMode(self)

    def copy_all(self) -> bool:
        """Copy all weights, so that nothing needs to be seen; whether that is new."""
        if self._all_copied:
            return False
        for copies in self._weights.values():
            for copy in copies:
                copy()
        self._all_copied = True
        return True

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Copy the weights that an op with these arguments writes to."""
        for place, name in _written(function):
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in given if isinstance(given, list | tuple) else [given]:
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                    for copy in self._weights.get(tensor.untyped_storage().data_ptr(), ()):
                        copy()


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an op writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write)


class _WriteGuardMode(TorchDispatchMode):
    """Asks the guard before every op."""

    supports_higher_order_operators = True

    def __init__(self, guard: WriteGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard


def _dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    self._guard.before(func, args, kwargs or {})
    return func(*args, **(kwargs or {}))


# Not in the body of the class, where torch would look for it and wrap it by its compiler: seconds to import.
_WriteGuardMode.__torch_dispatch__ = _dispatch  # type: ignore[method-assign]
