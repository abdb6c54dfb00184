"""Two-layer ReLU networks: rates of growth against finite differences, autograd and real training runs."""

import math

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import relu

matplotlib.use("Agg")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthonormal(samples: int, dimension: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(drawn(dimension, samples, seed=seed))[0].T


def signs(samples: int, seed: int = 0) -> Tensor:
    return drawn(samples, seed=seed).sign()


class Frozen:
    """f = V (D * W x) with gates D that do not move."""

    def __init__(self, x: Tensor, units: int, seed: int = 0) -> None:
        self.x = x
        self.W = drawn(units, x.shape[1], seed=seed) / math.sqrt(x.shape[1])
        self.V = drawn(units, seed=seed + 1) / math.sqrt(units)
        self.D = (x @ self.W.T > 0).double()

    def features(self) -> Tensor:
        return self.D * (self.x @ self.W.T)

    def outputs(self) -> Tensor:
        return self.features() @ self.V

    def parts(self) -> tuple[Tensor, Tensor]:
        phi = self.features()
        return phi @ phi.T, (self.x @ self.x.T) * ((self.D * self.V.square()) @ self.D.T)

    def moved(self, y: Tensor, step: float) -> "Frozen":
        """One step of descent on 1/2 |f - y|^2."""
        residual, phi = y - self.outputs(), self.features()
        new = object.__new__(Frozen)
        new.x, new.D = self.x, self.D
        new.W = self.W + step * ((self.D * self.V) * residual[:, None]).T @ self.x
        new.V = self.V + step * residual @ phi
        return new


def along(kernel: Tensor, z: Tensor) -> float:
    return float(z @ kernel @ z / (z @ z))


# --- rates ------------------------------------------------------------------------------------------------------------


def test_rates_with_measured_overlaps_are_derivatives():
    """Any targets and any direction, not only +-1 and y."""
    P, eta, h = 7, 0.3, 1e-5
    network, y, z = Frozen(orthonormal(P, 9), 30), drawn(P, seed=3), drawn(P, seed=4)
    Q = relu.ansatz(network.D, network.V, network.features()).measured
    before, after = network.moved(y, -h * eta).parts(), network.moved(y, h * eta).parts()
    for direction in (None, z):
        found = relu.growth_rates(y, network.outputs(), eta, direction=direction, Q=Q)
        w = y if direction is None else z
        for part, task, mean in (
            (0, found.readout_task, found.readout_mean),
            (1, found.hidden_task, found.hidden_mean),
        ):
            change = (after[part] - before[part]) / (2 * h)
            assert float(task) == pytest.approx(along(change, w), rel=1e-7, abs=1e-9)
            assert float(mean) == pytest.approx(float(change.trace()) / P, rel=1e-7, abs=1e-9)


def test_rates_under_the_ansatz_are_those_of_its_overlaps():
    y, f, z = drawn(6, seed=1), drawn(4, 6, seed=2), drawn(6, seed=3)
    overlaps = f[:, None, :] * (torch.ones(6, 6) + torch.eye(6)) / 2
    for direction in (None, z):
        found = relu.growth_rates(y, f, 0.7, direction=direction)
        expected = relu.growth_rates(y, f, 0.7, direction=direction, Q=overlaps)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == (4,)
            np.testing.assert_allclose(one, other, rtol=1e-12)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), samples=st.integers(1, 9), eta=st.floats(0, 10))
def test_the_average_over_directions_is_that_over_a_basis(seed: int, samples: int, eta: float):
    y, f = drawn(samples, seed=seed) + 2, drawn(samples, seed=seed + 1)
    basis = torch.linalg.qr(drawn(samples, samples, seed=seed + 2))[0]
    rates = [relu.growth_rates(y, f, eta, direction=z) for z in basis]
    average = relu.growth_rates(y, f, eta)
    scale = 1e-9 + eta * float(y.norm() + f.norm()) ** 2
    assert float(sum(r.readout_task for r in rates) / samples - average.readout_mean) == pytest.approx(
        0, abs=1e-12 * scale
    )
    assert float(sum(r.hidden_task for r in rates) / samples - average.hidden_mean) == pytest.approx(
        0, abs=1e-12 * scale
    )


