"""The size of a large kernel from a few of its columns: a Nyström approximation, and the error it leaves.

Hutchinson's estimate of |K|_F^2 has an error of 30 % after 16 products where one eigenvalue holds most of the norm, as
it does in tangent kernels. A third of the columns here make a Nyström approximation N of K, whose norm is known
exactly, and the others say by how much the squares of its columns fall short. What is approximated well adds no
variance.

The diagonal of K says which columns to take. K is positive, so |K_ij|^2 <= K_ii K_jj: a sample with a large gradient
has a large column, and where a few samples are much larger than the others (heavy tails, outliers) uniform draws miss
them, and with them both the norm and the error. Half of the first third are the samples with the largest K_ii, half
are drawn in proportion to K_ii. The approximation leaves R = K - N, positive too, whose diagonal is then known for all
samples. Column i of K has the squared norm of column i of N and 2 <N e_i, R e_i> + |R e_i|^2 more; the other two thirds
are drawn in proportion to a bound on that, 2 |N e_i| t_i + t_i^2 with |N e_i|^2 <= lambda_max(N) N_ii and
t_i^2 = R_ii (R_ii + tr R / k) in the place of |R e_i|^2 (`featlearn.linalg.sampling`). The bound need not hold: sizes
change the variance and not the mean.

The later draws are independent of what the approximation was made from: the estimates are unbiased, and the standard
error is that of the later draws. Letting the parts change places and averaging would halve the error, but the errors
of such parts are correlated and the stated one is too small: it held the truth in 45 of 100 trials where it should in
67.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.linalg.sampling import Draw, averaged, drawn_by_size, drawn_first, stated

REMEDY = "take more vectors="
ColumnTerm = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Something linear in blocks of columns: of rows (s g, n g) of s samples with n others, float64, and their n places."""


class Columns(Protocol):
    """A positive kernel of P samples, g rows for each, that gives its columns."""

    @property
    def samples(self) -> int:
        """P."""

    @property
    def group(self) -> int:
        """g."""

    @property
    def diagonal(self) -> Tensor:
        """(P,) the sum of the g diagonal entries of every sample, float64 on the CPU."""

    def sums(self, drawn: Tensor, term: ColumnTerm, wanted: Tensor | None = None) -> tuple[Tensor, ...]:
        """The sums of what `term` makes of the rows of the drawn samples, over blocks of columns.

        `wanted`, ascending, are the samples whose columns count, instead of all. `term` is also asked for no columns.
        """


@dataclass(frozen=True)
class Survey:
    """What columns show of a kernel: known parts, and what each of the later columns adds to them."""

    draw: Draw
    square: float
    """The known part of |K|_F^2."""
    squares: Tensor
    """(s,) what the later columns add to it."""
    overlap: float = 0.0
    """The known part of tr(Y^T K Y)."""
    overlaps: Tensor | None = None
    """(s,) what the later columns add to it; None without targets."""


