"""Leave no trace: what a measurement may touch is put back bit for bit, also when it raises."""

import gc
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals

from featlearn.network.compiler import eager_stance
from featlearn.network.inventory import Inventory
from featlearn.network.state import KeptState, state_kept


class RandomState:
    """States of random generators when a measurement began."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._generators = [(generator, _generator_state(generator)) for generator in generators]
        self._drew = False

    def restore(self) -> None:
        """Put back the state of every generator that was drawn from."""
        for generator, state in self._generators:
            if not _is_same_state(_generator_state(generator), state):
                self._drew = True
                _set_generator_state(generator, state)

    def has_drawn(self) -> bool:
        """Return whether any random number has been drawn since the measurement began."""
        self.restore()
        return self._drew

    def seed(self, seed: int) -> None:
        """Start all generators from another state."""
        for generator, _ in self._generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, numpy.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    # Of numpy a dictionary, which can be compared entry by entry.
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state(legacy=False)


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_is_same_state(value, b[key]) for key, value in a.items())
    return a.tobytes() == b.tobytes() if isinstance(a, numpy.ndarray) else bool(a == b)


@dataclass(frozen=True)
class Isolation:
    """What a measurement may ask of its surroundings."""

    rewind: Callable[[], None]
    """Put random generators and everything the model holds but its parameters back to where they stood on entry."""
    state: KeptState
    """What the model holds."""
    random: RandomState
    """States of the random generators that a forward pass may draw from."""


# Precision, flags and hooks belong to the process: one thread measures at a time.
_measuring = threading.RLock()


@contextmanager
def undisturbed(
    inside: Inventory,
    *,
    only_read: bool = True,
    guarded: bool = False,
) -> Iterator[Isolation]:
    """Measure inside: eval mode, autocast off, full precision, gradients on, compiled code run eagerly, hooks muted.

    `only_read`: weights that were written to are put back, and refused. `guarded`: the model runs under the guard of
    its state, if it has one.
    """
    with (
        _measuring,
        torch.inference_mode(False),
        torch.enable_grad(),
        _settings_for_measuring(inside) as compile_nothing,
        state_kept(inside, only_read=only_read, guarded=guarded) as state,
        random_state_kept(state.generators) as random_state,
        _hooks_muted(inside),
    ):
        untouched = True

        def start_over() -> None:
            nonlocal untouched
            compile_nothing()
            if not untouched:
                random_state.restore()
                state.rewind()
            untouched = False

        yield Isolation(start_over, state, random_state)


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
def random_state_kept(generators: Iterable[Any] = ()) -> Iterator[RandomState]:
    """Restore the global random generators, and these, on exit."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    state = RandomState([torch.default_generator, *cuda, random, numpy.random, *generators])
    try:
        yield state
    finally:
        state.restore()


@contextmanager
def _settings_for_measuring(inside: Inventory) -> Iterator[Callable[[], None]]:
    """Settings of the process and flags of the model: autocast, precision, compiled code, eval mode.

    Gives a function to call before every pass, in case the compiler has been loaded meanwhile.
    """
    training = [(part, part.training) for part in inside.modules if part.training]
    before = _precisions()
    with ExitStack() as stack:
        if torch._C._is_any_autocast_enabled():
            kinds = {device.type for _, _, device in inside.kind} | {"cpu", "cuda"}
            for kind in sorted(kinds - {"meta"}):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
        compile_nothing = eager_stance(stack)
        if [kind for kind in inside.types if issubclass(kind, nn.RNNBase)]:
            # Fused recurrent layers run as their parts, so that the graph shows every op; cuDNN has no backward pass
            # for them in eval mode. Not by flags(), which sets precision too.
            stack.enter_context(_switched_off(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled))
            stack.enter_context(_switched_off(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled))
        try:
            _ask_for_full_precision(before)
            for part, _ in training:  # directly: some modules act on train() or on assignments, and change weights
                part.__dict__["training"] = False
            yield compile_nothing
        finally:
            for part, flag in training:
                part.__dict__["training"] = flag
            _put_back(before)


_PRODUCTS = (
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("mkldnn", "matmul"),
)


def _precisions() -> list[str]:
    """By the functions behind `torch.backends`, whose attributes take as long as ops."""
    read = torch._C._get_fp32_precision_getter
    return [read(*product) for product in _PRODUCTS]


def _ask_for_full_precision(before: list[str]) -> None:
    """No TF32 or bfloat16 in float32 products; set as `fp32_precision` alone, the two interfaces do not mix."""
    for product, precision in zip(_PRODUCTS, before, strict=True):
        if precision != "ieee":
            torch._C._set_fp32_precision_setter(*product, "ieee")


def _put_back(before: list[str]) -> None:
    if _precisions() == before:
        return
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    for product, precision in zip(_PRODUCTS, before, strict=True):
        if read(*product) != precision:
            # "none" inherits from the general setting, and reads as what it inherits.
            write(*product, "none")
            if read(*product) != precision:
                write(*product, precision)


@contextmanager
def _switched_off(read: Callable[[], bool], write: Callable[[bool], None]) -> Iterator[None]:
    before = read()
    try:
        write(False)
        yield
    finally:
        write(before)


@contextmanager
def _hooks_muted(inside: Inventory) -> Iterator[None]:
    """Backward hooks of the user neither fire nor change gradients. Forward hooks are part of the function."""
    tables: list[dict[int, Any]] = [module_globals._global_backward_hooks, module_globals._global_backward_pre_hooks]
    for part in inside.modules:
        tables += (part._backward_hooks, part._backward_pre_hooks)
    for p in inside.parameters:
        tables += [table for table in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) if table]
    muted = [(table, dict(table)) for table in tables if table]
    bare = [p for p in inside.parameters if p._backward_hooks is None]
    try:
        for table, _ in muted:
            table.clear()
        yield
    finally:
        for table in tables:  # a forward pass may have put hooks on modules or weights
            if table:
                table.clear()
        for table, hooks in muted:
            table.update(hooks)
        for p in bare:
            if p._backward_hooks is not None:
                p._backward_hooks = None
