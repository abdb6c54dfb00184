"""Quadratic forms, teachers, mixtures, random labels and lines: definition, closed forms, samples and refusals."""

import math
import pickle

import numpy
import pytest
import torch
from scipy import stats
from torch import Tensor

import featlearn as fl
from featlearn.data import (
    gaussian_mixture,
    line,
    linear_teacher,
    quadratic_form,
    random_labels,
    standardize,
    two_gaussians,
)

DOUBLE = torch.float64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def within_errors(samples: Tensor, expected: Tensor, errors: float = 4.5) -> bool:
    """Means over the first axis, in units of their standard errors."""
    error = (samples.mean(0) - expected).abs() / (samples.std(0) / math.sqrt(len(samples))).clamp_min(1e-12)
    return bool((error < errors).all())


def gradients(task: fl.data.Regression) -> Tensor:
    assert task.target is not None
    x = task.x.clone().requires_grad_()
    return torch.autograd.grad(task.target(x).sum(), x)[0]


# quadratic form


@pytest.mark.parametrize("spectrum", [None, torch.tensor([2.0, 0.5, 1.0, 0.1])])
def test_the_quadratic_form_is_the_sum_of_squares_over_its_deviation(spectrum: Tensor | None):
    task = quadratic_form(200_000, 4, spectrum=spectrum, generator=seeded(3), dtype=DOUBLE)
    q = task.target.matrix.numpy()
    few = task.x[:9].numpy()
    plain = [sum(float(q[i] @ row) ** 2 for i in range(4)) for row in few]
    assert task.y[:9].numpy() * task.target.deviation == pytest.approx(numpy.array(plain), rel=1e-12)
    assert task.y.std() == pytest.approx(1.0, abs=0.02)
    assert within_errors(torch.einsum("pi,pj->pij", *2 * [gradients(task)]), task.egop)
    variances = torch.ones(4) if spectrum is None else spectrum
    torch.testing.assert_close(task.covariance, torch.diag(variances.double()))
    mean = float(numpy.trace(q.T @ q @ numpy.diag(variances.numpy()))) / task.target.deviation
    assert task.y.mean() == pytest.approx(mean, abs=0.01)


def test_the_quadratic_form_draws_the_inputs_of_the_chain():
    spectrum = fl.data.power_law_spectrum(6, 1.0)
    form = quadratic_form(5, 6, spectrum=spectrum, generator=seeded(8))
    assert torch.equal(form.x, fl.data.chain_monomial(5, 6, spectrum=spectrum, generator=seeded(8)).x)
    again = quadratic_form(7, 6, matrix=form.target.matrix, generator=seeded(9))
    torch.testing.assert_close(
        again.y, form.target(again.x.double()).float() * form.target.deviation / again.target.deviation
    )
    assert quadratic_form(3, 6, matrix=torch.ones(2, 6)).target.matrix.shape == (2, 6)
    pickle.loads(pickle.dumps(form.target))


def test_the_mean_of_a_large_quadratic_form_is_half_a_root():
    target = quadratic_form(1, 400).target
    assert float(target.matrix.square().sum()) / target.deviation == pytest.approx(math.sqrt(400) / 2, rel=0.02)


# teachers


def test_a_linear_teacher_has_unit_directions_of_its_own():
    task = linear_teacher(50, 7, 3, generator=seeded(1), dtype=DOUBLE)
    weights = task.target.weights
    assert weights.shape == (3, 7)
    torch.testing.assert_close(weights.norm(dim=1), torch.ones(3, dtype=DOUBLE))
    expected = [[sum(float(a * b) for a, b in zip(row, beta, strict=True)) for beta in weights] for row in task.x]
    torch.testing.assert_close(task.y, torch.tensor(expected, dtype=DOUBLE))
    torch.testing.assert_close(task.egop, sum(torch.outer(beta, beta) for beta in weights))
    one = linear_teacher(50, 7, generator=seeded(1), dtype=DOUBLE)
    assert one.y.shape == (50,)
    assert torch.equal(one.x, task.x)
    again = linear_teacher(5, 7, weights=one.target.weights, generator=seeded(2), dtype=DOUBLE)
    torch.testing.assert_close(again.y, one.target(again.x))


