"""Expected pre-activation tangent kernels of 003 App. D, and the corrupted AGOP: reference values, integrals, draws."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import featlearn as fl
from featlearn.theory import early, infinite_width


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


PAIR = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
TARGETS = torch.tensor([1.0, 2.0], dtype=torch.float64)
THREE, TWO = (0.5, 0.1, 0.1), (0.5, 0.1)


@pytest.mark.parametrize(
    ("arguments", "diagonal", "off"),
    [
        (("relu", 2, THREE), 0.25, 0.12985789646607734),
        (("relu", 2, THREE, False), 0.25, 0.12985789646607734),
        (("quadratic", 2, THREE), 14.4, 5.8752),
        (("quadratic", 2, THREE, True), 14.4, 5.8752),
        (("quadratic", 2, THREE, False), 6.0, 2.064),
        (("relu", 1, TWO), 0.5, 0.35241638234956674),
        (("relu", 1, TWO, True), 0.5, 0.35241638234956674),
        (("quadratic", 1, TWO), 2.0, 1.2),
    ],
)
def test_reference_expected_ptk(arguments: tuple, diagonal: float, off: float):
    kernel = early.expected_ptk(PAIR, 10, *arguments)
    np.testing.assert_allclose(kernel, [[diagonal, off], [off, diagonal]], rtol=1e-13)
    np.testing.assert_allclose(early.expected_ptk(PAIR, (10,) * arguments[1], *arguments), kernel, rtol=0)


@pytest.mark.parametrize(
    ("activation", "exact", "rho"), [("relu", None, 0.998044853476), ("quadratic", True, 0.997673269494)]
)
def test_reference_first_order_prediction(activation: str, exact: bool | None, rho: float):
    kernel = early.expected_ptk(PAIR, 10, activation, 2, THREE, exact)
    assert float(early.derivative_correlation(PAIR, TARGETS, kernel)) == pytest.approx(rho, abs=1e-12)


def all_numbers(variances: list[float], nodes: list[int]) -> tuple[Tensor, Tensor]:
    """A grid over independent centered normal numbers and its weights: exact expectations of polynomials."""
    rules = [np.polynomial.hermite_e.hermegauss(n) for n in nodes]
    scaled = [math.sqrt(v) * points for v, (points, _) in zip(variances, rules, strict=True)]
    chances = [weights / weights.sum() for _, weights in rules]
    grid = torch.tensor(np.array(list(itertools.product(*scaled))))
    return grid, torch.tensor(np.array([math.prod(part) for part in itertools.product(*chances)]))


def test_two_quadratic_layers_by_exact_quadrature():
    """Widths 2 and 1: four weights of degree 6, two of degree 4, one of degree 2, and autograd for df/dh."""
    X = drawn(3, 2)
    s0, s1, sa = 0.7, 0.4, 1.3
    grid, chance = all_numbers([s0] * 4 + [s1] * 2 + [sa], [4] * 4 + [3] * 2 + [2])
    W0, W1, a = grid[:, :4].reshape(-1, 2, 2), grid[:, 4:6].reshape(-1, 1, 2), grid[:, 6:].reshape(-1, 1, 1)
    h = (X @ W0.mT).requires_grad_()
    f = ((h.square() @ W1.mT).square() @ a).sum()
    (J,) = torch.autograd.grad(f, h)
    expected = torch.einsum("m,mij->ij", chance, J @ J.mT)
    np.testing.assert_allclose(early.expected_ptk(X, (2, 1), "quadratic", 2, (s0, s1, sa)), expected, rtol=1e-11)


def test_one_quadratic_layer_is_that_of_proposition_8():
    X, y = drawn(5, 3), drawn(5, seed=1)
    kernel = early.expected_ptk(X, 7, "quadratic", 1, (1 / 7, 1.0))
    np.testing.assert_allclose(kernel, early.quadratic_means(X, y, 7).ptk, rtol=1e-13)


def test_relu_layers_by_the_infinite_width_recursion():
    """T <- S + v E[phi' phi'] T gives the same derivatives, from its kernels (weight variance 2: v E = 1 - t / pi)."""
    X = drawn(6, 4)
    tangent = [infinite_width.ntk(X, hidden_layers=layers) for layers in (0, 1, 2)]
    covariance = [infinite_width.nngp(X, hidden_layers=layers) for layers in (0, 1, 2)]
    slopes = [(tangent[i] - covariance[i]) / tangent[i - 1] / 2 for i in (1, 2)]
    one = early.expected_ptk(X, 9, "relu", 1, (0.3, 0.2))
    np.testing.assert_allclose(one, 9 * 0.2 * slopes[0], rtol=1e-9)
    two = early.expected_ptk(X, (9, 11), "relu", 2, (0.3, 0.4, 0.2))
    np.testing.assert_allclose(two, 9 * 11 * 0.4 * 0.2 * slopes[0] * slopes[1], rtol=1e-9)


def test_relu_angles_are_exact():
    """0 on the diagonal and for parallel inputs, where arccos gives 1e-8; pi for opposite ones; any length."""
    x = drawn(1, 5)
    across = drawn(1, 5, seed=1)
    across = across - (across @ x.T) / (x @ x.T) * x
    tiny = 1e-9 * across * x.norm() / across.norm()
    X = torch.cat([x, 3 * x, -2 * x, x + tiny, torch.zeros(1, 5, dtype=torch.float64), 1e100 * x])
    one = early.expected_ptk(X, 2, "relu", 1, (1.0, 1.0))
    assert (one.diagonal()[[0, 1, 2, 3, 5]] == 1).all()
    np.testing.assert_allclose(one[0, [1, 2, 5]], [1, 0, 1], rtol=0, atol=1e-15)
    assert 1 - float(one[0, 3]) == pytest.approx(1e-9 / math.pi, rel=1e-6)
    assert float(one[4].abs().max()) == 0
    two = early.expected_ptk(X, 2, "relu", 2, (1.0, 1.0, 1.0))
    assert (two.diagonal()[[0, 1, 2, 3, 5]] == 1).all()
    assert float(two[4].abs().max()) == 0
    # opposite inputs share no active unit
    assert float(two[0, 2]) == pytest.approx(0, abs=1e-15)
    assert 1 - float(two[0, 3]) == pytest.approx(2e-9 / math.pi, rel=1e-6)


def slow_ptk(X: Tensor, weights: list[Tensor], activation: str) -> Tensor:
    """df/dh by autograd, sample by sample."""
    function: Callable[[Tensor], Tensor] = {"relu": torch.relu, "quadratic": torch.square}[activation]
    rows = []
    for x in X:
        h = (weights[0] @ x).requires_grad_()
        signal = function(h)
        for weight in weights[1:-1]:
            signal = function(weight @ signal)
        rows.append(torch.autograd.grad((weights[-1] @ signal).sum(), h)[0])
    return torch.stack(rows) @ torch.stack(rows).T


@pytest.mark.parametrize("activation", ["relu", "quadratic"])
@pytest.mark.parametrize("hidden_layers", [1, 2])
def test_a_draw_is_a_network(activation: str, hidden_layers: int):
    X = drawn(5, 3)
    widths = (6, 4)[:hidden_layers]
    variances = (0.5, 0.2, 1.3)[: hidden_layers + 1]
    generator = torch.Generator().manual_seed(5)
    shapes = zip((*widths, 1), (3, *widths), variances, strict=True)
    weights = [math.sqrt(v) * torch.randn(m, n, dtype=torch.float64, generator=generator) for m, n, v in shapes]
    found = early.drawn_ptk(X, widths, activation, hidden_layers, variances, torch.Generator().manual_seed(5))
    np.testing.assert_allclose(found, slow_ptk(X, weights, activation), rtol=1e-11, atol=1e-13)
    one, same = (early.drawn_ptk(X, widths, activation, hidden_layers, variances) for _ in range(2))
    assert torch.equal(one, same)


@pytest.mark.parametrize("seed", range(20))
def test_draws_without_a_generator_are_not_those_of_a_common_seed(seed: int):
    """Data made with seed 0 must not meet weights of the same numbers."""
    usual, other = (
        early.drawn_ptk(PAIR, 3, "quadratic", 1, TWO, generator)
        for generator in (None, torch.Generator().manual_seed(seed))
    )
    assert not torch.allclose(usual, other)


@pytest.mark.parametrize(
    ("activation", "widths", "networks"),
    [("relu", (5,), 3000), ("quadratic", (5,), 3000), ("quadratic", (30, 20), 3000), ("relu", (400, 20), 1000)],
)
def test_draws_average_to_the_expectation(activation: str, widths: tuple[int, ...], networks: int):
    X = drawn(3, 4) / 2
    variances = (*(0.5, 0.3)[: len(widths)], 0.7)
    generator = torch.Generator().manual_seed(0)
    arguments = (X, widths, activation, len(widths), variances)
    draws = torch.stack([early.drawn_ptk(*arguments, generator) for _ in range(networks)])
    expected = early.expected_ptk(*arguments)
    error = draws.std(0) / math.sqrt(networks)
    assert float(((draws.mean(0) - expected).abs() / error).max()) < 4
    scale = expected.diagonal().outer(expected.diagonal()).sqrt()
    assert float((error / scale).max()) < 0.04


def test_the_second_relu_layer_counts():
    """The draws above, with errors of 0.02, tell the angle after the first layer from the one before it."""
    X = drawn(3, 4) / 2
    right = early.expected_ptk(X, (400, 20), "relu", 2, (0.5, 0.3, 0.7))
    wrong = 20 * 0.3 / (400 * 0.7) * early.expected_ptk(X, 400, "relu", 1, (0.5, 0.7)).square()
    assert float(((right - wrong) / right)[0, 1]) > 0.2


def test_the_exact_form_approaches_the_leading_order():
    X, variances = drawn(4, 3), (0.3, 0.2, 0.1)
    gaps = []
    for width in (1000, 2000):
        exact, leading = (early.expected_ptk(X, width, "quadratic", 2, variances, form) for form in (True, False))
        gaps.append((exact / leading - 1).diagonal())
    np.testing.assert_allclose(gaps[0] / gaps[1], 2, rtol=1e-2)


# the corrupted AGOP

W = torch.tensor([[1.0, 2.0], [0.0, 1.0], [-1.0, 0.5]], dtype=torch.float64)
SPECTRUM = torch.tensor([0.2, 0.5, 2.8], dtype=torch.float64)


def test_reference_corruption():
    assert float(early.annealed_corruption(W, SPECTRUM)) == pytest.approx(0.8078089150283798, rel=1e-13)


def corrupted(weight: Tensor, spectrum: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
    """<F, W^T Q W> and |W^T Q W|^2 for every rotation."""
    agop = weight.T @ (rotations * spectrum) @ rotations.mT @ weight
    return (agop * (weight.T @ weight)).sum((-2, -1)), agop.square().sum((-2, -1))


def test_two_units_by_the_integral_over_the_angle():
    """Trigonometric polynomials of degree 4: eight angles are exact."""
    weight, spectrum = drawn(2, 5), torch.tensor([-0.3, 1.7], dtype=torch.float64)
    angle = torch.arange(16, dtype=torch.float64) * math.pi / 8
    rotations = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).reshape(-1, 2, 2)
    overlap, size = corrupted(weight, spectrum, rotations)
    expected = overlap.mean() / ((weight.T @ weight).norm() * size.mean().sqrt())
    assert float(early.annealed_corruption(weight, spectrum)) == pytest.approx(float(expected), rel=1e-12)


def test_corruption_by_random_rotations():
    weight, spectrum, count = drawn(5, 3), torch.tensor([0.1, 0.2, 0.5, 1.0, 4.0], dtype=torch.float64), 20000
    orthogonal, triangular = torch.linalg.qr(drawn(count, 5, 5, seed=1))
    rotations = orthogonal * triangular.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    overlap, size = corrupted(weight, spectrum, rotations)
    norm = float((weight.T @ weight).norm())
    # leaving out one draw at a time shows the error of the ratio
    ratios = (overlap.sum() - overlap) / ((size.sum() - size) * (count - 1)).sqrt() / norm
    value = float(overlap.mean() / size.mean().sqrt()) / norm
    error = math.sqrt((count - 1) * float(ratios.var(correction=0)))
    assert abs(value - float(early.annealed_corruption(weight, spectrum))) < 4 * error
    assert error < 0.003


def test_corruption_that_changes_nothing():
    weight = drawn(4, 3)
    flat = torch.full((4,), 2.0, dtype=torch.float64)
    assert float(early.annealed_corruption(weight, flat)) == pytest.approx(1, rel=1e-13)  # Q is a multiple of I
    assert float(early.annealed_corruption(weight[:1], flat[:1])) == pytest.approx(1, rel=1e-13)
    assert float(early.annealed_corruption(3 * W, 0.1 * SPECTRUM)) == pytest.approx(0.8078089150283798, rel=1e-13)
    assert math.isnan(early.annealed_corruption(0 * W, SPECTRUM))
    assert math.isnan(early.annealed_corruption(W, 0 * SPECTRUM))


BAD = {
    "images": lambda: early.expected_ptk(torch.ones(2, 3, 4), 3, "relu", 1, TWO),
    "another activation": lambda: early.expected_ptk(PAIR, 3, "gelu", 1, TWO),
    "three hidden layers": lambda: early.expected_ptk(PAIR, 3, "relu", 3, (1.0, 1.0, 1.0, 1.0)),
    "a width too few": lambda: early.expected_ptk(PAIR, (3,), "relu", 2, THREE),
    "half a width": lambda: early.expected_ptk(PAIR, (3, 2.5), "relu", 2, THREE),
    "a variance too few": lambda: early.expected_ptk(PAIR, 3, "relu", 2, TWO),
    "one variance": lambda: early.expected_ptk(PAIR, 3, "relu", 1, 0.5),
    "no variance": lambda: early.expected_ptk(PAIR, 3, "relu", 1, (0.5, 0.0)),
    "an exact form that is not known": lambda: early.expected_ptk(PAIR, 3, "relu", 2, THREE, True),
    "a seed": lambda: early.drawn_ptk(PAIR, 3, "relu", 1, TWO, 3),
    "a draw of another activation": lambda: early.drawn_ptk(PAIR, 3, "tanh", 1, TWO),
    "a spectrum of samples": lambda: early.annealed_corruption(W, torch.ones(4)),
    "a matrix for its spectrum": lambda: early.annealed_corruption(W, torch.eye(3)),
    "a vector for a weight": lambda: early.annealed_corruption(torch.ones(3), SPECTRUM),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
