"""The networks of the page against PyTorch: the same weights, steps by autograd, kernels by `fl.ntk`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.theory import transfer
from tests.explorer.vectors import random_numbers

NODE = shutil.which("node")
HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")

STEPS = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "silent": {
        "inputs": 6,
        "width": 9,
        "layers": 3,
        "modes": [1.0, 0.5],
        "sigma": 0.7,
        "spread": 0.8,
        "rate": 0.1,
        "end": 9,
        "seed": 3,
        "start": "random",
    },
    "mechanism": {
        "scale": 0.3,
        "rateU": 0.05,
        "rateW": 0.02,
        "normU": 2.0,
        "normV": 1.5,
        "zeta": 0.4,
        "target": 1.7,
        "width": 11,
        "activation": "relu",
        "off": 0.3,
        "end": 9,
        "seed": 4,
    },
    "rich": {"flips": 3, "width": 13, "richness": 4.0, "rate": 0.1, "end": 9, "threshold": 0.02, "seed": 5},
    "growth": {
        "samples": 6,
        "size": 1.2,
        "ratio": 1.5,
        "width": 17,
        "rate": 0.05,
        "end": 9,
        "perClass": 2,
        "noise": 0.4,
        "seed": 6,
    },
    "features": {
        "decay": 1.3,
        "width": 10,
        "hidden": 2,
        "activation": "quadratic",
        "size": 0.5,
        "optimizer": "descent",
        "speed": 1,
        "rate": 0.02,
        "end": 9,
        "seed": 7,
    },
    "transfer": {
        "dimension": 7,
        "spike": 2.0,
        "overlap": 0.6,
        "ridge": 0.3,
        "noise": 0.1,
        "samples": 5,
        "sizes": [],
        "descent": 100000,
        "draws": 40,
        "seed": 8,
    },
}


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, Any]]:
    asked = [{"topic": topic, "setting": one, "steps": STEPS} for topic, one in SETTINGS.items()]
    slo = SETTINGS["features"] | {"optimizer": "slo", "speed": 20.0, "activation": "relu", "hidden": 1}
    done = subprocess.run(
        [str(NODE), str(HERE / "networks.mjs")],
        text=True,
        capture_output=True,
        check=True,
        input=json.dumps([*asked, {"topic": "features", "setting": slo, "steps": STEPS}]),
        timeout=120,
    )
    return dict(zip([*SETTINGS, "slo"], json.loads(done.stdout), strict=True))


def tensor(values: Any, *shape: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(*shape)


def points(part: dict[str, Any]) -> dict[tuple[str, int], float]:
    return {(one["chart"], one["series"]): one["y"] for one in part["points"]}


def close(given: Any, expected: Any) -> None:
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (given, expected))
    torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


class Squares(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.square()


def network(weights: list[Tensor], activation: type[nn.Module]) -> nn.Sequential:
    parts: list[nn.Module] = []
    for weight in weights:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        parts += [layer, activation()]
    return nn.Sequential(*parts[:-1])


def descend(model: nn.Module, loss: Any, rates: list[float], steps: int = STEPS) -> None:
    """Plain gradient descent, one rate for each parameter."""
    for _ in range(steps):
        gradients = torch.autograd.grad(loss(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient, rate in zip(model.parameters(), gradients, rates, strict=True):
                parameter -= rate * gradient


def test_a_deep_linear_network(trained: dict[str, Any]):
    run, (D, N, C) = trained["silent"], (6, 9, 2)
    variances = torch.arange(1, D + 1, dtype=torch.float64) ** -0.8
    X = (D * variances / variances.mean()).sqrt().diag()
    index = torch.arange(D, dtype=torch.float64) + 0.5
    v = torch.stack([torch.full_like(index, D**-0.5), (2 / D) ** 0.5 * (torch.pi * index / D).cos()])
    Y = X @ (torch.tensor([[1.0], [0.5]]) * v).T
    shapes = [(N, D), (N, N), (C, N)]
    model = network([tensor(run["before"]["weights"][f"layer{l}"], *shapes[l]) for l in range(3)], nn.Identity)
    descend(model, lambda: (model(X) - Y).square().sum() / (2 * D), [0.1] * 3)
    for l in range(3):
        close(run["after"]["weights"][f"layer{l}"], model[2 * l].weight.detach().flatten())
    found, K = points(run["after"]), fl.ntk(model, X, dtype=torch.float64)
    close(found["alignment", 0], fl.metrics.alignment(K, Y))
    close(found["norm", 0], K.norm())
    close(found["loss", 0], (model(X) - Y).square().sum().detach() / Y.square().sum())
    product = model(torch.eye(D, dtype=torch.float64)).detach().T
    close([found["strength", 0], found["strength", 1]], (product * v).sum(1))


def test_a_balanced_start_follows_the_theory():
    setting = SETTINGS["silent"] | {"start": "balanced", "spread": 0.0, "sigma": 0.3, "rate": 1e-4, "modes": [1.0, 0.6]}
    done = subprocess.run(
        [str(NODE), str(HERE / "networks.mjs")],
        text=True,
        capture_output=True,
        check=True,
        input=json.dumps([{"topic": "silent", "setting": setting, "steps": 20000}]),
    )
    found = points(json.loads(done.stdout)[0]["after"])
    c = fl.theory.deep_linear.strength(2.0, torch.tensor([1.0, 0.6]), 0.3**3, 3)
    assert [found["strength", 0], found["strength", 1]] == pytest.approx(c.tolist(), rel=1e-3)


def test_a_latent_network(trained: dict[str, Any]):
    run, given = trained["mechanism"], SETTINGS["mechanism"]
    before = run["before"]["weights"]
    W, u, x = tensor(before["W"], 11, 4), tensor(before["u"], 1, 11), tensor(before["x"], 20, 4)
    first = points(run["before"])
    close(first["norms", 0], 2.0)
    close((W[:, 0] @ u[0]) / (W[:, 0].norm() * u.norm()), 0.4)
    close(x[:, 0].square().mean(), 1.0)
    model = network([W, u], nn.ReLU)
    descend(model, lambda: (0.3 * model(x)[:, 0] - 1.7 * x.sum(1)).square().mean(), [given["rateW"], given["rateU"]])
    close(run["after"]["weights"]["W"], model[0].weight.detach().flatten())
    close(run["after"]["weights"]["u"], model[2].weight.detach().flatten())
    found, line = points(run["after"]), torch.eye(4, dtype=torch.float64)[:1]
    hidden, readout = model[:2](line)[0].detach(), model[2].weight[0].detach()
    close(found["output", 0], 0.3 * hidden @ readout)
    close(found["zeta", 0], hidden @ readout / (hidden.norm() * readout.norm()))
    optimizer = torch.optim.SGD([{"params": [model[0].weight], "lr": 0.02}, {"params": [model[2].weight], "lr": 0.05}])
    close(found["kernel", 0], 0.3**2 * fl.ntk(model, line, optimizer=optimizer, dtype=torch.float64)[0, 0])


def two_layers(part: dict[str, Any], hidden: int, inputs: int, outputs: int = 1, prefix: str = "") -> nn.Sequential:
    names = ("mixtureW", "mixtureV") if prefix else ("W", "V")
    return network(
        [tensor(part["weights"][names[0]], hidden, inputs), tensor(part["weights"][names[1]], outputs, hidden)], nn.ReLU
    )


def test_a_network_with_a_divided_output(trained: dict[str, Any]):
    run, N = trained["rich"], 13
    X = tensor(random_numbers(1, 24 * 32), 24, 32)
    y = X[:, 0].sign()
    y[:3] *= -1
    model = two_layers(run["before"], N, 32)
    scale = (2 / 32) ** 0.5 * (2 / N) ** 0.5  # of the first and of the second layer; ReLU is homogeneous
    start = scale * model(X)[:, 0].detach()

    def divided() -> Tensor:
        return (scale * model(X)[:, 0] - start) / 4.0

    K0 = scale**2 * fl.ntk(model, X, dtype=torch.float64)
    # the kernel of NTK parametrization is that of unscaled weights: both layers are multiplied by scale
    descend(model, lambda: (divided() - y).square().sum() / 2, [0.1 * 4.0**2 / 24] * 2)
    close(run["after"]["weights"]["W"], model[0].weight.detach().flatten())
    found, K = points(run["after"]), scale**2 * fl.ntk(model, X, dtype=torch.float64)
    close(found["loss", 0], (divided() - y).square().mean().detach())
    close(found["alignment", 0], fl.metrics.alignment(K, y))
    gamma = float(fl.metrics.feature_rate(K0, K, y))
    place = next(one["x"] for one in run["after"]["points"] if one["chart"] == "gamma")
    close(place, gamma / 0.02)
    spectrum = [one["y"] for one in run["after"]["points"] if one["chart"] == "spectrum"]
    close(spectrum, torch.linalg.eigvalsh(K).flip(0))


def test_both_relu_networks(trained: dict[str, Any]):
    run, (P, M) = trained["growth"], (6, 17)
    X, y = torch.eye(P, dtype=torch.float64), torch.tensor([1.0, -1.0] * 3).double()
    model = two_layers(run["before"], M, P)
    before = fl.ntk(model, X, by="layer", dtype=torch.float64)
    descend(model, lambda: (model(X)[:, 0] - y).square().sum() / 2, [0.05] * 2)
    close(run["after"]["weights"]["V"], model[2].weight.detach().flatten())
    after, found = fl.ntk(model, X, by="layer", dtype=torch.float64), points(run["after"])
    for series, (layer, value) in enumerate(
        (layer, value) for layer in ("2", "0") for value in (lambda K: y @ K @ y / P, lambda K: K.trace() / P)
    ):
        close(found["growth", series], value(after[layer]) - value(before[layer]))
    close(found["alignment", 0], fl.metrics.alignment(after["0"] + after["2"], y))

    inputs = tensor(run["before"]["weights"]["mixtureX"], 6, 15)
    classes = torch.eye(3, dtype=torch.float64).repeat_interleave(2, 0)
    mixture = two_layers(run["before"], M, 15, 3, "mixture")

    def own_and_other() -> Tensor:
        each = fl.ntk(mixture, inputs, outputs="each", by="layer", dtype=torch.float64)["0"]
        sums = torch.einsum("pd,cpq,qd->cd", classes, each, classes)
        return torch.stack([sums.diagonal().mean(), (sums.sum() - sums.trace()) / 6])

    first, rate = own_and_other(), 2.5 * 0.05 / 2
    descend(mixture, lambda: (mixture(inputs) - classes).square().sum() / 2, [rate] * 2)
    close(run["after"]["weights"]["mixtureW"], mixture[0].weight.detach().flatten())
    rates = (own_and_other() - first) / (STEPS * rate)
    close([found["mixture", 0], found["mixture", 1]], rates)


@pytest.mark.parametrize("name", ["features", "slo"])
def test_the_features_of_a_perceptron(trained: dict[str, Any], name: str):
    run, (n, d, k) = trained[name], (48, 12, 10)
    size = 1 / (1 + torch.arange(1, d + 1, dtype=torch.float64) ** 1.3)
    X = tensor(random_numbers(1, n * d), n, d) * (size / size.mean()).sqrt()
    y = X[:, 0] * X[:, 1] + X[:, 1] * X[:, 2] + X[:, 2] * X[:, 0]
    y = y / y.square().mean().sqrt()
    shapes = [(k, d), (k, k), (1, k)] if name == "features" else [(k, d), (1, k)]
    weights = [tensor(run["before"]["weights"][f"layer{l}"], *shape) for l, shape in enumerate(shapes)]
    model = network(weights, Squares if name == "features" else nn.ReLU)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    if name == "slo":
        groups = [{"params": [model[0].weight], "speed": 20.0}, {"params": [model[2].weight], "speed": 1 / 20.0}]
        optimizer = fl.steer.SLO(groups, lr=0.02, eps=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (model(X)[:, 0] - y).square().mean().backward()
            optimizer.step()
    else:
        descend(model, lambda: (model(X)[:, 0] - y).square().mean(), [0.02] * 3)
    for l in range(len(shapes)):
        close(run["after"]["weights"][f"layer{l}"], model[2 * l].weight.detach().flatten())
    features, found = fl.neural_features(model, X, initial=initial)["0"], points(run["after"])
    close(found["training", 1], features.uncentered)
    close(found["training", 0], features.centered)


def test_a_readout_trained_to_the_end_is_ridge_regression(trained: dict[str, Any]):
    D, P = 7, 5
    numbers, errors = random_numbers(8, STEPS * P * (D + 1)), []
    w = torch.zeros(D, dtype=torch.float64)
    w[0], w[1] = 0.6, 0.8
    S = torch.eye(D, dtype=torch.float64)
    S[0, 0] = 3.0
    for k in range(STEPS):
        drawn = tensor(numbers[k * P * (D + 1) : (k + 1) * P * (D + 1)], P, D + 1)
        x, y = drawn[:, :D], drawn[:, :D] @ w + 0.1**0.5 * drawn[:, D]
        dual = torch.linalg.solve(x @ S @ x.T + 0.3 * torch.eye(P), y)
        errors.append((w - S @ x.T @ dual).square().sum())
    found = points(trained["transfer"]["after"])
    assert found["curve", 0] == pytest.approx(float(torch.stack(errors).mean()), rel=1e-4)


def test_trained_readouts_follow_the_learning_curve():
    setting = SETTINGS["transfer"] | {"dimension": 60, "samples": 20, "noise": 0.0, "overlap": 0.5, "seed": 0}
    done = subprocess.run(
        [str(NODE), str(HERE / "networks.mjs")],
        text=True,
        capture_output=True,
        check=True,
        input=json.dumps([{"topic": "transfer", "setting": setting, "steps": 40}]),
    )
    point = next(one for one in json.loads(done.stdout)[0]["after"]["points"] if one["chart"] == "curve")
    expected = float(transfer.learning_curve(20, 60, 2.0, 0.5, 0.3).error)
    assert abs(point["y"] - expected) < 4 * point["error"] + 0.02 * expected
    assert point["error"] < 0.05
