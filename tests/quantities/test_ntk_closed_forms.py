"""Tangent kernels that are known by formula: the second, independent reference."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_linear_layer_has_the_input_gram():
    x, x2 = gaussian(5, 3), gaussian(4, 3, seed=1)
    model = nn.Linear(3, 2).double()
    torch.testing.assert_close(fl.ntk(model, x, x2=x2, by="parameter")["weight"], x @ x2.T)
    torch.testing.assert_close(fl.ntk(model, x, x2=x2), x @ x2.T + 1)


class DeepLinear(nn.Module):
    """f = W_L ... W_1 x without biases."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))
        for i, layer in enumerate(self.layers):
            layer.weight.data = gaussian(*layer.weight.shape, seed=i)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_deep_linear_network_has_a_sum_over_layers():
    """K_cc'(x, x') = sum_l (A_l A_l^T)_cc' (B_l x) . (B_l x'): what is above the layer, what is below it."""
    model, x, x2 = DeepLinear(4, 6, 3, 5, 2), gaussian(5, 4), gaussian(3, 4, seed=9)
    weights = [layer.weight.detach() for layer in model.layers]
    expected: dict[str, Tensor] = {}
    for depth in range(len(weights)):
        above, below = torch.eye(2, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
        for weight in reversed(weights[depth + 1 :]):
            above = above @ weight
        for weight in weights[:depth]:
            below = weight @ below
        gram = (x @ below.T) @ (x2 @ below.T).T
        expected[f"layers.{depth}"] = torch.einsum("pq,cd->pqcd", gram, above @ above.T)
    kernels = fl.ntk(model, x, x2=x2, outputs="full", by="layer")
    assert list(kernels) == list(expected)
    for name, kernel in expected.items():
        torch.testing.assert_close(kernels[name], kernel)


def test_a_balanced_deep_linear_network():
    """002 Eq. 58 corrected: K = u^(2L-2) x^T [(L-1) r r^T + I] x' for W_l = u r_(l+1) r_l^T (sheet 2.11)."""
    depth, u, x, x2 = 4, 0.7, gaussian(5, 3), gaussian(6, 3, seed=3)
    model = DeepLinear(3, 6, 4, 5, 1)
    directions = [gaussian(n, seed=20 + n) for n in (3, 6, 4, 5)]
    directions = [r / r.norm() for r in directions] + [torch.ones(1, dtype=torch.float64)]
    for i, layer in enumerate(model.layers):
        layer.weight.data = u * torch.outer(directions[i + 1], directions[i])
    r = directions[0]
    inside = (depth - 1) * torch.outer(r, r) + torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(fl.ntk(model, x, x2=x2), u ** (2 * depth - 2) * x @ inside @ x2.T)


def test_a_two_layer_relu_network():
    """K = phi(h) phi(h)^T + (a phi'(h)) (a phi'(h))^T x x^T: the K_V and K_W of 000 and 001."""
    x, x2, width = gaussian(5, 3), gaussian(4, 3, seed=1), 7
    hidden, readout = nn.Linear(3, width, bias=False), nn.Linear(width, 1, bias=False)
    model = nn.Sequential(hidden, nn.ReLU(), readout).double()
    h, h2 = (part @ hidden.weight.detach().T for part in (x, x2))
    a = readout.weight.detach()[0]
    readout_part = h.relu() @ h2.relu().T
    hidden_part = ((h > 0) * a) @ ((h2 > 0) * a).T * (x @ x2.T)
    kernels = fl.ntk(model, x, x2=x2, by="layer")
    torch.testing.assert_close(kernels["2"], readout_part)
    torch.testing.assert_close(kernels["0"], hidden_part)


def test_a_convolution_sums_over_pairs_of_positions():
    """One output channel, sum over positions: the gradient of the kernel is the sum of all patches."""
    x, model = gaussian(4, 2, 5, 6), nn.Conv2d(2, 1, 3, padding=1, stride=2).double()
    patches = nn.functional.unfold(x, 3, padding=1, stride=2).sum(-1)
    positions = 3 * 3
    kernel = fl.ntk(model, x, readout=lambda out: out.sum((1, 2, 3)))
    torch.testing.assert_close(kernel, patches @ patches.T + positions**2)


def test_an_embedding_counts_common_tokens():
    ids, ids2 = torch.tensor([[0, 1, 1], [2, 2, 2], [1, 0, 3]]), torch.tensor([[1, 1, 1], [4, 2, 0]])
    model = nn.Embedding(5, 6).double()
    counts, counts2 = (nn.functional.one_hot(part, 5).sum(1).double() for part in (ids, ids2))
    kernel = fl.ntk(model, ids, x2=ids2, readout=lambda out: out.sum((1, 2)))
    torch.testing.assert_close(kernel, 6 * counts @ counts2.T)


class NeuralTangentNetwork(nn.Module):
    """NTK parametrization: weights N(0, 1); each layer after the first divides by the root of half its fan-in."""

    def __init__(self, inputs: int, width: int, hidden_layers: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = [inputs, *[width] * hidden_layers, 1]
        self.weights = nn.ParameterList(
            torch.randn(fan_out, fan_in, dtype=torch.float64, generator=generator)
            for fan_in, fan_out in itertools.pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.weights
        h = x @ first.T
        for weight in others:
            h = h.relu() @ weight.T * (2 / weight.shape[1]) ** 0.5
        return h


@pytest.mark.parametrize(("hidden_layers", "diagonal", "off"), [(1, 2.0, 0.9423311144), (2, 3.0, 1.3514795611)])
def test_a_wide_relu_network_approaches_its_limit(hidden_layers: int, diagonal: float, off: float):
    """Infinite-width values of two inputs of covariance [[1, 0.5], [0.5, 1]], weight variance 2 (sheet, relu_ntk)."""
    x = torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    networks = [NeuralTangentNetwork(2, 1000, hidden_layers, generator) for _ in range(16)]
    kernels = torch.stack([fl.ntk(network, x) for network in networks])
    error = kernels.std(0) / len(kernels) ** 0.5
    expected = torch.tensor([[diagonal, off], [off, diagonal]], dtype=torch.float64)
    assert float(error.max()) < 0.1
    assert float(((kernels.mean(0) - expected).abs() / error).max()) < 4


def test_the_final_kernel_of_a_two_layer_linear_network_has_the_reference_value():
    """000 Eq. 12 to 14 corrected (sheet 2.10), f = V^T W x / N with N^-1 W^T V = s and nothing orthogonal to V."""
    V, s = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    model = DeepLinear(2, 2, 1)
    model.layers[0].weight.data = 2 * torch.outer(V, s) / V.square().sum()
    model.layers[1].weight.data = V[None]
    expected = [[1.45, -0.2, 1.05], [-0.2, 1.45, 2.7], [1.05, 2.7, 6.45]]
    kernel = fl.ntk(model, x, readout=lambda out: out / 2)
    torch.testing.assert_close(kernel, torch.tensor(expected, dtype=torch.float64))


def test_the_final_kernel_of_a_deep_linear_network_has_the_reference_value():
    """002 Eq. 63 corrected (sheet 2.11, deep_linear_final): three weight layers, s = 2, u^3 = s."""
    beta = torch.tensor([0.6, 0.8], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.5, -1.0]], dtype=torch.float64)
    model = DeepLinear(2, 4, 3, 1)
    directions = [beta, *(nn.functional.normalize(gaussian(n, seed=n), dim=0) for n in (4, 3)), torch.ones(1).double()]
    for i, layer in enumerate(model.layers):
        layer.weight.data = 2 ** (1 / 3) * torch.outer(directions[i + 1], directions[i])
    expected = [
        [4.334128411638364, 4.838096831596313, -0.2519842099789744],
        [4.838096831596313, 22.98095995008249, -9.071431559243088],
        [-0.2519842099789744, -9.071431559243088, 4.4097236746320565],
    ]
    torch.testing.assert_close(fl.ntk(model, x), torch.tensor(expected, dtype=torch.float64))
