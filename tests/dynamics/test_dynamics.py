"""What a kernel predicts, against reference values, matrix exponentials, plain loops and real training."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import featlearn as fl
from featlearn import dynamics

K = torch.tensor([[2.0, 0.5, 0.2], [0.5, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
Y = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gram(samples: int, seed: int, rank: int = 9) -> Tensor:
    features = drawn(samples, rank, seed=seed)
    return features @ features.T / rank


def test_reference_flow_and_descent():
    flow = dynamics.kernel_descent(K, Y, times=[0.0, 3.0], rate=0.1)
    assert float(flow.loss[0]) == pytest.approx(2.25)
    assert float(flow.loss[1]) == pytest.approx(1.3005735078825882, rel=1e-12)
    residual = [-0.6324784876053337, 0.8549218580764946, -0.41188965413335277]
    np.testing.assert_allclose(flow.outputs[1] - Y, residual, rtol=1e-11)
    steps = dynamics.kernel_descent(K, Y, times=[30], rate=0.1, discrete=True)
    assert float(steps.loss[0]) == pytest.approx(0.024886867439572528, rel=1e-11)


def test_reference_regression():
    """002 Theorem 1 with f0."""
    value = dynamics.kernel_regression(
        torch.tensor([[2.0, 0.5], [0.5, 1.0]]),
        torch.tensor([1.0, -1.0]),
        torch.tensor([[1.0, 0.3]]),
        f0=torch.tensor([0.1, 0.2]),
        f0_test=torch.tensor([0.05]),
    )
    assert float(value[0]) == pytest.approx(0.41857142857142865, rel=1e-6)


def test_a_power_law_spectrum_gives_a_power_law_loss():
    """000: lambda_k = k^-b, v_k^2 = k^-a, loss -> (1/b) Gamma((a-1)/b) (2 rate t)^-((a-1)/b), here at t = 1000."""
    k = torch.arange(1, 200_001, dtype=torch.float64)
    loss = float((k**-2.0 * torch.exp(-2 * k**-1.5 * 1000.0)).sum()) + 1 / 200_000
    assert loss == pytest.approx(0.005686938986411977, rel=2e-3)
    small = k[:60]
    flow = dynamics.kernel_descent(torch.diag(small**-1.5), small**-1.0, times=[1.0, 50.0])
    expected = [float((small**-2.0 * torch.exp(-2 * small**-1.5 * t)).sum()) for t in (1.0, 50.0)]
    np.testing.assert_allclose(flow.loss, expected, rtol=1e-11)


KINDS = ("shared", "each", "full")


def problem(kind: str, samples: int = 5, tests: int = 4, outputs: int = 3) -> tuple[Tensor, ...]:
    """K, K_test and the full matrices (P C, P C), (P2 C, P C) behind them."""
    if kind == "full":
        joint = gram((samples + tests) * outputs, 0, 40).reshape(samples + tests, outputs, samples + tests, outputs)
        joint = joint.permute(0, 2, 1, 3)
    else:
        each = torch.stack([gram(samples + tests, 0 if kind == "shared" else c) for c in range(outputs)])
        joint = torch.einsum("cpq,cd->pqcd", each, torch.eye(outputs, dtype=torch.float64))
    K, K_test = joint[:samples, :samples], joint[samples:, :samples]
    whole = [part.permute(0, 2, 1, 3).reshape(part.shape[0] * outputs, -1) for part in (K, K_test)]
    if kind != "full":
        K, K_test = (torch.einsum("pqcc->cpq", part) for part in (K, K_test))
        K, K_test = (K[0], K_test[0]) if kind == "shared" else (K, K_test)
    return K, K_test, *whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_flow_is_a_matrix_exponential(kind: str):
    K, K_test, whole, cross = problem(kind)
    y, f0, f0_test = drawn(5, 3), drawn(5, 3, seed=1), drawn(4, 3, seed=2)
    path = dynamics.kernel_descent(K, y, times=[0.0, 0.7, 4.0], rate=0.3, f0=f0, K_test=K_test, f0_test=f0_test)
    assert path.test_outputs is not None
    for i, t in enumerate((0.0, 0.7, 4.0)):
        residual = torch.linalg.matrix_exp(-0.3 * t * whole) @ (f0 - y).flatten()
        np.testing.assert_allclose((path.outputs[i] - y).flatten(), residual, atol=1e-12)
        assert float(path.loss[i]) == pytest.approx(float(residual.square().sum()))
        moved = cross @ torch.linalg.solve(whole, (path.outputs[i] - f0).flatten())
        np.testing.assert_allclose((path.test_outputs[i] - f0_test).flatten(), moved, atol=1e-9)


@pytest.mark.parametrize("rate", [0.02, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_descent_is_a_loop(kind: str, rate: float):
    K, K_test, whole, cross = problem(kind)
    rate = rate * 2 / float(torch.linalg.eigvalsh(whole).max())
    y, f0 = drawn(5, 3), drawn(5, 3, seed=1)
    path = dynamics.kernel_descent(K, y, times=[0, 1, 6, 7], rate=rate, f0=f0, discrete=True, K_test=K_test)
    f, test, done = f0.flatten(), torch.zeros(12, dtype=torch.float64), 0
    for i, steps in enumerate((0, 1, 6, 7)):
        while done < steps:
            residual = f - y.flatten()
            f, test, done = f - rate * whole @ residual, test - rate * cross @ residual, done + 1
        np.testing.assert_allclose(path.outputs[i].flatten(), f, atol=1e-12)
        assert path.test_outputs is not None
        np.testing.assert_allclose(path.test_outputs[i].flatten(), test, atol=1e-12)


@pytest.mark.parametrize("discrete", [False, True])
def test_directions_the_kernel_does_not_see_stay(discrete: bool):
    v = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    path = dynamics.kernel_descent(
        torch.outer(v, v), Y, times=[1000], rate=0.5, discrete=discrete, K_test=torch.eye(3, dtype=torch.float64)
    )
    np.testing.assert_allclose(path.outputs[0], (v @ Y / 2) * v, atol=1e-12)
    # the test kernel does see them: its outputs go on moving, by rate * steps
    assert path.test_outputs is not None
    unseen = Y - (v @ Y / 2) * v
    np.testing.assert_allclose(path.test_outputs[0] @ unseen, 500 * unseen @ unseen, rtol=1e-9)


def test_a_step_that_diverges_is_refused_by_name():
    limit = 2 / 2.235770551752477
    with pytest.raises(fl.FeatlearnError, match=rf"less than 2.*below {limit:.3g}"):
        dynamics.kernel_descent(K, Y, times=[5], rate=1.01 * limit, discrete=True)
    assert dynamics.kernel_descent(K, Y, times=[5], rate=0.99 * limit, discrete=True).loss[0] > 0


def test_a_rescaled_kernel_is_a_rescaled_rate():
    a = dynamics.kernel_descent(3 * K, Y, times=[2.0], rate=0.1)
    b = dynamics.kernel_descent(K, Y, times=[2.0], rate=0.3)
    np.testing.assert_allclose(a.outputs, b.outputs, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy_follows_its_equation(kind: str):
    K, K_test, whole, cross = problem(kind)
    y = nn.functional.one_hot(torch.tensor([0, 2, 1, 1, 0]), 3).double()
    f0 = drawn(5, 3, seed=1)

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        f = torch.from_numpy(flat[:15]).reshape(5, 3)
        residual = (f.softmax(1) - y).flatten()
        return np.concatenate([-0.4 * whole @ residual, -0.4 * cross @ residual])

    begin = np.concatenate([f0.flatten(), np.zeros(12)])
    solved = solve_ivp(velocity, (0, 5), begin, "Radau", t_eval=[0.5, 5.0], rtol=1e-9, atol=1e-11).y
    path = dynamics.kernel_descent(K, y, times=[0.5, 5.0], rate=0.4, f0=f0, loss="cross-entropy", K_test=K_test)
    np.testing.assert_allclose(path.outputs.reshape(2, 15), solved[:15].T, atol=1e-6)
    assert path.test_outputs is not None
    np.testing.assert_allclose(path.test_outputs.reshape(2, 12), solved[15:].T, atol=1e-6)
    expected = nn.functional.cross_entropy(path.outputs[1], y, reduction="sum")
    assert float(path.loss[1]) == pytest.approx(float(expected))
    steps = dynamics.kernel_descent(K, y, times=[2], rate=0.1, f0=f0, loss="cross-entropy", discrete=True)
    f = f0.flatten()
    for _ in range(2):
        f = f - 0.1 * whole @ (f.reshape(5, 3).softmax(1) - y).flatten()
    np.testing.assert_allclose(steps.outputs[0].flatten(), f, atol=1e-13)


def test_an_evolving_kernel_is_time_ordered():
    """Two kernels that do not commute: the exponential of the integral is not the answer."""
    A, B = gram(4, 0), gram(4, 1)
    times = torch.linspace(0, 3, 121, dtype=torch.float64)
    share = torch.exp(-times)[:, None, None]
    kernels = share * A + (1 - share) * B
    cross = share * gram(6, 2)[:2, :4] + (1 - share) * gram(6, 3)[:2, :4]
    y, f0 = drawn(4), drawn(4, seed=1)
    path = dynamics.evolving_kernel_descent(kernels, times, y, rate=2.0, f0=f0, kernels_test=cross)
    f, test, target = f0.numpy(), np.zeros(2), y.numpy()
    first = torch.cat([A, gram(6, 2)[:2, :4]]).numpy()
    last = torch.cat([B, gram(6, 3)[:2, :4]]).numpy()
    step = 3 / 60_000
    for i in range(60_000):
        s = np.exp(-(i + 0.5) * step)
        rows = s * first + (1 - s) * last
        middle = f - step * rows[:4] @ (f - target)
        moved = rows @ ((f + middle) / 2 - target)
        f, test = f - 2 * step * moved[:4], test - 2 * step * moved[4:]
    # the kernel is linear between the given times, an error of (1/40)^2 / 8 of its curvature
    np.testing.assert_allclose(path.outputs[-1], f, atol=2e-4)
    assert path.test_outputs is not None
    np.testing.assert_allclose(path.test_outputs[-1], test, atol=2e-4)
    integral = torch.trapezoid(kernels, times, dim=0)
    unordered = y + torch.linalg.matrix_exp(-2 * integral) @ (f0 - y)
    assert np.linalg.norm(unordered.numpy() - f) > 20 * np.linalg.norm(path.outputs[-1].numpy() - f)


def test_a_constant_kernel_evolves_as_a_frozen_one():
    times = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    y = drawn(3, 2)
    evolving = dynamics.evolving_kernel_descent(K.expand(3, 3, 3), times, y, rate=0.7)
    frozen = dynamics.kernel_descent(K, y, times=times, rate=0.7)
    np.testing.assert_allclose(evolving.outputs, frozen.outputs, atol=1e-9)
    np.testing.assert_allclose(evolving.loss, frozen.loss, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_regression_solves_the_linear_system(kind: str, ridge: float):
    K, K_test, whole, cross = problem(kind)
    y, f0, f0_test = drawn(5, 3), drawn(5, 3, seed=1), drawn(4, 3, seed=2)
    found = dynamics.kernel_regression(K, y, K_test, f0=f0, f0_test=f0_test, ridge=ridge)
    weights = torch.linalg.solve(whole + ridge * torch.eye(15, dtype=torch.float64), (y - f0).flatten())
    np.testing.assert_allclose((found - f0_test).flatten(), cross @ weights, atol=1e-9)


def test_regression_is_where_descent_ends():
    K, K_test, *_ = problem("shared")
    y = drawn(5)
    end = dynamics.kernel_descent(K, y, times=[1e9], K_test=K_test).test_outputs
    assert end is not None
    np.testing.assert_allclose(dynamics.kernel_regression(K, y, K_test), end[0], atol=1e-9)
    singular = gram(5, 0, rank=2)
    np.testing.assert_allclose(
        dynamics.kernel_regression(singular, y, singular), singular @ torch.linalg.pinv(singular) @ y, atol=1e-9
    )


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum-half": lambda f, y: 0.5 * (f - y).square().sum(),
    "mean": lambda f, y: (f - y).square().sum(1).mean(),
    "mean-half": lambda f, y: 0.5 * (f - y).square().sum(1).mean(),
    "mean-over-outputs": nn.MSELoss(),
}


@pytest.mark.parametrize("loss", [*LOSSES, "cross-entropy"])
def test_the_first_steps_of_a_real_network_are_those_of_its_kernel(loss: str):
    """Unequal sizes (P = 7, C = 3), so that no convention can hide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 3)).double()
    x, y = drawn(7, 4), drawn(7, 3, seed=1)
    if loss == "cross-entropy":
        y = nn.functional.one_hot(torch.arange(7) % 3, 3).double()
    kernel, f0 = fl.ntk(model, x, outputs="full"), model(x).detach()
    lr = 1e-5 * (1 if loss == "sum-half" else 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(5):
        optimizer.zero_grad()
        criterion = nn.CrossEntropyLoss() if loss == "cross-entropy" else LOSSES[loss]
        criterion(model(x), y).backward()
        optimizer.step()
    if loss == "cross-entropy":
        step, kind = dynamics.rate(lr, "mean-half", 7, 3), "cross-entropy"
    else:
        step, kind = dynamics.rate(lr, loss, 7, 3), "mse"
    predicted = dynamics.kernel_descent(kernel, y, times=[5], rate=step, f0=f0, discrete=True, loss=kind).outputs[0]
    change, expected = model(x).detach() - f0, predicted - f0
    assert float((change - expected).norm() / change.norm()) < 2e-3


BAD = {
    "a kernel of other size": lambda: dynamics.kernel_descent(K, torch.ones(4), times=[1.0]),
    "negative times": lambda: dynamics.kernel_descent(K, Y, times=[-1.0]),
    "half a step": lambda: dynamics.kernel_descent(K, Y, times=[0.5], discrete=True),
    "a negative rate": lambda: dynamics.kernel_descent(K, Y, times=[1.0], rate=-1.0),
    "an unknown loss": lambda: dynamics.kernel_descent(K, Y, times=[1.0], loss="hinge"),
    "labels for cross-entropy": lambda: dynamics.kernel_descent(K, Y, times=[1.0], loss="cross-entropy"),
    "a test start without kernel": lambda: dynamics.kernel_descent(K, Y, times=[1.0], f0_test=Y),
    "a test kernel the wrong way": lambda: dynamics.kernel_descent(K, Y, times=[1.0], K_test=torch.ones(3, 2)),
    "a start of other length": lambda: dynamics.kernel_descent(K, Y, times=[1.0], f0=torch.ones(2)),
    "an asymmetric kernel": lambda: dynamics.kernel_descent(K.triu(), Y, times=[1.0]),
    "a negative ridge": lambda: dynamics.kernel_regression(K, Y, K, ridge=-1.0),
    "one kernel that evolves": lambda: dynamics.evolving_kernel_descent(K, torch.ones(1), Y),
    "an unknown convention": lambda: dynamics.rate(0.1, "half", 5),
    "a list of conventions": lambda: dynamics.rate(0.1, ["mean"], 5),
    "a mean without P": lambda: dynamics.rate(0.1, "mean"),
    "half a mean without P": lambda: dynamics.rate(0.1, "mean-half", C=3),
    "a mean over outputs without C": lambda: dynamics.rate(0.1, "mean-over-outputs", 5),
    "half a sample": lambda: dynamics.rate(0.1, "mean", 0.5),
    "a negative learning rate": lambda: dynamics.rate(-0.1, "sum-half"),
    "a kernel of nan": lambda: dynamics.kernel_descent(K * np.nan, Y, times=[1.0]),
    "a kernel of nan to regress with": lambda: dynamics.kernel_regression(K * np.nan, Y, K),
    "a test kernel of nan": lambda: dynamics.kernel_regression(K, Y, K * np.nan),
    "a target of nan": lambda: dynamics.kernel_descent(K, Y * np.nan, times=[1.0]),
    "a start of nan": lambda: dynamics.kernel_descent(K, HOT, times=[1.0], f0=HOT * np.nan, loss="cross-entropy"),
    "no samples": lambda: dynamics.kernel_descent(torch.zeros(0, 0), torch.zeros(0), times=[1.0]),
    "one asymmetric kernel of two": lambda: dynamics.kernel_descent(
        torch.stack([1e5 * torch.eye(3), K.triu()]), torch.ones(3, 2), times=[1.0]
    ),
    "an asymmetric kernel for classes": lambda: dynamics.kernel_descent(
        K.triu(), HOT, times=[1.0], loss="cross-entropy"
    ),
    "labels": lambda: dynamics.kernel_descent(K, torch.tensor([0, 1, 2]), times=[1.0]),
    "labels in a column": lambda: dynamics.kernel_regression(K, torch.tensor([[0], [1], [2]]), K),
    "negative probabilities": lambda: dynamics.kernel_descent(K, 1 - 2 * HOT, times=[1.0], loss="cross-entropy"),
    "rows that do not sum to 1": lambda: dynamics.kernel_descent(K, 0.999 * HOT, times=[1.0], loss="cross-entropy"),
    "one class": lambda: dynamics.kernel_descent(K, torch.ones(3, 1), times=[1.0], loss="cross-entropy"),
    "an endless flow of classes": lambda: dynamics.kernel_descent(K, HOT, times=[np.inf], loss="cross-entropy"),
    "endless steps for classes": lambda: dynamics.kernel_descent(
        K, HOT, times=[np.inf], loss="cross-entropy", discrete=True
    ),
    "a rate in words": lambda: dynamics.kernel_descent(K, Y, times=[1.0], rate="1"),
    "an infinite rate": lambda: dynamics.kernel_descent(K, Y, times=[1.0], rate=np.inf),
    "two rates": lambda: dynamics.kernel_descent(K, Y, times=[1.0], rate=torch.ones(2)),
    "times in words": lambda: dynamics.kernel_descent(K, Y, times="soon"),
    "times of nan": lambda: dynamics.kernel_descent(K, Y, times=[np.nan]),
    "a kernel that is not positive": lambda: dynamics.kernel_descent(-K, Y, times=[1e4]),
    "a kernel that is not positive, for ever": lambda: dynamics.kernel_descent(-K, Y, times=[np.inf]),
    "a ridge in words": lambda: dynamics.kernel_regression(K, Y, K, ridge="1"),
    "a test start without kernels": lambda: evolving(f0_test=Y),
    "a negative rate of evolving kernels": lambda: evolving(rate=-1.0),
    "evolving kernels that are not symmetric": lambda: evolving(kernels=torch.stack([1e5 * K, K.triu()])),
    "evolving kernels of nan": lambda: evolving(kernels=torch.stack([K, K * np.nan])),
    "evolving kernels for ever": lambda: evolving(times=torch.tensor([0.0, np.inf])),
    "an evolving start with a column more": lambda: evolving(f0=Y[:, None]),
    "evolving labels": lambda: evolving(y=torch.tensor([0, 2, 1])),
    "an evolving target of nan": lambda: evolving(y=Y * np.nan),
    "evolving kernels that are not positive": lambda: evolving(kernels=torch.stack([-K, -K]), rate=1e3),
}
HOT = torch.eye(2, dtype=torch.float64)[[0, 1, 1]]


def evolving(**changes: object) -> dynamics.Trajectory:
    given = {"kernels": torch.stack([K, K]), "times": torch.arange(2.0), "y": Y, **changes}
    return dynamics.evolving_kernel_descent(**given)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()


def test_a_start_has_the_shape_of_the_targets_in_both_forms():
    """(P,) with (P,), (P, 1) with (P, 1), and the error names the shape of y itself."""
    for call in (lambda **given: dynamics.kernel_descent(K, times=[1.0], **given), evolving):
        assert call(y=Y, f0=Y).outputs.shape[1:] == (3,)
        assert call(y=Y[:, None], f0=Y[:, None]).outputs.shape[1:] == (3, 1)
        with pytest.raises(fl.FeatlearnError, match=r"f0 has shape \(3, 1\), expected \(3,\) like y"):
            call(y=Y, f0=Y[:, None])


def test_rates_and_times_come_as_they_are_at_hand():
    one = dynamics.kernel_descent(K, Y, times=[0.0, 2.0], rate=0.1)
    for rate in (torch.tensor(0.1, dtype=torch.float64), np.float64(0.1), torch.tensor(0.1).double().requires_grad_()):
        times = (torch.tensor([0, 2]), np.array([0, 2]), (0, 2), [torch.tensor(0), torch.tensor(2.0)])
        for moments in times:
            path = dynamics.kernel_descent(K, Y, times=moments, rate=rate)
            assert not path.outputs.requires_grad
            np.testing.assert_allclose(path.outputs, one.outputs, rtol=1e-6)
    assert dynamics.rate(np.float32(0.5), "mean", torch.tensor(4)) == 0.25
    assert dynamics.rate(0.6, "mean-over-outputs", np.int64(4), 3) == pytest.approx(0.1)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("discrete", [False, True])
def test_times_may_repeat(loss: str, discrete: bool):
    """As rounded, logarithmically spaced steps do."""
    path = dynamics.kernel_descent(K, HOT, times=[0, 0, 1, 1, 3], rate=0.2, loss=loss, discrete=discrete)
    once = dynamics.kernel_descent(K, HOT, times=[0, 1, 3], rate=0.2, loss=loss, discrete=discrete)
    np.testing.assert_allclose(path.outputs, once.outputs[[0, 0, 1, 1, 2]], atol=1e-12)
    assert float(path.outputs[2].abs().max()) > 0.01


def test_probabilities_may_carry_the_rounding_of_their_format():
    y = drawn(3, 50).float().softmax(1).half().float()
    with pytest.raises(fl.FeatlearnError, match="miss the sum 1"):
        dynamics.kernel_descent(K, y, times=[1.0], loss="cross-entropy")
    for rows in (y.half(), drawn(3, 50).float().softmax(1)):
        dynamics.kernel_descent(K, rows, times=[1.0], loss="cross-entropy")
