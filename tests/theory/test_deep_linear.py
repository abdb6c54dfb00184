"""Kernels of linear networks: reference values, autograd on real weights, and networks trained to the end."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import deep_linear


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def whitened(samples: int, dimension: int, seed: int = 0) -> Tensor:
    left, _, right = torch.linalg.svd(drawn(samples, dimension, seed=seed), full_matrices=False)
    return math.sqrt(samples) * left @ right


def model_of(weights: list[Tensor]) -> nn.Sequential:
    layers = []
    for weight in weights:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
        layer.weight.data = weight.clone()
        layers.append(layer)
    return nn.Sequential(*layers)


def jacobian_kernel(weights: list[Tensor], x: Tensor) -> Tensor:
    """(P, P, C, C), row by row from autograd: slow and obvious."""
    free = [weight.clone().requires_grad_() for weight in weights]
    out = x
    for weight in free:
        out = out @ weight.T
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(value, free, retain_graph=True)]) for value in out.flatten()
    ]
    jacobian = torch.stack(rows).reshape(*out.shape, -1)
    return torch.einsum("icn,jdn->ijcd", jacobian, jacobian)


def balanced(weights: Tensor, depth: int, widths: list[int], seed: int = 0) -> list[Tensor]:
    """Layers U_(l+1) diag(s^(1/L)) U_l^T with random orthonormal inner frames, whose product is `weights` (C, D)."""
    z, s, v = torch.linalg.svd(weights, full_matrices=False)
    s = torch.where(s > 1e-13 * s[0], s, 0.0)
    inner = [torch.linalg.qr(drawn(width, len(s), seed=seed + i))[0] for i, width in enumerate(widths)]
    frames = [v.T, *inner, z]
    return [(frames[i + 1] * s ** (1 / depth)) @ frames[i].T for i in range(depth)]


def trained(weights: list[Tensor], x: Tensor, y: Tensor, time: float) -> list[Tensor]:
    path = deep_linear.flow(weights, x, y, times=[time], rate=1 / len(x))
    assert path.layers is not None
    return [layer[-1] for layer in path.layers]


# --- the end of training ----------------------------------------------------------------------------------------------

X_FINAL = table([[1.0, 0.0, 0.5], [0.0, 2.0, -1.0]]).T
Y_FINAL = 2.0 * X_FINAL @ table([[0.6], [0.8]])[:, 0]


def test_final_kernel_and_nngp_at_their_reference_values():
    kernel = [
        [4.334128411638364, 4.838096831596313, -0.2519842099789744],
        [4.838096831596313, 22.98095995008249, -9.071431559243088],
        [-0.2519842099789744, -9.071431559243088, 4.4097236746320565],
    ]
    nngp = [
        [0.9071431559243086, 2.4190484157981564, -0.7559526299369239],
        [2.4190484157981564, 6.450795775461752, -2.015873679831798],
        [-0.7559526299369239, -2.015873679831798, 0.629960524947437],
    ]
    np.testing.assert_allclose(deep_linear.final_ntk(X_FINAL, Y_FINAL, 3), kernel, rtol=1e-12)
    np.testing.assert_allclose(deep_linear.final_nngp(X_FINAL, Y_FINAL, 2, 3), nngp, rtol=1e-12)
    balanced_kernel = deep_linear.balanced_ntk(X_FINAL, table([[0.6, 0.8]])[0], 2.0, 3)
    np.testing.assert_allclose(balanced_kernel, kernel, rtol=1e-12)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_kernels_of_balanced_networks_are_those_of_autograd(depth: int, outputs: int):
    x, weights = drawn(4, 5, seed=1), drawn(outputs, 5, seed=2)
    layers = balanced(weights, depth, [6, 4, 7][: depth - 1])
    y = x @ weights.T  # P < D: the teacher of least norm is the part of the weights in the span of the data
    span = torch.linalg.pinv(x) @ x
    layers_span = balanced(weights @ span, depth, [6, 4, 7][: depth - 1])
    expected = jacobian_kernel(layers_span, x)
    target = y if outputs > 1 else y[:, 0]
    found = deep_linear.final_ntk(x, target, depth)
    np.testing.assert_allclose(found if outputs > 1 else found[..., None, None], expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(
        torch.einsum("ia,cdab,jb->ijcd", x, deep_linear.balanced_subkernels(weights, depth), x),
        jacobian_kernel(layers, x),
        rtol=1e-11,
        atol=1e-11,
    )
    features = x
    for layer in range(depth + 1):
        gram = deep_linear.final_nngp(x, target, layer, depth)
        np.testing.assert_allclose(gram, features @ features.T, rtol=1e-10, atol=1e-10)
        if layer < depth:
            features = features @ layers_span[layer].T


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_more_outputs_than_inputs_and_modes_that_are_not_there(depth: int):
    """Only the layers themselves are of low rank: every output has its own readout weights."""
    x, weights = drawn(5, 3, seed=1), drawn(6, 2, seed=2) @ drawn(2, 3, seed=3)
    layers = balanced(weights, depth, [4, 5][: depth - 1])
    found = deep_linear.final_ntk(x, x @ weights.T, depth)
    np.testing.assert_allclose(found, jacobian_kernel(layers, x), rtol=1e-8, atol=1e-8)
    traced = found.diagonal(dim1=2, dim2=3).mean(-1)
    expected = float(fl.metrics.alignment(traced, x @ weights.T))
    assert float(deep_linear.max_alignment(x, x @ weights.T, depth)) == pytest.approx(expected, rel=1e-10)


def test_final_kernel_with_other_points_and_over_strengths():
    x, x1, x2 = drawn(8, 5, seed=1), drawn(3, 5, seed=2), drawn(2, 5, seed=3)
    y = x @ drawn(5, seed=4)
    together = deep_linear.final_ntk(x, y, 3, X1=torch.cat([x1, x2]))
    np.testing.assert_allclose(deep_linear.final_ntk(x, y, 3, X1=x1, X2=x2), together[:3, 3:], rtol=1e-12)
    beta = drawn(5, seed=4) / drawn(5, seed=4).norm()
    stack = deep_linear.balanced_ntk(x, beta, torch.tensor([0.1, -0.4]), 3)
    for c, kernel in zip((0.1, -0.4), stack, strict=True):
        np.testing.assert_allclose(kernel, deep_linear.balanced_ntk(x, beta, c, 3), rtol=1e-7)
    s = y.new_tensor(float(drawn(5, seed=4).norm()))
    on_training_set = s ** (2 - 2 / 3) * (2 / s**2 * torch.outer(y, y) + x @ x.T)
    np.testing.assert_allclose(deep_linear.final_ntk(x, y, 3), on_training_set, rtol=1e-12)
    assert float(deep_linear.final_ntk(x, torch.zeros(8), 3).abs().max()) == 0.0


def test_the_kernel_is_that_of_ofe_with_its_feature_rate():
    x = drawn(6, 8, seed=1)
    y = x @ drawn(8, seed=2)
    gamma = deep_linear.feature_rate(x, y, 4, kernel_scale=0.3)
    final = deep_linear.final_ntk(x, y, 4)
    ofe = 0.3 * x @ x.T + gamma * torch.outer(y, y)
    assert float(fl.metrics.kernel_distance(final, ofe)) < 1e-13


# --- maximal alignment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "rank", "expected"),
    [
        (2, 30, 0.3481553119113957),
        (3, 30, 0.48666426339228763),
        (2, 784, 0.07129230057995191),
        (5, 100, 0.4490132550669373),
    ],
)
def test_alignment_on_whitened_inputs(depth: int, rank: int, expected: float):
    assert float(deep_linear.whitened_max_alignment(depth, rank)) == pytest.approx(expected, rel=1e-13)
    if rank <= 100:
        x = whitened(rank + 20, rank)
        y = x @ drawn(rank, seed=1)
        assert float(deep_linear.max_alignment(x, y, depth)) == pytest.approx(expected, rel=1e-11)


def test_alignment_at_its_general_reference_value():
    x = table([[1.0, 0.0, 0.5, 2.0], [0.0, 2.0, -1.0, 0.3], [0.4, -0.2, 1.0, 0.0]]).T
    y = 1.5 * x @ table([[2.0], [-1.0], [2.0]])[:, 0] / 3
    assert float(deep_linear.max_alignment(x, y, 3)) == pytest.approx(0.9405907871512469, rel=1e-13)


def test_alignment_of_many_outputs_at_its_reference_value():
    s = torch.tensor([2.0, 1.2, 0.7], dtype=torch.float64)
    assert float(deep_linear.whitened_max_alignment(2, 12, s)) == pytest.approx(0.6891146792919668, rel=1e-13)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("outputs", [3, 5])
def test_alignment_of_many_outputs_is_that_of_the_traced_kernel(depth: int, outputs: int):
    x, s = whitened(20, 7), torch.tensor([2.0, 1.2, 0.7], dtype=torch.float64)
    z, v = torch.linalg.qr(drawn(outputs, 3, seed=1))[0], torch.linalg.qr(drawn(7, 3, seed=2))[0]
    y = x @ ((z * s) @ v.T).T
    kernel = deep_linear.final_ntk(x, y, depth).diagonal(dim1=2, dim2=3).mean(-1)
    expected = float(fl.metrics.alignment(kernel, y))
    assert float(deep_linear.max_alignment(x, y, depth)) == pytest.approx(expected, rel=1e-11)
    assert float(deep_linear.whitened_max_alignment(depth, 7, s, outputs=outputs)) == pytest.approx(expected, rel=1e-11)


def test_alignment_with_targets_that_are_not_linear():
    x, y = drawn(12, 4, seed=1), drawn(12, seed=2)
    kernel = deep_linear.final_ntk(x, y, 3)
    assert float(deep_linear.max_alignment(x, y, 3)) == pytest.approx(float(fl.metrics.alignment(kernel, y)), rel=1e-12)
    assert math.isnan(deep_linear.max_alignment(x, torch.zeros(12), 3))


# --- subkernels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(5, 3), (5, 6, 3), (5, 4, 7, 2), (5, 4, 3, 6, 1)])
def test_subkernels_are_those_of_autograd_and_of_the_measured_kernel(widths: tuple[int, ...]):
    weights = [drawn(b, a, seed=i) for i, (a, b) in enumerate(pairwise(widths))]
    x, x2 = drawn(4, 5, seed=20), drawn(3, 5, seed=21)
    expected = jacobian_kernel(weights, x)
    found = deep_linear.subkernels(weights, x)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-10)
    np.testing.assert_allclose(fl.ntk(model_of(weights), x, outputs="full"), expected, rtol=1e-9, atol=1e-9)
    across = deep_linear.subkernels(weights, torch.cat([x, x2]))[:4, 4:]
    np.testing.assert_allclose(deep_linear.subkernels(weights, x, x2), across, rtol=1e-11, atol=1e-10)
    scaled = deep_linear.subkernels(weights, x, scale=0.3)
    np.testing.assert_allclose(scaled, 0.09 * found, rtol=1e-12)
    terms = deep_linear.subkernel_terms(weights, x)
    by_layer = fl.ntk(model_of(weights), x, by="layer", outputs="full")
    for term, kernel in zip(terms, by_layer.values(), strict=True):
        measured = torch.einsum("ij,cd->ijcd", term.gram, term.coefficients)
        np.testing.assert_allclose(measured, kernel, rtol=1e-9, atol=1e-9)


# --- two layers, 000 --------------------------------------------------------------------------------------------------


def test_two_layer_final_kernel_at_its_reference_value():
    V, s, x = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0]), table([[1.0, 0.0, 1.0], [0.0, 1.0, 2.0]]).T
    parts = deep_linear.two_layer_final_kernel(V, 2 * torch.outer(V, s) / 5, x)
    expected = [[1.45, -0.2, 1.05], [-0.2, 1.45, 2.7], [1.05, 2.7, 6.45]]
    np.testing.assert_allclose(parts.kernel, expected, rtol=1e-6)  # V / 5 in single precision
    double = deep_linear.two_layer_final_kernel(V.double(), 2 * torch.outer(V, s).double() / 5, x)
    np.testing.assert_allclose(double.kernel, expected, rtol=1e-13)
    np.testing.assert_allclose(double.approximation, expected, rtol=1e-13)


def test_two_layer_final_kernel_is_the_measured_one():
    N, x = 6, drawn(4, 3, seed=1)
    V, W = drawn(N, seed=2), drawn(N, 3, seed=3)
    parts = deep_linear.two_layer_final_kernel(V, W, x)
    np.testing.assert_allclose(parts.kernel, jacobian_kernel([W, V[None]], x)[:, :, 0, 0] / N**2, rtol=1e-12)
    assert float(parts.remainder.norm()) > 0.1
    y = x @ W.T @ V / N
    np.testing.assert_allclose(parts.task, torch.outer(y, y) / V.square().sum(), rtol=1e-12)
    alpha = deep_linear.initial_kernel_scale(N, 0.3, 0.2)
    assert float(alpha) == pytest.approx(3.0)
    gamma = parts.feature_rate(alpha)
    mixed = alpha * x @ x.T / N**2 + gamma * torch.outer(y, y)
    assert float(fl.metrics.kernel_distance(mixed, parts.approximation)) < 1e-13


def test_small_weights_of_000_end_balanced():
    """Sheet 2.10: |V|^2 = N |s| and K = |s| / N X [s s^T / |s|^2 + 1] X^T, with f = V^T W x / N."""
    N, x = 20, drawn(30, 6, seed=1)
    s = drawn(6, seed=2)
    W, V = 0.01 * drawn(N, 6, seed=3), 0.01 * drawn(N, seed=4)
    # f = (V / sqrt N)^T (W / sqrt N) x
    layers = trained([W / math.sqrt(N), V[None] / math.sqrt(N)], x, x @ s, 300.0)
    V, W = math.sqrt(N) * layers[1][0], math.sqrt(N) * layers[0]
    parts = deep_linear.two_layer_final_kernel(V, W, x)
    assert float(V.square().sum()) == pytest.approx(N * float(s.norm()), rel=1e-3)
    assert float((parts.approximation - parts.kernel).norm() / parts.kernel.norm()) < 1e-3
    final = deep_linear.final_ntk(x, x @ s, 2) / N
    np.testing.assert_allclose(parts.kernel, final, rtol=0, atol=1e-3 * float(final.norm()))


# --- balance ----------------------------------------------------------------------------------------------------------


def test_conserved_matrices_stay_with_unequal_rates():
    x, y, rates = drawn(9, 4, seed=1), drawn(9, 2, seed=2), [0.05, 0.1, 0.02]
    weights = [drawn(5, 4, seed=3), drawn(3, 5, seed=4), drawn(2, 3, seed=5)]
    path = deep_linear.flow(weights, x, y, times=[0.0, 1.0, 4.0], rate=rates)
    assert path.layers is not None
    before = deep_linear.conserved_matrices(weights, rates)
    after = deep_linear.conserved_matrices([layer[-1] for layer in path.layers], rates)
    plain = deep_linear.conserved_matrices([layer[-1] for layer in path.layers])
    for one, other, wrong, start in zip(before, after, plain, deep_linear.conserved_matrices(weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)
        assert float((wrong - start).norm()) > 1e-2  # the rates matter
    measured = fl.quantities.layer_balance(model_of(weights), x[:2])
    for found, value in zip(measured.values(), deep_linear.conserved_matrices(weights), strict=True):
        np.testing.assert_allclose(found.value, value, rtol=1e-6, atol=1e-6)


def test_refined_balance_at_its_reference_value():
    g = torch.tensor([0.8333333333333334, 0.5, 0.0], dtype=torch.float64)
    np.testing.assert_allclose(deep_linear.width_corrections([9, 6, 4, 2]), g, rtol=1e-14)
    found = deep_linear.refined_balance(2.0, 0.1, g)
    assert float(found.u_squared[-1]) == pytest.approx(1.582960303006964, rel=1e-13)
    assert float(found.first_order) == pytest.approx(1.5829566075237549, rel=1e-13)


@given(
    s=st.floats(1e-6, 1e6),
    sigma=st.floats(0, 10),
    g=st.lists(st.floats(-5, 5), min_size=1, max_size=6).map(lambda values: [*values, 0.0]),
)
def test_refined_balance_has_the_product_and_the_differences(s: float, sigma: float, g: list[float]):
    found = deep_linear.refined_balance(s, sigma, torch.tensor(g, dtype=torch.float64))
    assert float(found.u_squared.log().sum()) == pytest.approx(2 * math.log(s), abs=1e-9)
    scale = float(found.u_squared.max())
    np.testing.assert_allclose(found.u_squared - found.u_squared[-1], sigma**2 * np.array(g), atol=1e-9 * scale)


def test_exact_balance_is_what_training_ends_with():
    """The paper's formula is off by as much as it corrects; the conserved matrix is not."""
    D, N, C, sigma = 10, 40, 2, 0.02
    x = whitened(40, D)
    z, v = torch.linalg.qr(drawn(C, C, seed=1))[0], torch.linalg.qr(drawn(D, C, seed=2))[0]
    s = torch.tensor([2.0, 1.3], dtype=torch.float64)
    y = x @ ((z * s) @ v.T).T
    W, A = sigma * drawn(N, D, seed=3) / math.sqrt(D), sigma * drawn(C, N, seed=4) / math.sqrt(N)
    layers = trained([W, A], x, y, 60.0)
    np.testing.assert_allclose(layers[1] @ layers[0], (z * s) @ v.T, atol=1e-9)
    for mode in range(C):
        first = float((layers[0] @ v[:, mode]).square().sum())
        last = float((layers[1].T @ z[:, mode]).square().sum())
        found = deep_linear.exact_balance(W, A, float(s[mode]), z[:, mode], v[:, mode])
        difference = float(found.u_squared[0] - found.u_squared[1])
        paper = sigma**2 * float(deep_linear.width_corrections([D, N, C])[0])
        assert first - last == pytest.approx(difference, abs=0.05 * sigma**2)
        assert abs(first - last - paper) > sigma**2


