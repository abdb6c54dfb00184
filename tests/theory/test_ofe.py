"""Optimal feature evolution: reference values, the flow integrated, conservation laws, every kind of start."""

import itertools

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor

import featlearn as fl
from featlearn.theory import ofe
from featlearn.theory.ofe import solution as solution_module
from featlearn.theory.prediction import NAMES

matplotlib.use("Agg")

K0 = torch.tensor([[2.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
GAMMA = 0.7

REFERENCE = {
    0.0: (
        [-1.0, 1.0, -0.5],
        [2.0, 0.5, 0.2, 1.0, 0.1, 0.5],
        2.25,
        0.40885523623850234,
        2.418677324489565,
    ),
    0.5: (
        [-0.28888542437857373, 0.5785251110269223, -0.28085118012668064],
        [
            2.641581648107128,
            -0.08301076945112822,
            0.49320633134931646,
            1.4657160871379011,
            -0.13626437788461893,
            0.6197858302350157,
        ],
        0.4970234778856506,
        0.709148919558239,
        3.169831893758362,
    ),
    1.0: (
        [-0.0318868016303635, 0.24305840216865626, -0.1453981362830532],
        [
            2.6992882623172503,
            -0.1945747514618184,
            0.5467546029296424,
            1.6586458291946538,
            -0.22526183292171836,
            0.6602015673757903,
        ],
        0.08123477301757971,
        0.7532536457776602,
        3.3538358435616398,
    ),
    3.0: (
        [0.009571523434226632, 0.002750961588951996, -0.03423676547756269],
        [
            2.699935870157404,
            -0.20001843162532068,
            0.5502293886021564,
            1.6999947025472353,
            -0.24993407118126887,
            0.6741794907227441,
        ],
        0.0012713379608814675,
        0.7578672930838568,
        3.382987919484736,
    ),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kernel(samples: int, rank: int, seed: int = 0) -> Tensor:
    features = drawn(rank, samples, seed=100 + seed)
    return features.T @ features / 2


def integrated(
    K: Tensor, delta: Tensor, gamma: float, rate: float, times: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """dDelta/dt = -rate K Delta, dK/dt = rate gamma (K Delta Delta^T + Delta Delta^T K), as it stands."""
    shape, size = delta.shape, delta.numel()

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        d, k = state[:size].reshape(len(K), -1), state[size:].reshape(K.shape)
        push = k @ d @ d.T
        return rate * np.concatenate([-(k @ d).ravel(), gamma * (push + push.T).ravel()])

    start = np.concatenate([delta.numpy().ravel(), K.numpy().ravel()])
    path = solve_ivp(velocity, (0, times[-1]), start, "DOP853", times, rtol=1e-12, atol=1e-14).y.T
    return path[:, :size].reshape(-1, *shape), path[:, size:].reshape(-1, *K.shape)


def test_reference_values():
    times = list(REFERENCE)
    found = ofe.solve(K0, Y, GAMMA, times)
    rows, columns = torch.triu_indices(3, 3)
    for i, (residual, K, loss, alignment, norm) in enumerate(REFERENCE.values()):
        np.testing.assert_allclose(found.residual[i], residual, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found.kernel(times)[i][rows, columns], K, rtol=1e-12, atol=1e-14)
        assert float(found.loss[i]) == pytest.approx(loss, rel=1e-13)
        assert float(found.alignment[i]) == pytest.approx(alignment, rel=1e-13)
        assert float(found.kernel_norm[i]) == pytest.approx(norm, rel=1e-13)


def test_reference_values_of_the_end():
    expected = [[2.7, -0.2, 0.55], [-0.2, 1.7, -0.25], [0.55, -0.25, 0.675]]
    np.testing.assert_allclose(ofe.final_kernel(K0, Y, GAMMA), expected, rtol=1e-14)
    np.testing.assert_allclose(ofe.solve(K0, Y, GAMMA, 0.0).final_kernel, expected, rtol=1e-13)
    assert float(ofe.final_alignment(K0, Y, GAMMA)) == pytest.approx(0.7578433496685515, rel=1e-14)
    assert float(ofe.final_alignment(K0, Y, 0.0)) == pytest.approx(0.408855236238502, rel=1e-14)
    assert float(ofe.late_amplification(K0, Y, GAMMA)) == pytest.approx(2.9260479041916168, rel=1e-14)
    assert float(ofe.final_loss(K0, Y, GAMMA)) == 0.0


def test_reference_values_of_two_outputs():
    targets = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    found = ofe.solve(K0, targets, GAMMA, 1.0)
    assert float(found.loss) == pytest.approx(0.2644946919, rel=1e-9)
    assert float(found.kernel_norm) == pytest.approx(3.5915101101, rel=1e-10)


def test_reference_value_of_a_loss_that_stays():
    singular = torch.diag(torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))
    found = ofe.solve(singular, Y, GAMMA, [1e3, 1e6, 1e12])
    floor = float(ofe.final_loss(singular, Y, GAMMA))
    assert floor == pytest.approx(0.07564386, abs=5e-9)
    assert float(found.final_loss) == pytest.approx(floor, rel=1e-14)
    np.testing.assert_allclose(found.loss, floor, rtol=1e-14)
    conserved = singular + GAMMA * torch.outer(Y, Y)
    assert floor == pytest.approx(float(torch.linalg.eigvalsh(conserved)[0]) / GAMMA, rel=1e-13)
    assert int(torch.linalg.matrix_rank(found.final_kernel)) == 2
    assert float(ofe.late_amplification(singular, Y, GAMMA)) == torch.inf
    # its end is not the papers' K0 + gamma y y^T, nor is its alignment
    assert float((found.final_kernel - conserved).norm()) > 0.05
    np.testing.assert_allclose(ofe.final_kernel(singular, Y, GAMMA), found.final_kernel, rtol=1e-13, atol=1e-15)
    expected = fl.metrics.alignment(found.final_kernel, Y)
    assert float(ofe.final_alignment(singular, Y, GAMMA)) == pytest.approx(float(expected), rel=1e-13)


CASES = [
    # samples, outputs (0 for none), rank, gamma, rate, start
    (3, 0, 3, 0.3, 0.7, False),
    (6, 0, 6, 5.0, 1.3, True),
    (5, 0, 3, 0.8, 0.4, True),
    (7, 1, 7, 0.02, 1.0, True),
    (4, 2, 4, 1.5, 0.6, True),
    (6, 3, 6, 0.4, 1.1, False),
    (5, 3, 2, 0.9, 0.8, True),
    (3, 5, 3, 0.2, 1.0, True),
    (6, 2, 4, 30.0, 0.1, True),
    (1, 0, 1, 2.0, 1.0, True),
    (5, 2, 5, 0.0, 1.0, True),
    (4, 0, 2, 0.0, 1.0, False),
]


@pytest.mark.parametrize(("samples", "outputs", "rank", "gamma", "rate", "moved"), CASES)
def test_the_flow_is_solved(samples: int, outputs: int, rank: int, gamma: float, rate: float, moved: bool):
    shape = (samples, outputs) if outputs else (samples,)
    K, y = kernel(samples, rank), drawn(*shape, seed=1) - 0.3
    f0 = drawn(*shape, seed=2) / 2 if moved else None
    times = [0.0, 0.02, 0.3, 1.0, 2.5]
    found = ofe.solve(K, y, gamma, times, f0=f0, rate=rate)
    path = ofe.integrate(K, y, gamma, times, f0=f0, rate=rate)
    scale = float(path.kernels.abs().max())
    np.testing.assert_allclose(found.residual, path.residual, atol=1e-9)
    np.testing.assert_allclose(found.kernel(times), path.kernels, atol=1e-10 * scale)
    for name, values in path.curves().items():
        np.testing.assert_allclose(found.curves()[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(found.outputs - found.residual, y.expand_as(found.outputs), atol=1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_the_integration_is_that_of_the_equations(seed: int):
    """Kernels in place of features, and no eigenvectors at all."""
    K, y, f0 = kernel(5, 5, seed), drawn(5, 2, seed=seed), drawn(5, 2, seed=10 + seed) / 3
    times = [0.0, 0.1, 0.7, 2.0]
    residual, kernels = integrated(K, f0 - y, 0.6, 0.9, times)
    found = ofe.solve(K, y, 0.6, times, f0=f0, rate=0.9)
    np.testing.assert_allclose(found.residual, residual, atol=1e-9)
    np.testing.assert_allclose(found.kernel(times), kernels, atol=1e-9 * float(np.abs(kernels).max()))
    path = ofe.integrate(K, y, 0.6, times, f0=f0, rate=0.9)
    np.testing.assert_allclose(path.residual, residual, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    samples=st.integers(1, 7),
    outputs=st.integers(1, 3),
    loss_of_rank=st.integers(0, 4),
    log_gamma=st.floats(-4, 4),
    log_time=st.floats(-3, 3),
)
def test_what_holds_for_every_problem(
    seed: int, samples: int, outputs: int, loss_of_rank: int, log_gamma: float, log_time: float
):
    rank, gamma = max(1, samples - loss_of_rank), 10**log_gamma
    K, y, f0 = kernel(samples, rank, seed), drawn(samples, outputs, seed=seed), drawn(samples, outputs, seed=seed + 1)
    times = torch.tensor([0.0, 10**log_time, 2 * 10**log_time], dtype=torch.float64)
    found = ofe.solve(K, y, gamma, times, f0=f0)
    delta = f0 - y
    conserved = K + gamma * delta @ delta.T
    kernels = found.kernel(times)
    left = found.residual
    size = float(conserved.norm())
    np.testing.assert_allclose(kernels + gamma * left @ left.mT, conserved.expand_as(kernels), atol=1e-12 * size)
    np.testing.assert_allclose(left[0], delta, atol=1e-12 * float(delta.norm()))
    np.testing.assert_allclose(kernels[0], K, atol=1e-12 * float(K.norm()))
    np.testing.assert_allclose(found.loss, left.square().sum((1, 2)), rtol=1e-11)
    np.testing.assert_allclose(found.kernel_norm, torch.linalg.matrix_norm(kernels), rtol=1e-11)
    np.testing.assert_allclose(found.kernel_trace, kernels.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-11)
    np.testing.assert_allclose(found.alignment, fl.metrics.alignment(kernels, y), rtol=1e-10)
    assert bool((torch.linalg.eigvalsh(kernels) > -1e-12 * size).all())
    assert bool((found.loss.diff() <= 1e-14 * found.loss[0]).all())
    assert bool((found.loss >= found.final_loss * (1 - 1e-12)).all())


def test_times_may_come_in_any_order_and_in_parts(monkeypatch: pytest.MonkeyPatch):
    K, y = kernel(5, 4), drawn(5, 2)
    times = torch.tensor([2.0, 0.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    ordered, order = times.sort()
    expected = ofe.solve(K, y, 0.8, ordered)
    monkeypatch.setattr(solution_module, "ELEMENTS", 1)
    found = ofe.solve(K, y, 0.8, times)
    np.testing.assert_allclose(found.residual[order], expected.residual, atol=1e-12)
    np.testing.assert_allclose(found.loss[order], expected.loss, rtol=1e-13)


def test_outputs_may_be_mixed():
    """Delta -> Delta Q for an orthogonal Q; not so if only Delta Delta^T were known."""
    K, y, f0 = kernel(6, 5), drawn(6, 3, seed=3), drawn(6, 3, seed=4)
    turn = torch.linalg.qr(drawn(3, 3, seed=5)).Q
    times = [0.1, 1.0, 30.0]
    plain, mixed = ofe.solve(K, y, 0.9, times, f0=f0), ofe.solve(K, y @ turn, 0.9, times, f0=f0 @ turn)
    np.testing.assert_allclose(mixed.residual, plain.residual @ turn, atol=1e-11)
    np.testing.assert_allclose(mixed.kernel(times), plain.kernel(times), atol=1e-12)


@pytest.mark.parametrize("lost", [0, 1])
def test_outputs_that_do_not_meet_are_solved_one_by_one(lost: int):
    """Also where one has come to rest long before the other has begun."""
    blocks = 300 * kernel(3, 3 - lost), kernel(2, 2 - lost, seed=1)
    y1, y2 = drawn(3, seed=6), drawn(2, seed=7)
    targets = torch.block_diag(y1[:, None], y2[:, None])
    turn = torch.linalg.qr(drawn(2, 2, seed=9)).Q  # mixed, so that only rounding tells them apart
    times = [0.0, 0.4, 2.0, 50.0, 1e4]
    both = ofe.solve(torch.block_diag(*blocks), targets @ turn, 1.1, times)
    first, second = (ofe.solve(K, y, 1.1, times) for K, y in zip(blocks, (y1, y2), strict=True))
    residual = both.residual @ turn.T
    np.testing.assert_allclose(residual[:, :3, 0], first.residual, atol=1e-11)
    np.testing.assert_allclose(residual[:, 3:, 1], second.residual, atol=1e-11)
    np.testing.assert_allclose(residual[:, :3, 1], 0.0, atol=1e-11)
    np.testing.assert_allclose(both.loss, first.loss + second.loss, rtol=1e-12)


def test_a_frozen_kernel_is_kernel_descent():
    K, y, f0 = kernel(6, 6), drawn(6, 2), drawn(6, 2, seed=1)
    times = torch.tensor([0.0, 0.3, 4.0], dtype=torch.float64)
    frozen = fl.dynamics.kernel_descent(K, y, times=times, rate=0.7, f0=f0)
    found = ofe.solve(K, y, 0.0, times, f0=f0, rate=0.7)
    np.testing.assert_allclose(found.outputs, frozen.outputs, atol=1e-12)
    np.testing.assert_allclose(found.loss, frozen.loss, rtol=1e-11)


def test_the_late_loss_is_amplified():
    """000 App. A.1 gives sum_k d_k^2 exp(-2 c_k t) without the factor."""
    K, y, gamma = kernel(5, 5), drawn(5), 2.0
    values, vectors = torch.linalg.eigh(ofe.final_kernel(K, y, gamma))
    t = 20 / float(values[0])
    papers = float(((vectors.T @ y).square() * torch.exp(-2 * values * t)).sum())
    factor = float(ofe.late_amplification(K, y, gamma))
    assert factor > 5
    assert float(ofe.solve(K, y, gamma, t).loss) == pytest.approx(factor * papers, rel=1e-8)


def test_large_feature_rates_bring_an_exponential():
    """000 p. 4 prints exp(-rate gamma t); it is exp(-2 rate gamma |y|^2 t)."""
    K = kernel(8, 8)
    y = drawn(8)
    for gamma, share in ((5e3, 0.9), (5e6, 0.998)):
        times = torch.linspace(0.05, 2, 400, dtype=torch.float64) * 10 / (gamma * float(y @ y))
        loss = ofe.solve(K, y, gamma, times).loss
        rates = -loss.log().diff() / times.diff() / (2 * gamma * float(y @ y))
        assert share < float(rates.max()) < 1.0


def test_alignment_can_exceed_its_end():
    """000 Fig. 2E calls it monotone."""
    assert float(ofe.solve(K0, Y, GAMMA, 3.0).alignment) > float(ofe.final_alignment(K0, Y, GAMMA)) + 2e-5


def test_effective_rate_is_the_inverse_of_the_final_alignment():
    K, y = kernel(6, 6), drawn(6)
    for gamma in (0.01, 0.4, 20.0):
        assert float(fl.metrics.feature_rate(K, ofe.final_kernel(K, y, gamma), y)) == pytest.approx(gamma, rel=1e-10)


def test_final_alignment_over_many_rates():
    K, y, f0 = kernel(6, 6), drawn(6, 2), drawn(6, 2, seed=3)
    rates = torch.tensor([[0.0, 0.3], [2.0, 1e9]], dtype=torch.float64)
    for case, start in itertools.product((K, kernel(6, 3)), (None, f0)):
        found = ofe.final_alignment(case, y, rates, f0=start)
        losses = ofe.final_loss(case, y, rates, f0=start)
        assert found.shape == losses.shape == rates.shape
        for gamma, alignment, loss in zip(rates.flatten(), found.flatten(), losses.flatten(), strict=True):
            end = ofe.solve(case, y, gamma, 0.0, f0=start)
            expected = fl.metrics.alignment(end.final_kernel, y)
            assert float(alignment) == pytest.approx(float(expected), rel=1e-11)
            assert float(loss) == pytest.approx(float(end.final_loss), rel=1e-11, abs=1e-30)


def test_what_is_undefined_is_nan():
    nothing = torch.zeros(3, dtype=torch.float64)
    found = ofe.solve(K0, nothing, GAMMA, [0.0, 1.0])
    assert found.alignment.isnan().all()
    assert found.loss.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found.kernel(1.0), K0, rtol=1e-13)
    empty = ofe.solve(torch.zeros(3, 3), Y, GAMMA, [0.0, 1.0])
    assert empty.alignment.isnan().all()
    np.testing.assert_allclose(empty.loss, 2.25, rtol=1e-14)
    still = ofe.solve(K0, Y, GAMMA, [0.0, 1.0], f0=Y)
    assert still.loss.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(still.alignment, 0.40885523623850234, rtol=1e-12)


def test_a_task_in_the_range_of_a_singular_kernel_is_learned():
    X = drawn(7, 3)
    K, y = X @ X.T, X @ drawn(3, seed=1)
    assert float(ofe.final_loss(K, y, 0.5)) == 0.0
    np.testing.assert_allclose(ofe.final_kernel(K, y, 0.5), K + 0.5 * torch.outer(y, y), rtol=1e-13)
    assert float(ofe.solve(K, y, 0.5, 1e6).loss) == 0.0
    assert float(ofe.late_amplification(K, y, 0.5)) == pytest.approx(
        1 + 0.5 * float(y @ torch.linalg.pinv(K) @ y), rel=1e-10
    )


def test_predictions_share_their_names_and_are_laid_over_each_other():
    times = torch.linspace(0, 2, 9, dtype=torch.float64)
    found, path = ofe.solve(K0, Y, GAMMA, times), ofe.integrate(K0, Y, GAMMA, times)
    rough = ofe.diagonal_approximation(K0, Y, GAMMA, times)
    for prediction in (found, path, rough):
        assert set(prediction.curves()) <= set(NAMES)
        assert all(values.shape == times.shape for values in prediction.curves().values())
    axes = found.overlay(path)
    assert len(axes) == 4
    measured = {"loss": (range(0, 40, 10), [2.0, 1.0, 0.5, 0.3])}
    (ax,) = found.overlay(measured, time_scale=0.05)
    np.testing.assert_allclose(ax.lines[1].get_xdata(), [0.0, 0.5, 1.0, 1.5])


def test_shapes():
    found = ofe.solve(K0, Y, GAMMA, 2.0)
    assert found.residual.shape == (1, 3)
    assert found.kernel(1).shape == (3, 3)
    assert found.kernel([1.0]).shape == (1, 3, 3)
    assert found.kernel(torch.tensor(1.0)).shape == (3, 3)
    columns = ofe.solve(K0, Y[:, None], GAMMA, [0.0, 2.0])
    assert columns.residual.shape == (2, 3, 1)
    np.testing.assert_allclose(columns.residual[1, :, 0], found.residual[0], rtol=1e-13)
    single = ofe.solve(K0.float(), Y.float(), GAMMA, [0.0, 1.0])
    assert single.residual.dtype == single.loss.dtype == torch.float64


BAD = {
    "a stack of kernels": lambda: ofe.solve(K0[None], Y, 1.0, 1.0),
    "a list": lambda: ofe.solve(K0.tolist(), Y, 1.0, 1.0),
    "another size": lambda: ofe.solve(K0, Y[:2], 1.0, 1.0),
    "a start of another shape": lambda: ofe.solve(K0, Y, 1.0, 1.0, f0=Y[:, None]),
    "an indefinite kernel": lambda: ofe.solve(K0 - torch.eye(3), Y, 1.0, 1.0),
    "no symmetry": lambda: ofe.solve(K0.tril(), Y, 1.0, 1.0),
    "nan": lambda: ofe.solve(K0, Y * torch.nan, 1.0, 1.0),
    "a negative gamma": lambda: ofe.solve(K0, Y, -1.0, 1.0),
    "several gammas": lambda: ofe.solve(K0, Y, [1.0, 2.0], 1.0),
    "no number": lambda: ofe.solve(K0, Y, "1", 1.0),
    "True": lambda: ofe.solve(K0, Y, True, 1.0),
    "a negative time": lambda: ofe.solve(K0, Y, 1.0, [-1.0]),
    "no time": lambda: ofe.solve(K0, Y, 1.0, []),
    "infinite time": lambda: ofe.solve(K0, Y, 1.0, float("inf")),
    "a negative rate": lambda: ofe.solve(K0, Y, 1.0, 1.0, rate=-1.0),
    "integration backwards": lambda: ofe.integrate(K0, Y, 1.0, [1.0, 0.0]),
    "amplification of many outputs": lambda: ofe.late_amplification(K0, K0, 1.0),
    "diagonal without features": lambda: ofe.diagonal_approximation(K0, Y, 0.0, 1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
