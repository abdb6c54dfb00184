"""Everything a model holds, put back bit for bit: weights, buffers, gradients, flags, plain attributes."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import UnsupportedModelError

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[Callable[[], set[int]]]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile.

    Yields a function that gives the identities of the tensors that have been written to so far.
    """
    held = _held(list(model.modules()))
    containers = [(thing, thing.copy()) for thing in held if isinstance(thing, _CONTAINERS)]
    generators = [(thing, thing.get_state()) for thing in held if isinstance(thing, torch.Generator)]
    tensors = [thing for thing in held if isinstance(thing, Tensor) and thing.device.type != "meta"]
    copies = [(tensor, tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]
    versions = [_version(tensor) for tensor in tensors]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]

    def rewritten() -> set[int]:
        written = {id(t) for t, version in zip(tensors, versions, strict=True) if _version(t) != version}
        return written | {id(tensor) for tensor, copy, _ in copies if not _same_bits(tensor, copy)}

    try:
        for parameter, _ in grads:
            parameter.grad = None
        yield rewritten
        if any(parameter.grad is not None for parameter, _ in grads):
            raise UnsupportedModelError(
                "a backward pass inside the model wrote to .grad of its parameters, so their gradients cannot be asked "
                "for one by one; reentrant checkpointing does this: pass use_reentrant=False to torch.utils.checkpoint"
            )
    finally:
        for container, entries in containers:
            _refill(container, entries)
        for generator, state in generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, copy, trainable in copies:
                if not _same_bits(tensor, copy):
                    tensor.detach().copy_(copy)
                if tensor.requires_grad != trainable and tensor.is_leaf:
                    tensor.requires_grad_(trainable)
        for parameter, grad in grads:
            parameter.grad = grad


def _held(parts: list[nn.Module]) -> list[Any]:
    """Tensors, containers and random generators in the attributes of modules, also inside one another."""
    found: dict[int, Any] = {}
    # Scripted modules keep their tables out of reach; what can be listed is.
    stack: list[Any] = [table for p in parts for table in (p.__dict__, p._parameters, p._buffers, p._modules)]
    while stack:
        thing = stack.pop()
        if id(thing) in found:
            continue
        if isinstance(thing, (*_CONTAINERS, Tensor, torch.Generator)):
            found[id(thing)] = thing
        if isinstance(thing, (*_CONTAINERS, tuple)):
            stack += thing.values() if isinstance(thing, dict) else thing
        elif not isinstance(thing, Tensor | torch.Generator | nn.Module) and hasattr(thing, "values"):
            stack += [value for value in thing.values() if isinstance(value, Tensor)]
    return list(found.values())


def _refill(container: Any, entries: Any) -> None:
    """Only where something changed: an untouched container is not touched."""
    if isinstance(container, dict):
        changed = list(container) != list(entries) or any(container[k] is not v for k, v in entries.items())
    elif isinstance(container, set):
        changed = container != entries
    else:
        changed = len(container) != len(entries) or any(a is not b for a, b in zip(container, entries, strict=True))
    if changed:
        container.clear()
        container.update(entries) if isinstance(container, dict | set) else container.extend(entries)


def _version(tensor: Tensor) -> int:
    """Counts what was written in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, and -0.0 is not 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout != torch.strided or a.is_quantized:
        return torch.equal(a, b)
    a, b = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in (a, b))
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
