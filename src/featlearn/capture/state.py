"""Everything a model holds, put back bit for bit: weights, buffers, gradients, flags, plain attributes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import UnsupportedModelError


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore what a forward or backward pass may have changed; `.grad` is put aside meanwhile."""
    parts = list(model.modules())
    containers = _containers(parts)
    copies = [(tensor, tensor.detach().clone(), tensor.requires_grad) for tensor in _tensors(parts)]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in grads:
            parameter.grad = None
        yield
        if any(parameter.grad is not None for parameter, _ in grads):
            raise UnsupportedModelError(
                "a backward pass inside the model wrote to .grad of its parameters, so their gradients cannot be asked "
                "for one by one; reentrant checkpointing does this: pass use_reentrant=False to torch.utils.checkpoint"
            )
    finally:
        for container, entries in containers:
            _refill(container, entries)
        with torch.no_grad():
            for tensor, copy, trainable in copies:
                if not _same_bits(tensor, copy):
                    tensor.detach().copy_(copy)
                if tensor.requires_grad != trainable and tensor.is_leaf:
                    tensor.requires_grad_(trainable)
        for parameter, grad in grads:
            parameter.grad = grad


def _containers(parts: list[nn.Module]) -> list[tuple[Any, Any]]:
    """Attributes, tables and plain lists, dicts and sets of every module, each with a shallow copy."""
    found: list[Any] = []
    for part in parts:
        found += [part.__dict__, *(v for v in part.__dict__.values() if isinstance(v, list | dict | set))]
        # Scripted modules keep theirs out of reach.
        found += [t for t in (part._parameters, part._buffers, part._modules) if isinstance(t, dict)]
    return [(container, container.copy()) for container in {id(c): c for c in found}.values()]


def _refill(container: Any, entries: Any) -> None:
    """Only where something changed: an untouched container is not touched."""
    if isinstance(container, dict):
        changed = list(container) != list(entries) or any(container[k] is not v for k, v in entries.items())
    elif isinstance(container, list):
        changed = len(container) != len(entries) or any(a is not b for a, b in zip(container, entries, strict=True))
    else:
        changed = container != entries
    if changed:
        container.clear()
        container.extend(entries) if isinstance(container, list) else container.update(entries)


def _tensors(parts: list[nn.Module]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for part in parts:
        held = (*part._parameters.values(), *part._buffers.values(), *part.__dict__.values())
        found.update((id(t), t) for t in held if isinstance(t, Tensor) and t.device.type != "meta")
    return list(found.values())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, and -0.0 is not 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout != torch.strided or a.is_quantized:
        return torch.equal(a, b)
    a, b = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in (a, b))
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