def surveyed(columns: Columns, count: int, generator: torch.Generator, targets: Tensor | None = None) -> Survey:
    """The columns of `count` samples, in two sweeps; with targets (P, d), which go with g = 1, the overlap too."""
    diagonal = columns.diagonal.clamp(min=0.0)
    first = drawn_first(diagonal, max(1, count // 3), generator)
    if not len(first):
        none = drawn_by_size(diagonal, count, generator)
        return Survey(none, 0.0, diagonal[:0], 0.0, None if targets is None else diagonal[:0])
    within, _, _ = _seen(columns, first, first, None, first)
    root = _inverse_root((within + within.mT) / 2)

    def seen(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        ahead, held = root.mT @ rows, torch.zeros_like(diagonal)
        held[places] = ahead.square().sum(0).reshape(-1, columns.group).sum(1).cpu()
        found = (ahead @ ahead.mT, held, rows.square().sum(1))
        if targets is None:
            return found
        part = targets[places.to(targets.device)].to(rows)
        return (*found, rows @ part, ahead @ part)

    middle, approximated, squares, *overlaps = columns.sums(first, seen)  # |N|_F = |middle|_F
    sizes = _sizes(diagonal, approximated, float(torch.linalg.eigvalsh(middle)[-1]), len(first), targets)
    sizes[first] = 0.0
    draw = drawn_by_size(sizes, count - len(first), generator)
    between, later, later_task = _seen(columns, draw.places, first, targets)
    group = columns.group

    def lacking(square: Tensor, ahead: Tensor) -> Tensor:
        """By how much the squares of some columns exceed those of the approximation."""
        return (square - (ahead * (middle @ ahead)).sum(0)).reshape(-1, group).sum(1)

    # Where no column is left to be drawn there is none to say on which device they are.
    between, later = between.to(root.device), later.to(root.device)
    inside, outside = root.mT @ within, root.mT @ between.mT
    # The columns that made the approximation are exact in it, but for eigenvalues that were cut.
    square = float(middle.square().sum() + lacking(squares, inside).sum())
    if targets is None or later_task is None:
        return Survey(draw, square, lacking(later, outside))
    task, known = overlaps
    own, others = (targets[places.to(targets.device)].to(known) for places in (first, draw.places))
    overlap = float(known.square().sum() + (own * (task - inside.mT @ known)).sum())
    return Survey(
        draw,
        square,
        lacking(later, outside),
        overlap,
        (others * (later_task.to(known.device) - outside.mT @ known)).sum(1),
    )


def _seen(
    columns: Columns, drawn: Tensor, among: Tensor, targets: Tensor | None, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """K[drawn, among], the squared norms of the drawn rows, and their products with targets; float64."""
    group, none = columns.group, torch.zeros(0, dtype=torch.float64, device="cpu")
    if not len(drawn):
        return none.reshape(0, len(among) * group), none, None if targets is None else none.reshape(0, targets.shape[1])

    def seen(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        between = rows.new_zeros(len(rows), len(among) * group)
        inside = (places[:, None] == among).nonzero()  # (place in the block, place among the others)
        for k in range(group):
            taken = rows[:, (inside[:, 0] * group + k).to(rows.device)]
            between[:, (inside[:, 1] * group + k).to(rows.device)] = taken
        found = (between, rows.square().sum(1))
        return found if targets is None else (*found, rows @ targets[places.to(targets.device)].to(rows))

    between, squares, *task = columns.sums(drawn, seen, wanted)
    return between, squares, task[0] if task else None


def _inverse_root(within: Tensor) -> Tensor:
    """U with U U^T = W^+ for a positive matrix W."""
    values, vectors = torch.linalg.eigh(within)
    # Kernels come in single precision: smaller eigenvalues are rounding. Any cut leaves the estimates unbiased.
    kept = values > 1e-6 * values[-1].clamp(min=0.0)
    root: Tensor = vectors[:, kept] / values[kept].sqrt()
    return root


def _sizes(diagonal: Tensor, approximated: Tensor, largest: float, first: int, targets: Tensor | None) -> Tensor:
    """(P,) about how much every sample adds to what the approximation has of |K|_F^2, or of the overlap."""
    scale = diagonal.max()
    whole, held = diagonal / scale, (approximated / scale).clamp(min=0.0)
    # What is left of a sample is known up to rounding, and that may be the sign of it.
    left = torch.maximum(whole - held, 1e-6 * whole)
    moved = (left * (left + left.sum() / first)).sqrt()
    sizes: Tensor = 2 * (held * (largest / scale)).sqrt() * moved + moved.square()
    if targets is None:
        return sizes
    overlaps = targets.double().norm(dim=1).cpu() * moved
    sizes = sizes / sizes.sum() + overlaps / overlaps.sum().clamp(min=1e-300)
    return sizes


def norm(survey: Survey, what: str = "the norm") -> Estimate:
    """|K|_F, the root of an unbiased estimate, its error to first order."""
    added = survey.draw.total(survey.squares)
    return _root(survey.square + added.value, added.stderr, added.draws, added.freedom, what)


def normalized_overlap(survey: Survey, what: str = "the overlap") -> Estimate:
    """tr(Y^T K Y) / |K|_F, both from the same draws: their errors are correlated, and partly cancel."""
    assert survey.overlaps is not None
    above = survey.overlap + survey.draw.total(survey.overlaps).value
    below = survey.square + survey.draw.total(survey.squares).value
    if not below > 0:
        return Estimate(float("nan"), float("nan"), 1)
    value = above / below**0.5
    # To first order in the deviations of both sums.
    terms = survey.draw.total(survey.overlaps / below**0.5 - value * survey.squares / (2 * below))
    return stated(value, terms.stderr, terms.draws, terms.freedom, what, REMEDY)


@dataclass(frozen=True)
class RandomProducts:
    """What s independent random vectors with E[omega omega^T] = 1 have seen of a kernel K; float64."""

    projected: Tensor
    """Omega^T K Omega, (s, s)"""
    squared: Tensor
    """Omega^T K^2 Omega, (s, s)"""


def sketched_norm(products: RandomProducts, what: str = "the norm") -> Estimate:
    """|K|_F from products with random vectors: a third of them make the approximation, the others are averaged.

    Their errors are skewed where few eigenvalues are left.
    """
    part = len(products.projected) // 3
    root = _inverse_root(products.projected[:part, :part])
    middle = root.mT @ products.squared[:part, :part] @ root
    ahead = root.mT @ products.projected[:part, part:]
    added = averaged(products.squared.diagonal()[part:] - (ahead * (middle @ ahead)).sum(0))
    return _root(float(middle.square().sum()) + added.value, added.stderr, added.draws, added.freedom, what)


def _root(square: float, error: float, draws: int, freedom: float, what: str) -> Estimate:
    value = max(square, 0.0) ** 0.5 if square == square else square
    if not value > 0:
        return Estimate(value, error if error == 0 else float("nan"), max(draws, 1))
    return stated(value, error / (2 * value), draws, freedom, what, REMEDY)
