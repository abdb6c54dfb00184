"""torch's compiler during a measurement: compiled code runs eagerly, so that the graph shows its ops."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

import torch

from featlearn.errors import FeatlearnError
from featlearn.torch_internals import COMPILER, compiler_loaded

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
