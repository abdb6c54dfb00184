"""Infinitely wide networks against the Gaussian integrals of their definition, by quadrature, layer after layer."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import scipy.special
import torch

import featlearn as fl

CLOSE = 1e-8
Integrals = Callable[[mpmath.mpf, mpmath.mpf, mpmath.mpf], tuple[mpmath.mpf, mpmath.mpf]]


def by_angle(a: mpmath.mpf, b: mpmath.mpf, covariance: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
    """E[phi phi], E[phi' phi'] for relu: the plane in polar coordinates, the angle by quadrature.

    With u = sqrt(a) r cos(t) and v = sqrt(b) r cos(t - s), r^2 / 2 exponential and t uniform, both are positive for t
    from s - pi/2 to pi/2.
    """
    size = mpmath.sqrt(a * b)
    if size == 0:
        return mpmath.mpf(0), mpmath.mpf(0)  # what multiplies the second is 0
    angle = mpmath.acos(max(min(covariance / size, mpmath.mpf(1)), mpmath.mpf(-1)))
    ends = [angle - mpmath.pi / 2, mpmath.pi / 2]
    product = mpmath.quad(lambda t: mpmath.cos(t) * mpmath.cos(t - angle), ends) if ends[0] < ends[1] else 0
    # E[r^2] = 2
    return size * 2 * product / (2 * mpmath.pi), (mpmath.pi - angle) / (2 * mpmath.pi)


def by_grid(a: mpmath.mpf, b: mpmath.mpf, covariance: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
    """E[erf erf], E[erf' erf'] by the trapezoidal rule, which converges exponentially for such functions."""
    step = 0.06
    z = np.arange(-8.4, 8.4 + step / 2, step)
    weight = np.exp(-(z**2) / 2) * step / math.sqrt(2 * math.pi)
    along = float(covariance / mpmath.sqrt(a)) if a else 0.0
    across = math.sqrt(max(float(b) - along**2, 0.0))
    u, v = math.sqrt(a) * z[:, None], along * z[:, None] + across * z[None, :]
    both = weight[:, None] * weight[None, :]
    slopes = 4 / math.pi * np.exp(-(u**2) - v**2)
    moment = float((both * scipy.special.erf(u) * scipy.special.erf(v)).sum())
    return mpmath.mpf(moment), mpmath.mpf(float((both * slopes).sum()))


def by_moments(a: mpmath.mpf, b: mpmath.mpf, covariance: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
    """E[u v], E[1 1]"""
    return covariance, mpmath.mpf(1)


INTEGRALS: dict[str, Integrals] = {"relu": by_angle, "erf": by_grid, "linear": by_moments}


def recursion(
    x: np.ndarray, x2: np.ndarray, layers: int, activation: str, variance: float
) -> list[tuple[float, float]]:
    """(S, T) of one pair of inputs for 0 to `layers` hidden layers (sheet 2.27), with 40 digits."""
    integral = INTEGRALS[activation]
    with mpmath.workdps(40):
        pairs = ((x, x), (x2, x2), (x, x2))
        a, b, s = (variance * mpmath.fdot(p.tolist(), q.tolist()) / len(x) for p, q in pairs)
        t, found = s, [(float(s), float(s))]
        for _ in range(layers):
            moment, slope = integral(a, b, s)
            a, b = (variance * integral(own, own, own)[0] for own in (a, b))
            s, t = variance * moment, variance * moment + variance * slope * t
            found.append((float(s), float(t)))
    return found


def probes(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three inputs against four: one at a general angle, a parallel, an opposite and a zero one among them."""
    x = random.normal(size=(3, 4)) * np.array([[1.0], [0.3], [2.0]])
    x[2] = 0
    x2 = np.stack([random.normal(size=4), 4 * x[0], -x[1] / 2, np.zeros(4)])
    return x, x2