def test_signs_as_targets_give_the_formulas_of_the_sheet():
    P, eta = 10, 0.2
    y, f = signs(P), 0.1 * drawn(P, seed=1) + 0.05 * signs(P)
    own = float((y - f) @ f)
    found = relu.growth_rates(y, f, eta)
    assert float(found.readout_task) == pytest.approx(eta / P * (own + float((y - f) @ y) * float(y @ f)), rel=1e-12)
    assert float(found.readout_mean) == pytest.approx(2 * eta / P * own, rel=1e-12)
    assert float(found.hidden_task) == pytest.approx(eta * (1 + 1 / P) * own, rel=1e-12)
    assert float(found.hidden_mean) == pytest.approx(eta * (1 + 1 / P) * own, rel=1e-12)


def test_early_growth_is_twice_as_fast_along_the_target():
    y = signs(400)
    found = relu.growth_rates(y, 1e-6 * y, 1.0)
    assert float((found.readout_task + found.hidden_task) / (found.readout_mean + found.hidden_mean)) == pytest.approx(
        2, rel=0.01
    )
    assert float(found.readout_task / found.readout_mean) == pytest.approx(200, rel=0.01)


# --- the parts of the kernel and the ansatz ---------------------------------------------------------------------------


def test_parts_of_the_kernel_are_the_measured_ones():
    x, x2 = drawn(5, 4, seed=1), drawn(3, 4, seed=2)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    W, V = model[0].weight.detach(), model[2].weight.detach()
    measured = fl.ntk(model, x, x2=x2, by="layer", outputs="each")
    found = relu.split_kernel(x, W, V, x2)
    np.testing.assert_allclose(found.hidden, measured["0"], rtol=1e-6, atol=1e-6)
    for c in range(3):
        np.testing.assert_allclose(found.readout, measured["2"][c], rtol=1e-6, atol=1e-6)
    one = relu.split_kernel(x, W, V[0])
    np.testing.assert_allclose(one.hidden, relu.split_kernel(x, W, V).hidden[0], rtol=1e-12)
    # 000: f = V relu(W x / sqrt N) / sqrt N
    N = 6
    free = [w.clone().requires_grad_() for w in (W, V[:1])]
    out = (torch.relu(x @ free[0].T / math.sqrt(N)) @ free[1].T / math.sqrt(N))[:, 0]
    rows = [torch.autograd.grad(value, free, retain_graph=True) for value in out]
    scaled = relu.split_kernel(x, W, V[0], hidden_scale=N**-0.5, readout_scale=N**-0.5)
    for k, part in ((0, scaled.hidden), (1, scaled.readout)):
        jacobian = torch.stack([row[k].flatten() for row in rows])
        np.testing.assert_allclose(part, jacobian @ jacobian.T, rtol=1e-12, atol=1e-14)


