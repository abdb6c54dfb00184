"""Gaussian mixtures: how fast each output's kernel turns to each class, with gates that move and that do not."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import relu


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Mixture:
    """C orthonormal class centers, n samples each, C outputs; gates frozen at the start."""

    def __init__(self, classes: int, per_class: int, dimension: int, units: int, noise: float = 0.0) -> None:
        self.classes, self.per_class = classes, per_class
        self.centers = torch.linalg.qr(drawn(dimension, classes))[0].T
        self.x = self.centers.repeat_interleave(per_class, 0)
        self.x = self.x + noise * drawn(*self.x.shape, seed=5) / math.sqrt(dimension)
        self.y = torch.eye(classes, dtype=torch.float64).repeat_interleave(per_class, 0)
        self.W = drawn(units, dimension, seed=1) / math.sqrt(dimension)
        self.V = drawn(classes, units, seed=2) / math.sqrt(units)
        self.D = (self.x @ self.W.T > 0).double()
        self.center_gates = (self.centers @ self.W.T > 0).double()

    def center_outputs(self) -> Tensor:
        """(classes e, outputs c), as a model gives them."""
        return (self.center_gates * (self.centers @ self.W.T)) @ self.V.T

    def overlaps(self) -> Tensor:
        """sum_i D_i^d V_ci phi_i^e, axes c, d, e."""
        phi = self.center_gates * (self.centers @ self.W.T)
        return torch.einsum("di,ci,ei->cde", self.center_gates, self.V, phi)

    def sizes(self) -> tuple[Tensor, Tensor]:
        """y_d^T K_V y_d (C,) and y_d^T K_W^cc y_d (C, C)."""
        phi = self.D * (self.x @ self.W.T)
        readout = ((phi.T @ self.y) ** 2).sum(0)
        weighted = torch.einsum("mi,ci,ni->cmn", self.D, self.V.square(), self.D)
        hidden = torch.einsum("md,cmn,nd->cd", self.y, (self.x @ self.x.T) * weighted, self.y)
        return readout, hidden

    def step(self, size: float) -> None:
        phi = self.D * (self.x @ self.W.T)
        residual = self.y - phi @ self.V.T
        W = self.W + size * (self.D * (residual @ self.V)).T @ self.x
        self.V = self.V + size * residual.T @ phi
        self.W = W


def test_rates_without_noise_are_derivatives():
    """The factor 2 n^3 of the sheet; the print has n^2."""
    mixture, eta, h = Mixture(3, 4, 8, 50), 0.7, 1e-6
    f, Q = mixture.center_outputs(), mixture.overlaps()
    before = mixture.sizes()
    mixture.step(h * eta)
    after = mixture.sizes()
    readout, hidden = ((b - a) / h for a, b in zip(before, after, strict=True))
    np.testing.assert_allclose(relu.mixture_rates(f, 4, 1.0, eta, Q=Q), hidden, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(relu.mixture_readout_rates(f, 4, 1.0, eta), readout, rtol=1e-3, atol=1e-3)


def test_the_ansatz_is_that_of_the_overlaps():
    f = drawn(2, 4, 4, seed=3)
    outputs = f.mT[:, :, None, :]  # f_c(e), with axes c, d, e
    Q = outputs * (torch.ones(4, 4) + torch.eye(4)) / 2
    found, expected = relu.mixture_rates(f, 5, 0.8, 0.3), relu.mixture_rates(f, 5, 0.8, 0.3, Q=Q)
    assert found.shape == (2, 4, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    n, c, d = 5, 1, 3
    s = (torch.eye(4) - f[0]) * f[0]  # [e, c]
    by_hand = 2 * 0.3 * n * (n + 0.8 * n * (n - 1)) * (s[:, c].sum() / 2 + s[d, c] / 2)
    assert float(found[0, c, d]) == pytest.approx(float(by_hand), rel=1e-12)


def test_early_an_outputs_own_class_is_twice_as_fast():
    rates = relu.mixture_rates(1e-7 * torch.eye(5, dtype=torch.float64), 10)
    own = torch.eye(5, dtype=torch.bool)
    np.testing.assert_allclose(rates[own], 2 * 1e3 * 1e-7, rtol=1e-6)
    np.testing.assert_allclose(rates[~own], 1e3 * 1e-7, rtol=1e-6)


def test_a_wide_network_specializes_as_predicted():
    """Live gates, few flips: 5 % with measured overlaps, 25 % under the ansatz; ratio of growth .4 to .6."""
    C, n, N, M = 5, 4, 60, 3000
    mixture = Mixture(C, n, N, M, noise=0.05)
    model = nn.Sequential(nn.Linear(N, M, bias=False), nn.ReLU(), nn.Linear(M, C, bias=False)).double()
    model[0].weight.data, model[2].weight.data = mixture.W.clone(), mixture.V.clone()
    lr = 0.005
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    outputs, overlaps, kernels = [], [], []
    for step in range(61):
        arriving = model[0](mixture.centers).detach()
        outputs.append(model(mixture.centers).detach())
        overlaps.append(relu.ansatz((arriving > 0).double(), model[2].weight, torch.relu(arriving)).measured)
        if step in (0, 60):
            kernels.append(fl.ntk(model, mixture.x, by="layer", outputs="each"))
        optimizer.zero_grad()
        (model(mixture.x) - mixture.y).square().sum(1).mean().backward()
        optimizer.step()
    f, Q, geometry = torch.stack(outputs), torch.stack(overlaps), relu.mixture_geometry(0.05**2, N)
    given = (f, n, geometry.overlap, fl.dynamics.rate(lr, "mean", C * n))
    hidden, readout = (
        torch.einsum("md,cmn,nd->cd", mixture.y, (kernels[1][layer] - kernels[0][layer]).double(), mixture.y)
        for layer in ("0", "2")
    )
    exact = torch.trapezoid(relu.mixture_rates(*given, square_norm=geometry.square_norm, Q=Q), dim=0)
    assert float((hidden - exact).norm() / exact.norm()) < 0.05  # each gate that flips is a jump
    own = torch.eye(C, dtype=torch.bool)
    predicted = torch.trapezoid(relu.mixture_rates(*given, square_norm=geometry.square_norm), dim=0)
    assert float(hidden[own].mean() / predicted[own].mean()) == pytest.approx(1, abs=0.25)
    assert float(hidden[~own].mean() / predicted[~own].mean()) == pytest.approx(1, abs=0.25)
    assert 0.4 < float(hidden[~own].mean() / hidden[own].mean()) < 0.6
    along = torch.trapezoid(relu.mixture_readout_rates(*given, square_norm=geometry.square_norm), dim=0)
    np.testing.assert_allclose(readout, along.expand(C, C), rtol=0.02)  # the same for every output


def test_both_meanings_of_the_variance():
    total = relu.mixture_geometry(0.01, 1000)
    each = relu.mixture_geometry(0.01, 1000, variance_is="per-coordinate")
    assert (float(total.square_norm), float(total.overlap)) == (1.01, 1.0)
    assert (float(each.square_norm), float(each.overlap)) == (pytest.approx(11.0), 1.0)
    unit = relu.mixture_geometry(0.01, 1000, variance_is="per-coordinate", normalized=True)
    assert (float(unit.square_norm), float(unit.overlap)) == (1.0, pytest.approx(1 / 11))
    generator = torch.Generator().manual_seed(0)
    for geometry, size in ((total, 0.01 / 1000), (each, 0.01)):
        noise = math.sqrt(size) * torch.randn(200, 1000, dtype=torch.float64, generator=generator)
        x = noise + torch.eye(1000, dtype=torch.float64)[0]
        gram = x @ x.T
        off = ~torch.eye(200, dtype=torch.bool)
        for sample, value in ((gram.diagonal(), geometry.square_norm), (gram[off], geometry.overlap)):
            assert abs(float(sample.mean() - value)) < 5 * float(sample.std()) / math.sqrt(200)
    f = 0.1 * torch.eye(3, dtype=torch.float64)
    ratio = relu.mixture_rates(f, 50, *each[1:], square_norm=each.square_norm) / relu.mixture_rates(f, 50)
    np.testing.assert_allclose(ratio, (11 + 49) / 50, rtol=1e-12)
