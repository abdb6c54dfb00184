"""Norms from a few columns: unbiased, with a standard error that covers the truth as often as it should."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from featlearn.linalg.estimate import Estimate
from featlearn.linalg.sketch import Sketch, norm, normalised_overlap, squared_norm

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


def columns(kernel: Tensor, draws: int, generator: torch.Generator, group: int = 1) -> Sketch:
    places = torch.randperm(SIZE // group, generator=generator)[:draws]
    places = (places[:, None] * group + torch.arange(group)).flatten()
    seen = kernel[places]
    return Sketch(seen[:, places], seen @ seen.T, group, SIZE // group, seen @ TARGETS, TARGETS[places])


def random_vectors(kernel: Tensor, draws: int, generator: torch.Generator) -> Sketch:
    omega = torch.randint(2, (SIZE, draws), generator=generator).double() * 2 - 1
    seen = kernel @ omega
    return Sketch(omega.T @ seen, seen.T @ seen)


def assert_covers(estimates: list[Estimate], truth: float) -> None:
    """One and two standard errors hold the truth as often as those of a mean of so many normal numbers do."""
    off = torch.tensor([abs(float(e) - truth) / float(e.stderr) for e in estimates])
    for bound in (1.0, 2.0):
        expected = 2 * stats.t.cdf(bound, estimates[0].samples - 1) - 1
        held = int((off <= bound).sum())
        assert stats.binomtest(held, len(off), expected).pvalue > 0.002, f"{held} of {len(off)}, expected {expected}"


@pytest.mark.parametrize("name", KERNELS)
def test_the_standard_error_of_a_norm_covers_the_truth(name):
    generator, kernel = torch.Generator().manual_seed(0), KERNELS[name]
    assert_covers([norm(columns(kernel, 48, generator)) for _ in range(200)], float(kernel.norm()))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("draw", [columns, random_vectors])
def test_the_stated_variance_is_the_actual_one(name, draw):
    """Also of random vectors, whose errors are skewed where few eigenvalues are left: no normal law holds there."""
    generator, kernel = torch.Generator().manual_seed(4), KERNELS[name]
    found = [squared_norm(draw(kernel, 48, generator)) for _ in range(1500)]
    stated = sum(float(e.stderr) ** 2 for e in found)
    actual = sum((float(e) - float(kernel.square().sum())) ** 2 for e in found)
    assert stated == pytest.approx(actual, rel=0.25)  # the spread of such a ratio over seeds is about 0.07


def test_the_standard_error_of_groups_of_columns_covers_the_truth():
    generator, kernel = torch.Generator().manual_seed(1), KERNELS["one large eigenvalue"]
    assert_covers([norm(columns(kernel, 32, generator, group=3)) for _ in range(200)], float(kernel.norm()))


@pytest.mark.parametrize("name", KERNELS)
def test_the_standard_error_of_a_ratio_covers_the_truth(name):
    generator, kernel = torch.Generator().manual_seed(2), KERNELS[name]
    truth = float((TARGETS * (kernel @ TARGETS)).sum() / kernel.norm())
    assert_covers([normalised_overlap(columns(kernel, 48, generator)) for _ in range(200)], truth)


def test_squared_norms_are_unbiased_and_far_better_than_hutchinson():
    generator, kernel = torch.Generator().manual_seed(3), KERNELS["one large eigenvalue"]
    truth = float(kernel.square().sum())
    found = torch.tensor([float(squared_norm(columns(kernel, 16, generator))) for _ in range(400)]).double() / truth
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
    sketch = columns(kernel, 10, torch.Generator().manual_seed(0))
    found = norm(sketch)
    assert abs(float(found) - float(kernel.norm())) < 1e-8
    assert float(found.stderr) < 1e-8
    overlap = float((TARGETS * (kernel @ TARGETS)).sum() / kernel.norm())
    assert abs(float(normalised_overlap(sketch)) - overlap) < 1e-8 * overlap


def test_nearly_all_columns_leave_nearly_no_error():
    kernel = KERNELS["power law"]
    found = norm(columns(kernel, SIZE, torch.Generator().manual_seed(0)))
    assert abs(float(found) - float(kernel.norm())) < 1e-9
    assert float(found.stderr) == 0.0  # nothing is left to be drawn


def test_a_kernel_of_zeros_has_norm_zero_and_no_ratio():
    sketch = columns(torch.zeros(SIZE, SIZE, dtype=torch.float64), 8, torch.Generator().manual_seed(0))
    assert float(norm(sketch)) == 0.0
    assert float(norm(sketch).stderr) == 0.0
    assert torch.isnan(torch.tensor(float(normalised_overlap(sketch))))
