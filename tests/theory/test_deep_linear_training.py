"""Linear networks along training: closed forms against integrated flows, flows against autograd and real descent."""

import math

import matplotlib
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import deep_linear

matplotlib.use("Agg")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whitened(samples: int, dimension: int, seed: int = 0) -> Tensor:
    left, _, right = torch.linalg.svd(drawn(samples, dimension, seed=seed), full_matrices=False)
    return math.sqrt(samples) * left @ right


def small_weights(sigma: float, D: int, N: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return sigma * drawn(N, D, seed=seed) / math.sqrt(D), sigma * drawn(N, seed=seed + 1) / math.sqrt(N)


def by_autograd(weights: list[Tensor], x: Tensor, y: Tensor, times: list[float], rates: list[float]) -> list[Tensor]:
    """Gradient flow of 1/2 |f - y|^2 with gradients from autograd: each layer at each time, (T, outputs, inputs)."""
    sizes = [w.numel() for w in weights]

    def unpacked(state: Tensor) -> list[Tensor]:
        return [part.reshape(w.shape) for part, w in zip(state.split(sizes), weights, strict=True)]

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        layers = [part.requires_grad_() for part in unpacked(torch.tensor(state))]
        out = x
        for layer in layers:
            out = out @ layer.T
        gradients = torch.autograd.grad((out - y.reshape(out.shape)).square().sum() / 2, layers)
        return torch.cat([-eta * g.flatten() for eta, g in zip(rates, gradients, strict=True)]).numpy()

    start = torch.cat([w.flatten() for w in weights]).numpy()
    states = solve_ivp(velocity, (0, times[-1]), start, "DOP853", times, rtol=1e-12, atol=1e-13).y.T
    return [torch.stack(parts) for parts in zip(*(unpacked(torch.tensor(state)) for state in states), strict=True)]


# --- the flow itself --------------------------------------------------------------------------------------------------


def test_flow_is_that_of_autograd():
    """Unequal sizes and rates, inputs that are not whitened, targets that are not linear, f0 != 0."""
    weights = [0.5 * drawn(4, 5, seed=1), 0.7 * drawn(3, 4, seed=2), 0.6 * drawn(2, 3, seed=3)]
    x, y, times, rates = drawn(7, 5, seed=4), drawn(7, 2, seed=5) - 0.4, [0.0, 0.5, 2.0, 6.0], [0.1, 0.05, 0.2]
    expected = by_autograd(weights, x, y, times, rates)
    path = deep_linear.flow(weights, x, y, times=times, rate=rates)
    assert path.layers is not None
    for found, layer in zip(path.layers, expected, strict=True):
        np.testing.assert_allclose(found, layer, rtol=1e-8, atol=1e-9)
    for i in range(4):
        layers = [layer[i] for layer in expected]
        f = x @ (layers[2] @ layers[1] @ layers[0]).T
        kernel = deep_linear.subkernels(layers, x).diagonal(dim1=2, dim2=3).mean(-1)
        np.testing.assert_allclose(path.kernel(path.times[i]), kernel, rtol=1e-8, atol=1e-8)
        assert float(path.loss[i]) == pytest.approx(float((f - y).square().sum()), rel=1e-8)
        assert float(path.alignment[i]) == pytest.approx(float(fl.metrics.alignment(kernel, y)), rel=1e-8)
        assert float(path.kernel_norm[i]) == pytest.approx(float(kernel.norm()), rel=1e-8)
        assert float(path.kernel_trace[i]) == pytest.approx(float(kernel.trace()), rel=1e-8)
        along = (y * (kernel @ y)).sum() / y.square().sum()
        assert float(path.task[i]) == pytest.approx(float(along), rel=1e-8)


def test_flow_is_descent_with_small_steps():
    W, a = small_weights(0.3, 6, 8)
    x, lr, steps = drawn(10, 6, seed=4), 0.004, 750
    y = x @ drawn(6, seed=5)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 1, bias=False)).double()
    model[0].weight.data, model[1].weight.data = W.clone(), a[None].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    measured = {"loss": ([], []), "ntk/alignment": ([], []), "ntk/norm": ([], [])}
    for step in range(steps + 1):
        loss = (model(x)[:, 0] - y).square().mean()
        if step % 150 == 0:
            kernel = fl.ntk(model, x)
            values = (10 * loss.item(), float(fl.metrics.alignment(kernel, y)), float(kernel.norm()))
            for (times, seen), value in zip(measured.values(), values, strict=True):
                times.append(step * lr)
                seen.append(value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rate = fl.dynamics.rate(1.0, "mean", P=10)
    path = deep_linear.flow([W, a], x, y, times=measured["loss"][0], rate=rate)
    for name, (_, seen) in measured.items():
        np.testing.assert_allclose(path.curves()[name], seen, rtol=0.02, atol=2e-3)
    axes = path.overlay(measured)
    assert axes[0].get_ylabel().startswith("squared error")
    assert all(len(ax.get_lines()) == 2 for ax in axes)


# --- balanced networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(("samples", "outputs"), [(12, 1), (12, 3), (4, 2)])
def test_balanced_networks_follow_the_closed_form(depth: int, samples: int, outputs: int):
    """More samples than dimensions and fewer, noise that no linear function fits, modes that start apart."""
    x, D = whitened(samples, 6, seed=1), 6
    y = x @ drawn(outputs, D, seed=2).T + 0.1 * drawn(samples, outputs, seed=3)
    z, _, v = torch.linalg.svd(deep_linear.minimum_norm(x, y), full_matrices=False)
    c0 = torch.tensor([0.02, 0.05, 3.5], dtype=torch.float64)[:outputs]
    frames = [v.T, *(torch.linalg.qr(drawn(5 + i, outputs, seed=7 + i))[0] for i in range(depth - 1)), z]
    weights = [(frames[i + 1] * c0 ** (1 / depth)) @ frames[i].T for i in range(depth)]
    times, rate = torch.linspace(0, 12, 25, dtype=torch.float64), 0.7 / samples
    found = deep_linear.solve(x, y, times=times, c0=c0, weight_layers=depth, rate=rate)
    path = deep_linear.flow(weights, x, y, times=times, rate=rate)
    np.testing.assert_allclose(found.strength, path.strength, rtol=1e-8, atol=1e-8)
    for name, curve in path.curves().items():
        np.testing.assert_allclose(found.curves()[name], curve, rtol=1e-8, atol=1e-8, err_msg=name)
    np.testing.assert_allclose(found.kernel(found.times[11]), path.kernel(path.times[11]), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.weights, path.weights, rtol=1e-8, atol=1e-8)


def test_one_target_column_is_one_vector():
    x = whitened(9, 4)
    y = x @ drawn(4, seed=1)
    flat, column = (
        deep_linear.solve(x, target, times=[0.0, 3.0], c0=0.01, weight_layers=3, rate=1 / 9)
        for target in (y, y[:, None])
    )
    for name, curve in flat.curves().items():
        np.testing.assert_array_equal(curve, column.curves()[name])


def test_the_final_loss_keeps_falling():
    """The loss is known far below the rounding of the outputs."""
    x = whitened(9, 4)
    path = deep_linear.solve(x, x @ drawn(4, seed=1), times=[0.0, 20.0, 40.0], c0=0.1, weight_layers=2, rate=1 / 9)
    s = float(drawn(4, seed=1).norm())
    assert float((path.loss[1] / path.loss[2]).log()) == pytest.approx(4 * s * 20, rel=1e-6)


# --- two layers from small weights ------------------------------------------------------------------------------------


def test_two_layers_at_their_reference_values():
    q, r = deep_linear.two_layer(2.0, 1e-3, 2e-4, 1.5)
    assert float(q) == pytest.approx(0.20849630156233978, rel=1e-13)
    assert float(r) == pytest.approx(0.20849459350860064, rel=1e-13)
    q, r = deep_linear.two_layer(2.0, 1e-3, 0.0, 1.5)  # the print
    assert float(q) == pytest.approx(0.1778573322459334, rel=1e-13)
    assert float(r) == pytest.approx(0.17785514667292618, rel=1e-13)


def test_initial_statistics_at_their_reference_values():
    found = deep_linear.initial_statistics(0.5, D=30, N=20)
    expected = [0.20833333333333331, 0.0022569444444444447, 0.0, 0.0020833333333333333]
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert deep_linear.initial_statistics(torch.tensor([0.1, 0.2]), 30, 20).var_q0.shape == (2,)


def test_initial_statistics_are_those_of_random_weights():
    sigma, D, N, count = 0.5, 6, 9, 40000
    W, a = sigma * drawn(count, N, seed=1) / math.sqrt(D), sigma * drawn(count, N, seed=2) / math.sqrt(N)  # W beta
    q, r = (a.square().sum(1) + W.square().sum(1)) / 2, (a * W).sum(1)
    expected = deep_linear.initial_statistics(sigma, D, N)
    for sample, value in (
        (q, expected.mean_q0),
        (r, expected.mean_r0),
        (r.square(), expected.mean_r0_sq),
        ((q - expected.mean_q0).square(), expected.var_q0),
    ):
        error = sample.std() / math.sqrt(count)
        assert abs(float((sample.mean() - value) / error)) < 4


@pytest.mark.parametrize(("sigma", "tolerance"), [(0.1, 1e-2), (1e-2, 3e-4), (1e-3, 5e-6)])
@pytest.mark.parametrize(("samples", "sign"), [(40, 1.0), (8, -1.0)])
def test_small_weights_follow_the_matched_path(sigma: float, tolerance: float, samples: int, sign: float):
    """Errors of order sigma^2 in everything, on unseen inputs too, where the data span all dimensions and where not."""
    D, N = 12, 20
    x, unseen = whitened(samples, D, seed=3), drawn(5, D, seed=4)
    beta = drawn(D, seed=5)
    y = sign * 1.3 * x @ beta / beta.norm()
    W, a = small_weights(sigma, D, N, seed=6)
    times = torch.linspace(0, 18, 37, dtype=torch.float64)
    found = deep_linear.silent_alignment(x, y, W, a, times=times, rate=1 / samples)
    path = deep_linear.flow([W, a], x, y, times=times, rate=1 / samples)
    for name, curve in path.curves().items():
        assert float((found.curves()[name] - curve).abs().max() / curve.abs().max()) < tolerance, name
    for i in (0, 10, 20, 36):
        error = (found.kernel(i, unseen) - path.kernel(i, unseen)).norm() / path.kernel(36, unseen).norm()
        assert float(error) < tolerance
    teacher = deep_linear.minimum_norm(x, y)
    s, direction = teacher.norm(), teacher / teacher.norm()
    forward = W @ direction
    q0, r0 = (a.square().sum() + forward.square().sum()) / 2, a @ forward
    both = deep_linear.two_layer(times, q0, r0, s, samples=samples)
    np.testing.assert_allclose(both.r, path.strength[:, 0], atol=tolerance * float(s))
    np.testing.assert_allclose(both.curves()["ntk/task"], path.task, atol=2 * tolerance * samples * float(s))
    if sigma < 0.05:
        # what the print leaves out, r0, does not go away with sigma
        printed = deep_linear.two_layer(times, q0, 0.0, s).r
        assert float((printed - path.strength[:, 0]).abs().max()) > 20 * tolerance * float(s)
    assert float(path.alignment[-1]) == pytest.approx(
        float(deep_linear.max_alignment(x, y, 2)), abs=0.1 * math.sqrt(sigma)
    )


def test_the_kernel_turns_before_the_loss_falls():
    D, N = 30, 50
    x = whitened(40, D)
    y = x @ drawn(D, seed=1) / drawn(D, seed=1).norm()
    W, a = small_weights(1e-4, D, N, seed=2)
    times = torch.linspace(0, 14, 200, dtype=torch.float64)
    path = deep_linear.silent_alignment(x, y, W, a, times=times, rate=1 / 40)
    aligned = fl.metrics.time_to(times, path.alignment, 0.9)
    half = fl.metrics.time_to(times, path.loss, 0.5, of="initial")
    assert float(aligned) < 0.5 * float(half)
    # typical half-loss time, from the mean of q0 (sheet 2.19: 8.97 against 9.19 measured in one network)
    typical = deep_linear.half_time(1.0, deep_linear.initial_statistics(1e-4, D, N).mean_q0 / 2, 2)
    assert float(typical) == pytest.approx(8.97, abs=0.01)
    assert float(half) == pytest.approx(float(typical), abs=0.4)


def linearized(times: list[float], W: Tensor, a: Tensor, pull: Tensor) -> list[tuple[Tensor, Tensor]]:
    """da/dt = W pull, dW/dt = a pull^T."""
    N, D = W.shape
    force = pull.numpy()

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        w, readout = state[: N * D].reshape(N, D), state[N * D :]
        return np.concatenate([np.outer(readout, force).ravel(), w @ force])

    start = torch.cat([W.flatten(), a]).numpy()
    states = solve_ivp(velocity, (0, times[-1]), start, "DOP853", times, rtol=1e-12, atol=1e-18).y.T
    return [(torch.tensor(z[: N * D].reshape(N, D)), torch.tensor(z[N * D :])) for z in states]


def test_phase_one_is_the_linearized_flow():
    W, a = small_weights(1e-3, 5, 7)
    beta, s, times = drawn(5, seed=3), -1.4, [0.0, 0.5, 1.5, 3.0]
    beta = beta / beta.norm()
    sigma = drawn(5, 5, seed=8)
    sigma = sigma @ sigma.T / 5
    for pull, covariance in ((s * beta, None), (s * sigma @ beta, sigma)):
        found = deep_linear.early_kernel(torch.tensor(times), W, a, beta, s, covariance=covariance)
        for metric, (w, readout) in zip(found, linearized(times, W, a, pull), strict=True):
            expected = w.T @ w + readout.square().sum() * torch.eye(5, dtype=torch.float64)
            np.testing.assert_allclose(metric, expected, rtol=1e-9, atol=1e-10 * float(expected.norm()))
    forward = W @ beta
    q0, r0 = (a.square().sum() + forward.square().sum()) / 2, a @ forward
    for t, (w, readout) in zip(times, linearized(times, W, a, s * beta), strict=True):
        q, r = deep_linear.early_path(t, q0, r0, s)
        assert float(q) == pytest.approx(float(readout @ readout + (w @ beta) @ (w @ beta)) / 2, rel=1e-9)
        assert float(r) == pytest.approx(float(readout @ w @ beta), rel=1e-8)


def test_phase_one_of_a_real_network_and_the_printed_form():
    D, N, s, sigma = 12, 20, 1.3, 1e-3
    W, a = small_weights(sigma, D, N, seed=6)
    x = whitened(30, D, seed=3)
    beta = drawn(D, seed=5) / drawn(D, seed=5).norm()
    path = deep_linear.flow([W, a], x, s * x @ beta, times=[1 / s], rate=1 / 30)
    exact = path.metrics(path.times)[0]
    found = deep_linear.early_kernel(1 / s, W, a, beta, s)
    assert float((found - exact).norm() / exact.norm()) < 2e-5
    start = W.T @ W + a.square().sum() * torch.eye(D, dtype=torch.float64)
    q0 = float(beta @ start @ beta) / 2
    printed = q0 * math.cosh(2) * (torch.outer(beta, beta) + torch.eye(D, dtype=torch.float64)) + start
    assert float((printed - exact).norm() / exact.norm()) > 0.1


# --- inputs that are not whitened -------------------------------------------------------------------------------------


def test_five_variables_at_their_reference_values():
    a, b = 1.3166666666666667, 3.558333333333333
    system = deep_linear.unwhitened_system(a, b, 1.0)
    values = [-3.7727090178455764, -1.8863545089227882, 0.0, 1.8863545089227882, 3.7727090178455764]
    np.testing.assert_allclose(system.eigenvalues, values, rtol=1e-13)
    vector = [1.3166666666666667, 1.8863545089227882, 2.4837001034150044, 3.558333333333333, 6.712278127583588]
    np.testing.assert_allclose(system.eigenvectors[:, -1], vector, rtol=1e-13)
    np.testing.assert_allclose(
        system.matrix @ system.eigenvectors, system.eigenvectors * system.eigenvalues, rtol=1e-13, atol=1e-13
    )
    spectrum = torch.linalg.eigvals(system.matrix)
    np.testing.assert_allclose(spectrum.real.sort().values, values, atol=1e-7)
    diagonal = torch.diag(torch.tensor([4, 2, 1, 0.5, 0.3, 0.1], dtype=torch.float64))
    beta = torch.ones(6, dtype=torch.float64) / math.sqrt(6)
    assert float(beta @ diagonal @ beta) == pytest.approx(a)
    assert float(beta @ diagonal @ diagonal @ beta) == pytest.approx(b)


@pytest.mark.parametrize("s", [0.8, -0.8])
def test_five_variables_follow_the_linearized_flow(s: float):
    W, readout = small_weights(1e-3, 5, 7)
    beta, root, times = drawn(5, seed=3), drawn(5, 5, seed=8), [0.0, 0.5, 1.5, 3.0]
    beta, sigma = beta / beta.norm(), root @ root.T / 5
    a, b = beta @ sigma @ beta, beta @ sigma @ sigma @ beta
    start = deep_linear.unwhitened_variables(W, readout, beta, sigma)
    found = deep_linear.unwhitened_path(torch.tensor(times), start, a, b, s)
    for values, (w, v) in zip(found, linearized(times, W, readout, s * sigma @ beta), strict=True):
        expected = deep_linear.unwhitened_variables(w, v, beta, sigma)
        np.testing.assert_allclose(values, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


def test_the_spike_first_grows_along_sigma_beta_and_ends_along_beta():
    D, N, s = 6, 12, 1.0
    x = math.sqrt(6) * torch.linalg.qr(drawn(6, 6, seed=1))[0] * torch.tensor([4, 2, 1, 0.5, 0.3, 0.1]).double().sqrt()
    beta = torch.ones(D, dtype=torch.float64) / math.sqrt(D)
    sigma = x.T @ x / 6
    W, a = small_weights(1e-6, D, N, seed=2)
    path = deep_linear.flow([W, a], x, s * x @ beta, times=[0.0, 4.5, 400.0], rate=1 / 6)
    assert path.layers is not None
    _, early, last = path.metrics(path.times)
    size = path.layers[1][1].square().sum()
    spike = deep_linear.unwhitened_spike(sigma, beta, size)
    assert float((early - spike).norm() / spike.norm()) < 2e-3
    assert float(path.loss[1] / path.loss[0]) > 0.99
    final = s * (torch.outer(beta, beta) + torch.eye(D, dtype=torch.float64))
    assert float((last - final).norm() / final.norm()) < 1e-5
    root = torch.outer(sigma @ beta, sigma @ beta) / (sigma @ beta).norm() + torch.eye(
        D, dtype=torch.float64
    )  # the print
    assert float((early - size * root).norm() / spike.norm()) > 0.1


# --- extremes and wrong input -----------------------------------------------------------------------------------------


def test_tiny_weights_and_long_times_are_finite_and_right():
    x = whitened(8, 4)
    y = x @ drawn(4, seed=1)
    s = float(drawn(4, seed=1).norm())
    W, a = small_weights(1e-8, 4, 5)
    path = deep_linear.silent_alignment(x, y, W, a, times=[0.0, 1.0, 1e6], rate=1 / 8)
    assert all(bool(torch.isfinite(curve).all()) for curve in path.curves().values())
    assert float(path.strength[-1]) == pytest.approx(s, rel=1e-12)
    assert float(path.loss[-1]) < 1e-20
    assert float(path.alignment[-1]) == pytest.approx(2 / math.sqrt(3 + 4), abs=1e-7)
    q, r = deep_linear.two_layer(torch.tensor([1e6, math.inf]), 1e-16, -3e-17, -2.0)
    np.testing.assert_allclose(q, 2.0, rtol=1e-13)
    np.testing.assert_allclose(r, -2.0, rtol=1e-13)
    still = deep_linear.two_layer(torch.tensor([0.0, 1.0, 1e4]), 1.0, -1.0, 1.0)  # the way into the saddle
    np.testing.assert_allclose(still.q, [1.0, math.exp(-2), 0.0], rtol=1e-12)
    kernels = deep_linear.two_layer_kernel(torch.tensor([0.0, 1e6, math.inf]), W * 0, a * 0, drawn(4, seed=1) / s, s)
    assert float(kernels.abs().max()) == 0.0
    end = deep_linear.two_layer_kernel(math.inf, W, a, drawn(4, seed=1) / s, s)
    np.testing.assert_allclose(
        end, torch.outer(drawn(4, seed=1), drawn(4, seed=1)) / s + s * torch.eye(4, dtype=torch.float64), atol=1e-7
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, W, a: deep_linear.solve(2 * x + 1, y, times=[1.0], c0=0.1, weight_layers=2),
        lambda x, y, W, a: deep_linear.solve(x, y, times=1.0, c0=0.1, weight_layers=2),
        lambda x, y, W, a: deep_linear.solve(x, y, times=[math.inf], c0=0.1, weight_layers=2),
        lambda x, y, W, a: deep_linear.solve(x, y, times=[1.0], c0=torch.ones(2), weight_layers=2),
        lambda x, y, W, a: deep_linear.solve(x, 0 * y, times=[1.0], c0=0.1, weight_layers=2),
        lambda x, y, W, a: deep_linear.solve(x, y, times=[1.0], c0=0.1, weight_layers=2, rate=-1.0),
        lambda x, y, W, a: deep_linear.silent_alignment(x, torch.stack([y, y], 1), W, a, times=[1.0]),
        lambda x, y, W, a: deep_linear.silent_alignment(x, y, W, a[:-1], times=[1.0]),
        lambda x, y, W, a: deep_linear.flow([W, a], x, torch.stack([y, y], 1), times=[1.0]),
        lambda x, y, W, a: deep_linear.flow([W, a], x, y, times=[1.0, 0.5]),
        lambda x, y, W, a: deep_linear.flow([W, a], x, y, times=[1.0], rate=[1.0]),
        lambda x, y, W, a: deep_linear.two_layer(1.0, 0.1, 0.2, 1.0),
        lambda x, y, W, a: deep_linear.two_layer(1.0, 0.1, 0.05, 0.0),
        lambda x, y, W, a: deep_linear.early_kernel(1e3, W, a, torch.tensor([1.0, 0, 0, 0]), 1.0),
        lambda x, y, W, a: deep_linear.two_layer_kernel(
            1.0, W, a, torch.tensor([1.0, 0, 0, 0]), 1.0, covariance=torch.diag(torch.tensor([1.0, 2, 1, 1]))
        ),
        lambda x, y, W, a: deep_linear.unwhitened_system(1.0, 0.5, 1.0),
        lambda x, y, W, a: deep_linear.unwhitened_path(1e4, torch.ones(5), 1.0, 1.5, 1.0),
        lambda x, y, W, a: deep_linear.unwhitened_path(1.0, torch.ones(4), 1.0, 1.5, 1.0),
    ],
)
def test_wrong_input_says_what_was_expected(call):
    x = whitened(8, 4)
    with pytest.raises(fl.FeatlearnError, match="expected"):
        call(x, x @ drawn(4, seed=1), *small_weights(0.1, 4, 5))
