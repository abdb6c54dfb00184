"""Optimal feature evolution where digits are at stake: against hundreds of them, and the secular equation."""

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mp
from torch import Tensor

from featlearn.theory import ofe
from featlearn.theory.ofe.frames import largest_entries
from featlearn.theory.ofe.secular import rank_one_update


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exact(K: Tensor, y: Tensor, gamma: float, t: float) -> tuple[float, float, float, np.ndarray]:
    """Loss, alignment, norm and kernel from E H E^T, H^-1 = 1 - gamma Delta_0^T (1 - e^-2Ct)/C Delta_0, as it is."""
    Y = mpmath.matrix(y.tolist())
    samples, outputs = Y.rows, Y.cols
    values, V = mpmath.eigsy(mpmath.matrix(K.tolist()) + mp.mpf(gamma) * Y * Y.T)
    start = V.T * -Y
    gone = [(1 - mpmath.exp(-2 * c * t)) / c for c in values]
    inverse = mpmath.eye(outputs) - mp.mpf(gamma) * start.T * mpmath.diag(gone) * start
    E = mpmath.diag([mpmath.exp(-c * t) for c in values]) * start
    square = E * inverse**-1 * E.T
    kernel = V * (mpmath.diag(list(values)) - mp.mpf(gamma) * square) * V.T
    norm = mpmath.sqrt(sum(v**2 for v in kernel))
    task = Y * Y.T
    overlap = sum(kernel[i, j] * task[i, j] for i in range(samples) for j in range(samples))
    alignment = overlap / norm / mpmath.sqrt(sum(v**2 for v in task))
    table = np.array([[float(kernel[i, j] / norm) for j in range(samples)] for i in range(samples)])
    return float(sum(square[i, i] for i in range(samples))), float(alignment), float(norm), table


KERNELS = {
    "dense": drawn(4, 4, seed=3) @ drawn(4, 4, seed=3).T,
    "graded": torch.diag(torch.tensor([1.0, 1e-3, 1e-9, 1e-18], dtype=torch.float64)),
}


@pytest.mark.parametrize("gamma", [1e-18, 1e-3, 1.0, 1e6, 1e14])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("name", KERNELS)
def test_every_digit_counts(name: str, outputs: int, gamma: float):
    K, y = KERNELS[name], drawn(4, outputs, seed=1)
    times = [0.0, 1e-6, 0.03, 1.0, 20.0, 1e6]
    found = ofe.solve(K, y, gamma, times, rank_tolerance=0.0)
    kernels = found.kernel(times)
    with mp.workdps(150):
        for i, t in enumerate(times):
            loss, alignment, norm, table = exact(K, y, gamma, t)
            if loss > 1e-100:  # beyond, the reference has lost its digits
                # a rate known to 1e-16 makes c t times that in the exponent
                assert float(found.loss[i]) == pytest.approx(loss, rel=2e-14 + 1e-15 * 20 * min(t, 20.0))
            assert float(found.alignment[i]) == pytest.approx(alignment, rel=2e-14)
            assert float(found.kernel_norm[i]) == pytest.approx(norm, rel=2e-14)
            np.testing.assert_allclose(kernels[i] / norm, table, atol=2e-14)


@pytest.mark.parametrize("gamma", [1e-12, 1.0, 1e12])
def test_the_floor_is_reached_and_kept(gamma: float):
    """exp(-2 c t) is 10^-900000 here."""
    K, y = torch.diag(torch.tensor([2.0, 0.3, 0.0, 0.0], dtype=torch.float64)), drawn(4, seed=1)
    late = ofe.solve(K, y, gamma, [1e6, 1e18] if gamma < 1 else [1e6])
    with mp.workdps(60):
        column = mpmath.matrix(y.tolist())
        values, vectors = mpmath.eigsy(mpmath.matrix(K.tolist()) + mp.mpf(gamma) * column * column.T)
        # K0 has a null space of two dimensions: one eigenvalue of C stays zero, the next is the floor
        floor = values[1] / mp.mpf(gamma)
        assert abs(sum(vectors[i, 0] * column[i] for i in range(4))) < 1e-25
    assert float(late.final_loss) == pytest.approx(float(floor), rel=1e-13)
    assert float(late.loss[-1]) == pytest.approx(float(floor), rel=1e-13)
    assert bool(late.residual.isfinite().all())


def test_nothing_overflows():
    for samples, outputs, scale in ((3, 1, 1e-8), (3, 2, 1e8), (4, 3, 1.0)):
        K, y = scale * (drawn(samples, samples) @ drawn(samples, samples).T), drawn(samples, outputs, seed=2)
        for gamma in (0.0, 1e-100, 1e100):
            found = ofe.solve(K, y, gamma, [0.0, 1e-300, 1.0, 1e6, 1e100])
            for values in (*found.curves().values(), found.residual, found.kernel([0.0, 1e100])):
                assert bool(values.isfinite().all())
            np.testing.assert_allclose(found.kernel(0.0), K, atol=1e-9 * float(K.norm()))
            assert float(found.loss[-1]) == 0.0