def test_ansatz_holds_on_average_over_readouts_for_orthogonal_samples():
    """Gates at one sample know nothing of features at an orthogonal one: the slope is 1/2 within its error."""
    x, units, count = orthonormal(6, 8), 3000, 30
    W = drawn(units, 8, seed=1)
    gates, phi = (x @ W.T > 0).double(), torch.relu(x @ W.T)
    V = drawn(count, units, seed=2) + 0.3
    found = relu.ansatz(gates, V, phi)
    assert found.measured.shape == found.predicted.shape == (count, 6, 6)
    expected = torch.einsum("mi,ci,ni->cmn", gates, V, phi)
    np.testing.assert_allclose(found.measured, expected, rtol=1e-10, atol=1e-9)
    outputs = V @ phi.T
    np.testing.assert_allclose(found.predicted.diagonal(dim1=1, dim2=2), outputs, rtol=1e-12)
    np.testing.assert_allclose(found.predicted[:, 0, 1:], outputs[:, 1:] / 2, rtol=1e-12)
    assert abs(float(found.slope.mean()) - 0.5) < 4 * float(found.slope.std()) / math.sqrt(count) + 0.01
    single = relu.ansatz(gates, V[0], phi)
    assert float(single.slope) == pytest.approx(float(found.slope[0]), rel=1e-12)
    pairs = ~torch.eye(6, dtype=torch.bool)
    x_, y_ = outputs[0].expand(6, 6)[pairs], single.measured[pairs]
    assert float(single.slope) == pytest.approx(float(x_ @ y_ / (x_ @ x_)), rel=1e-12)
    assert float(single.correlation) == pytest.approx(np.corrcoef(x_, y_)[0, 1], rel=1e-10)
    assert math.isnan(relu.ansatz(gates[:1], V[0], phi[:1]).slope)


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_closed_system_is_integrated_right():
    """Against the rates themselves, and against the same equations written entry by entry."""
    P, eta = 5, 0.3
    network, y = Frozen(orthonormal(P, 7), 40), drawn(P, seed=3)
    K_V, K_W = network.parts()
    f0, times = network.outputs(), [0.0, 0.4, 1.5, 4.0]
    found = relu.solve(K_V, K_W, y, times=times, rate=eta, f0=f0)

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        f, readout, hidden = state[:P], state[P : P + P * P].reshape(P, P), state[P + P * P :].reshape(P, P)
        e = y.numpy() - f
        Q = np.array([[f[n] * (1.0 if m == n else 0.5) for n in range(P)] for m in range(P)])
        grown = np.array([[e[m] * Q[m, n] + e[n] * Q[n, m] for n in range(P)] for m in range(P)])
        hidden_grown = np.diag([2 * sum(e[n] * Q[m, n] for n in range(P)) for m in range(P)])
        return eta * np.concatenate([(readout + hidden) @ e, grown.ravel(), hidden_grown.ravel()])

    start = torch.cat([f0, K_V.flatten(), K_W.flatten()]).numpy()
    states = solve_ivp(velocity, (0, 4.0), start, "DOP853", times, rtol=1e-12, atol=1e-14).y.T
    np.testing.assert_allclose(found.outputs, states[:, :P], rtol=1e-8, atol=1e-9)
    kernels = states[:, P : P + P * P].reshape(-1, P, P) + states[:, P + P * P :].reshape(-1, P, P)
    assert found.kernels is not None
    np.testing.assert_allclose(found.kernels, kernels, rtol=1e-8, atol=1e-9)
    fine = torch.linspace(0, 4, 2001, dtype=torch.float64)
    path = relu.solve(K_V, K_W, y, times=fine, rate=eta, f0=f0)
    summed = relu.growth(fine, path.outputs, y, eta, K_V=K_V, K_W=K_W)
    for name, curve in summed.curves().items():
        np.testing.assert_allclose(curve, path.curves()[name], rtol=1e-5, atol=1e-6, err_msg=name)
    start_values = [along(K_V, y), float(K_V.trace()) / P, along(K_W, y), float(K_W.trace()) / P]
    np.testing.assert_allclose(
        [float(curve[0]) for curve in list(summed.curves().values())[1:]], start_values, rtol=1e-12
    )


