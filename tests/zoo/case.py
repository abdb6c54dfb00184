"""A case of the zoo, and the small parts that the cases are made of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Any, Any, Callable[..., Tensor] | None]


@dataclass(frozen=True)
class Case:
    """One model with two batches of unequal size.

    `build()` gives (model, x, x2, readout), the same at every call, in training mode as a user would hand them over.
    `tolerance` bounds errors relative to the largest entry of the whole network's kernel. Not of one parameter's: some
    are zero but for rounding, as that of a key bias, to which the softmax is blind.
    `fallback` marks models in which some parameter can hardly be read per sample from the graph of a batch: a loop over
    samples is a fair way to treat them. It is a hint to people, not something to assert.
    `flags` are properties that tests may select by. `why` says what is awkward, or why the case must be refused.
    """

    name: str
    build: Callable[[], Built]
    tolerance: float = 1e-10
    fallback: bool = False
    flags: frozenset[str] = frozenset()
    why: str = ""

    def __repr__(self) -> str:
        return f"Case({self.name})"


def case(
    into: list[Case],
    *,
    tolerance: float = 1e-10,
    fallback: bool = False,
    flags: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Add a builder to a list of cases, under its own name, made deterministic; its docstring is the reason for it."""

    def add(make: Callable[[], Built]) -> Callable[[], Built]:
        def build() -> Built:
            with torch.random.fork_rng(devices=[]), default_dtype(dtype):
                torch.manual_seed(0)
                return make()

        why = " ".join((make.__doc__ or "").split())
        into.append(Case(make.__name__, build, tolerance, fallback, frozenset(flags), why))
        return build

    return add


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Net(nn.Module):
    """A module from its parts (modules, parameters, buffers, constants) and a forward function of (self, *inputs)."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.function(self, *inputs, **named_inputs)


def parameter(*shape: int, scale: float = 0.5) -> nn.Parameter:
    return nn.Parameter(scale * torch.randn(shape))


def gaussian(*shape: int, P: int = 5, P2: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(P, *shape), torch.randn(P2, *shape)


def tokens(vocabulary: int, *shape: int, P: int = 5, P2: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (P, *shape)), torch.randint(vocabulary, (P2, *shape))
