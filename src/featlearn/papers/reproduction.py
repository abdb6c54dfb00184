"""What it takes to reproduce a figure: set-ups, one seed's run, the picture and the claims."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from featlearn.errors import InputValueError
from featlearn.papers.claims import Claim
from featlearn.papers.context import Context
from featlearn.papers.runs import Numbers, Runs
from featlearn.papers.scale import Scale

S = TypeVar("S")
"""The set-up of a figure: a frozen keyword-only dataclass of numbers, words and tuples of them."""

SEEDS = 3
"""A claim about chance is judged over at least so many seeds, but for smoke."""


@dataclass(frozen=True, kw_only=True)
class Size(Generic[S]):
    """A figure at one scale."""

    setup: S
    seeds: int
    """0 to seeds - 1"""
    seconds: float
    """for one seed, on one core, or on the GPU where `device` is "cuda" """
    mebibytes: float
    """that one seed needs at its peak, beside the 400 of torch itself"""
    device: str = "cpu"
    """what it is meant for"""


@dataclass(frozen=True, kw_only=True)
class Reproduction(Generic[S]):
    """One figure or table of a paper; declared in `registry`."""

    id: str
    """As declared: "002/figC2"."""
    about: str
    """What the paper shows, what it leaves open and what was chosen; one paragraph, shown on the page."""
    sizes: Mapping[Scale, Size[S]]
    measure: Callable[[S, Context], Mapping[str, Numbers]]
    """One seed: set-up and context to named numbers or arrays."""
    plot: Callable[[S, Runs], Any]
    """The picture as in the paper, ours beside theirs: a matplotlib Figure."""
    claims: Callable[[S, Runs], Iterable[Claim]]
    random: bool = True
    """False where no seed enters: one run is enough."""

    def __post_init__(self) -> None:
        for scale, size in self.sizes.items():
            if size.seeds < (SEEDS if self.random and scale is not Scale.SMOKE else 1):
                raise InputValueError(
                    f"{self.id} has {size.seeds} seeds at scale {scale}, expected at least {SEEDS}, or random=False "
                    "where nothing is drawn"
                )

    def size(self, scale: Scale) -> Size[S]:
        """The figure at a scale, or an error that names those it has."""
        if scale not in self.sizes:
            raise InputValueError(f"{self.id} has no scale {scale}, expected {' or '.join(self.sizes)}")
        return self.sizes[scale]
