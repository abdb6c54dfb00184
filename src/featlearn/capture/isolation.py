"""Leave no trace: what a measurement may touch is put back bit for bit, also when it raises."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals

from featlearn.errors import UnsupportedModelError


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Measure inside: eval mode, autocast off, full precision, gradients on, compiled code run eagerly, hooks muted.

    Yields a function that sets every random generator back to where it stood on entry.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        rewind = stack.enter_context(_random_state(model))
        for context in (_autocast_off, _full_precision, _eager, _state_kept, _hooks_muted, _eval_mode):
            stack.enter_context(context(model))
        yield rewind


def _devices(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


@contextmanager
def _random_state(model: nn.Module) -> Iterator[Callable[[], None]]:
    del model  # its random numbers may come from any device
    cpu, python, array = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def rewind() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy.random.set_state(array)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    try:
        yield rewind
    finally:
        rewind()


@contextmanager
def _autocast_off(model: nn.Module) -> Iterator[None]:
    kinds = {device.type for device in _devices(model)} | {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    with ExitStack() as stack:
        for kind in sorted(kinds - {"meta"}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """No TF32 or bfloat16 in float32 products; set through `fp32_precision` alone, the two interfaces do not mix."""
    del model
    backends = torch.backends
    owners: list[Any] = [backends.cuda.matmul]
    owners += [getattr(part, kind) for part in (backends.cudnn, backends.mkldnn) for kind in ("conv", "rnn")]
    owners.append(getattr(backends.mkldnn, "matmul"))  # noqa: B009 (unknown to the type stubs)
    before = [owner.fp32_precision for owner in owners]
    try:
        for owner in owners:
            owner.fp32_precision = "ieee"
        yield
    finally:
        for owner, precision in zip(owners, before, strict=True):
            owner.fp32_precision = precision


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Compiled code runs eagerly, fused recurrent layers as their parts: the graph then shows every op."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(part, nn.RNNBase) for part in model.modules()):
            # cuDNN has no backward pass for recurrent layers in eval mode. Not by flags(), which sets precision too.
            stack.enter_context(_switched_off(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled))
            stack.enter_context(_switched_off(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled))
        yield


@contextmanager
def _switched_off(read: Callable[[], bool], write: Callable[[bool], None]) -> Iterator[None]:
    before = read()
    try:
        write(False)
        yield
    finally:
        write(before)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Flags are set directly: some wrappers override train() and change weights when it is called."""
    before = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in before:
            part.training = False
        yield
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def _hooks_muted(model: nn.Module) -> Iterator[None]:
    """Backward hooks of the user neither fire nor change gradients. Forward hooks are part of the function."""
    tables: list[dict[int, Any]] = [module_globals._global_backward_hooks, module_globals._global_backward_pre_hooks]
    for part in model.modules():
        tables += [part._backward_hooks, part._backward_pre_hooks]
    tables += [table for p in model.parameters() if (table := p._backward_hooks)]
    before = [(table, dict(table)) for table in tables]
    try:
        for table, _ in before:
            table.clear()
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Parameters, buffers, `.grad` and plain attributes of every module."""
    parts = list(model.modules())
    attributes = [(part, dict(part.__dict__)) for part in parts]
    tables = [
        (table, dict(table))
        for part in parts
        for table in (part._parameters, part._buffers, part._modules)
        if isinstance(table, dict)  # scripted modules keep theirs out of reach
    ]
    tensors = _tensors_of(parts)
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
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
        for table, entries in (*((part.__dict__, kept) for part, kept in attributes), *tables):
            if len(table) != len(entries) or any(table.get(key) is not value for key, value in entries.items()):
                table.clear()
                table.update(entries)
        with torch.no_grad():
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):
                    tensor.detach().copy_(copy)
        for parameter, grad in grads:
            parameter.grad = grad


def _tensors_of(parts: list[nn.Module]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for part in parts:
        held = (*part._parameters.values(), *part._buffers.values(), *part.__dict__.values())
        found.update((id(t), t) for t in held if isinstance(t, Tensor) and t.device.type != "meta")
    return list(found.values())
