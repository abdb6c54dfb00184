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
from featlearn.network.fingerprint import INTEGERS
from featlearn.torch_internals import (
    HOOKS,
    PARAMETERS,
    RESERVED,
    buffer_table,
    child_table,
    copy_each,
    flattened,
    parameter_table,
    version,
)

if TYPE_CHECKING:
    from featlearn.network.large_weights import LargeWeights


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
        distinct = {id(tensor): tensor for tensor in (*self.parameters, *buffers)}
        self.tensors = list(distinct.values())

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


LARGE, LARGE_TOGETHER = 2**24, 2**28
"""Bytes of a large weight, and of all large ones together above which they are not copied."""
_GROUP_BYTES = 2**26


class TensorCopies:
    """Tensors in memory of one type and device, with one copy of their bits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._places = [tensor.data for tensor in tensors]
        self._addresses = [_address(place) for place in self._places]
        self._entries = [place if place.is_contiguous() else _unrepeated(place) for place in self._places]
        self._copy = self._content().clone() if len(tensors) == 1 else self._content()
        self.copied_bytes = self._copy.nbytes

    def _content(self) -> Tensor:
        return _bits(self._entries[0].reshape(-1) if len(self._entries) == 1 else flattened(self._entries))

    @cached_property
    def _bits_and_copies(self) -> list[tuple[Tensor, Tensor]]:
        """The memory of every tensor, and its copy."""
        bits = [_bits(entries) for entries in self._entries]
        pieces = self._copy.reshape(-1).split([part.numel() for part in bits])
        return [(part, piece.view(part.shape)) for part, piece in zip(bits, pieces, strict=True)]

    def put_in_place(self) -> list[Tensor]:
        """Give tensors the memory they had. Return those that held something else in another one."""
        moved = []
        for k, (tensor, address) in enumerate(zip(self.tensors, self._addresses, strict=True)):
            if _address(tensor) != address:
                place = self._places[k]
                alike = (tensor.shape, tensor.dtype, tensor.device) == (place.shape, place.dtype, place.device)
                if not alike or not torch.equal(_bits(_unrepeated(tensor.data)), self._bits_and_copies[k][1]):
                    moved.append(tensor)
                tensor.data = place
        return moved

    def restore(self) -> list[Tensor]:
        """Write what has changed, through memory whose writes no version counts. Return the tensors written to."""
        if torch.equal(self._content(), self._copy):
            return []
        pairs = zip(self.tensors, self._bits_and_copies, strict=True)
        changed = [(tensor, *both) for tensor, both in pairs if not torch.equal(*both)]
        for _, bits, copy in changed:
            bits.copy_(copy)
        return [tensor for tensor, _, _ in changed]

    def rewind(self) -> None:
        """Put everything back. On a GPU all is written: a comparison would have to be waited for."""
        self.put_in_place()
        if self._copy.device.type == "cpu":
            self.restore()
        else:
            copy_each(*zip(*self._bits_and_copies, strict=True))


class UnusualTensors:
    """Tensors whose memory cannot be named: sparse or quantized ones, and classes of others. Their versions count."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # nothing writes to these
        with torch.no_grad():
            self._copies = [(tensor, version(tensor), tensor.detach().clone()) for tensor in tensors]
        self.copied_bytes = sum(copy.nbytes for _, _, copy in self._copies if copy.layout == torch.strided)

    def put_in_place(self) -> list[Tensor]:
        """Do nothing: a version counts what takes the place of their content."""
        return []

    def restore(self) -> list[Tensor]:
        """Replace the content of what was written to. Return these tensors."""
        changed = [(tensor, copy) for tensor, number, copy in self._copies if version(tensor) != number]
        for tensor, copy in changed:
            tensor.data = copy.clone()
        return [tensor for tensor, _ in changed]

    rewind = restore


Copies = TensorCopies | UnusualTensors


