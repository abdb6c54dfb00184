"""Norms from a few columns: unbiased, with a standard error that covers the truth as often as it should."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from featlearn.linalg import nystrom
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.nystrom import (
    ColumnTerm,
    RandomProducts,
    Survey,
    norm,
    normalized_overlap,
    sketched_norm,
    survey_columns,
)

SIZE = 240


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    return (rotation * values) @ rotation.T


def features(width: int = 40, shift: float = 3.0) -> Tensor:
    """A kernel with one eigenvalue that holds nearly all of its norm, as tangent kernels have."""
    generator = torch.Generator().manual_seed(1)
    decay = torch.arange(1, width + 1, dtype=torch.float64) ** -1.0
    rows = torch.randn(SIZE, width, generator=generator, dtype=torch.float64) * decay
    rows[:, 0] = shift + 0.3 * rows[:, 0]
    return rows @ rows.T + 0.01 * torch.eye(SIZE, dtype=torch.float64)


KERNELS = {"one large eigenvalue": features(), "power law": rotated(torch.arange(1.0, SIZE + 1).double() ** -0.8)}
TARGETS = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5


class Formed:
    """The columns of a kernel that is at hand, in blocks of unequal length."""

    def __init__(self, kernel: Tensor, group: int = 1) -> None:
        self._kernel, self.group, self.samples = kernel, group, len(kernel) // group
        self.diagonal = kernel.diagonal().reshape(-1, group).sum(1)

    def _places(self, samples: Tensor) -> Tensor:
        return (samples[:, None] * self.group + torch.arange(self.group)).flatten()

    def sums(self, drawn: Tensor, term: ColumnTerm, wanted: Tensor | None = None) -> tuple[Tensor, ...]:
        others = torch.arange(self.samples) if wanted is None else wanted
        rows = self._kernel[self._places(drawn)]
        terms = [term(rows[:, self._places(places)], places) for places in (others[:0], *others.split(37))]
        return tuple(map(sum, zip(*terms, strict=True)))


def columns(
    kernel: Tensor, draws: int, generator: torch.Generator, group: int = 1, targets: Tensor | None = None
) -> Survey:
    return survey_columns(Formed(kernel, group), draws, generator, targets)


def random_vectors(kernel: Tensor, draws: int, generator: torch.Generator) -> RandomProducts:
    omega = torch.randint(2, (SIZE, draws), generator=generator).double() * 2 - 1
    seen = kernel @ omega
    return RandomProducts(omega.T @ seen, seen.T @ seen)


def assert_covers(estimates: list[Estimate], truth: float) -> None:
    """One and two stated errors hold the truth as often as Student's distribution says for their freedom.

    A plain error, of a mean of samples, is not widened.
    """
    off = torch.tensor([abs(float(e) - truth) / float(e.stderr) for e in estimates])

    def expected_share(e: Estimate, bound: float) -> float:
        if e.freedom is None:
            return 2 * stats.t.cdf(bound, e.samples - 1) - 1
        return 2 * stats.t.cdf(bound * stats.t.ppf(stats.norm.cdf(2), e.freedom) / 2, e.freedom) - 1

    for bound in (1.0, 2.0):
        expected = sum(expected_share(e, bound) for e in estimates) / len(estimates)
        held = int((off <= bound).sum())
        assert stats.binomtest(held, len(off), expected).pvalue > 0.002, f"{held} of {len(off)}, expected {expected}"


def heavy(spread: float = 2.0, seed: int = 5) -> Tensor:
    """A few samples hold nearly all of the norm."""
    size = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scale = (spread * size).exp()
    return scale[:, None] * KERNELS["one large eigenvalue"] * scale


def alone() -> Tensor:
    """Samples that have nothing in common, of very different sizes: no approximation holds them."""
    size = torch.randn(SIZE, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return size.exp().diag()


HEAVY = {"lognormal": heavy(), "narrow lognormal": heavy(1.2), "alone": alone()}


@pytest.mark.parametrize("name", [*KERNELS, *HEAVY])
def test_the_standard_error_of_a_norm_covers_the_truth(name):
    generator, kernel = torch.Generator().manual_seed(0), (KERNELS | HEAVY)[name]
    assert_covers([norm(columns(kernel, 48, generator)) for _ in range(200)], float(kernel.norm()))


@pytest.mark.filterwarnings("ignore::featlearn.errors.HeavyTailWarning")
@pytest.mark.parametrize("name", HEAVY)
def test_columns_drawn_by_size_beat_columns_drawn_at_random(name, monkeypatch: pytest.MonkeyPatch):
    """Both with an approximation from a third of them."""
    kernel = HEAVY[name]

    def off() -> float:
        generator = torch.Generator().manual_seed(1)
        found = [float(norm(columns(kernel, 48, generator))) for _ in range(100)]
        return float((torch.tensor(found) / kernel.norm() - 1).square().mean().sqrt())

    by_size = off()
    first = nystrom.drawn_first
    monkeypatch.setattr(nystrom, "drawn_first", lambda sizes, *others: first(torch.ones_like(sizes), *others))
    monkeypatch.setattr(nystrom, "_sizes", lambda diagonal, *others: torch.ones_like(diagonal))
    assert by_size < 0.3 * off()


def added(found: Survey) -> tuple[float, float]:
    """|K|_F^2 and the variance of it that is stated, not widened."""
    total = found.draw.total(found.squares)
    plain = 2 * total.stderr / float(stats.t.ppf(stats.norm.cdf(2), total.freedom))
    return found.square + total.value, plain**2


@pytest.mark.parametrize("name", [*KERNELS, *HEAVY])
def test_the_stated_variance_is_the_actual_one(name):
    generator, kernel = torch.Generator().manual_seed(4), (KERNELS | HEAVY)[name]
    found = torch.tensor([added(columns(kernel, 48, generator)) for _ in range(500)], dtype=torch.float64)
    actual = (found[:, 0] - kernel.square().sum()).square().mean()
    assert float(found[:, 1].mean()) == pytest.approx(float(actual), rel=0.25)


@pytest.mark.filterwarnings("ignore::featlearn.errors.HeavyTailWarning")
@pytest.mark.parametrize("name", [*KERNELS, "lognormal", "narrow lognormal"])
def test_the_error_of_random_vectors_is_not_too_small(name):
    """Their errors are skewed where few eigenvalues are left: no normal law holds there."""
    generator, kernel = torch.Generator().manual_seed(4), (KERNELS | HEAVY)[name]
    found = [sketched_norm(random_vectors(kernel, 48, generator)) for _ in range(300)]
    off = torch.tensor([(float(e) - float(kernel.norm())) / float(e.stderr) for e in found])
    assert int((off.abs() <= 2).sum()) >= 270
    assert float(off.square().mean().sqrt()) > 0.7


def test_the_standard_error_of_groups_of_columns_covers_the_truth():
    generator = torch.Generator().manual_seed(1)
    for kernel in (KERNELS["one large eigenvalue"], HEAVY["narrow lognormal"]):
        assert_covers([norm(columns(kernel, 32, generator, group=3)) for _ in range(200)], float(kernel.norm()))


@pytest.mark.parametrize("name", [*KERNELS, "narrow lognormal"])
def test_the_standard_error_of_a_ratio_covers_the_truth(name):
    generator, kernel = torch.Generator().manual_seed(2), (KERNELS | HEAVY)[name]
    truth = float((TARGETS * (kernel @ TARGETS)).sum() / kernel.norm())
    found = [normalized_overlap(columns(kernel, 48, generator, targets=TARGETS)) for _ in range(200)]
    assert_covers(found, truth)


def test_squared_norms_are_unbiased_and_far_better_than_hutchinson():
    generator, kernel = torch.Generator().manual_seed(3), KERNELS["one large eigenvalue"]
    truth = float(kernel.square().sum())
    found = torch.tensor([added(columns(kernel, 16, generator))[0] for _ in range(400)]).double() / truth
    assert abs(found.mean() - 1) < 3 * found.std() / 20
    plain = torch.randn(SIZE, 16, 400, generator=generator, dtype=torch.float64)
    hutchinson = torch.einsum("pq,qkt->pkt", kernel, plain).square().sum((0, 1)) / 16 / truth
    assert hutchinson.std() > 0.25
    assert found.std() < 0.02


@pytest.mark.parametrize("rank", [1, 3])
def test_a_kernel_of_low_rank_is_known_exactly(rank):
    values = torch.zeros(SIZE, dtype=torch.float64)
    values[:rank] = torch.tensor([5.0, 2.0, 1.0])[:rank]
    kernel = rotated(values)
    sketch = columns(kernel, 10, torch.Generator().manual_seed(0), targets=TARGETS)
    found = norm(sketch)
    assert abs(float(found) - float(kernel.norm())) < 1e-8
    assert float(found.stderr) < 1e-8
    overlap = float((TARGETS * (kernel @ TARGETS)).sum() / kernel.norm())
    assert abs(float(normalized_overlap(sketch)) - overlap) < 1e-8 * overlap


def test_nearly_all_columns_leave_nearly_no_error():
    kernel = KERNELS["power law"]
    found = norm(columns(kernel, SIZE, torch.Generator().manual_seed(0)))
    assert abs(float(found) - float(kernel.norm())) < 1e-9
    assert float(found.stderr) == 0.0  # nothing is left to be drawn


def test_a_kernel_of_zeros_has_norm_zero_and_no_ratio():
    zeros = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    sketch = columns(zeros, 8, torch.Generator().manual_seed(0), targets=TARGETS)
    assert float(norm(sketch)) == 0.0
    assert float(norm(sketch).stderr) == 0.0
    assert torch.isnan(torch.tensor(float(normalized_overlap(sketch))))


def test_kernels_with_fewer_samples_that_count_than_columns_are_exact():
    """Samples without gradients have no columns: all others are seen, and nothing is left to be drawn."""
    kernel = KERNELS["power law"].clone()
    kernel[12:], kernel[:, 12:] = 0.0, 0.0
    found = columns(kernel, 48, torch.Generator().manual_seed(0), targets=TARGETS)
    assert float(norm(found)) == pytest.approx(float(kernel.norm()), rel=1e-12)
    assert float(norm(found).stderr) == 0.0
    overlap = float((TARGETS * (kernel @ TARGETS)).sum() / kernel.norm())
    assert float(normalized_overlap(found)) == pytest.approx(overlap, rel=1e-10)
    one = torch.zeros_like(kernel)
    one[3, 3] = 2.0
    assert float(norm(columns(one, 8, torch.Generator().manual_seed(0)))) == pytest.approx(2.0, rel=1e-12)
