"""Early-time theory of 003: Eq. 6 against real gradient steps and flows, Eq. 7 against exact expectations."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import early

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum-half": lambda f, y: (f - y).square().sum() / 2,
    "mean": lambda f, y: (f - y).square().sum() / len(f),
    "mean-half": lambda f, y: (f - y).square().sum() / (2 * len(f)),
    "mean-over-outputs": lambda f, y: nn.functional.mse_loss(f, y),
    "cross-entropy": lambda f, y: nn.functional.cross_entropy(f, y),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


class Network:
    """Two hidden layers, no biases; every layer and every derivative written out."""

    def __init__(self, sizes: tuple[int, ...], activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        pairs = zip(sizes[1:], sizes[:-1], strict=True)
        self.weights = [drawn(m, n, seed=i) / math.sqrt(n) for i, (m, n) in enumerate(pairs)]
        self.activation = activation

    def layers(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and pre-activations of every layer; the last pre-activation is the output."""
        inputs, pre = [x], []
        for weight in self.weights:
            pre.append(inputs[-1] @ weight.T)
            inputs.append(self.activation(pre[-1]))
        return inputs[:-1], pre

    def jacobian(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Inputs of the layer (n, d), and df/dh (n c, k), rows (sample, output)."""
        self.weights = [weight.detach().requires_grad_() for weight in self.weights]
        inputs, pre = self.layers(x)
        rows = [torch.autograd.grad(f.sum(), pre[layer], retain_graph=True)[0] for f in pre[-1].unbind(1)]
        return inputs[layer].detach(), torch.stack(rows, 1).flatten(0, 1)

    def gradients(self, x: Tensor, y: Tensor, loss: str) -> list[Tensor]:
        self.weights = [weight.detach().requires_grad_() for weight in self.weights]
        return list(torch.autograd.grad(LOSSES[loss](self.layers(x)[1][-1], y), self.weights))

    def outputs(self, x: Tensor) -> Tensor:
        return self.layers(x)[1][-1].detach()


def task(samples: int, dimension: int, outputs: int, loss: str) -> tuple[Tensor, Tensor]:
    x = drawn(samples, dimension, seed=10)
    if loss == "cross-entropy":
        return x, nn.functional.one_hot(torch.arange(samples) % outputs, outputs).double()
    return x, drawn(samples, outputs, seed=11) - 0.5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_loss_derivatives_are_those_of_autograd(loss: str, outputs: int):
    if loss == "cross-entropy" and outputs == 1:
        pytest.skip("one output has no classes")
    _, y = task(7, 5, outputs, loss)
    f = drawn(7, outputs, seed=3).requires_grad_()
    (expected,) = torch.autograd.grad(LOSSES[loss](f, y), f)
    np.testing.assert_allclose(early.loss_derivative(f, y, loss), expected, rtol=1e-13, atol=1e-16)
    if outputs == 1:
        flat = early.loss_derivative(f[:, 0], y[:, 0], loss)
        np.testing.assert_allclose(flat, expected[:, 0], rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("activation", [torch.tanh, torch.relu, torch.square])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("loss", ["mean-over-outputs", "sum-half", "cross-entropy"])
def test_one_step_of_gradient_descent(loss: str, layer: int, activation: Callable[[Tensor], Tensor]):
    """Sheet 2.0, Prop. 3: exact after one step, with K at the initial weights."""
    eta, samples, outputs = 0.03, 7, 3
    network = Network((5, 6, 4, outputs), activation)
    x, y = task(samples, 5, outputs, loss)
    inputs, J = network.jacobian(x, layer)
    residual = early.loss_derivative(network.outputs(x), y, loss)
    before = network.weights[layer].detach().clone()
    after = before - eta * network.gradients(x, y, loss)[layer]
    change = after - before
    nfm, agop = change.T @ change, change.T @ J.T @ J @ change / samples
    found = early.derivative_matrices(inputs, residual, J @ J.T)
    scale = float(nfm.abs().max())
    assert float((nfm - eta**2 * found.nfm).abs().max()) < 1e-12 * scale
    assert float((agop - eta**2 * found.agop / samples).abs().max()) < 1e-12 * float(agop.abs().max())
    rho = early.derivative_correlation(inputs, residual, J @ J.T)
    assert float(rho) == pytest.approx(cosine(nfm, agop), abs=1e-10)
    pearson = early.derivative_correlation(inputs, residual, J @ J.T, kind="pearson")
    assert float(pearson) == pytest.approx(cosine(nfm - nfm.mean(), agop - agop.mean()), abs=1e-10)
    if activation is not torch.square:  # there one sample outweighs the others, and both correlations are nearly 1
        assert 0 < float(rho) < 1 - 1e-4
        assert abs(float(pearson - rho)) > 1e-5


def test_the_forms_of_many_outputs_agree():
    network = Network((5, 6, 4, 3))
    x, y = task(7, 5, 3, "mean")
    _, J = network.jacobian(x, 0)
    ptk = J @ J.T
    expected = early.derivative_matrices(x, y, ptk)
    full = torch.einsum("icd,jed->ijce", J.reshape(7, 3, 6), J.reshape(7, 3, 6))
    stacked = x.repeat_interleave(3, 0)
    for form in ((x, y, full), (stacked, y, ptk), (stacked, y.flatten(), ptk), (stacked, y.reshape(-1, 1), ptk)):
        for one, other in zip(early.derivative_matrices(*form), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_layer_shared_between_positions_has_a_row_for_each():
    samples, positions, dimension, width, eta = 4, 3, 5, 6, 0.1
    x, y = drawn(samples, positions, dimension), drawn(samples, seed=1)
    W, a = drawn(width, dimension, seed=2).requires_grad_(), drawn(width, seed=3)
    h = x @ W.T
    f = (h.tanh() @ a).square().sum(1)
    (gradient,) = torch.autograd.grad((f - y).square().mean(), W, retain_graph=True)
    J = torch.autograd.grad(f.sum(), h)[0].flatten(0, 1)
    residual = early.loss_derivative(f.detach(), y, "mean").repeat_interleave(positions)
    found = early.derivative_matrices(x.flatten(0, 1), residual, J @ J.T)
    change = eta * gradient
    np.testing.assert_allclose(eta**2 * found.nfm, change.T @ change, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(eta**2 * found.agop, change.T @ J.T @ J @ change, rtol=1e-10, atol=1e-14)


def flow(network: Network, x: Tensor, y: Tensor, loss: str, time: float, steps: int) -> None:
    """Gradient flow of all layers by Runge-Kutta of fourth order; time may run backwards."""
    dt = time / steps

    def velocity(weights: list[Tensor]) -> list[Tensor]:
        network.weights = weights
        return [-g for g in network.gradients(x, y, loss)]

    def moved(weights: list[Tensor], slopes: list[Tensor], by: float) -> list[Tensor]:
        return [w.detach() + by * s for w, s in zip(weights, slopes, strict=True)]

    for _ in range(steps):
        start = [w.detach() for w in network.weights]
        k1 = velocity(start)
        k2 = velocity(moved(start, k1, dt / 2))
        k3 = velocity(moved(start, k2, dt / 2))
        k4 = velocity(moved(start, k3, dt))
        slopes = [(a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(k1, k2, k3, k4, strict=True)]
        network.weights = moved(start, slopes, dt)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("loss", ["mean", "cross-entropy"])
def test_second_derivatives_along_the_flow(loss: str, layer: int):
    """Prop. 3: twice the matrices, with the K of the moving network in the AGOP."""
    sizes = (3, 5, 4, 2)
    x, y = task(6, 3, 2, loss)
    network = Network(sizes)
    inputs, J = network.jacobian(x, layer)
    residual = early.loss_derivative(network.outputs(x), y, loss)
    expected = early.derivative_matrices(inputs, residual, J @ J.T)
    start = network.weights[layer].detach()

    def moved(time: float) -> Tensor:
        twin = Network(sizes)
        flow(twin, x, y, loss, time, 4)
        change = twin.weights[layer].detach() - start
        rows = twin.jacobian(x, layer)[1] @ change
        return torch.stack([change.T @ change, rows.T @ rows])

    def second(h: float) -> Tensor:
        return (moved(h) + moved(-h)) / h**2  # both matrices vanish at time 0

    differences = (4 * second(0.0025) - second(0.005)) / 3
    for found, wanted in zip(differences, expected, strict=True):
        assert float((found - 2 * wanted).abs().max()) < 1e-7 * float(wanted.abs().max())


def test_equation_6_as_printed():
    X, y, J = drawn(6, 4), drawn(6, seed=1), drawn(6, 3, seed=2)
    calK, Y = J @ J.T, torch.diag(y)
    first, second = X.T @ Y @ calK @ Y @ X, X.T @ Y @ calK @ calK @ Y @ X
    printed = (first @ second).trace() * (first @ first).trace() ** -0.5 * (second @ second).trace() ** -0.5
    assert float(early.derivative_correlation(X, y, calK)) == pytest.approx(float(printed), rel=1e-12)
    rescaled = early.derivative_correlation(X, -3 * y, 0.1 * calK)
    assert float(rescaled) == pytest.approx(float(printed), rel=1e-12)


def test_a_projection_gives_perfect_correlation():
    basis = torch.linalg.qr(drawn(7, 3))[0]
    rho = early.derivative_correlation(drawn(7, 4, seed=1), drawn(7, seed=2), 2.5 * basis @ basis.T)
    assert float(rho) == pytest.approx(1, abs=1e-12)


def test_nothing_to_correlate_is_nan():
    X, y, K = drawn(5, 3), drawn(5, seed=1), torch.eye(5, dtype=torch.float64)
    assert math.isnan(early.derivative_correlation(X, 0 * y, K))
    assert math.isnan(early.derivative_correlation(X, y, 0 * K))


def test_float32_is_read_in_double():
    X, y, J = drawn(6, 4).float(), drawn(6, seed=1).float(), drawn(6, 3, seed=2).float()
    found = early.derivative_correlation(X, y, J @ J.T)
    expected = early.derivative_correlation(X.double(), y.double(), (J @ J.T).double())
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


def quadratic_ptks(X: Tensor, width: int, networks: int, seed: int = 0) -> Tensor:
    """calK of f = a^T (W x)^2, by its definition, (networks, n, n)."""
    W = drawn(networks, width, X.shape[1], seed=seed) / math.sqrt(width)
    rows = 2 * (X @ W.mT) * drawn(networks, 1, width, seed=seed + 1)
    return rows @ rows.mT


def test_mean_and_covariance_by_loops_over_pairs():
    X, y = drawn(4, 3), drawn(4, seed=1)
    ptks = quadratic_ptks(X, 5, 6)
    terms = early.mean_and_covariance_terms(X, y, ptks)
    first = [X.T @ torch.diag(y) @ K @ torch.diag(y) @ X for K in ptks]
    second = [X.T @ torch.diag(y) @ K @ K @ torch.diag(y) @ X for K in ptks]
    pairs = {"numerator": (first, second), "den1": (first, first), "den2": (second, second)}
    for name, (P, Q) in pairs.items():
        part = getattr(terms, name)
        own = [float((p * q).sum()) for p, q in zip(P, Q, strict=True)]
        across = [float((p * q).sum()) for i, p in enumerate(P) for j, q in enumerate(Q) if i != j]
        assert part.total.value == pytest.approx(np.mean(own), rel=1e-12)
        assert part.mean.value == pytest.approx(np.mean(across), rel=1e-12)
        spread = sum(float(((p - sum(P) / 6) * (q - sum(Q) / 6)).sum()) for p, q in zip(P, Q, strict=True))
        assert part.covariance.value == pytest.approx(spread / 5, rel=1e-10)
        assert part.total.value == pytest.approx(part.mean.value + part.covariance.value, rel=1e-13)
        assert part.total.stderr == pytest.approx(np.std(own, ddof=1) / math.sqrt(6), rel=1e-10)
        assert part.total.samples == 6
        # the jackknife by its definition: every network left out in turn
        left_out = [early.mean_and_covariance_terms(X, y, ptks[[j for j in range(6) if j != i]]) for i in range(6)]
        for term in ("mean", "covariance"):
            values = [getattr(getattr(one, name), term).value for one in left_out]
            assert getattr(part, term).stderr == pytest.approx(math.sqrt(5) * np.std(values), rel=1e-9)
    single = [float(early.derivative_correlation(X, y, K)) for K in ptks]
    assert terms.average_correlation.value == pytest.approx(np.mean(single), rel=1e-12)
    parts = [getattr(terms, name) for name in pairs]
    for term, rho in (("total", terms.correlation), ("mean", terms.mean_correlation)):
        top, left, right = (getattr(part, term).value for part in parts)
        assert rho.value == pytest.approx(top / math.sqrt(left * right), rel=1e-12)


def test_mean_and_covariance_terms_are_unbiased():
    """Against the exact expectations of the quadratic network: Prop. 8 for the means, Wick for the totals."""
    X, y, width = drawn(5, 3), drawn(5, seed=1) - 0.3, 20
    terms = early.mean_and_covariance_terms(X, y, quadratic_ptks(X, width, 6000, seed=4))
    exact, means = early.exact_word_traces(*early.data_matrices(X, y), width), early.quadratic_means(X, y, width)
    totals = {"numerator": 64 * exact.numerator, "den1": 16 * exact.den1, "den2": 256 * exact.den2}
    products = {"numerator": means.nfm * means.agop, "den1": means.nfm.square(), "den2": means.agop.square()}
    for name, total in totals.items():
        mean = float(products[name].sum())
        for term, wanted in (("total", total), ("mean", mean), ("covariance", total - mean)):
            found = getattr(getattr(terms, name), term)
            assert abs(found.value - wanted) < 4 * found.stderr, (name, term)
            assert found.stderr < 0.2 * wanted
    assert abs(terms.correlation.value - exact.correlation) < 4 * terms.correlation.stderr
    assert abs(terms.mean_correlation.value - float(means.correlation)) < 4 * terms.mean_correlation.stderr
    assert terms.mean_correlation.stderr < 0.01


def test_the_errors_are_the_spread_over_repetitions():
    X, y = drawn(4, 3), drawn(4, seed=1)
    rows = drawn(400, 15, 4, 40, seed=2) / math.sqrt(40)  # Wishart PTKs: light tails
    runs = [early.mean_and_covariance_terms(X, y, J @ J.mT) for J in rows]
    for name in ("numerator", "den1", "den2"):
        for term in ("total", "mean", "covariance"):
            found = [getattr(getattr(run, name), term) for run in runs]
            claimed = math.sqrt(np.mean([one.stderr**2 for one in found]))
            assert claimed == pytest.approx(np.std([one.value for one in found]), rel=0.2), (name, term)


def test_a_function_draws_the_networks():
    X, y = drawn(4, 3), drawn(4, seed=1)
    variances = (1 / 3, 1 / 7, 1 / 6)

    def draw(generator: torch.Generator) -> Tensor:
        return early.drawn_ptk(X, (7, 6), "relu", 2, variances, generator)

    found = early.mean_and_covariance_terms(X, y, draw, samples=5, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    same = early.mean_and_covariance_terms(X, y, torch.stack([draw(generator) for _ in range(5)]))
    assert found.numerator.total.value == same.numerator.total.value
    again, once = (early.mean_and_covariance_terms(X, y, draw, samples=4) for _ in range(2))
    assert again.den2.mean.value == once.den2.mean.value


def test_equal_networks_have_no_covariance():
    X, y = drawn(4, 3), drawn(4, seed=1)
    K = quadratic_ptks(X, 5, 1)
    terms = early.mean_and_covariance_terms(X, y, K.expand(4, -1, -1))
    rho = float(early.derivative_correlation(X, y, K[0]))
    assert abs(terms.den2.covariance.value) < 1e-12 * terms.den2.total.value
    for found in (terms.correlation, terms.mean_correlation, terms.average_correlation):
        assert found.value == pytest.approx(rho, rel=1e-12)
        assert found.stderr < 1e-7


def test_many_outputs_decompose_as_well():
    network = Network((5, 6, 4, 3))
    x, y = task(7, 5, 3, "mean")
    _, J = network.jacobian(x, 0)
    stack = torch.stack([J @ J.T, J @ torch.diag(drawn(6).square()) @ J.T, J @ torch.diag(drawn(6).abs()) @ J.T])
    full = stack.reshape(3, 7, 3, 7, 3).transpose(2, 3)
    found, same = (early.mean_and_covariance_terms(x, y, form) for form in (stack, full))
    assert found.numerator.total.value == pytest.approx(same.numerator.total.value, rel=1e-13)
    singles = [float(early.derivative_correlation(x, y, K)) for K in stack]
    assert found.average_correlation.value == pytest.approx(np.mean(singles), rel=1e-12)


EYE = torch.eye(4)
BAD = {
    "images": lambda: early.derivative_correlation(torch.ones(4, 2, 2), torch.ones(4), EYE),
    "a list": lambda: early.derivative_correlation([[1.0]], torch.ones(1), torch.ones(1, 1)),
    "too few residuals": lambda: early.derivative_correlation(torch.ones(4, 2), torch.ones(3), EYE),
    "a number": lambda: early.derivative_correlation(torch.ones(4, 2), torch.tensor(1.0), EYE),
    "no outputs": lambda: early.derivative_correlation(torch.ones(4, 2), torch.ones(4, 0), EYE),
    "the covariance for the kernel": lambda: early.derivative_correlation(torch.ones(4, 2), torch.ones(4), EYE[:3, :3]),
    "one kernel for two outputs": lambda: early.derivative_correlation(torch.ones(4, 2), torch.ones(4, 2), EYE),
    "a skew kernel": lambda: early.derivative_correlation(
        torch.ones(4, 2), torch.ones(4), EYE + torch.ones(4, 4).triu(1)
    ),
    "another kind": lambda: early.derivative_correlation(torch.ones(4, 2), torch.ones(4), EYE, kind="spearman"),
    "class numbers": lambda: early.loss_derivative(torch.ones(4, 3), torch.arange(4), "cross-entropy"),
    "one class": lambda: early.loss_derivative(torch.ones(4, 1), torch.ones(4, 1), "cross-entropy"),
    "another loss": lambda: early.loss_derivative(torch.ones(4), torch.ones(4), "hinge"),
    "two networks": lambda: early.mean_and_covariance_terms(torch.ones(4, 2), torch.ones(4), torch.ones(2, 4, 4)),
    "one network": lambda: early.mean_and_covariance_terms(torch.ones(4, 2), torch.ones(4), EYE),
    "a list of kernels": lambda: early.mean_and_covariance_terms(torch.ones(4, 2), torch.ones(4), [EYE] * 3),
    "a function without a number": lambda: early.mean_and_covariance_terms(
        torch.ones(4, 2), torch.ones(4), lambda g: EYE
    ),
    "a stack with a number": lambda: early.mean_and_covariance_terms(
        torch.ones(4, 2), torch.ones(4), torch.ones(3, 4, 4), samples=3
    ),
    "a seed": lambda: early.mean_and_covariance_terms(
        torch.ones(4, 2), torch.ones(4), lambda g: EYE, samples=3, generator=7
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
