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

_KINDS: dict[str, tuple[type, ...]] = {
    "container": (list, dict, set, deque),
    "tensor": (Tensor,),
    "array": (numpy.ndarray,),
    "generator": (torch.Generator, numpy.random.Generator, random.Random),
    "tuple": (tuple,),
}


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


def parameters_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    """The parameters of all these modules, each once."""
    found = {id(p): p for part in parts for p in part._parameters.values() if p is not None}
    return list(found.values())


@contextmanager
def state_kept(parts: Sequence[nn.Module], *, only_read: bool = True) -> Iterator[KeptState]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile.

    `only_read`: weights that were written to are put back and then refused.
    """
    held = _held(parts)
    parameters = parameters_of(parts)
    weights = set(map(id, parameters))
    tables = {id(part.__dict__) for part in parts}
    hooks = [table for part in parts for key in _HOOK_KEYS if (table := part.__dict__.get(key)) is not None]
    own = set(map(id, hooks))
    containers: list[tuple[Any, Any]] = [(thing, thing.copy() if thing else ()) for thing in held["container"]]
    empty_hooks: list[dict[Any, Any]] = [table for table in hooks if not table]
    generators = [(thing, _generator_state(thing)) for thing in held["generator"]]
    arrays = [(thing, thing.copy()) for thing in held["array"]]
    tensors = _kept([tensor for tensor in held["tensor"] if tensor.device.type != "meta"])
    grads = [(parameter, parameter.grad) for parameter in parameters]

    buffers = [kept for kept in tensors if id(kept.tensor) not in weights]
    # Flags and hooks stay as the measurement has set them.
    attributes = [(thing, _without_own(entries)) for thing, entries in containers if id(thing) in tables]
    others = [(thing, entries) for thing, entries in containers if id(thing) not in tables and id(thing) not in own]

    def rewind() -> None:
        for table, kept in attributes:
            _refill_attributes(table, kept)
        for container, entries in others:
            if container or entries:
                _refill(container, entries)
        put_back_outside()
        _rewind(buffers)

    def put_back_outside() -> None:
        """Random generators and arrays."""
        for generator, state in generators:
            _set_generator_state(generator, state)
        for array, copy in arrays:
            if array.shape == copy.shape and array.tobytes() != copy.tobytes():
                array[...] = copy

    def rewritten() -> set[int]:
        return {id(kept.tensor) for kept, same in zip(tensors, _unchanged(tensors), strict=True)
                if not same or _version(kept.tensor) != kept.version}  # fmt: skip

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
        for parameter, grad in grads:  # first: it cannot fail
            parameter.grad = grad
        put_back_outside()
        for container, entries in containers:
            if container or entries:
                _refill(container, entries)
        for table in empty_hooks:
            if table:
                table.clear()
        changed += _restore(tensors)
    if only_read and any(id(tensor) in weights for tensor in changed):
        raise UnsupportedModelError(
            "a forward pass in eval mode rewrites weights, expected a model that only reads them; they were put back"
        )


class _KeptTensor:
    """A tensor with a copy of what it held."""

    def __init__(self, tensor: Tensor, copy: Tensor, bundle: "_Bundle | None" = None) -> None:
        self.tensor, self.copy, self.bundle = tensor, copy, bundle
        self.trainable, self.version = tensor.requires_grad, _version(tensor)
        self._kind = _kind(copy) if tensor.is_cuda else ()  # of others it is not asked

    def is_alike(self) -> bool:
        """Whether it still has the shape, type and place that it had."""
        return _kind(self.tensor) == self._kind

    def same(self) -> bool | Tensor:
        """Whether it holds what it held; on a GPU an answer that is not waited for."""
        a, b = self.tensor.detach(), self.copy
        if a.layout != torch.strided or a.is_quantized or a.is_nested or a.is_mkldnn:
            return _version(self.tensor) == self.version  # their bits cannot be compared
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and _same_bits(a, b)

    def restore(self, same: bool) -> None:
        """Write only where something changed: versions count."""
        if not same:
            # Through .data, so that graphs which have saved the tensor do not see a new version of it.
            if self.tensor.layout == torch.strided and self.tensor.shape == self.copy.shape:
                self.tensor.data.copy_(self.copy)
            else:
                self.tensor.data = self.copy.clone()
        if self.tensor.requires_grad != self.trainable and self.tensor.is_leaf:
            self.tensor.requires_grad_(self.trainable)


class _Bundle:
    """Small tensors on a GPU, copied and compared together."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._whole = torch.cat([tensor.detach().view(-1) for tensor in tensors])
        pieces = self._whole.split([tensor.numel() for tensor in tensors])
        self.kept = [_KeptTensor(t, piece.view(t.shape), self) for t, piece in zip(tensors, pieces, strict=True)]

    def same(self) -> Tensor:
        """Whether all hold what they held."""
        whole = torch.cat([kept.tensor.detach().view(-1) for kept in self.kept])
        bits = _WHOLE[whole.element_size()]
        return (whole.view(bits) == self._whole.view(bits)).all()


