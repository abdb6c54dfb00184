"""Everything a model holds, put back bit for bit: weights, buffers, gradients, flags, plain attributes."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from featlearn.errors import UnsupportedModelError
from featlearn.network.inventory import Inventory
from featlearn.network.kept_tensors import (
    GUARDED,
    kept,
    kept_weights,
    moved_back,
    restore,
    rewind_tensors,
    version_of,
)
from featlearn.network.write_guard import WriteGuard

_KINDS: dict[str, tuple[type, ...]] = {
    "container": (list, dict, set, deque),
    "tensor": (Tensor,),
    "array": (numpy.ndarray,),
    "generator": (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random),
    "tuple": (tuple,),
}


_INERT = frozenset((bool, int, float, str, type(None)))
# The flag and the hook tables of a module, which belong to the measurement while it runs.
_MODULE_KEYS = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_HOOK_KEYS = tuple(key for key in _MODULE_KEYS if isinstance(nn.Module().__dict__[key], dict))


@dataclass(frozen=True)
class KeptState:
    """What a model held when a measurement began."""

    rewind: Callable[[], None]
    """Put back everything but parameters: each forward pass then starts from the same state."""
    rewritten: Callable[[], set[int]]
    """Identities of the tensors that have been written to."""
    tensors: Sequence[Tensor] = ()
    """All tensors that it held."""
    copied_bytes: int = 0
    """Bytes of all copies that were made of them at once."""
    guard: WriteGuard | None = None
    """Where weights are not copied at once: the model runs under it, and `copy_all` is called before user code runs
    otherwise, in a backward pass."""
    generators: Sequence[Any] = ()
    """Random generators that it held."""


@contextmanager
def state_kept(inside: Inventory, *, only_read: bool = True, guarded: bool = False) -> Iterator[KeptState]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile.

    `only_read`: weights that were written to are put back and then refused. `guarded`: models run under the guard
    that is given, so that weights of large ones need not be copied before something writes to them.
    """
    held = _held(inside.modules)
    weights = set(map(id, inside.parameters))
    hooks = [table for part in inside.modules for key in _HOOK_KEYS if (table := part.__dict__.get(key)) is not None]
    containers: list[tuple[Any, Any]] = [(thing, _entries(thing) if thing else ()) for thing in held["container"]]
    empty_hooks: list[dict[Any, Any]] = [table for table in hooks if not table]
    arrays = [(thing, thing.copy()) for thing in held["array"]]
    tensors = [tensor for tensor in held["tensor"] if has_memory(tensor)]
    own = [tensor for tensor in tensors if id(tensor) in weights]
    guard, kept_own = kept_weights(own, guarded=guarded)
    kept_others = kept([tensor for tensor in tensors if id(tensor) not in weights])
    copied = sum(one.copied_bytes for one in (*kept_own, *kept_others))
    grads = [(parameter, parameter.grad) for parameter in inside.parameters]

    def rewind() -> None:
        tables, own_hooks = {id(part.__dict__) for part in inside.modules}, set(map(id, hooks))
        for container, entries in containers:
            if id(container) in tables:
                _refill_attributes(container, entries)
            elif id(container) not in own_hooks and (container or entries):
                _refill(container, entries)
        put_back_arrays()
        moved_back(kept_others)
        rewind_tensors(kept_others)

    def put_back_arrays() -> None:
        """Put back numpy arrays."""
        for array, copy in arrays:
            if array.shape == copy.shape and array.tobytes() != copy.tobytes():
                array[...] = copy

    def put_back_tensors() -> None:
        for table in empty_hooks:
            if table:
                table.clear()
        changed.extend(moved_back(kept_own))  # all, before any is written to: one may lie in the memory of another
        moved_back(kept_others)
        changed.extend(restore(kept_own))
        restore(kept_others)

    def put_back_gradients() -> None:
        for parameter, grad in grads:
            parameter.grad = grad

    def rewritten() -> set[int]:
        return {
            id(tensor)
            for one in (*kept_own, *kept_others)
            for tensor, version, changed in zip(one.tensors, one.versions, one.changed(), strict=True)
            if changed or version_of(tensor) != version
        }

    changed: list[Tensor] = []
    try:
        for parameter, _ in grads:
            parameter.grad = None
        yield KeptState(rewind, rewritten, held["tensor"], copied, guard, held["generator"])
        written = [parameter for parameter, _ in grads if isinstance(parameter.grad, Tensor)]
        if written:
            raise UnsupportedModelError(
                "a backward pass inside the model wrote to .grad of its parameters, so their gradients cannot be asked "
                "for one by one; reentrant checkpointing does this: pass use_reentrant=False to torch.utils.checkpoint"
            )
    finally:
        # Each step is made whatever the ones before it raise: code of the user may run in them.
        with ExitStack() as steps:  # from the last to the first
            steps.callback(put_back_gradients)  # a gradient must fit its weight
            steps.callback(put_back_tensors)
            steps.callback(_refill_all, containers)
            steps.callback(put_back_arrays)
        if any(one.lost for one in kept_own):
            raise UnsupportedModelError(
                "weights have been rewritten otherwise than by an op of torch in a forward pass (through a pointer or "
                f"a numpy array, say); where large weights take more than {GUARDED >> 20} MiB they cannot be put back "
                "then; load them again, and measure a model that only reads its weights"
            )
    if only_read and changed:
        raise UnsupportedModelError(
            "a forward pass in eval mode rewrites weights, expected a model that only reads them; they were put back"
        )


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has numbers here: not on the meta device, nor where a weight is spread over ranks."""
    if tensor.device.type == "meta":
        return False
    plain = type(tensor) is nn.Parameter and tensor.layout == torch.strided
    return not plain or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def _held(modules: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Containers, tensors, arrays and random generators in the attributes of modules, also inside one another."""
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS if kind != "tuple"}
    found["container"] = [part.__dict__ for part in modules]
    stack: list[Any] = []
    for part in modules:
        # Most of its own tables are those of hooks, and empty: they are kept apart.
        own = part.__dict__
        stack += [
            value for key, value in own.items() if type(value) not in _INERT and (key not in _MODULE_KEYS or value)
        ]
        if "_parameters" not in own:  # scripted modules keep their tables out of reach; what can be listed is
            stack += (part._parameters, part._buffers, part._modules)
    seen = set(map(id, found["container"]))
    while stack:
        thing = stack.pop()
        kind = _kind_of(type(thing))  # type: ignore[arg-type]
        if kind is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        if kind in found:
            found[kind].append(thing)
        if kind == "container" or kind == "tuple":
            stack.extend(_members(thing))
        elif kind == "table":
            stack += [value for value in thing.values() if isinstance(value, Tensor)]
    return found