def trained(
    P: int, N: int, M: int, steps: int, every: int
) -> tuple[Tensor, Tensor, list[Tensor], list[dict], float, float]:
    """Real descent: targets, times, outputs, kernels by layer, rate, share of flipped gates."""
    x, y = orthonormal(P, N), signs(P, seed=1)
    model = nn.Sequential(nn.Linear(N, M, bias=False), nn.ReLU(), nn.Linear(M, 1, bias=False)).double()
    model[0].weight.data, model[2].weight.data = drawn(M, N, seed=2) / math.sqrt(N), drawn(1, M, seed=3) / math.sqrt(M)
    gates = model[0](x) > 0
    lr = 0.1 * P / 2 / (M / N * (0.5 + P / (2 * math.pi)))  # a tenth of what is stable for the mean loss
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    outputs, kernels = [], []
    for step in range(steps + 1):
        f = model(x)[:, 0]
        if step % every == 0:
            outputs.append(f.detach())
            kernels.append(fl.ntk(model, x, by="layer"))
        optimizer.zero_grad()
        (f - y).square().mean().backward()
        optimizer.step()
    flips = float((gates != (model[0](x) > 0)).double().mean())
    times = torch.arange(0, steps + 1, every, dtype=torch.float64)
    return y, times, outputs, kernels, fl.dynamics.rate(lr, "mean", P), flips


def test_a_wide_network_grows_as_predicted():
    """Sheet 2.15: .974, 1.003, .983, .983 of theory where few gates flip; the printed 1/2 of K_W would give 2."""
    y, times, outputs, kernels, rate, flips = trained(P=20, N=40, M=2000, steps=120, every=6)
    assert flips < 0.002
    first = kernels[0]
    measured = {
        "ntk/readout/task": [along(k["2"], y) for k in kernels],
        "ntk/readout/mean": [float(k["2"].trace()) / 20 for k in kernels],
        "ntk/hidden/task": [along(k["0"], y) for k in kernels],
        "ntk/hidden/mean": [float(k["0"].trace()) / 20 for k in kernels],
        "ntk/alignment": [float(fl.metrics.alignment(k["0"] + k["2"], y)) for k in kernels],
        "loss": [float((f - y).square().sum()) for f in outputs],
    }
    known = relu.growth(times, torch.stack(outputs), y, rate, K_V=first["2"], K_W=first["0"])
    alone = relu.solve(first["2"], first["0"], y, times=times, rate=rate, f0=outputs[0])
    for path in (known, alone):
        for name in ("ntk/readout/task", "ntk/readout/mean", "ntk/hidden/task", "ntk/hidden/mean"):
            curve = path.curves()[name]
            grown = (measured[name][-1] - measured[name][0]) / float(curve[-1] - curve[0])
            assert 0.92 < grown < 1.03, name
    np.testing.assert_allclose(alone.loss, measured["loss"], rtol=0.06)
    np.testing.assert_allclose(alone.curves()["ntk/alignment"], measured["ntk/alignment"], rtol=2e-3)
    axes = alone.overlay({name: (times, values) for name, values in measured.items()})
    assert len(axes) == 6


def test_the_closed_system_follows_a_network_that_is_not_lazy():
    """Kernel and loss change much; the frozen kernel is far off, the closed system near."""
    P, N, M, steps = 30, 200, 400, 240
    network, y = Frozen(orthonormal(P, N), M), signs(P, seed=1)
    K_V, K_W = network.parts()
    step = 0.04 / float(torch.linalg.eigvalsh(K_V + K_W)[-1])
    losses, start = [], network.outputs()
    for i in range(steps + 1):
        if i % 40 == 0:
            losses.append(float((network.outputs() - y).square().sum()))
        network = network.moved(y, step)
    times = step * torch.arange(0, steps + 1, 40, dtype=torch.float64)
    lazy = fl.dynamics.kernel_descent(K_V + K_W, y, times=times, f0=start).loss
    found = relu.solve(K_V, K_W, y, times=times, f0=start)
    worst = [float(((loss - torch.tensor(losses)) / y.square().sum()).abs().max()) for loss in (found.loss, lazy)]
    assert worst[0] < 0.03
    assert worst[1] > 0.1
    assert found.alignment is not None
    assert float(found.alignment[-1]) > 1.5 * float(found.alignment[0])
    reached = fl.metrics.alignment(sum(network.parts()), y)
    assert float(found.alignment[-1]) == pytest.approx(float(reached), rel=0.05)


