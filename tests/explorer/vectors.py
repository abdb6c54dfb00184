"""Test vectors for the mathematics of the explorer, written by `featlearn.theory`: a call, and what it must return."""

import itertools
import math
from typing import Any

import torch

import featlearn as fl
from featlearn.theory import deep_linear, early, infinite_width, latent, ofe, phases, relu, transfer

Vector = dict[str, Any]


def vectors() -> list[Vector]:
    """All of them; `call` is [module, function] of `mathematics`, `expected` any part of what it returns."""
    parts = (
        deep_linear_vectors,
        latent_vectors,
        phase_vectors,
        ofe_vectors,
        transfer_vectors,
        early_vectors,
        relu_vectors,
    )
    return [vector for part in parts for vector in part()]


def vector(module: str, function: str, arguments: list[Any], expected: Any) -> Vector:
    return {"call": [module, function], "arguments": _plain(arguments), "expected": _plain(expected)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def times(end: float, count: int = 9) -> torch.Tensor:
    return torch.linspace(0, end, count, dtype=torch.float64)


# ---- deep linear networks


def deep_linear_vectors() -> list[Vector]:
    found = []
    for s, sigma, layers in itertools.product((1.0, 0.4), (0.05, 0.3, 0.9), (2, 3, 4, 5)):
        c0 = sigma**layers
        half = float(deep_linear.half_time(s, c0, layers))
        asked = times(2 * half if half > 0 else 3.0)
        path = deep_linear.strength(asked, s, c0, layers)
        found.append(vector("deepLinear", "strength", [asked, s, c0, layers], path))
        if half > 0:
            found.append(vector("deepLinear", "halfTime", [s, c0, layers], half))
    for q0, r0, s in ((0.01, 0.004, 1.0), (1e-4, -5e-5, 0.5), (0.3, 0.0, 2.0), (1e-6, 1e-6, 1.0)):
        q, r = deep_linear.two_layer(times(8.0), q0, r0, s)
        found.append(vector("deepLinear", "twoLayer", [times(8.0), q0, r0, s], {"q": q, "r": r}))
    for sigma, D, N in itertools.product((0.01, 0.2), (8, 16), (24, 50)):
        mean = deep_linear.initial_statistics(sigma, D, N).mean_q0
        found.append(vector("deepLinear", "meanStart", [sigma, D, N], mean))
        path = typical_start(sigma, D, N, times(6.0))
        expected = {
            "strength": path.strength.T,
            "loss": path.loss,
            "alignment": path.alignment,
            "norm": path.kernel_norm,
        }
        found.append(vector("deepLinear", "typicalPath", [times(6.0), [1.0], sigma, D, N], expected))
    for sigma, layers, s in itertools.product((0.1, 0.3), (2, 3, 4), ([1.0], [1.0, 0.5], [1.0, 0.6, 0.36])):
        D = 12
        asked = times(3 * float(deep_linear.half_time(1.0, sigma**layers, layers)))
        X, Y = whitened_task(D, s)
        path = deep_linear.solve(X, Y, times=asked, c0=sigma**layers, weight_layers=layers, rate=1 / D)
        expected = {
            "strength": path.strength.T,
            "loss": path.loss,
            "alignment": path.alignment,
            "norm": path.kernel_norm,
        }
        found.append(vector("deepLinear", "balancedPath", [asked, s, sigma, D, layers], expected))
    return found


def whitened_task(D: int, s: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """D samples along the axes, and a teacher with singular values s."""
    X = D**0.5 * torch.eye(D, dtype=torch.float64)
    v = torch.linalg.qr(normal(D, len(s), seed=D))[0]
    return X, X @ v * torch.tensor(s, dtype=torch.float64)


def typical_start(sigma: float, D: int, N: int, asked: torch.Tensor) -> deep_linear.LinearPath:
    """Two layers whose weights have exactly the averages of random ones: W^T W = sigma^2 N / D, a across all of W."""
    X, Y = whitened_task(D, [1.0])
    eye = torch.eye(N, dtype=torch.float64)
    W0, a0 = sigma * (N / D) ** 0.5 * eye[:, :D], sigma * eye[D]
    return deep_linear.silent_alignment(X, Y[:, 0], W0, a0, times=asked, rate=1 / D)


# ---- the latent-variable model


def latent_vectors() -> list[Vector]:
    found = []
    for seed in range(40):
        u, v, other = normal(2, seed=seed), normal(2, seed=100 + seed), normal(5, seed=200 + seed)
        scale, rho = float(other[0]), float(other[1].abs() + 0.2)
        y, rate_u, rate_w = float(other[2] * 2), float(other[3].exp()), float(other[4].exp())
        W = (v / rho)[:, None]
        asked = times(3.0 / (1 + abs(scale)))
        path = latent.solve(
            u, W, torch.tensor([rho], dtype=torch.float64), y, times=asked, scale=scale, rate_u=rate_u, rate_w=rate_w
        )
        expected = {
            "output": path.output,
            "loss": path.loss,
            "ntk": path.ntk,
            "layerAlignment": path.layer_alignment,
            "normU": path.norms.u,
            "normWx": path.norms.Wx,
            "timeScale": path.time_scale,
            "featureShare": path.feature_share,
            "finalKernel": path.final.ntk,
            "mechanism": str(path.mechanism),
        }
        found.append(vector("latent", "solve", [u, v, rho, y, asked, scale, rate_u, rate_w], expected))
    for u, v, y in (([3.0, 0.0], [-3.0, 0.0], 2.0), ([3.0, 0.0], [3.0, 0.0], 2.0), ([3.0, 0.0], [3.0, 0.0], -2.0)):
        # layers that are opposite or parallel and balanced: into the saddle, or only stretched
        W = torch.tensor(v, dtype=torch.float64)[:, None]
        one, asked = torch.ones(1, dtype=torch.float64), torch.tensor([0.0, 0.1, 1.0, 500.0], dtype=torch.float64)
        path = latent.solve(torch.tensor(u, dtype=torch.float64), W, one, y, times=asked, scale=0.7)
        expected = {"output": path.output, "loss": path.loss, "ntk": path.ntk, "mechanism": str(path.mechanism)}
        found.append(vector("latent", "solve", [u, v, 1.0, y, asked, 0.7, 1.0, 1.0], expected))
    return found


def phase_vectors() -> list[Vector]:
    found = []
    for column in phases.TABLE_1.values():
        for cell in column:
            c = cell.exponents
            given = {"d": c.d, "gamma": c.gamma, "u": c.u, "w": c.w, "rate": c.rate}
            found.append(vector("latent", "classify", [given], str(cell.phase)))
            found.append(vector("latent", "featureTerm", [given], c.feature_term))
            found.append(vector("latent", "kernelTerm", [given], c.kernel_term))
    for gamma, rate in itertools.product((-1.0, -0.5, 0.0, 1.0), (-2.0, -1.0, 0.0, 1.0)):
        given = {"d": 1, "gamma": gamma, "u": 0, "w": -1, "rate": rate}
        phase = phases.classify(phases.Exponents(1, gamma, 0, -1, rate, rate))
        found.append(vector("latent", "classify", [given], str(phase)))
    return found


def table_1() -> dict[str, Any]:
    """What TABLE_1 of the page must hold."""
    return {
        name: {
            key: {"d": c.d, "gamma": c.gamma, "u": c.u, "w": c.w, "rate": c.rate}
            for key, c in ((key, cell.exponents) for key, cell in column._asdict().items())
        }
        for name, column in phases.TABLE_1.items()
    }


# ---- optimal feature evolution


def ofe_vectors() -> list[Vector]:
    found = []
    for seed, P in ((0, 5), (1, 8), (2, 12)):
        features, y = normal(P, 2 * P, seed=seed), normal(P, seed=50 + seed)
        K0 = features @ features.T / P + 3 * torch.ones(P, P, dtype=torch.float64) / P
        star = float(ofe.threshold(K0, y))
        start = {"basis": [K0, y]}
        found.append(vector("ofe", "threshold", [start], star))
        for share in (0.1, 0.5, 2.0, 8.0):
            gamma = share * star
            path = ofe.solve(K0, y, gamma, times(4.0), rate=0.7)
            spikes = ofe.spike(K0, y, gamma)
            expected = {
                "loss": path.loss,
                "alignment": path.alignment,
                "norm": path.kernel_norm,
                "eigenvalues": spikes.eigenvalues,
                "overlaps": spikes.overlaps,
            }
            found.append(vector("ofe", "solve", [K0, y, gamma, times(4.0), 0.7, start], expected))
            found.append(vector("ofe", "topOverlap", [start, gamma], ofe.top_overlap(K0, y, gamma)))
            found.append(vector("ofe", "finalAlignment", [K0, y, gamma], ofe.final_alignment(K0, y, gamma)))
            K1 = ofe.final_kernel(K0, y, gamma)
            found.append(vector("ofe", "finalKernel", [K0, y, gamma], K1))
            found.append(vector("ofe", "featureRate", [K0, K1, y], fl.metrics.feature_rate(K0, K1, y)))
        x = normal(P, 3, seed=90 + seed)
        found.append(vector("ofe", "infiniteWidthKernel", [x], infinite_width.ntk(x, hidden_layers=1)))
    return found


# ---- transfer


def transfer_vectors() -> list[Vector]:
    found = []
    for spike, overlap, ridge, noise in itertools.product((0.0, 3.0, 30.0), (0.0, 0.7, 1.0), (0.0, 0.5), (0.0, 0.2)):
        for samples in (5.0, 30.0, 90.0):
            curve = transfer.learning_curve(samples, 40, spike, overlap, ridge, noise)
            expected = {
                "error": curve.error,
                "effectiveRidge": curve.effective_ridge,
                "varianceShare": curve.variance_share,
            }
            found.append(vector("transfer", "learningCurve", [samples, 40, spike, overlap, ridge, noise], expected))
    return found


# ---- early features


def early_vectors() -> list[Vector]:
    found = []
    for n, d, width in ((9, 4, 6), (14, 7, 20)):
        X, y = normal(n, d, seed=n), normal(n, seed=d)
        for activation, hidden in itertools.product(("relu", "quadratic"), (1, 2)):
            variances = [*[1 / d, 1 / width, 1 / width][:hidden], 0.5]
            ptk = early.expected_ptk(X, width, activation, hidden, variances)
            found.append(vector("early", "expectedPtk", [X, width, activation, hidden, variances], ptk))
            found.append(vector("early", "derivativeCorrelation", [X, y, ptk], early.derivative_correlation(X, y, ptk)))
        A, B = early.data_matrices(X, y)
        found.append(vector("early", "dataMatrices", [X, y], {"A": A, "B": B}))
        moments = early.quadratic_moments(width, d, 4)
        found.append(vector("early", "quadraticMoments", [width, d], moments))
        found.append(
            vector("early", "freeProbability", [A, B, moments], early.free_probability(A, B, moments).correlation)
        )
    return found


# ---- ReLU networks


def relu_vectors() -> list[Vector]:
    found = []
    for seed, P in ((0, 4), (1, 6), (2, 7)):
        y, f = normal(P, seed=seed), normal(P, seed=10 + seed)
        rates = relu.growth_rates(y, f, 0.3)
        expected = {
            "readoutTask": rates.readout_task,
            "readoutMean": rates.readout_mean,
            "hiddenTask": rates.hidden_task,
            "hiddenMean": rates.hidden_mean,
        }
        found.append(vector("relu", "growthRates", [y, f, 0.3], expected))
        features = normal(P, 20, seed=20 + seed).relu()
        K_V, K_W = features @ features.T / 20, torch.diag(torch.rand(P, dtype=torch.float64) + 0.1)
        K_W[0, 1] = K_W[1, 0] = 0.05
        path = relu.solve(K_V, K_W, y, times=times(5.0), rate=0.3)
        expected = {
            "loss": path.loss,
            "readoutTask": path.readout_task,
            "readoutMean": path.readout_mean,
            "hiddenTask": path.hidden_task,
            "hiddenMean": path.hidden_mean,
            "alignment": path.alignment,
        }
        found.append(vector("relu", "solve", [K_V, K_W, y, times(5.0), 0.3], expected))
        classes = 2 + seed
        outputs = normal(classes, classes, seed=30 + seed)
        found.append(
            vector(
                "relu",
                "mixtureRates",
                [outputs, 3 + seed, 0.8, 0.3, 1.1],
                relu.mixture_rates(outputs, 3 + seed, 0.8, 0.3, square_norm=1.1),
            )
        )
    return found


def random_numbers(seed: int, count: int) -> list[float]:
    """The numbers of `random.mjs`, in Python."""
    state, found = 1 + seed * 7919 % 2147483646, []

    def uniform() -> float:
        nonlocal state
        state = 48271 * state % 2147483647
        return state / 2147483647

    for _ in range(8):
        uniform()
    for _ in range(count):
        radius = math.sqrt(-2 * math.log(uniform()))
        found.append(radius * math.cos(2 * math.pi * uniform()))
    return found
