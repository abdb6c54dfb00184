"""Infinite-width kernels against reference values, Gaussian quadrature, wide networks and extreme inputs."""

import math

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

    kernels = torch.stack([fl.ntk(Network(), x, x2) for _ in range(24)])
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


def test_no_hidden_layer_is_linear_regression():
    x = drawn(3, 5)
    np.testing.assert_allclose(infinite_width.ntk(x, hidden_layers=0, weight_variance=1.0), x @ x.T / 5, rtol=1e-12)


BAD = {
    "images": lambda: infinite_width.ntk(torch.ones(2, 3, 4), hidden_layers=1),
    "other widths": lambda: infinite_width.ntk(torch.ones(2, 3), torch.ones(2, 4), hidden_layers=1),
    "half a layer": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=0.5),
    "no variance": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=1, weight_variance=0.0),
    "another activation": lambda: infinite_width.ntk(torch.ones(2, 3), hidden_layers=1, activation="gelu"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str):
    with pytest.raises(fl.FeatlearnError, match="expected"):
        BAD[name]()
