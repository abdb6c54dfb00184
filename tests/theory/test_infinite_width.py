"""Infinite-width kernels against reference values, Gaussian quadrature, wide networks and extreme inputs."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import infinite_width


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


PAIR = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)  # v x . x' / d = [[1, .5], [.5, 1]]


@pytest.mark.parametrize(
    ("hidden_layers", "off", "covariance"),
    [(1, 0.9423311144, 0.608997781), (2, 1.3514795611, 0.6839056509), (3, 1.7378446792, 0.7381281923)],
)
def test_reference_values(hidden_layers: int, off: float, covariance: float):
    kernel = infinite_width.ntk(PAIR, hidden_layers=hidden_layers)
    np.testing.assert_allclose(kernel.diagonal(), [1.0 + hidden_layers] * 2, rtol=1e-12)
    assert float(kernel[0, 1]) == pytest.approx(off, rel=1e-9)
    assert float(infinite_width.nngp(PAIR, hidden_layers=hidden_layers)[0, 1]) == pytest.approx(covariance, rel=1e-9)


@pytest.mark.parametrize("activation", ["relu", "erf", "linear"])
def test_one_layer_is_a_gaussian_integral(activation: str):
    x, x2, variance = drawn(4, 3), drawn(5, 3, seed=1), 1.3
    nodes, weights = np.polynomial.hermite_e.hermegauss(151)
    weights = weights / weights.sum()
    erf = np.vectorize(math.erf)
    value, slope = {
        "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
        "erf": (erf, lambda z: 2 / math.sqrt(math.pi) * np.exp(-(z**2))),
        "linear": (lambda z: z, lambda z: np.ones_like(z)),
    }[activation]
    nngp = infinite_width.nngp(x, x2, hidden_layers=1, activation=activation, weight_variance=variance)
    ntk = infinite_width.ntk(x, x2, hidden_layers=1, activation=activation, weight_variance=variance)
    for i, j in ((0, 0), (2, 4), (3, 1)):
        a, b, c = (variance / 3 * float(p @ q) for p, q in ((x[i], x[i]), (x2[j], x2[j]), (x[i], x2[j])))
        u, w = np.meshgrid(nodes, nodes, indexing="ij")
        first, second = math.sqrt(a) * u, c / math.sqrt(a) * u + math.sqrt(b - c * c / a) * w
        both = np.outer(weights, weights)
        moment, derivative = (float((both * g(first) * g(second)).sum()) for g in (value, slope))
        tolerance = 2e-2 if activation == "relu" else 1e-9  # quadrature is rough at a kink
        assert float(nngp[i, j]) == pytest.approx(variance * moment, rel=tolerance, abs=1e-3)
        assert float(ntk[i, j]) == pytest.approx(variance * (moment + derivative * c), rel=tolerance, abs=2e-2)


@pytest.mark.parametrize("activation", ["relu", "erf", "linear"])
def test_wide_networks_come_near(activation: str):
    x, x2, variance = drawn(4, 6), drawn(3, 6, seed=1), 1.5
    generator = torch.Generator().manual_seed(0)
    function = {"relu": torch.relu, "erf": torch.erf, "linear": lambda h: h}[activation]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [(500, 6), (500, 500), (1, 500)]
            self.weights = nn.ParameterList(
                torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes
            )

        def forward(self, h: Tensor) -> Tensor:
            for i, weight in enumerate(self.weights):
                h = (function(h) if i else h) @ weight.T * math.sqrt(variance / weight.shape[1])
            return h

    kernels = torch.stack([fl.ntk(Network(), x, x2=x2) for _ in range(24)])
    expected = infinite_width.ntk(x, x2, hidden_layers=2, activation=activation, weight_variance=variance)
    error = kernels.std(0) / len(kernels) ** 0.5
    assert float(((kernels.mean(0) - expected).abs() / error).max()) < 4.5
    assert float((error / expected.abs().max()).max()) < 0.05


@pytest.mark.parametrize("activation", ["relu", "erf", "linear"])
def test_nearly_parallel_inputs_keep_their_digits(activation: str):
    """K(x, x) - K(x, x + delta) goes to zero smoothly, and never jumps for equal inputs."""
    x = drawn(1, 4)
    same = infinite_width.ntk(x, hidden_layers=3, activation=activation)
    again = infinite_width.ntk(x, x.clone(), hidden_layers=3, activation=activation)
    np.testing.assert_allclose(again, same, rtol=1e-14)
    drops = []
    for size in (1e-3, 1e-5, 1e-7, 1e-9):
        moved = x + size * torch.tensor([[0.0, 1.0, -1.0, 0.5]], dtype=torch.float64)
        scale = x.norm() / moved.norm()
        drops.append(float(same - infinite_width.ntk(x, scale * moved, hidden_layers=3, activation=activation)) / size)
    if activation == "relu":  # the kernel has a kink: the drop is linear in the angle
        np.testing.assert_allclose(drops[1:3], drops[1], rtol=1e-2)
        assert drops[3] == pytest.approx(drops[1], rel=1e-4 + 0.3)
    else:
        assert abs(drops[3]) < 1e-5


def test_angles_are_exact_where_the_cosine_is_not():
    """Inputs 1e-9 apart must read as that, where their cosine is 1 - 5e-19, which is 1."""
    for angle in (1e-3, 1e-6, 1e-9):
        x = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        one = infinite_width.ntk(x, hidden_layers=1, weight_variance=2.0)
        # 1 - kappa_1 + 1 - (1 - t / pi) cos t = t / pi + t^2 + O(t^3)
        assert float(one[0, 0] - one[0, 1]) == pytest.approx(angle / math.pi + angle**2, rel=1e-5 + 1e-15 / angle)


def test_zero_inputs_and_opposite_inputs():
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    kernel = infinite_width.ntk(x, hidden_layers=2)
    assert torch.isfinite(kernel).all()
    assert float(kernel[0].abs().max()) == 0.0
    assert float(kernel[1, 2]) > -1e-12


def test_opposite_inputs_keep_their_digits():
    """One relu layer: exactly 0 at the angle pi, then (sin s - s cos s) / pi in the supplement s, which cancels."""
    for seed in range(20):
        x = drawn(1, 7, seed=seed)
        assert abs(float(infinite_width.ntk(x, -x, hidden_layers=1))) < 1e-15
        assert float(infinite_width.nngp(x, -3 * x, hidden_layers=1)) < 1e-30
    for s in (1e-8, 1e-5, 1e-2, 0.04, 0.06, 0.5):
        x = torch.tensor([[1.0, 0.0], [-math.cos(s), math.sin(s)]], dtype=torch.float64)
        with mpmath.workdps(40):
            turned = mpmath.atan2(float(x[1, 1]), -float(x[1, 0]))
            covariance = (mpmath.sin(turned) - turned * mpmath.cos(turned)) / mpmath.pi
            tangent = covariance - turned / mpmath.pi * mpmath.cos(turned)
        size = float(x[1].norm())
        found = infinite_width.nngp(x, hidden_layers=1), infinite_width.ntk(x, hidden_layers=1)
        assert float(found[0][0, 1]) == pytest.approx(size * float(covariance), rel=1e-13, abs=0)
        assert float(found[1][0, 1]) == pytest.approx(size * float(tangent), rel=1e-13, abs=0)


@pytest.mark.parametrize("hidden_layers", [1, 2, 4])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e7, 1e12])
def test_erf_kernels_of_inputs_of_any_size(size: float, hidden_layers: int):
    """Against the formulas as they are printed, with 60 digits: equal, nearly equal, unequal and opposite inputs."""
    x = size * torch.tensor([[1.0, 2.0], [1.0, 2.0 + 1e-6], [3.0, -0.5], [-1.0, -2.0]], dtype=torch.float64)
    found = infinite_width.ntk(x, hidden_layers=hidden_layers, activation="erf", weight_variance=1.3)
    for i, j in itertools.product(range(4), range(4)):
        with mpmath.workdps(60):
            v, rows = mpmath.mpf(1.3), [[mpmath.mpf(float(e)) for e in x[k]] for k in (i, j)]
            a, b, c = (v * mpmath.fdot(p, q) / 2 for p, q in ((rows[0],) * 2, (rows[1],) * 2, rows))
            t = c
            for _ in range(hidden_layers):
                root = mpmath.sqrt((1 + 2 * a) * (1 + 2 * b) - 4 * c**2)
                c, t = v * 2 / mpmath.pi * mpmath.asin(2 * c / mpmath.sqrt((1 + 2 * a) * (1 + 2 * b))), t * 4 / root
                t = c + v * t / mpmath.pi
                a, b = (v * 2 / mpmath.pi * mpmath.asin(2 * own / (1 + 2 * own)) for own in (a, b))
        assert float(found[i, j]) == pytest.approx(float(t), rel=1e-9)


def test_angles_by_products_are_angles_by_differences():
    """Inputs with a large shared part, equal ones and nearly equal ones among them."""
    x = 5 + drawn(40, 30)
    x[7], x[8] = 3 * x[2], x[2] * (1 + 1e-9 * drawn(30))
    unit = x / x.norm(dim=1, keepdim=True)
    expected = (unit[:, None] - unit).square().sum(-1) / 2
    found = infinite_width._half_squares(unit, unit)
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-31)
    assert float(found[2, 8]) > 1e-20
    other = infinite_width._half_squares(unit, -unit[:9])
    np.testing.assert_allclose(other, (unit[:, None] + unit[:9]).square().sum(-1) / 2, rtol=1e-13)


def test_many_inputs_come_in_blocks(monkeypatch: pytest.MonkeyPatch):
    x, x2 = drawn(23, 3), drawn(5, 3, seed=1)
    whole = infinite_width.ntk(x, x2, hidden_layers=2)
    monkeypatch.setattr(infinite_width, "BLOCK", 16)
    monkeypatch.setattr(infinite_width, "CHUNK_NUMBERS", 7)
    np.testing.assert_allclose(infinite_width.ntk(x, x2, hidden_layers=2), whole, rtol=1e-14)
    assert infinite_width.ntk(x, x2[:0], hidden_layers=2).shape == (23, 0)


def test_no_hidden_layer_is_linear_regression():
    x = drawn(3, 5)
    np.testing.assert_allclose(infinite_width.ntk(x, hidden_layers=0, weight_variance=1.0), x @ x.T / 5, rtol=1e-12)


BAD = {
    "images": lambda: infinite_width.ntk(torch.ones(2, 3, 4), hidden_layers=1),
    "other widths": lambda: infinite_width.ntk(torch.ones(2, 3), torch.ones(2, 4), hidden_layers=1),
    "half a layer": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=0.5),
    "no variance": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=1, weight_variance=0.0),
    "no features": lambda: infinite_width.ntk(torch.ones(2, 0), hidden_layers=1),
    "no inputs": lambda: infinite_width.ntk(torch.ones(0, 2), hidden_layers=1),
    "inputs of nan": lambda: infinite_width.ntk(torch.full((1, 2), math.nan), hidden_layers=1),
    "a variance in words": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=1, weight_variance="2"),
    "another activation": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=1, activation="gelu"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
