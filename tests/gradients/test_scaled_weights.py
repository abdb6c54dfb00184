"""Weights that are a parameter times a number, as in NTK and mean-field layers, are contracted as the parameter is."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import featlearn as fl

P, D, N, C = 7, 5, 6, 3


class Scaled(nn.Module):
    """Two layers whose weights are used in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(N, D, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(N, N, generator=generator, dtype=torch.float64))
        self.read = nn.Parameter(torch.randn(C, N, generator=generator, dtype=torch.float64))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "product":
            return functional.linear(self._hidden(x, 0.3 * self.first), self.second[:C] * -1.7)
        if self.way == "quotient":
            return functional.linear(self._hidden(x, self.first / 4), -self.read / 3)
        if self.way == "transposed":
            h = torch.tanh(x @ (self.first.T * 2.5))
            return functional.linear(h @ (0.5 * self.second).T / 1.5, self.read)
        if self.way == "twice":  # with other numbers, once transposed
            h = torch.tanh(functional.linear(self._hidden(x, self.first), 0.5 * self.second))
            return functional.linear(h @ (self.second * 3.0), self.read)
        h = functional.linear(self._hidden(x, self.first), self.second * torch.linspace(1, 2, N).double())
        return functional.linear(h, self.read / self.read.norm())

    def _hidden(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(functional.linear(x, weight))


def dense_kernels(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One backward pass for every output of every sample; mean over outputs."""
    f = model(x)
    kernels = {}
    for name, parameter in model.named_parameters():
        rows = [
            torch.autograd.grad(f[i, c], parameter, retain_graph=True, allow_unused=True)[0]
            for i in range(P)
            for c in range(C)
        ]
        J = torch.stack([torch.zeros_like(parameter) if row is None else row for row in rows]).reshape(P, C, -1)
        kernels[name] = torch.einsum("pcn,qcn->pq", J, J) / C
    return kernels


@pytest.mark.parametrize("way", ["product", "quotient", "transposed", "twice", "computed"])
def test_kernels_are_exact(way: str):
    model = Scaled(way)
    x = torch.randn(P, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = fl.ntk(model, x, by="parameter")
    for name, expected in dense_kernels(model, x).items():
        assert torch.allclose(found[name], expected, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("way", ["quotient", "transposed", "twice"])
def test_nothing_is_formed(way: str):
    model = Scaled(way)
    plan = str(fl.plan(model, torch.zeros(P, D, dtype=torch.float64)))
    assert "pulled back" not in plan


def test_weights_times_other_numbers_are_pulled_back():
    plan = str(fl.plan(Scaled("computed"), torch.zeros(P, D, dtype=torch.float64)))
    assert plan.count("pulled back") == 2


def test_features_are_those_of_the_scaled_weight():
    """NFM of a layer W / 4 is that of the matrix which multiplies its inputs."""
    x = torch.randn(P, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layer = nn.Linear(D, N, bias=False).double()
    plain = nn.Sequential(layer, nn.Tanh(), nn.Linear(N, C).double())
    divided = nn.Sequential(Divided(layer.weight.detach() * 4), nn.Tanh(), plain[2])
    expected, found = (fl.neural_features(model, x) for model in (plain, divided))
    for name in ("nfm", "agop"):
        one, other = getattr(found["0"], name), getattr(expected["0"], name)
        assert torch.allclose(one, other, rtol=1e-10), name


class Divided(nn.Module):
    """A layer with the weight W / 4."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight / 4)