def _members(container: Any) -> Iterable[Any]:
    """Return what a container holds, by the method of its built-in type: a subclass may raise or answer otherwise."""
    if isinstance(container, dict):
        return dict.values(container)
    kind = next(kind for kind in (list, tuple, set, deque) if isinstance(container, kind))
    return kind.__iter__(container)


@lru_cache(maxsize=1024)
def _kind_of(kind: type) -> str | None:
    """What objects of this type are to a measurement; asked once for each, since some answer slowly."""
    for name, kinds in _KINDS.items():
        if issubclass(kind, kinds):
            return name
    # Tables of scripted modules.
    return "table" if kind.__name__.startswith("Ordered") and hasattr(kind, "values") else None


def _refill_attributes(attributes: dict[str, Any], entries: dict[str, Any]) -> None:
    """All attributes but flags and hooks, which stay as the measurement has set them."""
    for key in attributes.keys() - entries.keys() - _MODULE_KEYS:
        del attributes[key]
    for key, value in entries.items():
        if key not in _MODULE_KEYS and attributes.get(key) is not value:
            attributes[key] = value


def _refill_all(containers: Sequence[tuple[Any, Any]]) -> None:
    """Every one of them, also where another raises."""
    failed: list[tuple[Any, Exception]] = []
    for container, entries in containers:
        try:
            if container or entries:
                _refill(container, entries)
        except Exception as error:  # from a class of the user
            failed.append((container, error))
    if failed:
        container, first = failed[0]
        raise UnsupportedModelError(
            f"a {type(container).__name__} that the model holds was changed by a forward pass and cannot be put back: "
            f"{type(first).__name__}: {first}; measure a model that only reads it"
        ) from first


def _entries(container: Any) -> Any:
    """What a container holds, in a plain one: a class of the user may not be copied in the usual way."""
    return next(kind(container) for kind in (dict, set, list) if kind is list or isinstance(container, kind))


def _refill(container: Any, entries: Any) -> None:
    """Only where something changed: an untouched container is not touched."""
    if not entries:
        if container:
            container.clear()
        return
    if isinstance(container, dict):
        changed = list(container) != list(entries) or not all(map(is_, _members(container), entries.values()))
    elif isinstance(container, set):
        changed = container != entries
    else:
        changed = len(container) != len(entries) or not all(map(is_, container, entries))
    if changed:
        container.clear()
        container.update(entries) if isinstance(container, dict | set) else container.extend(entries)