def test_wide_networks_have_the_mean_difference():
    D, N, C, sigma = 40, 120, 40, 0.25
    z, v = torch.zeros(C, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    z[0] = v[0] = 1
    values = []
    for seed in range(60):
        W, A = sigma * drawn(N, D, seed=seed) / math.sqrt(D), sigma * drawn(C, N, seed=1000 + seed) / math.sqrt(N)
        found = deep_linear.exact_balance(W, A, 1.0, z, v).u_squared
        values.append(float(found[0] - found[1]))
    mean, error = np.mean(values), np.std(values) / math.sqrt(len(values))
    expected = float(deep_linear.wide_difference(sigma, D, N, C))
    assert expected == pytest.approx(sigma**2 * (3 - 1 / 3))  # .167; the print has .042
    assert abs(mean - expected) < 4 * error + 0.01
    assert error < 0.01


# --- the function that is learned -------------------------------------------------------------------------------------


def test_minimum_norm_at_its_reference_value():
    x, y = table([[1, 0], [1, 1], [0, 2]]).T, torch.tensor([1.0, -1.0])
    beta = deep_linear.minimum_norm(x, y)
    np.testing.assert_allclose(beta, [2 / 3, 1 / 3, -2 / 3], rtol=1e-13)
    norm = deep_linear.rkhs_norm(beta, beta / beta.norm(), 3)
    assert float(norm) == pytest.approx(0.25, rel=1e-13)


def test_every_spike_in_the_span_gives_the_same_function():
    x, y = drawn(4, 7, seed=1), drawn(4, 2, seed=2)
    expected = deep_linear.minimum_norm(x, y)
    assert expected.shape == (2, 7)
    inside = x.T @ drawn(4, seed=3)
    outside = drawn(7, seed=4)
    for amplitude in (0.0, 0.5, 30.0):
        found = deep_linear.spiked_interpolator(x, y, inside / inside.norm(), amplitude)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    other = deep_linear.spiked_interpolator(x, y, outside / outside.norm(), 30.0)
    assert float((other - expected).norm()) > 0.1
    np.testing.assert_allclose(x @ other.T, y, atol=1e-10)  # another interpolator all the same
    spike = outside / outside.norm()
    kernel = x @ (30.0 * torch.outer(spike, spike) + torch.eye(7)) @ x.T
    by_regression = fl.dynamics.kernel_regression(kernel, y, (30.0 * torch.outer(spike, spike) + torch.eye(7)) @ x.T)
    np.testing.assert_allclose(other.T, by_regression, rtol=1e-8, atol=1e-9)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), amplitude=st.floats(0, 1e6))
