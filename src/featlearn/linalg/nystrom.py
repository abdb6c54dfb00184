"""The norm of a large kernel from a few of its columns, by a Nyström approximation and its residual.

Hutchinson's estimate of |K|_F^2 has an error of 30% after 16 products if a single eigenvalue dominates the norm, as in
tangent kernels. Here, a third of the columns form a Nyström approximation N of K, whose norm is known exactly. The
other columns estimate the remainder. Parts that are approximated well add no variance.

The diagonal of K determines which columns to draw. K is positive, so |K_ij|^2 <= K_ii K_jj: a sample with a large
gradient has a large column. If a few samples are much larger than the others (heavy tails, outliers), uniform draws
miss them, and underestimate both the norm and the error. Half of the first third are the samples with the largest K_ii,
half are drawn in proportion to K_ii. The remainder R = K - N is positive too, and its diagonal is then known for all
samples. Column i of K has the squared norm of column i of N and 2 <N e_i, R e_i> + |R e_i|^2 more; the other two thirds
are drawn in proportion to a bound on that, 2 |N e_i| t_i + t_i^2 with |N e_i|^2 <= lambda_max(N) N_ii and t_i^2 = R_ii
(R_ii + tr R / k) in place of |R e_i|^2 (`featlearn.linalg.sampling`). The bound need not hold: sizes change the
variance but not the mean.

The later draws are independent of the approximation: the estimates are unbiased, and the standard error is that of the
later draws. Swapping the parts and averaging would halve the error, but their errors are correlated. The stated error
was then too small: it had 45% coverage in place of 67%.
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
"""Function linear in blocks of columns: takes rows (s g, n g) of s samples with n others, float64, and n indices."""


class Columns(Protocol):
    """A positive kernel of P samples with g rows per sample, read by columns."""

    @property
    def samples(self) -> int:
        """Number of samples P."""

    @property
    def group(self) -> int:
        """Number of rows per sample g."""

    @property
    def diagonal(self) -> Tensor:
        """(P,) sum of the g diagonal entries of every sample, float64 on the CPU."""

    def sums(self, drawn: Tensor, term: ColumnTerm, wanted: Tensor | None = None) -> tuple[Tensor, ...]:
        """Sum `term` of the rows of the drawn samples over blocks of columns.

        `wanted` (ascending) restricts the sum to the columns of these samples. `term` must accept blocks without
        columns.
        """


@dataclass(frozen=True)
class Survey:
    """Known parts of quadratic forms of a kernel, and the contributions of the later columns."""

    draw: Draw
    square: float
    """The known part of |K|_F^2."""
    squares: Tensor
    """(s,) contributions of the later columns."""
    overlap: float = 0.0
    """The known part of tr(Y^T K Y)."""
    overlaps: Tensor | None = None
    """(s,) contributions of the later columns; None without targets."""


def survey_columns(columns: Columns, count: int, generator: torch.Generator, targets: Tensor | None = None) -> Survey:
    """Survey the columns of `count` samples in two passes. Targets (P, d), which need g = 1, add the overlap."""
    diagonal = columns.diagonal.clamp(min=0.0)
    first = drawn_first(diagonal, max(1, count // 3), generator)
    if not len(first):
        empty_draw = drawn_by_size(diagonal, count, generator)
        return Survey(empty_draw, 0.0, diagonal[:0], 0.0, None if targets is None else diagonal[:0])
    within, _, _ = _read_columns(columns, first, first, None, first)
    root = _inverse_root((within + within.mT) / 2)

    def products(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        ahead, by_sample = root.mT @ rows, torch.zeros_like(diagonal)
        by_sample[places] = ahead.square().sum(0).reshape(-1, columns.group).sum(1).cpu()
        parts = (ahead @ ahead.mT, by_sample, rows.square().sum(1))
        if targets is None:
            return parts
        part = targets[places.to(targets.device)].to(rows)
        return (*parts, rows @ part, ahead @ part)

    middle, approximated, squares, *overlaps = columns.sums(first, products)  # |N|_F = |middle|_F
    sizes = _sizes(diagonal, approximated, float(torch.linalg.eigvalsh(middle)[-1]), len(first), targets)
    sizes[first] = 0.0
    draw = drawn_by_size(sizes, count - len(first), generator)
    between, later, later_task = _read_columns(columns, draw.places, first, targets)
    group = columns.group

    def lacking(square: Tensor, ahead: Tensor) -> Tensor:
        """Return squared norms of columns minus those of the approximation."""
        return (square - (ahead * (middle @ ahead)).sum(0)).reshape(-1, group).sum(1)

    # Without later columns, the empty tensors are on the CPU.
    between, later = between.to(root.device), later.to(root.device)
    inside, outside = root.mT @ within, root.mT @ between.mT
    # The approximation is exact in its columns, except for truncated eigenvalues.
    square = float(middle.square().sum() + lacking(squares, inside).sum())
    if targets is None or later_task is None:
        return Survey(draw, square, lacking(later, outside))
    task, projected = overlaps
    first_targets, later_targets = (targets[places.to(targets.device)].to(projected) for places in (first, draw.places))
    overlap = float(projected.square().sum() + (first_targets * (task - inside.mT @ projected)).sum())
    return Survey(
        draw,
        square,
        lacking(later, outside),
        overlap,
        (later_targets * (later_task.to(projected.device) - outside.mT @ projected)).sum(1),
    )


def _read_columns(
    columns: Columns, drawn: Tensor, among: Tensor, targets: Tensor | None, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return K[drawn, among], squared norms of the drawn rows, and their products with targets, in float64."""
    group, empty = columns.group, torch.zeros(0, dtype=torch.float64, device="cpu")
    if not len(drawn):
        overlaps = None if targets is None else empty.reshape(0, targets.shape[1])
        return empty.reshape(0, len(among) * group), empty, overlaps

    def products(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        between = rows.new_zeros(len(rows), len(among) * group)
        inside = (places[:, None] == among).nonzero()  # (index in the block, index in `among`)
        for k in range(group):
            columns_k = rows[:, (inside[:, 0] * group + k).to(rows.device)]
            between[:, (inside[:, 1] * group + k).to(rows.device)] = columns_k
        parts = (between, rows.square().sum(1))
        return parts if targets is None else (*parts, rows @ targets[places.to(targets.device)].to(rows))

    between, squares, *task = columns.sums(drawn, products, wanted)
    return between, squares, task[0] if task else None


def _inverse_root(within: Tensor) -> Tensor:
    """Return U with U U^T = W^+ for a positive matrix W."""
    values, vectors = torch.linalg.eigh(within)
    # In float32 kernels, smaller eigenvalues are rounding. Any cutoff leaves the estimates unbiased.
    significant = values > 1e-6 * values[-1].clamp(min=0.0)
    root: Tensor = vectors[:, significant] / values[significant].sqrt()
    return root


def _sizes(diagonal: Tensor, approximated: Tensor, largest: float, first: int, targets: Tensor | None) -> Tensor:
    """Bound the contribution (P,) of every sample to |K|_F^2, or to the overlap, beyond the approximation."""
    scale = diagonal.max()
    diagonal_share, approximated_share = diagonal / scale, (approximated / scale).clamp(min=0.0)
    # Rounding can make the remainder negative.
    remainder = torch.maximum(diagonal_share - approximated_share, 1e-6 * diagonal_share)
    column_bound = (remainder * (remainder + remainder.sum() / first)).sqrt()
    sizes: Tensor = 2 * (approximated_share * (largest / scale)).sqrt() * column_bound + column_bound.square()
    if targets is None:
        return sizes
    overlaps = targets.double().norm(dim=1).cpu() * column_bound
    sizes = sizes / sizes.sum() + overlaps / overlaps.sum().clamp(min=1e-300)
    return sizes


def norm(survey: Survey, what: str = "the norm") -> Estimate:
    """Estimate |K|_F as the root of an unbiased estimate, with the error to first order."""
    added = survey.draw.total(survey.squares)
    return _root(survey.square + added.value, added.stderr, added.draws, added.freedom, what)


def normalized_overlap(survey: Survey, what: str = "the overlap") -> Estimate:
    """Estimate tr(Y^T K Y) / |K|_F from the same draws: the errors are correlated, and partly cancel."""
    assert survey.overlaps is not None
    overlap = survey.overlap + survey.draw.total(survey.overlaps).value
    square = survey.square + survey.draw.total(survey.squares).value
    if not square > 0:
        return Estimate(float("nan"), float("nan"), 1)
    value = overlap / square**0.5
    # To first order in the deviations of both sums.
    terms = survey.draw.total(survey.overlaps / square**0.5 - value * survey.squares / (2 * square))
    return stated(value, terms.stderr, terms.draws, terms.freedom, what, REMEDY)


@dataclass(frozen=True)
class RandomProducts:
    """Projections of a kernel K on s independent random vectors with E[omega omega^T] = 1, in float64."""

    projected: Tensor
    """Omega^T K Omega, (s, s)"""
    squared: Tensor
    """Omega^T K^2 Omega, (s, s)"""


def sketched_norm(products: RandomProducts, what: str = "the norm") -> Estimate:
    """Estimate |K|_F from random products: a third form the Nyström approximation, the others are averaged.

    The errors are skewed if few eigenvalues remain.
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