# Bytes of tensors that are looked at together, and the kinds that are.
_TOGETHER = 2**26
_COMMON = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


def _kept(tensors: Sequence[Tensor]) -> list[_KeptTensor]:
    """All with copies of what they hold, in the same order; small ones on a GPU are copied together."""
    groups: dict[object, list[list[Tensor]]] = {}
    together: dict[object, int] = {}
    for t in tensors:
        plain = t.is_cuda and t.dtype in _COMMON and t.layout == torch.strided and t.is_contiguous() and not t.is_neg()
        if plain and 0 < t.nbytes < _TOGETHER // 4:
            alike = (t.dtype, t.device)
            some = groups.setdefault(alike, [[]])
            if together.get(alike, 0) > _TOGETHER:
                some.append([])
                together[alike] = 0
            some[-1].append(t)
            together[alike] = together.get(alike, 0) + t.nbytes
    bundles = [_Bundle(some) for several in groups.values() for some in several]
    bundled = {id(kept.tensor): kept for bundle in bundles for kept in bundle.kept}
    return [bundled.get(id(t)) or _KeptTensor(t, t.detach().clone()) for t in tensors]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _rewind(tensors: Sequence[_KeptTensor]) -> None:
    """Put back what was changed. On a GPU everything is copied: to compare would mean to wait."""
    distant = [kept for kept in tensors if kept.tensor.is_cuda and kept.is_alike()]
    if distant:
        torch._foreach_copy_([kept.tensor.data for kept in distant], [kept.copy for kept in distant])
    copied = set(map(id, distant))
    _restore([kept for kept in tensors if id(kept) not in copied])


def _restore(tensors: Sequence[_KeptTensor]) -> list[Tensor]:
    """Put back what was changed, which is returned."""
    changed = []
    for kept, same in zip(tensors, _unchanged(tensors), strict=True):
        kept.restore(same)
        if not same:
            changed.append(kept.tensor)
    return changed


def _unchanged(tensors: Sequence[_KeptTensor]) -> list[bool]:
    """Which of them hold what they held; asked together, because a GPU would be waited for each time."""
    bundles = list({id(kept.bundle): kept.bundle for kept in tensors if kept.bundle is not None}.values())
    whole = [bundle for bundle in bundles if all(kept.is_alike() for kept in bundle.kept)]
    same = {id(bundle) for bundle, equal in zip(whole, _answers([b.same() for b in whole]), strict=True) if equal}
    left = [kept for kept in tensors if id(kept.bundle) not in same]
    changed = {id(kept) for kept, equal in zip(left, _answers([k.same() for k in left]), strict=True) if not equal}
    return [id(kept) not in changed for kept in tensors]


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


def _held(parts: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Containers, tensors, arrays and random generators in the attributes of modules, also inside one another."""
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS if kind != "tuple"}
    seen: set[int] = set()
    tables = {id(p.__dict__) for p in parts}
    # Scripted modules keep their tables out of reach; what can be listed is.
    stack: list[Any] = [table for p in parts for table in (p.__dict__, p._parameters, p._buffers, p._modules)]
    while stack:
        thing = stack.pop()
        kind = _kind_of(type(thing))  # type: ignore[arg-type]
        if kind is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        if kind in found:
            found[kind].append(thing)
        if id(thing) in tables:  # most of its tables are those of hooks, and empty: they are kept apart
            stack += [value for key, value in thing.items() if key not in _MODULE_KEYS or value]
        elif kind == "container" or kind == "tuple":
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


def _without_own(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key not in _MODULE_KEYS}


def _refill_attributes(attributes: dict[str, Any], entries: dict[str, Any]) -> None:
    """All attributes but flags and hooks."""
    for key in attributes.keys() - entries.keys() - _MODULE_KEYS:
        del attributes[key]
    for key, value in entries.items():
        if attributes.get(key) is not value:
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
