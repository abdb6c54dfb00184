"""Everything a model holds, put back bit for bit: weights, buffers, gradients, flags, plain attributes."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from featlearn.errors import UnsupportedModelError
from featlearn.network.inventory import Inventory

_KINDS: dict[str, tuple[type, ...]] = {
    "container": (list, dict, set, deque),
    "tensor": (Tensor,),
    "array": (numpy.ndarray,),
    "generator": (torch.Generator, numpy.random.Generator, random.Random),
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


NOTHING_KEPT = KeptState(lambda: None, set)
"""Of a model that a pass only reads."""


@contextmanager
def state_kept(inside: Inventory, *, only_read: bool = True) -> Iterator[KeptState]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile.

    `only_read`: weights that were written to are put back and then refused.
    """
    held = _held(inside.modules)
    weights = set(map(id, inside.parameters))
    hooks = [table for part in inside.modules for key in _HOOK_KEYS if (table := part.__dict__.get(key)) is not None]
    containers: list[tuple[Any, Any]] = [(thing, thing.copy() if thing else ()) for thing in held["container"]]
    empty_hooks: list[dict[Any, Any]] = [table for table in hooks if not table]
    generators = [(thing, _generator_state(thing)) for thing in held["generator"]]
    arrays = [(thing, thing.copy()) for thing in held["array"]]
    tensors = [tensor for tensor in held["tensor"] if tensor.device.type != "meta"]
    kept_weights = _kept([tensor for tensor in tensors if id(tensor) in weights])
    kept_others = _kept([tensor for tensor in tensors if id(tensor) not in weights])
    grads = [(parameter, parameter.grad) for parameter in inside.parameters]

    def rewind() -> None:
        tables, own = {id(part.__dict__) for part in inside.modules}, set(map(id, hooks))
        for container, entries in containers:
            if id(container) in tables:
                _refill_attributes(container, entries)
            elif id(container) not in own and (container or entries):
                _refill(container, entries)
        put_back_outside()
        _replaced(kept_others)
        _rewind(kept_others)

    def put_back_outside() -> None:
        """Random generators and arrays."""
        for generator, state in generators:
            _set_generator_state(generator, state)
        for array, copy in arrays:
            if array.shape == copy.shape and array.tobytes() != copy.tobytes():
                array[...] = copy

    def rewritten() -> set[int]:
        return {
            id(tensor)
            for kept in (*kept_weights, *kept_others)
            for tensor, version, changed in zip(kept.tensors, kept.versions, kept.changed(), strict=True)
            if changed or _version(tensor) != version
        }

    changed: list[Tensor] = []
    try:
        for parameter, _ in grads:
            parameter.grad = None
        yield KeptState(rewind, rewritten, held["tensor"])
        written = [parameter for parameter, _ in grads if isinstance(parameter.grad, Tensor)]
        if written:
            raise UnsupportedModelError(
                "a backward pass inside the model wrote to .grad of its parameters, so their gradients cannot be asked "
                "for one by one; reentrant checkpointing does this: pass use_reentrant=False to torch.utils.checkpoint"
            )
    finally:
        put_back_outside()
        for container, entries in containers:
            if container or entries:
                _refill(container, entries)
        for table in empty_hooks:
            if table:
                table.clear()
        try:
            changed += _replaced(kept_weights)  # all, before any is written to: one may lie in the memory of another
            _replaced(kept_others)
            changed += _restore(kept_weights)
            _restore(kept_others)
        finally:  # last: a gradient must fit its weight
            for parameter, grad in grads:
                parameter.grad = grad
    if only_read and changed:
        raise UnsupportedModelError(
            "a forward pass in eval mode rewrites weights, expected a model that only reads them; they were put back"
        )


