"""The modules and tensors of a model, found in one walk, and everything it holds, put back bit for bit."""

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import eq, is_
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from featlearn.errors import UnsupportedModelError
from featlearn.network.tensor_copies import LARGE_TOGETHER, LargeWeights, copies_of, large_weights
from featlearn.torch_internals import HOOKS, PARAMETERS, RESERVED, buffer_table, child_table, parameter_table, version

if TYPE_CHECKING:
    from featlearn.network.write_guard import WriteGuard


class Inventory:
    """All modules of a model, its parameters and buffers, each once; a walk takes as long as many small ops."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        found: dict[int, nn.Module] = {}
        named: dict[int, tuple[str, Tensor]] = {}
        stack = [("", model)]
        while stack:
            prefix, part = stack.pop()
            key = id(part)
            if key in found:
                continue
            found[key] = part
            if own := parameter_table(part):
                for name, parameter in own.items():
                    if parameter is not None:
                        named.setdefault(id(parameter), (prefix + name, parameter))
            if inner := child_table(part):
                children = reversed(inner.items())
                stack += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
        self.modules = list(found.values())
        self.types = set(map(type, self.modules))
        """The classes of all modules."""
        self._named = list(named.values())
        self.parameters = [parameter for _, parameter in self._named]
        tables = [table for part in self.modules if (table := buffer_table(part))]
        buffers = [buffer for table in tables for buffer in table.values() if buffer is not None]
        self.tensors = _distinct([*self.parameters, *buffers]) if buffers else self.parameters

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """What `model.named_parameters()` gives, unless the model has one of its own."""
        if type(self.model).named_parameters is not nn.Module.named_parameters:
            return self.model.named_parameters()
        return self._named

    @cached_property
    def kind(self) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
        """Shape, type and device of all tensors."""
        return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in self.tensors])

    def needs_copy(self, dtype: torch.dtype | None) -> bool:
        """Return whether the model must be copied: another dtype is asked for, or it holds inference tensors."""
        kinds = {kind.to_real() for _, kind, _ in self.kind if kind.is_floating_point or kind.is_complex}
        return (dtype is not None and bool(kinds - {dtype})) or any(tensor.is_inference() for tensor in self.tensors)


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


_CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, deque, set, tuple)
_KINDS: dict[str, tuple[type, ...]] = {
    "tensor": (Tensor,),
    "array": (numpy.ndarray,),
    "generator": (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random),
}
_INERT = frozenset((bool, int, float, str, type(None)))


@dataclass(frozen=True)
class KeptState:
    """What a model held when a measurement began."""

    rewind: Callable[[], None]
    """Put back everything but parameters, so that each forward pass starts from the same state."""
    rewritten: Callable[[], set[int]]
    """Return the identities of the weights that have been written to."""
    tensors: Sequence[Tensor] = ()
    """All tensors that it held."""
    copied_bytes: int = 0
    """Bytes of all copies that were made of them."""
    guard: "WriteGuard | None" = None
    """Set where weights are too large to copy: the model runs under it."""
    generators: Sequence[Any] = ()
    """Random generators that it held."""


@contextmanager
def state_kept(inside: Inventory, *, only_read: bool = True) -> Iterator[KeptState]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile.

    `only_read`: weights that were written to are put back and then refused. Large ones are not copied: an op that
    would write to them is refused before it runs.
    """
    held = _Held(inside.modules)
    weights = [p for p in inside.parameters if has_memory(p)]
    own = set(map(id, weights))
    large = LargeWeights(large_weights(weights) if only_read else [])
    uncopied = set(map(id, large.tensors))
    kept_weights = copies_of(weight for weight in weights if id(weight) not in uncopied)
    kept_others = copies_of(tensor for tensor in held.tensors if id(tensor) not in own and has_memory(tensor))
    arrays = [(array, array.copy()) for array in held.arrays]
    versions = [(weight, version(weight)) for weight in weights]
    trainable = [(tensor, tensor.requires_grad) for tensor in held.tensors]
    gradients = [(parameter, parameter.grad) for parameter in inside.parameters]
    changed: list[Tensor] = []

    def put_back_arrays() -> None:
        for array, copy in arrays:
            if array.shape == copy.shape and array.tobytes() != copy.tobytes():
                array[...] = copy

    def put_back_tensors() -> None:
        # All are in place before any is written to: one may lie in the memory of another.
        for copies in (large, *kept_weights):
            changed.extend(copies.put_in_place())
        for copies in kept_others:
            copies.put_in_place()
        for copies in kept_weights:
            changed.extend(copies.restore())
        for copies in kept_others:
            copies.restore()
        for tensor, flag in trainable:
            if tensor.requires_grad != flag and tensor.is_leaf:
                tensor.requires_grad_(flag)

    def put_back_gradients() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def rewind() -> None:
        held.refill_containers()
        put_back_arrays()
        for copies in kept_others:
            copies.rewind()

    def rewritten() -> set[int]:
        written = {id(tensor) for copies in (large, *kept_weights) for tensor in copies.changed()}
        return written | {id(weight) for weight, number in versions if version(weight) != number}

    copied_bytes = sum(copies.copied_bytes for copies in (*kept_weights, *kept_others))
    guard = _guard_of(large.tensors) if large.tensors else None
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield KeptState(rewind, rewritten, held.tensors, copied_bytes, guard, held.generators)
        if any(isinstance(parameter.grad, Tensor) for parameter, _ in gradients):
            raise UnsupportedModelError(
                "a backward pass inside the model wrote to .grad of its parameters, so their gradients cannot be asked "
                "for one by one; reentrant checkpointing does this: pass use_reentrant=False to torch.utils.checkpoint"
            )
    finally:
        # Each step is made whatever the ones before it raise: code of the user may run in them.
        with ExitStack() as steps:  # from the last to the first
            steps.callback(put_back_gradients)  # a gradient must fit its weight
            steps.callback(put_back_tensors)
            steps.callback(held.refill_containers_and_hooks)
            steps.callback(put_back_arrays)
        if large.changed():
            raise UnsupportedModelError(
                "weights have been rewritten, and not by an op of torch in a forward pass (in a backward pass, or "
                f"through a pointer or a numpy array). Large weights of more than {LARGE_TOGETHER >> 20} MiB together "
                "are not copied, so they cannot be put back: load them again, and measure a model that only reads them"
            )
    if only_read and changed:
        raise UnsupportedModelError(
            "a forward pass in eval mode rewrites weights, expected a model that only reads them; they were put back"
        )