def test_pivots_are_found_where_rounding_hides_them():
    """At time 1e18 logarithms differ by thirty, and the products beside them are rounded by a hundred."""
    logs = torch.tensor([[[-torch.inf, -torch.inf], [-30.0, -40.0], [-1.0, -35.0]]], dtype=torch.float64)
    rates = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    row, column = largest_entries(logs, rates, torch.tensor([1e18], dtype=torch.float64))
    assert (int(row), int(column)) == (2, 0)


@pytest.mark.parametrize("weight", [1e-14, 1e-3, 1.0, 1e8, 1e16])
def test_eigenvalues_keep_their_digits_beside_a_spike(weight: float):
    poles, z = 10 ** torch.linspace(-12, 0, 7, dtype=torch.float64), drawn(7)
    found = rank_one_update(poles, z, weight)
    with mp.workdps(60):
        column = mpmath.matrix(z.tolist())
        values, vectors = mpmath.eigsy(mpmath.diag(poles.tolist()) + mp.mpf(weight) * column * column.T)
        overlaps = [abs(float((vectors[:, k].T * column)[0])) for k in range(7)]
        expected = [float(v) for v in values]
    np.testing.assert_allclose(found.values, expected, rtol=3e-15)
    np.testing.assert_allclose(found.overlaps, overlaps, rtol=3e-14)


SPECTRA = {
    "one": ([2.0], [-1.5]),
    "equal": ([1.0, 1.0, 1.0], [1.0, -2.0, 0.5]),
    "zeros": ([0.0, 0.0, 0.0, 1.0, 1.0, 2.0], [1.0, -2.0, 0.0, 0.0, 0.5, 0.0]),
    "nothing moves": ([1.0, 2.0], [0.0, 0.0]),
    "neighbors": ([1.0, 1.0 + 2.3e-16, 1.0 + 1e-15, 1.0 + 1e-14, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]),
    "tiny weights": ([0.1, 0.2, 0.3], [1e-120, 1.0, 1e-170]),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("weight", [0.0, 1e-9, 0.7, 1e9])
def test_rank_one_updates_are_eigendecompositions(name: str, weight: float):
    poles, z = (torch.tensor(part, dtype=torch.float64) for part in SPECTRA[name])
    matrix = torch.diag(poles) + weight * torch.outer(z, z)
    values, vectors, overlaps = rank_one_update(poles, z, weight)
    size = float(matrix.abs().max())
    np.testing.assert_allclose(vectors.T @ vectors, torch.eye(len(poles)), atol=1e-14)
    np.testing.assert_allclose(matrix @ vectors, vectors * values, atol=4e-15 * size)
    np.testing.assert_allclose(values, torch.linalg.eigvalsh(matrix), atol=1e-14 * size)
    np.testing.assert_allclose(overlaps, vectors.T @ z, atol=1e-14 * max(1.0, float(z.abs().max())))


@pytest.mark.parametrize("size", [1.0, 1e6, 1e14])
@pytest.mark.parametrize("small", [1.0, 1e-8, 1e-16, 1e-30])
def test_updates_are_orthogonal_where_the_equation_is_nearly_degenerate(size: float, small: float):
    """Two large terms that cancel at the pole of a small one: its roots are known to few digits, the vectors to all."""
    poles = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    z = torch.tensor([size, small, 2 * (size - 1) + 1e-9 * size], dtype=torch.float64).sqrt()
    values, vectors, overlaps = rank_one_update(poles, z, 1.0)
    matrix = torch.diag(poles) + torch.outer(z, z)
    np.testing.assert_allclose(vectors.T @ vectors, torch.eye(3), atol=1e-14)
    np.testing.assert_allclose(matrix @ vectors, vectors * values, atol=1e-14 * float(matrix.max()))
    np.testing.assert_allclose(overlaps, (vectors.T @ z).abs(), atol=1e-13 * float(z.max()))


def test_large_updates_are_orthogonal():
    for decay in (0.0, 1.0, 3.0):
        poles = (torch.arange(200, 0, -1, dtype=torch.float64) ** -decay * (1 + 0.1 * drawn(200).abs())).sort().values
        z = drawn(200, seed=1)
        for weight in (1e-6, 1.0, 1e6):
            found = rank_one_update(poles, z, weight)
            identity = found.vectors.T @ found.vectors
            np.testing.assert_allclose(identity, torch.eye(200), atol=1e-13)
            np.testing.assert_allclose(found.vectors.T @ z, found.overlaps, atol=1e-12)
