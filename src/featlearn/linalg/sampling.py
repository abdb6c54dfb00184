"""A total over many items from a few of them, drawn with probabilities in proportion to a measure of their size.

The scheme is that of Rao, Hartley and Cochran (1962): the items are divided at random into as many groups as there are
draws, and every group gives one item, with a probability in proportion to its size. No item is drawn twice, the total
is unbiased whatever the sizes are, and so is its variance; with equal sizes both are those of simple random sampling
without replacement. Good sizes make the variance small: it vanishes where the items are in proportion to them.

A standard error is itself an estimate. Its degrees of freedom are m - 1 for m draws, and fewer where few of the draws
carry it: 2 m / (kurtosis - 1) by the variance of a variance (Satterthwaite 1946). The error that is stated is wider by
t / 2, t being the 97.7 % quantile of Student's distribution, so that two stated standard errors hold the truth in 95 of
100 draws for any number of degrees of freedom.
"""

import math
import sys
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import HeavyTailWarning
from featlearn.linalg.estimate import Estimate

# Below this many degrees of freedom the spread of the draws says too little of the error.
FEW = 4.0
# Relative errors below this are rounding of kernels in single precision.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Total:
    """An estimated total."""

    value: float
    stderr: float
    """Widened by t / 2; nan for a single draw."""
    draws: int
    """How many draws the error rests on; 0 where every item was seen."""
    freedom: float
    """Degrees of freedom of the error."""


@dataclass(frozen=True)
class Draw:
    """Which items are seen, and what each of them stands for."""

    certain: Tensor
    """(a,) places of items that are always seen, because they are large."""
    drawn: Tensor
    """(m,) places of the others, one for each group."""
    probabilities: Tensor
    """(m,) sizes of the drawn items, as a share of all that are not certain."""
    shares: Tensor
    """(m,) the same, of their groups."""
    factor: float
    """The variance is this times the spread of the draws about their mean."""

    @property
    def places(self) -> Tensor:
        """(a + m,) all items that are seen."""
        return torch.cat([self.certain, self.drawn])

    def total(self, values: Tensor) -> Total:
        """The sum over all items of what `values` (a + m,) gives for those that are seen."""
        values = values.cpu()
        known, seen = float(values[: len(self.certain)].sum()), values[len(self.certain) :]
        if not len(seen):
            return Total(known, 0.0, 0, math.inf)
        terms = seen / self.probabilities
        mean = (self.shares * terms).sum()
        error, freedom = widened(self.shares * (terms - mean).square(), self.factor)
        return Total(known + float(mean), error, len(seen), freedom)


def widened(squares: Tensor, factor: float) -> tuple[float, float]:
    """The stated error and its degrees of freedom, from squares (m,) whose sum times `factor` is the variance."""
    draws, whole = len(squares), float(squares.sum())
    if draws < 2:
        return math.nan, 0.0
    if not whole > 0.0:
        return (0.0 if whole == 0.0 else math.nan), draws - 1.0
    kurtosis = draws * float((squares / whole).square().sum())
    freedom = min(draws - 1.0, 2 * draws / max(kurtosis - 1.0, 1e-12))
    return math.sqrt(factor * whole) * student(freedom), freedom


def averaged(values: Tensor) -> Total:
    """The mean of independent values (m,), with its widened error."""
    draws, mean = len(values), values.mean()
    error, freedom = widened((values - mean).square(), 1 / (draws * max(draws - 1, 1)))
    return Total(float(mean), error, draws, freedom)


def student(freedom: float) -> float:
    """By how much a standard error with so many degrees of freedom is widened: t / 2, 1 for infinitely many."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.9772498680518208)) / 2


def drawn_by_size(sizes: Tensor, count: int, generator: torch.Generator) -> Draw:
    """`count` of the items with sizes (n,) > 0; items of size 0 add nothing to the total and are never seen.

    Items that are expected more than once are certain, at most half of the draws, for an error to be seen.
    """
    items = sizes.nonzero().flatten()
    nothing = sizes.new_zeros(0)
    if len(items) <= count:
        return Draw(items, items[:0], nothing, nothing, 0.0)
    certain = _certain(sizes[items], count)
    rest = items[~certain]
    share = sizes[rest] / sizes[rest].sum()
    draws = count - int(certain.sum())
    order = torch.randperm(len(rest), generator=generator, device=generator.device).cpu()
    uniform = torch.rand(draws, generator=generator, device=generator.device, dtype=torch.float64).cpu()
    n = len(rest)
    ends = torch.arange(1, draws + 1, device=sizes.device) * n // draws - 1  # groups are equally long, but for one item
    cumulative = share[order].cumsum(0)
    upper, starts = cumulative[ends], torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    lower = torch.cat([upper.new_zeros(1), upper[:-1]])
    found = torch.searchsorted(cumulative, lower + uniform * (upper - lower), right=True)
    places = order[found.clamp(min=starts, max=ends)]
    squares = int((ends - starts + 1).square().sum())
    factor = (squares - n) / (n**2 - squares) if draws > 1 else 0.0
    return Draw(items[certain], rest[places], share[places], upper - lower, factor)


def _certain(sizes: Tensor, count: int) -> Tensor:
    """Which items would be expected at least once among `count`; the rest is asked again, without them."""
    certain = torch.zeros_like(sizes, dtype=torch.bool)
    while True:
        left = count - int(certain.sum())
        room = left - (count + 1) // 2
        more = ((sizes * left >= sizes[~certain].sum()) & ~certain).nonzero().flatten()
        if not len(more) or room <= 0:
            return certain
        certain[more[sizes[more].argsort(descending=True)[:room]]] = True


def drawn_first(sizes: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(count,) places, ascending: the largest items for a half, the others drawn in proportion to their sizes.

    Items of size 0 are left out, so there may be fewer.
    """
    count = min(count, int((sizes > 0).sum()))
    largest = sizes.topk(count // 2).indices
    uniform = torch.rand(len(sizes), generator=generator, device=generator.device, dtype=torch.float64).cpu()
    # The order of exponential waiting times with these rates is that of draws without replacement.
    waiting = -torch.log(uniform.clamp(min=1e-300)) / sizes
    waiting[largest] = math.inf
    others = waiting.topk(count - len(largest), largest=False).indices
    return torch.cat([largest, others]).sort().values


def stated(value: float, stderr: float, draws: int, freedom: float, what: str, remedy: str) -> Estimate:
    """The estimate, with a warning where too few draws carry its error."""
    if freedom < FEW and not stderr <= ROUNDING * abs(value):
        warnings.warn(
            f"the standard error of {what} rests on {freedom:.1f} degrees of freedom, expected {FEW:g} or more: a few "
            f"of {draws} draws carry it, and the real error may be larger than the stated one; {remedy}",
            HeavyTailWarning,
            stacklevel=_outside(),
        )
    return Estimate(value, stderr, max(draws, 1), freedom if draws else None)


def _outside() -> int:
    """How many calls above the caller of this function the library was entered."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "featlearn":
        level, frame = level + 1, frame.f_back
    return level