@pytest.mark.parametrize("variance", [2.0, 0.7])
@pytest.mark.parametrize("activation", ["relu", "erf", "linear"])
def test_kernels_are_gaussian_integrals_of_gaussian_integrals(activation: str, variance: float):
    random = np.random.default_rng([20240713, int(10 * variance)])
    x, x2 = probes(random)
    depth = 5
    expected = np.array([[recursion(p, q, depth, activation, variance) for q in x2] for p in x])
    given = torch.from_numpy(x), torch.from_numpy(x2)
    for layers in range(depth + 1):
        common = {"hidden_layers": layers, "activation": activation, "weight_variance": variance}
        covariance, tangent = (
            fl.theory.infinite_width.nngp(*given, **common),
            fl.theory.infinite_width.ntk(*given, **common),
        )
        assert covariance.dtype == tangent.dtype == torch.float64
        np.testing.assert_allclose(covariance, expected[:, :, layers, 0], rtol=CLOSE, atol=CLOSE)
        np.testing.assert_allclose(tangent, expected[:, :, layers, 1], rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("angle", [1e-6, 1e-3, 0.03, 0.049, 0.051, 0.2, 1.5, 3.0])
def test_relu_kernels_keep_all_digits_at_every_angle(angle: float):
    x, x2 = np.array([1.0, 0.0]), np.array([math.cos(angle), math.sin(angle)])
    expected = recursion(x, x2, 4, "relu", 2.0)
    for layers in range(1, 5):
        given = torch.from_numpy(x[None]), torch.from_numpy(x2[None])
        covariance = float(fl.theory.infinite_width.nngp(*given, hidden_layers=layers))
        tangent = float(fl.theory.infinite_width.ntk(*given, hidden_layers=layers))
        assert (covariance, tangent) == pytest.approx(expected[layers], rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("activation", ["relu", "erf", "linear"])
def test_one_probe_is_two_equal_ones(activation: str):
    x = torch.from_numpy(np.random.default_rng(20240714).normal(size=(6, 3)))
    for layers in range(6):
        common = {"hidden_layers": layers, "activation": activation, "weight_variance": 1.3}
        one = fl.theory.infinite_width.ntk(x, **common)
        assert torch.equal(one, fl.theory.infinite_width.ntk(x, x.clone(), **common))
        torch.testing.assert_close(one, one.T, rtol=1e-13, atol=1e-13)
        assert float(torch.linalg.eigvalsh(one)[0]) > -1e-12
        mixed = fl.theory.infinite_width.ntk(x.float(), x[:2].float(), **common)
        assert mixed.dtype == torch.float64
        rounded = x.float().double()
        torch.testing.assert_close(mixed, fl.theory.infinite_width.ntk(rounded, rounded[:2], **common), rtol=0, atol=0)


def test_relu_kernels_are_homogeneous_in_their_inputs():
    """Of degree one in each, whatever the sizes: pixels in 0 to 255 and inputs of 1e-6 alike."""
    x = torch.from_numpy(np.random.default_rng(20240715).normal(size=(4, 5)))
    for layers in (1, 3, 5):
        unit = fl.theory.infinite_width.ntk(x, hidden_layers=layers)
        scaled = fl.theory.infinite_width.ntk(255 * x, 1e-6 * x, hidden_layers=layers)
        torch.testing.assert_close(scaled / 255e-6, unit, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_sampled_networks_scatter_about_the_covariance(activation: str):
    """One hidden layer, 4e5 units at once: the mean of products of activations, with its standard error."""
    random = np.random.default_rng([20240716, len(activation)])
    x = random.normal(size=(4, 3))
    weights = random.normal(size=(400_000, 3)) * math.sqrt(1.5 / 3)
    hidden = weights @ x.T
    hidden = np.maximum(hidden, 0) if activation == "relu" else scipy.special.erf(hidden)
    products = 1.5 * hidden[:, :, None] * hidden[:, None, :]
    error = products.std(0) / math.sqrt(len(weights))
    given = fl.theory.infinite_width.nngp(
        torch.from_numpy(x), hidden_layers=1, activation=activation, weight_variance=1.5
    )
    assert np.all(np.abs(products.mean(0) - given.numpy()) < 4.5 * error)