def _guard_of(weights: Sequence[Tensor]) -> "WriteGuard":
    """Load the guard where it is needed."""
    from featlearn.network.write_guard import WriteGuard

    return WriteGuard(weights)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers here: not on the meta device, nor where a weight is spread over ranks."""
    if tensor.device.type == "meta":
        return False
    plain = type(tensor) is nn.Parameter and tensor.layout == torch.strided
    return not plain or not tensor.numel() or tensor.untyped_storage().nbytes() > 0


class _Held:
    """Containers, tensors, arrays and random generators in the attributes of modules, also inside one another."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self.arrays: list[Any] = []
        self.generators: list[Any] = []
        self._attributes = [(part.__dict__, dict(part.__dict__)) for part in modules]
        tables = [table for part in modules for key in HOOKS if (table := part.__dict__.get(key)) is not None]
        self._hooks = [(table, _entries(table) if table else {}) for table in tables]
        self._containers: list[tuple[Any, Any]] = []
        stack: list[Any] = []
        for part in modules:
            own = part.__dict__
            stack += [value for key, value in own.items() if key not in RESERVED and type(value) not in _INERT]
            if PARAMETERS not in own:  # scripted modules keep their tables out of reach; what can be listed is
                stack += (parameter_table(part), buffer_table(part), child_table(part))
        lists = {"tensor": self.tensors, "array": self.arrays, "generator": self.generators}
        seen = {id(part.__dict__) for part in modules}
        while stack:
            thing = stack.pop()
            kind = _kind_of(type(thing))  # type: ignore[arg-type]
            if kind is None or id(thing) in seen:
                continue
            seen.add(id(thing))
            if kind == "table":
                stack += [value for value in thing.values() if isinstance(value, Tensor)]
            elif isinstance(kind, str):
                lists[kind].append(thing)
            else:
                entries = _entries(thing)
                stack += entries.values() if isinstance(entries, dict) else entries
                if kind is not tuple:
                    self._containers.append((thing, entries))

    def refill_containers(self) -> None:
        """Put back all attributes but flags and hooks, and what containers held."""
        for attributes, entries in self._attributes:
            if len(attributes) == len(entries) and all(map(is_, attributes.values(), entries.values())):
                continue
            for key in attributes.keys() - entries.keys() - RESERVED:
                del attributes[key]
            for key, value in entries.items():
                if key not in RESERVED and attributes.get(key) is not value:
                    attributes[key] = value
        for container, held in self._containers:
            _refill(container, held)

    def refill_containers_and_hooks(self) -> None:
        """Put back flags and hooks as well."""
        for attributes, entries in self._attributes:
            _refill(attributes, entries)
        for container, held in self._containers:
            _refill(container, held)
        for table, hooks in self._hooks:
            if table or hooks:
                _refill(table, hooks)


@lru_cache(maxsize=1024)
def _kind_of(kind: type) -> Any:
    """Return what objects of a type are to a measurement; asked once for each, since some types answer slowly."""
    for base in _CONTAINERS:
        if issubclass(kind, base):
            return base
    for name, kinds in _KINDS.items():
        if issubclass(kind, kinds):
            return name
    # Tables of scripted modules.
    return "table" if kind.__name__.startswith("Ordered") and hasattr(kind, "values") else None


# By the methods of the built-in types: those of a subclass may raise or answer otherwise.


def _entries(container: Any) -> Any:
    """Return what a container holds, in a dictionary or a list."""
    kind = _kind_of(type(container))  # type: ignore[arg-type]
    if kind in (dict, OrderedDict):
        return dict(kind.items(container))
    return list(kind.__iter__(container))


def _refill(container: Any, entries: Any) -> None:
    """Give a container its entries back, in their order; an untouched one is not touched."""
    if type(container) is dict and not container and not entries:
        return
    kind = _kind_of(type(container))  # type: ignore[arg-type]
    same_size = kind.__len__(container) == len(entries)
    if isinstance(entries, dict):
        if (
            not same_size
            or not all(map(is_, kind.values(container), entries.values()))
            or (not all(map(eq, kind.__iter__(container), entries)))
        ):
            kind.clear(container)
            for key, value in entries.items():
                kind.__setitem__(container, key, value)
    elif not same_size or not all(map(is_, kind.__iter__(container), entries)):
        kind.clear(container)
        kind.update(container, entries) if kind is set else kind.extend(container, entries)
