"""What the optimizers are for: the effects of 003 Fig. 4 and 12, and alignment at constant norms."""

import copy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.steer import SLO, AdaptiveSLO, hidden_correlations, speed_groups

Correlations = tuple[float, float, float]


def network(seed: int, hidden: int, width: int, scales: tuple[float, ...]) -> nn.Sequential:
    """32 inputs, ReLU layers without biases, initialized by torch and then scaled layer by layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = [32, *[width] * hidden, 1]
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair, bias=False), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for weight, scale in zip(model.parameters(), scales, strict=True):
            weight *= scale
    return model


def samples(seed: int, degree: int, count: int = 256) -> fl.data.Regression:
    return fl.data.chain_monomial(count, 32, degree, generator=torch.Generator().manual_seed(100 + seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: fl.data.Regression, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(data.x)[:, 0] - data.y).square().mean().backward()
        optimizer.step()


def correlations(model: nn.Sequential, start: Tensor, x: Tensor) -> Correlations:
    """UC-NFC, C-NFC and C/UC of the first layer of a network with two hidden ones, from autograd alone."""
    model, x = copy.deepcopy(model).double(), x.double()
    hidden = model[0](x).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(model[1:](hidden).sum(), hidden)
    covariance = gradients.T @ gradients
    products = []
    for weight in (model[0].weight.detach(), model[0].weight.detach() - start):
        products.append((weight.T @ weight, weight.T @ covariance @ weight))
    cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b in products]
    overlaps = [float((a * b).sum()) for a, b in products]
    return cosines[0], cosines[1], overlaps[1] / overlaps[0]


def fig4(seed: int, scale: float, lr: float, *, limited: bool, steps: int = 600) -> tuple[Correlations, float]:
    """Correlations of the first layer after training, and the resemblance of its NFM with the EGOP."""
    data, model = samples(seed, degree=5), network(seed, 2, 256, (scale, 1.0, 0.01))
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr)
    if limited:
        optimizer = SLO(speed_groups(model, {"0": 500.0, "*": 0.002}), lr, eps=0.1)
    train(model, optimizer, data, steps)
    found = correlations(model, initial["0.weight"], data.x)
    first = fl.neural_features(model, data.x, initial=initial, layers="0", dtype=torch.float64)["0"]
    assert (first.uncentered, first.centered, first.centered_share) == pytest.approx(found, rel=1e-9)
    return found, float(fl.metrics.correlation(first.nfm, data.egop))


def test_slo_makes_the_first_layer_learn_features_from_large_weights():
    """003 Fig. 4 at scale 1, one seed; the bands are those of the theory sheet."""
    (plain, _, plain_share), plain_egop = fig4(0, 1.0, 0.03, limited=False)
    (driven, centered, share), egop = fig4(0, 1.0, 0.03, limited=True)
    assert plain < 0.72
    assert plain_share < 0.01
    assert driven > 0.85
    assert centered == pytest.approx(driven, abs=0.02)
    assert share > 0.95
    assert egop > plain_egop + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_slo_makes_the_initial_scale_irrelevant(seed: int):
    """003 Fig. 4: C/UC falls from 1 to 0 with the scale under gradient descent, and is 1 under SLO."""
    settings = ((1.0, 0.03), (0.1, 0.1), (0.01, 0.2), (0.001, 0.4))
    plain = [fig4(seed, scale, lr, limited=False)[0] for scale, lr in settings]
    driven = [fig4(seed, scale, lr, limited=True)[0] for scale, lr in settings]
    assert [share for _, _, share in plain] == sorted(share for _, _, share in plain)
    assert plain[0][2] < 0.01
    assert 0.5 < plain[1][2] < 0.75
    assert plain[2][2] > 0.95
    assert all(uncentered > 0.85 and centered > 0.85 and share > 0.95 for uncentered, centered, share in driven)
    assert driven[0][0] > plain[0][0] + 0.2


def lowest(seed: int, scales: tuple[float, ...], width: int, steps: int, every: int | None) -> float:
    """Mean over the last 20 % of the steps of the lowest UC-NFC of a layer."""
    data, model = samples(seed, degree=3), network(seed, 3, width, scales)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.25)
    if every is not None:
        optimizer = AdaptiveSLO(model, data.x, 0.05, every=every)
    train(model, optimizer, data, steps - steps // 5)
    found = []
    for _ in range(4):
        train(model, optimizer, data, steps // 20)
        found.append(min(hidden_correlations(model, data.x).values()))
    return sum(found) / len(found)


LITERAL, TRAINING = (0.1, 0.1, 0.1, 0.1), (0.1, 1.0, 1.0, 0.01)


def test_adaptive_slo_raises_the_lowest_correlation():
    """What is safe to say of 003 Fig. 12; a small network, and measured every tenth step."""
    assert lowest(0, TRAINING, width=64, steps=200, every=10) > lowest(0, TRAINING, width=64, steps=200, every=None)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [LITERAL, TRAINING], ids=["literal", "training"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adaptive_slo_raises_the_lowest_correlation_at_the_size_of_the_paper(seed: int, scales: tuple[float, ...]):
    assert lowest(seed, scales, 256, 500, every=1) > lowest(seed, scales, 256, 500, every=None) + 0.1


def alignment(model: nn.Sequential) -> list[float]:
    """|U W| / (|U| |W|) of consecutive layers."""
    weights = [weight.detach() for weight in model.parameters()]
    return [float((u @ w).norm() / u.norm() / w.norm()) for w, u in pairwise(weights)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kept_norms_align_layers_more_than_free_ones(seed: int):
    data = samples(seed, degree=5, count=128)
    aligned, norms = [], []
    for keep in (False, True):
        model = network(seed, 2, 64, (0.6, 0.6, 0.6))
        before = [float(weight.detach().norm()) for weight in model.parameters()]
        speeds = {str(2 * i): norm for i, norm in enumerate(before)}
        optimizer = SLO(speed_groups(model, speeds), 0.02, keep_output_scale=keep)
        train(model, optimizer, data, 200)
        aligned.append(alignment(model))
        norms.append(
            [float(weight.detach().norm()) / norm for weight, norm in zip(model.parameters(), before, strict=True)]
        )
    assert norms[1] == pytest.approx(3 * [1.0], rel=1e-6)
    assert max(norms[0]) > 1.2
    assert all(kept > free for free, kept in zip(*aligned, strict=True))
    assert all(value > 1.2 / 8 for value in aligned[1])  # 1 / sqrt(width) at the start


def test_norms_too_small_for_the_target_cannot_fit_it():
    """|f| <= |a| |W2| |W1| |x|: with kept norms this bound stays."""
    data, model = samples(0, degree=5), network(0, 2, 64, (0.05, 0.05, 0.05))
    optimizer = SLO(model.parameters(), 0.01, keep_output_scale=True)
    train(model, optimizer, data, 50)
    bound = data.x.norm(dim=1)
    for weight in model.parameters():
        bound = bound * weight.detach().norm()
    outputs = model(data.x)[:, 0].detach()
    assert (outputs.abs() <= bound * (1 + 1e-5)).all()
    assert bound.max() < 0.1  # of targets with deviation 1
    assert (outputs - data.y).square().mean() > 0.8 * data.y.square().mean()


@pytest.mark.slow
def test_the_example_runs():
    script = Path(__file__).parents[2] / "examples" / "slo.py"
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, check=True)
    assert done.stdout.count("SLO") >= 6
    assert "nan" not in done.stdout
