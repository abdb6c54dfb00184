"""Leave no trace: what a measurement may touch is put back bit for bit, also when it raises.

Compiled code runs eagerly meanwhile, so that the graph shows its ops.
"""

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from featlearn.errors import FeatlearnError
from featlearn.network.state import Inventory, KeptState, state_kept
from featlearn.torch_internals import (
    BACKWARD_HOOKS,
    COMPILER,
    ask_for_full_precision,
    compiler_loaded,
    drop_hook_table,
    global_backward_hooks,
    has_hook_table,
    hook_tables,
    is_autocasting,
    product_precisions,
    restore_precisions,
    without_fused_recurrent_layers,
)

OPERANDS = (
    "functions for torch.cond, scan and while_loop must take the weights that they use as operands and return tuples: "
    "torch.cond(condition, f, g, (x, self.weight))"
)
"""What to do where such functions fail, or get no gradient, without the compiler."""


class CompilerNotLoadedError(FeatlearnError):
    """A model needs torch's compiler, which must not be imported while ops are recorded."""


def load_compiler() -> None:
    """Import torch's compiler."""
    __import__(COMPILER)


def eager_stance(stack: ExitStack) -> Callable[[], None]:
    """Return a function that makes compiled code run eagerly until `stack` closes, as soon as anything is compiled."""
    entered = False

    def enter() -> None:
        nonlocal entered
        if not entered and compiler_loaded():  # importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            entered = True

    enter()
    return enter


class _Refusal(MetaPathFinder):
    """Raises where this thread imports the compiler."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        del path, target
        if fullname == COMPILER and threading.get_ident() == self._thread:
            raise CompilerNotLoadedError(
                "a forward pass imports torch's compiler (torch.cond does) after others that did not; "
                f"import {COMPILER} first, and measure again"
            )


@contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Raise `CompilerNotLoadedError` if code inside imports the compiler.

    Imported while ops are recorded, it fails on every later call of `torch.cond` in the process (torch 2.13).
    """
    if compiler_loaded():
        yield
        return
    refusal = _Refusal()
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)


class RandomState:
    """States of random generators when a measurement began."""

    def __init__(self, generators: Iterable[Any]) -> None:
        wrapped = map(_Generator.of, generators)
        self._generators = [(generator.state(), generator) for generator in wrapped]
        self._drew = False

    def restore(self) -> None:
        """Put back the state of every generator that was drawn from."""
        for state, generator in self._generators:
            if not _is_same_state(generator.state(), state):
                self._drew = True
                generator.set_state(state)

    def has_drawn(self, *, at_end: bool = False) -> bool:
        """Return whether any random number has been drawn since the measurement began.

        `at_end`: if none has, nothing is left to restore. To read the states takes as long as many ops.
        """
        self.restore()
        if at_end and not self._drew:
            self._generators = []
        return self._drew

    def seed(self, seed: int) -> None:
        """Start all generators from another state."""
        for _, generator in self._generators:
            generator.seed(seed)


class _Generator(NamedTuple):
    """The functions of a random generator, of torch, numpy or Python."""

    state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[int], Any]

    @classmethod
    def of(cls, generator: Any) -> "_Generator":
        if isinstance(generator, torch.Generator):
            return cls(generator.get_state, generator.set_state, generator.manual_seed)
        if isinstance(generator, numpy.random.Generator):
            bits: Any = generator.bit_generator
            write = partial(setattr, bits, "state")
            return cls(lambda: bits.state, write, lambda seed: write(type(bits)(seed).state))
        if hasattr(generator, "getstate"):
            return cls(generator.getstate, generator.setstate, generator.seed)
        # A dictionary, which can be compared entry by entry.
        return cls(partial(generator.get_state, legacy=False), generator.set_state, generator.seed)


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_is_same_state(value, b[key]) for key, value in a.items())
    return a.tobytes() == b.tobytes() if isinstance(a, numpy.ndarray) else bool(a == b)


@contextmanager
def random_state_kept(generators: Iterable[Any] = ()) -> Iterator[RandomState]:
    """Restore the global random generators, and these, on exit."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    state = RandomState([torch.default_generator, *cuda, random, numpy.random, *generators])
    try:
        yield state
    finally:
        state.restore()


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
def undisturbed(inside: Inventory, *, only_read: bool = True) -> Iterator[Isolation]:
    """Measure inside: eval mode, autocast off, full precision, gradients on, compiled code run eagerly, hooks muted.

    `only_read`: weights that were written to are put back, and refused.
    """
    with (
        _measuring,
        torch.inference_mode(False),
        torch.enable_grad(),
        _settings_for_measuring(inside) as compile_nothing,
        state_kept(inside, only_read=only_read) as state,
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
    """Collect no garbage inside: to look through all that a process has loaded takes longer than most kernels.

    Code that repeats forward passes inside collects young objects between them.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _settings_for_measuring(inside: Inventory) -> Iterator[Callable[[], None]]:
    """Set what belongs to the process, and flags of the model: autocast, precision, compiled code, eval mode.

    Yields a function to call before every pass, in case the compiler has been loaded meanwhile.
    """
    training = [(part, part.training) for part in inside.modules if part.training]
    before = product_precisions()
    with ExitStack() as stack:
        if is_autocasting():
            kinds = {device.type for _, _, device in inside.kind} | {"cpu", "cuda"}
            for kind in sorted(kinds - {"meta"}):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
        compile_nothing = eager_stance(stack)
        if any(issubclass(kind, nn.RNNBase) for kind in inside.types):
            # The graph shows every op then; cuDNN has no backward pass for recurrent layers in eval mode.
            stack.enter_context(without_fused_recurrent_layers())
        try:
            ask_for_full_precision(before)
            for part, _ in training:  # directly: some modules act on train() or on assignments, and change weights
                part.__dict__["training"] = False
            yield compile_nothing
        finally:
            for part, flag in training:
                part.__dict__["training"] = flag
            restore_precisions(before)


@contextmanager
def _hooks_muted(inside: Inventory) -> Iterator[None]:
    """Mute the user's backward hooks: they neither fire nor change gradients. Forward hooks are part of the function.

    Those of modules come back with the state of the model.
    """
    tables = [table for part in inside.modules for key in BACKWARD_HOOKS if (table := getattr(part, key))]
    muted = [*global_backward_hooks(), *(table for p in inside.parameters for table in hook_tables(p))]
    hooks = [(table, dict(table)) for table in muted]
    bare = [p for p in inside.parameters if not has_hook_table(p)]
    try:
        for table in (*tables, *muted):
            table.clear()
        yield
    finally:
        for table, entries in hooks:
            table.clear()
            table.update(entries)
        for p in bare:
            if has_hook_table(p):
                drop_hook_table(p)