def test_rkhs_norm_inverts_the_metric(seed: int, amplitude: float):
    weights, spike = drawn(5, seed=seed), drawn(5, seed=seed + 1)
    spike = spike / spike.norm()
    metric = amplitude * torch.outer(spike, spike) + torch.eye(5)
    expected = weights @ torch.linalg.solve(metric, weights)
    assert float(deep_linear.rkhs_norm(weights, spike, amplitude)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("depth", [2, 3])
def test_small_weights_learn_it_on_any_data(depth: int):
    """002 App. G.1: fewer samples than dimensions, inputs of unequal size."""
    x = drawn(3, 6, seed=1) * torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5, 0.7])
    y = 5 * drawn(3, seed=2)
    sizes = [6, *[8] * (depth - 1), 1]
    sigma = 0.003 if depth == 2 else 0.01
    weights = [sigma * drawn(b, a, seed=9 + i) for i, (a, b) in enumerate(pairwise(sizes))]
    layers = trained(weights, x, y, 60.0 if depth == 2 else 250.0)
    product = layers[0]
    for layer in layers[1:]:
        product = layer @ product
    beta = deep_linear.minimum_norm(x, y)
    assert float((product[0] - beta).norm() / beta.norm()) < (1e-2 if depth == 2 else 3e-2)
    final = deep_linear.final_ntk(x, y, depth)
    reached = deep_linear.subkernels(layers, x)[:, :, 0, 0]
    assert float((reached - final).norm() / final.norm()) < (1e-2 if depth == 2 else 3e-2)