class _KeptTensors:
    """Tensors with a copy of what they hold: small ones of one type and device together, another one alone."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.versions = [_version(tensor) for tensor in tensors]
        self._trainable = [tensor.requires_grad for tensor in tensors]
        self._kinds = [_kind(tensor) for tensor in tensors] if len(tensors) > 1 or tensors[0].is_cuda else []
        self._copy = _side_by_side(tensors)
        self._places = [_place(tensor) for tensor in tensors]

    def put_in_place(self) -> list[Tensor]:
        """Give tensors the memory that they had; those that held something else in another one are returned."""
        found: list[Tensor] = []
        for i, (tensor, place) in enumerate(zip(self.tensors, self._places, strict=True)):
            if place is None or _lies_at(tensor, place):
                continue
            if not bool(self._is_same(tensor, self.copies()[i], self.versions[i])):
                found.append(tensor)
            tensor.data = place
        return found

    def copies(self) -> list[Tensor]:
        """What each of them held."""
        if len(self.tensors) == 1:
            return [self._copy]
        pieces = self._copy.split([shape.numel() for shape, *_ in self._kinds])
        return [piece.view(shape) for piece, (shape, *_) in zip(pieces, self._kinds, strict=True)]

    def is_alike(self) -> bool:
        """Whether they still have the shapes, types and places that they had."""
        return [_kind(tensor) for tensor in self.tensors] == self._kinds

    def same(self) -> bool | Tensor:
        """Whether all hold what they held; on a GPU an answer that is not waited for."""
        if len(self.tensors) > 1:
            return self.is_alike() and _same_bits(_side_by_side(self.tensors), self._copy)
        return self._is_same(self.tensors[0], self._copy, self.versions[0])

    @staticmethod
    def _is_same(tensor: Tensor, copy: Tensor, version: int) -> bool | Tensor:
        a = tensor.detach()
        if a.layout != torch.strided or a.is_quantized or a.is_nested or a.is_mkldnn:
            return _version(tensor) == version  # their bits cannot be compared
        return a.shape == copy.shape and a.dtype == copy.dtype and a.device == copy.device and _same_bits(a, copy)

    def changed(self) -> list[bool]:
        """Which of them hold something else."""
        found = _answers(
            [self._is_same(*each) for each in zip(self.tensors, self.copies(), self.versions, strict=True)]
        )
        return [not same for same in found]

    def restore(self, changed: Sequence[bool]) -> None:
        """Write only where something changed: versions count."""
        for tensor, copy, written in zip(self.tensors, self.copies() if any(changed) else (), changed, strict=False):
            # Through .data, so that graphs which have saved the tensor do not see a new version of it.
            alike = tensor.layout == torch.strided and (tensor.shape, tensor.dtype, tensor.device) == (
                copy.shape, copy.dtype, copy.device
            )  # fmt: skip
            if written and alike:
                # of an expanded tensor every number is there once
                once = tuple(slice(None) if step else slice(0, 1) for step in tensor.stride())
                tensor.data[once].copy_(copy[once])
            elif written:
                tensor.data = copy.clone()
        for tensor, trainable in zip(self.tensors, self._trainable, strict=True):
            if tensor.requires_grad != trainable and tensor.is_leaf:
                tensor.requires_grad_(trainable)


# Bytes of tensors that are looked at together, and the kinds that are.
_TOGETHER = 2**26
_COMMON = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


def _kept(tensors: Sequence[Tensor]) -> list[_KeptTensors]:
    """All with copies of what they hold: each by itself takes longer than a small copy."""
    groups: dict[object, list[Tensor]] = {}
    sizes: dict[object, int] = {}
    alone: list[list[Tensor]] = []
    for t in tensors:
        plain = type(t) in (Tensor, nn.Parameter) and t.dtype in _COMMON and t.layout == torch.strided
        if not (
            plain and 0 < t.nbytes < _TOGETHER // 4 and t.is_contiguous() and not t.is_neg() and not t.is_inference()
        ):
            alone.append([t])
            continue
        alike = (t.dtype, t.device)
        if sizes.get(alike, 0) > _TOGETHER:
            alone.append(groups.pop(alike))
            sizes[alike] = 0
        groups.setdefault(alike, []).append(t)
        sizes[alike] = sizes.get(alike, 0) + t.nbytes
    return [_KeptTensors(some) for some in (*groups.values(), *alone)]


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of one tensor, or of all entries of several."""
    if len(tensors) == 1:
        return tensors[0].detach().clone()
    with torch.no_grad():
        flat: Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
        return flat


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _place(tensor: Tensor) -> Tensor | None:
    """Another tensor in the same memory, which stays there; None for kinds whose memory is not theirs alone to name."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    return tensor.data if plain and not tensor.is_inference() else None


def _lies_at(tensor: Tensor, place: Tensor) -> bool:
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.dtype == place.dtype
    )


def _replaced(kept: Sequence[_KeptTensors]) -> list[Tensor]:
    """Tensors that are back in their memory, and held something else meanwhile."""
    return [tensor for one in kept for tensor in one.put_in_place()]


def _rewind(kept: Sequence[_KeptTensors]) -> None:
    """Put back what was changed. On a GPU everything is copied: to compare would mean to wait."""
    distant = [one for one in kept if one.tensors[0].is_cuda and one.is_alike()]
    if distant:
        now, before = [t.data for one in distant for t in one.tensors], [c for one in distant for c in one.copies()]
        torch._foreach_copy_(now, before)
    _restore([one for one in kept if one not in distant])


def _restore(kept: Sequence[_KeptTensors]) -> list[Tensor]:
    """Put back what was changed, which is returned."""
    found: list[Tensor] = []
    for one, same in zip(kept, _answers([one.same() for one in kept]), strict=True):
        changed = [False] * len(one.tensors) if same else one.changed()
        one.restore(changed)
        found += [tensor for tensor, written in zip(one.tensors, changed, strict=True) if written]
    return found


def _answers(given: Sequence[bool | Tensor]) -> list[bool]:
    """Answers that a device may still be computing, fetched together."""
    pending = [answer for answer in given if isinstance(answer, Tensor)]
    known = iter(torch.stack([answer.to(pending[0].device) for answer in pending]).tolist() if pending else ())
    return [bool(next(known)) if isinstance(answer, Tensor) else answer for answer in given]


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


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
            stack += thing.values() if isinstance(thing, dict) else thing
        elif kind == "table":
            stack += [value for value in thing.values() if isinstance(value, Tensor)]
    return found


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


def _refill(container: Any, entries: Any) -> None:
    """Only where something changed: an untouched container is not touched."""
    if not entries:
        if container:
            container.clear()
        return
    if isinstance(container, dict):
        changed = list(container) != list(entries) or not all(map(is_, container.values(), entries.values()))
    elif isinstance(container, set):
        changed = container != entries
    else:
        changed = len(container) != len(entries) or not all(map(is_, container, entries))
    if changed:
        container.clear()
        container.update(entries) if isinstance(container, dict | set) else container.extend(entries)


def _version(tensor: Tensor) -> int:
    """Counts what was written in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(a: Tensor, b: Tensor) -> bool | Tensor:
    """Equal bit for bit: NaN equals itself, and -0.0 is not 0.0."""
    if a.is_complex() or a.is_neg() or b.is_neg():
        a, b = (t.resolve_conj().resolve_neg() for t in (a, b))
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    bits = _WHOLE[a.element_size()]
    a, b = a.view(bits), b.view(bits)
    return torch.equal(a, b) if a.device.type == "cpu" else (a == b).all()
