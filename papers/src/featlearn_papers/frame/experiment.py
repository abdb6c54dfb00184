"""What is run: set-ups, seeds, and the measurement of one seed. Figures that show the same runs share it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from featlearn.errors import InputValueError
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale

S = TypeVar("S")
"""The set-up of an experiment: a frozen keyword-only dataclass of numbers, words and tuples of them."""

SEEDS = 3
"""A verdict about chance needs at least so many seeds, but for smoke."""
MOST_SEEDS = 5
"""Where the paper has more runs than this, so many are enough."""


@dataclass(frozen=True, kw_only=True)
class Size(Generic[S]):
    """An experiment at one scale."""

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
class Experiment(Generic[S]):
    """Runs that one or several figures draw; its seeds are kept under its id."""

    id: str
    """PAPER/NAME, unique: "004/initial-scales"; that of the figure where only one shows it"""
    sizes: Mapping[Scale, Size[S]]
    measure: Callable[[S, Context], Mapping[str, Numbers]]
    """One seed: set-up and context to named numbers or arrays."""
    paper_seeds: int | None = None
    """How many runs the paper shows, where it says so."""
    random: bool = True
    """False where no seed enters: one run is enough."""

    def __post_init__(self) -> None:
        for scale, size in self.sizes.items():
            if size.seeds < self.least_seeds(scale):
                raise InputValueError(
                    f"{self.id} has {size.seeds} seeds at scale {scale}, expected at least {self.least_seeds(scale)}, "
                    "or random=False where nothing is drawn"
                )

    def least_seeds(self, scale: Scale) -> int:
        """How many a verdict at this scale needs."""
        if scale is Scale.SMOKE or not self.random:
            return 1
        return max(SEEDS, min(self.paper_seeds or 0, MOST_SEEDS))

    def size(self, scale: Scale) -> Size[S]:
        """The experiment at a scale, or an error that names those it has."""
        if scale not in self.sizes:
            raise InputValueError(f"{self.id} has no scale {scale}, expected {' or '.join(self.sizes)}")
        return self.sizes[scale]


AnyExperiment = Experiment[Any]
