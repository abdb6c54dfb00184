"""Estimate a total over many items from a few, drawn with probabilities proportional to their size.

The scheme is that of Rao, Hartley and Cochran (1962). Items are divided at random into as many groups as there are
draws. One item is drawn per group, with a probability proportional to its size. No item is drawn twice. The total and
its variance are unbiased for any sizes; equal sizes give simple random sampling without replacement. The variance
vanishes if the items are proportional to their sizes.

A standard error is itself an estimate. Its degrees of freedom are m - 1 for m draws, and fewer if a few draws dominate:
2 m / (kurtosis - 1) by the variance of a variance (Satterthwaite 1946). The stated error is widened by t / 2, where t
is the 97.7% quantile of Student's distribution. Two stated standard errors thus have 95% coverage for any number of
degrees of freedom.
"""

import math
import sys
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.errors import HeavyTailWarning
from featlearn.linalg.estimate import Estimate

# Degrees of freedom below which the error estimate is unreliable.
FEW = 4.0
# Relative rounding error of float32 kernels.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Total:
    """An estimated total."""

    value: float
    stderr: float
    """Widened by t / 2; nan for a single draw."""
    draws: int
    """Number of draws that determine the error; 0 if all items were seen."""
    freedom: float
    """Degrees of freedom of the error."""


@dataclass(frozen=True)
class Draw:
    """Drawn items and their weights."""

    certain: Tensor
    """(a,) indices of items that are always included, because they are large."""
    drawn: Tensor
    """(m,) indices of the other items, one per group."""
    probabilities: Tensor
    """(m,) sizes of the drawn items, as a fraction of all items that are not certain."""
    shares: Tensor
    """(m,) sizes of their groups, as the same fraction."""
    factor: float
    """Ratio of the variance to the spread of the draws around their mean."""

    @property
    def places(self) -> Tensor:
        """(a + m,) indices of all drawn items."""
        return torch.cat([self.certain, self.drawn])

    def total(self, values: Tensor) -> Total:
        """Estimate the sum over all items from `values` (a + m,) of the drawn items."""
        values = values.cpu()
        certain_sum, drawn_values = float(values[: len(self.certain)].sum()), values[len(self.certain) :]
        if not len(drawn_values):
            return Total(certain_sum, 0.0, 0, math.inf)
        terms = drawn_values / self.probabilities
        mean = (self.shares * terms).sum()
        error, freedom = widened(self.shares * (terms - mean).square(), self.factor)
        return Total(certain_sum + float(mean), error, len(drawn_values), freedom)


def widened(squares: Tensor, factor: float) -> tuple[float, float]:
    """Return the widened error and its degrees of freedom; the sum of `squares` (m,) times `factor` is the variance."""
    draws, whole = len(squares), float(squares.sum())
    if draws < 2:
        return math.nan, 0.0
    if not whole > 0.0:
        return (0.0 if whole == 0.0 else math.nan), draws - 1.0
    kurtosis = draws * float((squares / whole).square().sum())
    freedom = min(draws - 1.0, 2 * draws / max(kurtosis - 1.0, 1e-12))
    return math.sqrt(factor * whole) * student(freedom), freedom


def averaged(values: Tensor) -> Total:
    """Return the mean of independent values (m,), with its widened error."""
    draws, mean = len(values), values.mean()
    error, freedom = widened((values - mean).square(), 1 / (draws * max(draws - 1, 1)))
    return Total(float(mean), error, draws, freedom)


def student(freedom: float) -> float:
    """Return the widening factor t / 2 of a standard error; it is 1 for infinitely many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.9772498680518208)) / 2


def drawn_by_size(sizes: Tensor, count: int, generator: torch.Generator) -> Draw:
    """Draw `count` of the items with sizes (n,) > 0; items of size 0 do not contribute to the total.

    Items expected more than once are always included, in at most half of the draws so that an error remains.
    """
    items = sizes.nonzero().flatten()
    empty = sizes.new_zeros(0)
    if len(items) <= count:
        return Draw(items, items[:0], empty, empty, 0.0)
    certain = _certain(sizes[items], count)
    rest = items[~certain]
    share = sizes[rest] / sizes[rest].sum()
    draws = count - int(certain.sum())
    order = torch.randperm(len(rest), generator=generator, device=generator.device).cpu()
    uniform = torch.rand(draws, generator=generator, device=generator.device, dtype=torch.float64).cpu()
    n = len(rest)
    ends = torch.arange(1, draws + 1, device=sizes.device) * n // draws - 1  # group lengths differ by at most 1
    cumulative = share[order].cumsum(0)
    upper, starts = cumulative[ends], torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    lower = torch.cat([upper.new_zeros(1), upper[:-1]])
    positions = torch.searchsorted(cumulative, lower + uniform * (upper - lower), right=True)
    places = order[positions.clamp(min=starts, max=ends)]
    squares = int((ends - starts + 1).square().sum())
    factor = (squares - n) / (n**2 - squares) if draws > 1 else 0.0
    return Draw(items[certain], rest[places], share[places], upper - lower, factor)


def _certain(sizes: Tensor, count: int) -> Tensor:
    """Return a mask of items expected at least once among `count`, applied again to the rest."""
    certain = torch.zeros_like(sizes, dtype=torch.bool)
    while True:
        left = count - int(certain.sum())
        room = left - (count + 1) // 2
        more = ((sizes * left >= sizes[~certain].sum()) & ~certain).nonzero().flatten()
        if not len(more) or room <= 0:
            return certain
        certain[more[sizes[more].argsort(descending=True)[:room]]] = True


def drawn_first(sizes: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return indices (count,), ascending: one half the largest items, the others drawn in proportion to size.

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
    """Return the estimate, and warn if too few draws dominate its error."""
    if freedom < FEW and not stderr <= ROUNDING * abs(value):
        warnings.warn(
            f"the standard error of {what} rests on {freedom:.1f} degrees of freedom, expected {FEW:g} or more: a few "
            f"of {draws} draws carry it, and the real error may be larger than the stated one; {remedy}",
            HeavyTailWarning,
            stacklevel=_outside(),
        )
    return Estimate(value, stderr, max(draws, 1), freedom if draws else None)


def _outside() -> int:
    """Return the number of stack frames from the caller to the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "featlearn":
        level, frame = level + 1, frame.f_back
    return level
