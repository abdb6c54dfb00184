"""The spike in the final kernel: the secular equation against dense eigenvectors, thresholds, random kernels."""

import numpy as np
import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.theory import ofe

K0 = torch.tensor([[2.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def diagonal(*values: float) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def dense_top_overlap(K: Tensor, y: Tensor, gamma: float) -> float:
    top = torch.linalg.eigh(K + gamma * torch.outer(y, y)).eigenvectors[:, -1]
    return float((top @ y).square() / (y @ y))


def test_reference_values():
    found = ofe.spike(K0, Y, 0.7)
    np.testing.assert_allclose(
        found.eigenvalues, [2.8950547353339453, 1.6765740306225827, 0.5033712340434717], rtol=1e-14
    )
    overlaps = [0.7318077473726601, 0.2644599384201661, 0.00373231420717338]
    np.testing.assert_allclose(found.overlaps, overlaps, rtol=1e-12)
    star = ofe.threshold(diagonal(4.0, 1.0, 0.5), vector(0.001, 0.6, 0.4).sqrt())
    assert float(star) == pytest.approx(3.181818181818182, rel=1e-14)
    assert float(ofe.bulk_threshold(0.5)) == pytest.approx(1.2071067811865475, rel=1e-15)


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 40.0])
def test_the_spectrum_is_that_of_the_final_kernel(gamma: float):
    K, y = drawn(9, 6) @ drawn(9, 6).T, drawn(9, seed=1)
    found = ofe.spike(K, y, gamma)
    dense = fl.metrics.spectrum(K + gamma * torch.outer(y, y), y)
    scale = float(dense.eigenvalues[0])
    np.testing.assert_allclose(found.eigenvalues, dense.eigenvalues, atol=1e-13 * scale)
    if gamma > 0:
        np.testing.assert_allclose(found.overlaps[:6], dense.task_power[:6] / (y @ y), atol=1e-11)
    assert float(found.overlaps.sum()) == pytest.approx(1.0, rel=1e-12)
    rebuilt = found.eigenvectors * found.eigenvalues @ found.eigenvectors.T
    np.testing.assert_allclose(rebuilt, K + gamma * torch.outer(y, y), atol=1e-12 * scale)


def test_top_overlap_is_that_of_the_top_eigenvector():
    K, y = drawn(12, 12) @ drawn(12, 12).T, drawn(12, seed=1)
    rates = torch.tensor([[0.0, 1e-6, 0.1], [1.0, 3.0, 1e3]], dtype=torch.float64)
    found = ofe.top_overlap(K, y, rates)
    assert found.shape == rates.shape
    expected = [dense_top_overlap(K, y, gamma) for gamma in rates.flatten().tolist()]
    np.testing.assert_allclose(found.flatten(), expected, atol=1e-12)
    # never falls
    many = ofe.top_overlap(K, y, torch.logspace(-6, 12, 300, dtype=torch.float64))
    assert bool((many.diff() >= -1e-15).all())
    assert float(many[-1]) == pytest.approx(1.0, abs=1e-15)


def test_overlap_at_no_rate_is_that_of_the_top_eigenspace():
    y = vector(1.0, 2.0, 2.0, 4.0)
    assert float(ofe.top_overlap(diagonal(1.0, 3.0, 3.0, 2.0), y, 0.0)) == pytest.approx(8 / 25, rel=1e-14)
    for gamma in (1e-30, 1e-160):
        assert float(ofe.top_overlap(diagonal(1.0, 3.0, 3.0, 2.0), y, gamma)) == pytest.approx(8 / 25, rel=1e-12)


def test_without_a_share_in_the_top_mode_the_overlap_jumps_at_the_threshold():
    K, y = diagonal(4.0, 1.0, 0.5), vector(0.0, 0.8, -0.6)
    star = float(ofe.threshold(K, y))
    assert star == pytest.approx(1 / (0.64 / 3 + 0.36 / 3.5), rel=1e-14)
    below, above = ofe.top_overlap(K, y, [star * (1 - 1e-9), star * (1 + 1e-9)]).tolist()
    assert below == 0.0
    assert above > 0.99
    assert float(ofe.rate_for_overlap(K, y)) == pytest.approx(star, rel=1e-12)
    # beyond the jump it goes on continuously
    beyond = float(ofe.rate_for_overlap(K, y, 0.9999))
    assert float(ofe.top_overlap(K, y, beyond)) == pytest.approx(0.9999, rel=1e-9)
    assert beyond > star


def test_a_small_share_smooths_the_jump_by_as_much():
    """The width is proportional to |y_1|, its place is the threshold."""
    widths = []
    for share in (1e-2, 1e-3, 1e-4):
        K, y = diagonal(10.0, 1.0, 0.5, 0.2), vector(share, 0.8, -0.5, 0.3)
        star = float(ofe.threshold(K, y))
        assert float(ofe.rate_for_overlap(K, y)) == pytest.approx(star, rel=0.05 * share / 1e-2)
        widths.append(float(ofe.rate_for_overlap(K, y, 0.75) - ofe.rate_for_overlap(K, y, 0.25)) / star)
    np.testing.assert_allclose(np.log10(widths[0] / np.array(widths[1:])), [1.0, 2.0], atol=0.01)


def test_the_rate_for_an_overlap_is_the_inverse_of_the_overlap():
    K, y = drawn(10, 10) @ drawn(10, 10).T, drawn(10, seed=4)
    start = float(ofe.top_overlap(K, y, 0.0))
    assert start < 0.3
    for overlap in (0.3, 0.5, 0.9, 0.999999):
        gamma = ofe.rate_for_overlap(K, y, overlap)
        assert float(ofe.top_overlap(K, y, gamma)) == pytest.approx(overlap, rel=1e-10)
    assert float(ofe.rate_for_overlap(K, y, start / 2)) == 0.0


def test_a_task_that_is_the_top_mode_has_no_threshold():
    assert ofe.threshold(diagonal(2.0, 2.0, 1.0), vector(0.6, 0.8, 0.0)).isnan()
    assert float(ofe.rate_for_overlap(diagonal(2.0, 2.0, 1.0), vector(0.6, 0.8, 0.0))) == 0.0
    assert float(ofe.threshold(diagonal(2.0, 2.0, 1.0), vector(0.6, 0.0, 0.8))) == pytest.approx(1 / 0.64, rel=1e-14)


def test_a_mode_close_below_the_top_counts():
    star = float(ofe.threshold(diagonal(2.0, 1.99, 1.0), vector(0.0, 0.6, 0.8)))
    assert star == pytest.approx(1 / (0.36 / 0.01 + 0.64), rel=1e-11)


@pytest.mark.parametrize(("samples", "dimension"), [(250, 500), (400, 200)])
def test_a_random_kernel_lets_the_task_out_of_its_bulk(samples: int, dimension: int):
    """Overlap and eigenvalue, averaged over kernels, against the limit of large size."""
    aspect, scale, power, draws = samples / dimension, 1.7, 2.3, 10
    star = float(ofe.bulk_threshold(aspect, scale=scale, power=power))
    for factor in (0.5, 1.5, 2.5):
        expected = ofe.bulk_spike(factor * star, aspect, scale=scale, power=power)
        values, overlaps = [], []
        for seed in range(draws):
            Z, y = drawn(samples, dimension, seed=seed), drawn(samples, seed=50 + seed)
            y = y * (power**0.5 / y.norm())
            K = scale * Z @ Z.T / dimension + factor * star * torch.outer(y, y)
            eigenvalues, vectors = torch.linalg.eigh(K)
            values.append(float(eigenvalues[-1]))
            overlaps.append(float((vectors[:, -1] @ y).square() / power))
        error = np.std(overlaps, ddof=1) / draws**0.5
        if factor < 1:  # the eigenvector is one of many, the eigenvalue the edge of the bulk
            assert float(expected.overlap) == 0.0
            assert np.mean(overlaps) < 0.05
            assert np.mean(values) == pytest.approx(float(expected.eigenvalue), rel=0.04)
        else:
            assert abs(np.mean(overlaps) - float(expected.overlap)) < 4 * error
            assert np.mean(values) == pytest.approx(float(expected.eigenvalue), rel=0.02)


def test_the_bulk_formulas_solve_their_equations():
    """G(c) = 1 / (gamma |y|^2) with G from quadrature over the Marchenko-Pastur density, and the overlap from G'."""
    aspect, theta = 0.4, 1.9
    found = ofe.bulk_spike(theta, aspect)
    low, high = (1 - aspect**0.5) ** 2, (1 + aspect**0.5) ** 2
    angle = (np.arange(4000) + 0.5) * np.pi / 4000
    x = (low + high) / 2 + (high - low) / 2 * np.cos(angle)
    weight = ((high - low) / 2 * np.sin(angle)) ** 2 / (2 * np.pi * aspect * x) * np.pi / 4000
    assert weight.sum() == pytest.approx(1.0, rel=1e-12)
    c = float(found.eigenvalue)
    assert (weight / (c - x)).sum() == pytest.approx(1 / theta, rel=1e-12)
    assert 1 / (theta**2 * (weight / (c - x) ** 2).sum()) == pytest.approx(float(found.overlap), rel=1e-11)
    assert 1 / (weight / (high - x)).sum() == pytest.approx(float(ofe.bulk_threshold(aspect)), rel=1e-3)


def test_bulk_formulas_broadcast_and_join():
    aspect = torch.tensor([[0.2], [3.0]], dtype=torch.float64)
    star = ofe.bulk_threshold(aspect)
    found = ofe.bulk_spike(star * torch.tensor([0.0, 1 - 1e-9, 1 + 1e-9], dtype=torch.float64), aspect)
    assert found.overlap.shape == (2, 3)
    np.testing.assert_allclose(found.eigenvalue, (1 + aspect.sqrt()).square().expand(2, 3), rtol=1e-8)
    np.testing.assert_allclose(found.overlap, 0.0, atol=1e-8)


BAD = {
    "no task": lambda: ofe.threshold(K0, torch.zeros(3)),
    "several outputs": lambda: ofe.spike(K0, K0, 1.0),
    "one column": lambda: ofe.top_overlap(K0, Y[:, None], 1.0),
    "a negative rate": lambda: ofe.spike(K0, Y, -1.0),
    "all of the overlap": lambda: ofe.rate_for_overlap(K0, Y, 1.0),
    "none of the overlap": lambda: ofe.rate_for_overlap(K0, Y, 0.0),
    "no aspect": lambda: ofe.bulk_threshold(0.0),
    "a negative power": lambda: ofe.bulk_spike(1.0, 0.5, power=-1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