def copies_of(tensors: Iterable[Tensor]) -> list[Copies]:
    """Copy all tensors, as few at a time as fits the cost of a call and of a comparison."""
    groups: dict[object, list[Tensor]] = {}
    sizes: dict[object, int] = {}
    unusual = []
    for tensor in tensors:
        if not _is_plain(tensor):
            unusual.append(tensor)
            continue
        kind = (tensor.dtype, tensor.device)
        groups.setdefault((kind, sizes.get(kind, 0) // _GROUP_BYTES), []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    return [*map(TensorCopies, groups.values()), *([UnusualTensors(unusual)] if unusual else [])]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory of its own that `.data` names."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    return plain and not (tensor.is_inference() or tensor.is_nested or tensor.is_neg() or tensor.is_conj())


def _unrepeated(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's entries, those that an expanded one repeats once."""
    return tensor[tuple([slice(None) if step else slice(0, 1) for step in tensor.stride()])]


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bits as integers."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return numbers.view(INTEGERS[numbers.element_size()])


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_CONTAINERS: tuple[type, ...] = (OrderedDict, dict, list, deque, set, tuple)
_KINDS: dict[str, tuple[type, ...]] = {
    "tensor": (Tensor,),
    "array": (numpy.ndarray,),
    "generator": (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random),
}
_INERT = frozenset((bool, int, float, str, type(None)))


def _large_weights(weights: Sequence[Tensor]) -> "LargeWeights | None":
    """Return the weights that are too large to copy, None where they fit together."""
    large = [weight for weight in weights if weight.nbytes >= LARGE and _is_plain(weight) and weight.is_contiguous()]
    if not large or sum(weight.nbytes for weight in large) <= LARGE_TOGETHER:
        return None
    from featlearn.network.large_weights import LargeWeights  # late: few models need it

    return LargeWeights(large)


@dataclass(frozen=True)
class KeptState:
    """What a model held when a measurement began."""

    rewind: Callable[[], None]
    """Put back everything but parameters, so that each forward pass starts from the same state."""
    rewritten: Callable[[], set[int]]
    """Put back the weights that have been written to, and return their identities."""
    tensors: Sequence[Tensor]
    """All tensors that it held."""
    copied_bytes: int
    """Bytes of all copies that were made of them."""
    guard: "LargeWeights | None"
    """Weights that are too large to copy: the model runs where these are watched."""
    generators: Sequence[Any]
    """Random generators that it held."""


@contextmanager
def state_kept(inside: Inventory, *, only_read: bool = True) -> Iterator[KeptState]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile.

    `only_read`: weights that were written to are put back and then refused. Large ones are not copied: an op that
    would write to them is refused before it runs.
    """
    held = _Held(inside.modules)
    weights = [p for p in inside.parameters if has_memory(p)]
    own, large = set(map(id, weights)), _large_weights(weights) if only_read else None
    uncopied = set(map(id, large.tensors if large else ()))
    of_weights = copies_of(weight for weight in weights if id(weight) not in uncopied)
    of_others = copies_of(tensor for tensor in held.tensors if id(tensor) not in own and has_memory(tensor))
    all_weights = [*of_weights, *([large] if large else [])]
    arrays = [(array, array.copy()) for array in held.arrays]
    versions = [(weight, version(weight)) for weight in weights]
    trainable = [(tensor, tensor.requires_grad) for tensor in held.tensors]
    gradients = [(parameter, parameter.grad) for parameter in inside.parameters]
    changed: list[Tensor] = []

    def put_back_arrays() -> None:
        for array, copy in arrays:
            if array.shape == copy.shape and array.tobytes() != copy.tobytes():
                array[...] = copy

    def put_back_weights() -> list[Tensor]:
        # All are in place before any is written to: one may lie in the memory of another.
        moved = [tensor for copies in (*all_weights, *of_others) for tensor in copies.put_in_place()]
        return [*moved, *(tensor for copies in all_weights for tensor in copies.restore())]

    def put_back_tensors() -> None:
        changed.extend(tensor for tensor in put_back_weights() if id(tensor) in own)
        for copies in of_others:
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
        for copies in of_others:
            copies.rewind()

    def rewritten() -> set[int]:
        numbers = {id(weight) for weight, number in versions if version(weight) != number}
        return numbers | set(map(id, put_back_weights()))

    copied_bytes = sum(copies.copied_bytes for copies in (*of_weights, *of_others))
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield KeptState(rewind, rewritten, held.tensors, copied_bytes, large, held.generators)
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
        if large and large.restore():
            raise UnsupportedModelError(
                "weights have been rewritten, and not by an op of torch in a forward pass (in a backward pass, or "
                f"through a pointer or a numpy array). Large weights of more than {LARGE_TOGETHER >> 20} MiB together "
                "are not copied, so they cannot be put back: load them again, and measure a model that only reads them"
            )
    if only_read and changed:
        raise UnsupportedModelError(
            "a forward pass in eval mode rewrites weights, expected a model that only reads them; they were put back"
        )


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