@pytest.mark.parametrize(
    "call",
    [
        lambda: relu.growth_rates(torch.ones(3, 1), torch.ones(3)),
        lambda: relu.growth_rates(torch.ones(3), torch.ones(4)),
        lambda: relu.growth_rates(torch.zeros(3), torch.ones(3)),
        lambda: relu.growth_rates(torch.ones(3), torch.ones(3), -1.0),
        lambda: relu.growth_rates(torch.ones(3), torch.ones(3), Q=torch.ones(4, 4)),
        lambda: relu.ansatz(torch.ones(3, 4), torch.ones(5), torch.ones(3, 4)),
        lambda: relu.ansatz(torch.ones(3, 4), torch.ones(4), torch.ones(3, 5)),
        lambda: relu.split_kernel(torch.ones(3, 4), torch.ones(5, 4), torch.ones(4)),
        lambda: relu.growth([0.0, 1.0], torch.ones(3, 4), torch.ones(4)),
        lambda: relu.growth([1.0, 0.0], torch.ones(2, 4), torch.ones(4)),
        lambda: relu.solve(torch.eye(3), torch.eye(4), torch.ones(3), times=[1.0]),
        lambda: relu.solve(torch.eye(3), torch.eye(3), torch.ones(3), times=[1.0], f0=torch.ones(2)),
        lambda: relu.mixture_rates(torch.ones(3, 4), 5),
        lambda: relu.mixture_rates(torch.eye(3), 0),
        lambda: relu.mixture_rates(torch.eye(3), 5, Q=torch.ones(3, 3)),
        lambda: relu.mixture_geometry(-1.0, 10),
        lambda: relu.mixture_geometry(0.1, 10, variance_is="each"),
    ],
)
def test_wrong_input_says_what_was_expected(call):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        call()


@pytest.mark.parametrize("along_another", [False, True])
def test_rates_from_weights_are_derivatives_for_any_inputs(along_another: bool):
    """Central differences of both parts along gradient flow, and the orthonormal formula where it applies."""
    x, y = drawn(7, 5, seed=3), drawn(7, seed=4)
    network = Frozen(x, 11, seed=5)
    z = drawn(7, seed=6) if along_another else y
    rates = relu.weight_growth_rates(x, network.W, network.V, y, rate=0.3, direction=z if along_another else None)
    pull = 0.3 * (y - network.outputs())
    moves = (network.D * pull[:, None]).T @ x * network.V[:, None], network.features().T @ pull
    W, V, kernels = network.W, network.V, []
    for step in (1e-5, -1e-5):
        network.W, network.V = W + step * moves[0], V + step * moves[1]
        kernels.append(network.parts())
    for part, names in enumerate((("readout_task", "readout_mean"), ("hidden_task", "hidden_mean"))):
        change = (kernels[0][part] - kernels[1][part]) / 2e-5
        assert float(getattr(rates, names[0])) == pytest.approx(along(change, z), rel=1e-6)
        assert float(getattr(rates, names[1])) == pytest.approx(float(change.trace()) / 7, rel=1e-6)
    frame = orthonormal(6, 9, seed=1)
    network = Frozen(frame, 13, seed=2)
    overlaps = (network.D * network.V) @ network.features().T
    target = drawn(6, seed=8)
    expected = relu.growth_rates(target, network.outputs(), Q=overlaps)
    for value, reference in zip(relu.weight_growth_rates(frame, network.W, network.V, target), expected, strict=True):
        assert float(value) == pytest.approx(float(reference), rel=1e-10)


def test_rates_from_weights_refuse_what_does_not_fit():
    with pytest.raises(fl.FeatlearnError, match=r"expected \(P, D\) and \(M, D\) with P = 4"):
        relu.weight_growth_rates(drawn(5, 3), drawn(6, 3), drawn(6), drawn(4))