# --- wrong input ------------------------------------------------------------------------------------------------------

GOOD = (drawn(4, 3), drawn(4, seed=1))


@pytest.mark.parametrize(
    "call",
    [
        lambda: deep_linear.final_ntk(GOOD[0].T, GOOD[1], 2),
        lambda: deep_linear.final_ntk(GOOD[0], GOOD[1], 0),
        lambda: deep_linear.final_ntk(GOOD[0], [1.0, 2.0, 3.0, 4.0], 2),
        lambda: deep_linear.final_nngp(*GOOD, 3, 2),
        lambda: deep_linear.balanced_ntk(GOOD[0], torch.ones(3), 1.0, 2),
        lambda: deep_linear.balanced_ntk(GOOD[0], torch.ones(4) / 2, 1.0, 2),
        lambda: deep_linear.feature_rate(GOOD[0], GOOD[1][:, None], 2),
        lambda: deep_linear.whitened_max_alignment(2, 2, torch.ones(3)),
        lambda: deep_linear.subkernels([torch.ones(3, 2), torch.ones(2, 4)], GOOD[0]),
        lambda: deep_linear.subkernels(torch.ones(3, 3), GOOD[0]),
        lambda: deep_linear.two_layer_final_kernel(torch.ones(3), torch.ones(4, 3), GOOD[0]),
        lambda: deep_linear.conserved_matrices([torch.ones(3, 2), torch.ones(1, 3)], [1.0]),
        lambda: deep_linear.refined_balance(2.0, 0.1, torch.ones(2, 2)),
        lambda: deep_linear.refined_balance(-2.0, 0.1, torch.ones(2)),
        lambda: deep_linear.exact_balance(torch.ones(3, 2), torch.ones(1, 3), 1.0, torch.ones(2), torch.ones(2)),
        lambda: deep_linear.width_corrections([3]),
        lambda: deep_linear.spiked_interpolator(*GOOD, torch.ones(3), 1.0),
        lambda: deep_linear.rkhs_norm(torch.ones(3), torch.tensor([1.0, 0, 0]), -1.0),
    ],
)
def test_wrong_input_says_what_was_expected(call):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        call()
