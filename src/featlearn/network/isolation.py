"""Leave no trace: what a measurement may touch is put back bit for bit, also when it raises."""

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules import module as module_globals

from featlearn.network.state import NOTHING_KEPT, KeptState, parameters_of, state_kept


@dataclass(frozen=True)
class Isolation:
    """What a measurement may ask of its surroundings."""

    rewind: Callable[[], None]
    """Put random generators and everything the model holds but its parameters back to where they stood on entry."""
    state: KeptState
    """What the model holds."""
    builtin: bool = False
    """Whether a forward pass is known to treat samples one by one, to write to nothing and to draw no random number."""


# Precision, flags and hooks belong to the process: one thread measures at a time.
_measuring = threading.RLock()


@contextmanager
def undisturbed(
    model: nn.Module, is_builtin: Callable[[Sequence[nn.Module]], bool] = lambda parts: False, *,
    only_read: bool = True,
) -> Iterator[Isolation]:  # fmt: skip
    """Measure inside: eval mode, autocast off, full precision, gradients on, compiled code run eagerly, hooks muted.

    `is_builtin` says whether a forward pass of these modules leaves no trace anyway. `only_read`: weights that were
    written to are put back, and refused.
    """
    with _measuring, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        parts = list(model.modules())
        if is_builtin(parts):  # asked here: another thread may have muted hooks before
            for context in (_autocast_off, _full_precision, _eager, _eval_mode):
                stack.enter_context(context(parts))
            yield Isolation(lambda: None, NOTHING_KEPT, builtin=True)
            return
        rewind = stack.enter_context(random_state_kept())
        for context in (_autocast_off, _full_precision, _eager):
            stack.enter_context(context(parts))
        state = stack.enter_context(state_kept(parts, only_read=only_read))
        for context in (_hooks_muted, _eval_mode):
            stack.enter_context(context(parts))

        untouched = True

        def start_over() -> None:
            nonlocal untouched
            if not untouched:
                rewind()
                state.rewind()
            untouched = False

        yield Isolation(start_over, state)


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage is collected meanwhile: to look through all that a process has loaded takes longer than most kernels.

    Who repeats forward passes inside collects what is young between them.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def random_state_kept() -> Iterator[Callable[[], None]]:
    """Random numbers go on as before; the function given rewinds them to where they stood on entry."""
    cpu, python, array = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    cuda = [(generator, generator.get_state()) for generator in generators]

    def rewind() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy.random.set_state(array)
        for generator, state in cuda:
            generator.set_state(state)

    try:
        yield rewind
    finally:
        rewind()


@contextmanager
def _autocast_off(parts: Sequence[nn.Module]) -> Iterator[None]:
    tensors = (tensor for part in parts for table in (part._parameters, part._buffers) for tensor in table.values())
    kinds = {tensor.device.type for tensor in tensors if tensor is not None}
    with ExitStack() as stack:
        for kind in sorted((kinds | {"cpu", "cuda"}) - {"meta"}):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _full_precision(parts: Sequence[nn.Module]) -> Iterator[None]:
    """No TF32 or bfloat16 in float32 products; set through `fp32_precision` alone, the two interfaces do not mix."""
    del parts
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
            # "none" inherits from the general setting, and reads as what it inherits.
            owner.fp32_precision = "none"
            if owner.fp32_precision != precision:
                owner.fp32_precision = precision


@contextmanager
def _eager(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Compiled code runs eagerly, fused recurrent layers as their parts: the graph then shows every op."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing has been compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(part, nn.RNNBase) for part in parts):
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
def _eval_mode(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Flags are set directly: some modules act on train() or on assignments, and change weights."""
    before = [(part, part.training) for part in parts if part.training]
    try:
        for part, _ in before:
            part.__dict__["training"] = False
        yield
    finally:
        for part, training in before:
            part.__dict__["training"] = training


@contextmanager
def _hooks_muted(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Backward hooks of the user neither fire nor change gradients. Forward hooks are part of the function."""
    tables: list[dict[int, Any]] = [module_globals._global_backward_hooks, module_globals._global_backward_pre_hooks]
    for part in parts:
        tables += [part._backward_hooks, part._backward_pre_hooks]
    parameters = parameters_of(parts)
    for p in parameters:
        tables += [table for table in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) if table]
    before = [(table, dict(table)) for table in tables]
    bare = [p for p in parameters if p._backward_hooks is None]
    try:
        for table, _ in before:
            table.clear()
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)
        for p in bare:  # a forward pass may have put a hook on a weight
            if p._backward_hooks is not None:
                p._backward_hooks = None