def test_inputs_of_a_teacher_have_the_distribution_they_state():
    spectrum = torch.tensor([3.0, 1.0, 0.2], dtype=DOUBLE)
    gaussian = linear_teacher(50_000, 3, spectrum=spectrum, dtype=DOUBLE)
    sphere = linear_teacher(50_000, 3, inputs="sphere", dtype=DOUBLE)
    for task in (gaussian, sphere):
        assert within_errors(torch.einsum("pi,pj->pij", task.x, task.x), task.covariance)
    torch.testing.assert_close(sphere.x.norm(dim=1), torch.ones(50_000, dtype=DOUBLE))
    # Archimedes: a coordinate on the sphere in three dimensions is uniform
    assert stats.kstest(sphere.x[:, 0].numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_noise_is_added_to_the_targets_last():
    clean, noisy = (linear_teacher(20_000, 4, noise=noise, generator=seeded(5), dtype=DOUBLE) for noise in (0.0, 0.3))
    assert torch.equal(clean.x, noisy.x)
    assert torch.equal(clean.target.weights, noisy.target.weights)
    assert float((noisy.y - clean.y).std()) == pytest.approx(0.3, rel=0.02)


# mixtures


@pytest.mark.parametrize(("spread", "each"), [("total", 0.09 / 5), ("coordinate", 0.09)])
def test_a_mixture_is_centers_and_noise(spread: str, each: float):
    data = gaussian_mixture(30_000, 5, 3, variance=0.09, spread=spread, generator=seeded(2), dtype=DOUBLE)
    assert data.labels.bincount().tolist() == [10_000] * 3
    assert data.labels[:7].tolist() == [0, 1, 2, 0, 1, 2, 0]
    torch.testing.assert_close(data.centers.norm(dim=1), torch.ones(3, dtype=DOUBLE))
    noise = data.x - data.centers[data.labels]
    for label in range(3):
        own = noise[data.labels == label]
        assert within_errors(own, torch.zeros(5, dtype=DOUBLE))
        assert within_errors(torch.einsum("pi,pj->pij", own, own), each * torch.eye(5, dtype=DOUBLE))
    assert stats.kstest(noise.flatten().numpy() / math.sqrt(each), "norm").pvalue > 1e-3


def test_centers_may_be_orthogonal_and_given():
    data = gaussian_mixture(12, 6, 4, variance=0.0, orthogonal=True, dtype=DOUBLE)
    torch.testing.assert_close(data.centers @ data.centers.T, torch.eye(4, dtype=DOUBLE), rtol=0, atol=1e-14)
    assert torch.equal(data.x, data.centers[data.labels])
    again = gaussian_mixture(8, 6, 4, centers=data.centers, generator=seeded(7))
    assert torch.equal(again.centers, data.centers)
    wide = gaussian_mixture(2, 1000, 2, dtype=DOUBLE)
    assert float((wide.x - wide.centers[wide.labels]).square().sum(1).mean()) == pytest.approx(0.01, rel=0.15)


def test_two_gaussians_are_those_of_the_paper():
    data = two_gaussians(40_000, dtype=DOUBLE)
    assert data.x.shape == (40_000, 1)
    assert data.labels[:4].tolist() == [0, 1, 0, 1]
    for label, mean in ((0, 0.0), (1, 4.0)):
        assert stats.kstest(data.x[data.labels == label, 0].numpy(), stats.norm(mean, 1).cdf).pvalue > 1e-3
    assert data.centers.tolist() == [[0.0], [4.0]]
    beyond = ((data.x[:, 0] > 2) != data.labels.bool()).double().mean()
    assert float(beyond) == pytest.approx(stats.norm.sf(2), abs=0.003)
    assert data.signs().tolist()[:2] == [-1, 1]


# random labels and lines


def test_random_labels_are_fair_and_independent_of_the_inputs():
    task = random_labels(20_000, 3, dtype=DOUBLE)
    assert set(task.y.tolist()) == {-1.0, 1.0}
    assert within_errors(task.y[:, None] * torch.cat([torch.ones(20_000, 1), task.x], 1), torch.zeros(4, dtype=DOUBLE))
    assert within_errors(torch.einsum("pi,pj->pij", task.x, task.x), task.covariance)
    assert random_labels(100, 1000).x.square().sum(1).mean() == pytest.approx(1.0, abs=0.02)


def test_orthonormal_inputs_are_uniform():
    x = random_labels(4, 9, inputs="orthonormal", dtype=DOUBLE).x
    torch.testing.assert_close(x @ x.T, torch.eye(4, dtype=DOUBLE), rtol=0, atol=1e-14)
    drawn = torch.stack(
        [random_labels(2, 3, inputs="orthonormal", generator=seeded(s), dtype=DOUBLE).x for s in range(500)]
    )
    for row in (0, 1):  # each coordinate of a uniform direction in three dimensions is uniform
        assert stats.kstest(drawn[:, row, 2].numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-3
        assert stats.kstest(drawn[:, row, 0].numpy(), stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_a_line_is_that_of_the_paper():
    task = line(40_000, dtype=DOUBLE)
    assert stats.kstest(task.x[:, 0].numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(((task.y - 2 * task.x[:, 0]) * 10).numpy(), "norm").pvalue > 1e-3
    assert (task.egop.item(), task.covariance.item()) == (4.0, 1.0)


def test_a_line_in_space_reduces_to_one_sample():
    direction = torch.tensor([3.0, 0.0, -4.0])
    task = line(30, slope=-1.5, noise=0.0, direction=direction, dtype=DOUBLE)
    torch.testing.assert_close(task.target(task.x), task.y)
    reduced = fl.theory.latent.reduce_line(task.x, task.y)
    positions = task.x @ direction.double() / 25
    assert float(reduced.floor) == pytest.approx(0.0, abs=1e-12)
    assert abs(float(reduced.y)) == pytest.approx(1.5 * float(positions.square().mean().sqrt()))
    torch.testing.assert_close(task.covariance, torch.outer(direction, direction).double())


# standardization


def test_standardize_uses_the_statistics_of_the_first():
    x, other = torch.rand(50, 3, 4, 5, generator=seeded(1)), torch.rand(7, 3, 4, 5, generator=seeded(2))
    x[:, 1, 2, 3] = 0.7
    pixel, others = standardize(x, other)
    mean, deviation = x.double().numpy().mean(0), x.double().numpy().std(0)
    deviation[1, 2, 3] = 1
    torch.testing.assert_close(
        pixel.double(), torch.from_numpy((x.double().numpy() - mean) / deviation), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        others.double(), torch.from_numpy((other.double().numpy() - mean) / deviation), rtol=1e-5, atol=1e-6
    )
    assert pixel[:, 1, 2, 3].abs().max() == 0
    assert pixel.dtype == torch.float32
    (channel,) = standardize(x, by="channel")
    assert channel.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(channel.std((0, 2, 3), correction=0), torch.ones(3))


# what all have in common


TASKS = {
    "form": lambda **options: quadratic_form(6, 5, **options),
    "teacher": lambda **options: linear_teacher(6, 5, 2, noise=0.1, **options),
    "mixture": lambda **options: gaussian_mixture(6, 5, 3, **options),
    "two": lambda **options: two_gaussians(6, **options),
    "random": lambda **options: random_labels(6, 5, **options),
    "line": lambda **options: line(6, **options),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_generators_decide_and_the_global_one_is_left_alone(task):
    before = torch.get_rng_state()
    first = task()
    for position in range(2):
        assert torch.equal([*first][position], [*task(generator=seeded(0))][position])
    assert not torch.equal(first.x, task(generator=seeded(1)).x)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.x.dtype == torch.float32
    assert torch.equal(task(dtype=DOUBLE).x.float(), first.x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quadratic_form(0, 5), "samples is 0"),
        (lambda: quadratic_form(3, 5, matrix=torch.ones(5)), r"matrix has shape \(5,\)"),
        (lambda: quadratic_form(3, 5, matrix=torch.zeros(5, 5)), "target is constant"),
        (lambda: quadratic_form(3, 5, spectrum=torch.ones(4)), r"spectrum has shape \(4,\)"),
        (lambda: linear_teacher(3, 5, 1), "outputs=1, expected None"),
        (lambda: linear_teacher(3, 5, inputs="cube"), "inputs='cube'"),
        (lambda: linear_teacher(3, 5, inputs="sphere", spectrum=torch.ones(5)), "and no spectrum"),
        (lambda: linear_teacher(3, 5, weights=torch.ones(1, 5)), r"weights have shape \(1, 5\)"),
        (lambda: linear_teacher(3, 5, 2, weights=torch.ones(5)), r"expected \(2, 5\)"),
        (lambda: linear_teacher(3, 5, noise=-1.0), "noise is -1.0"),
        (lambda: linear_teacher(3, 5, noise="x"), "noise is 'x'"),
        (lambda: gaussian_mixture(7, 5, 3), "samples divisible by classes"),
        (lambda: gaussian_mixture(6, 2, 3, orthogonal=True), "classes <= dimension"),
        (lambda: gaussian_mixture(6, 5, 3, spread="all"), "spread='all'"),
        (lambda: gaussian_mixture(6, 5, 3, variance=math.inf), "variance is inf"),
        (lambda: gaussian_mixture(6, 5, 3, centers=torch.ones(2, 5)), r"centers have shape \(2, 5\)"),
        (lambda: two_gaussians(5), "expected an even number"),
        (lambda: two_gaussians(4, means=(0.0, math.nan)), "two finite numbers"),
        (lambda: random_labels(6, 5, inputs="orthonormal"), "samples <= dimension"),
        (lambda: random_labels(6, 5, generator=1), r"manual_seed\(1\)"),
        (lambda: line(5, direction=torch.zeros(3)), "a nonzero vector"),
        (lambda: line(5, slope=math.nan), "slope"),
        (lambda: standardize(torch.ones(3, 2), torch.ones(3, 4)), r"others\[0\] has shape"),
        (lambda: standardize(torch.ones(3, 2), by="channel"), "expected \\(P, channels, height, width\\)"),
        (lambda: standardize(torch.ones(3, 2, dtype=torch.int64)), "expected a float tensor"),
        (lambda: standardize(torch.ones(3, 2), by="row"), "by='row'"),
        (lambda: fl.data.Regression(torch.ones(3, 2), torch.ones(2, 2)), r"y has shape \(2, 2\)"),
    ],
)
def test_wrong_input_is_refused(call, words: str):
    with pytest.raises(fl.FeatlearnError, match=words):
        call()
