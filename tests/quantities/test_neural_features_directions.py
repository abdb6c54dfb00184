"""Neural features from random directions: no bias where there can be none, and errors that hold the exact numbers."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.linalg.sampling import student
from featlearn.quantities import neural_features as module
from featlearn.quantities.layer_features import QUANTITIES, Deviations, LayerFeatures

OUTPUTS = 11


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trained(samples: int) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, OUTPUTS)]
        model = nn.Sequential(*layers).double()
    start, x, y = copy.deepcopy(model.state_dict()), drawn(samples, 7), drawn(samples, OUTPUTS, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, x, start


def checked(k: int, samples: int, seeds: int) -> None:
    model, x, start = trained(samples)
    exact = fl.neural_features(model, x, initial=start)
    found = [
        fl.neural_features(model, x, initial=start, outputs=fl.Directions(k, torch.Generator().manual_seed(seed)))
        for seed in range(seeds)
    ]
    held = []
    for name, layer in exact.items():
        assert layer.errors["uncentered"] == 0.0
        for quantity in QUANTITIES:
            truth = getattr(layer, quantity)
            values = torch.tensor([getattr(one[name], quantity) for one in found], dtype=torch.float64)
            errors = torch.tensor([one[name].errors[quantity] for one in found], dtype=torch.float64)
            if math.isnan(truth) or truth == 0.0 or quantity == "weight_change":
                continue
            assert float(errors.min()) > 0
            # The mean of so many seeds has an error of its own, 0.16 of that of one for 40 of them.
            assert abs(float(values.mean()) - truth) < 0.6 * float(values.std()), (name, quantity)
            assert float(errors.square().mean().sqrt()) < 3 * float(values.std())
            held.append(int(((values - truth).abs() <= 2 * errors).sum()) / seeds)
    assert len(held) == 15  # a linear readout has no change of gradients
    assert min(held) >= 0.85
    assert sum(held) / len(held) >= 0.92
    assert all(one["4"].is_readout and not one["2"].is_readout and not one["0"].is_readout for one in found)


def test_estimates_have_no_bias_and_their_errors_hold_the_truth():
    checked(4, 60, 40)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "samples"), [(2, 120), (3, 90), (11, 25), (20, 30)])
def test_estimates_have_no_bias_and_their_errors_hold_the_truth_for_any_number_of_directions(k, samples):
    checked(k, samples, 100)


def test_norms_and_variances_are_unbiased_over_every_draw(monkeypatch: pytest.MonkeyPatch):
    """All 256 draws of two directions for two samples and two outputs, with equal weights: means are exact."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = drawn(2, 3, seed=2)
    exact = fl.neural_features(model, x)["0"]
    sizes, traces, variances = [], [], []
    for signs in itertools.product([-1.0, 1.0], repeat=8):
        table = torch.tensor(signs, dtype=torch.float64).reshape(2, 2, 2)
        monkeypatch.setattr(module._Directions, "_drawn", lambda self, samples, table=table: iter(table.unbind(1)))
        layer = fl.neural_features(model, x, outputs=fl.Directions(2))["0"]
        W, parts = layer.weight, layer.deviations.covariance
        assert parts.shape == (4, 4, 4)
        assert layer.deviations.freedom == 2
        noise = sum((W.mT @ part @ W).square().sum() for part in parts)
        sizes.append(float(layer.agop.square().sum() - noise))
        traces.append(float(layer.agop.trace()))
        variances.append(sum(float((W.mT @ part @ W).trace()) ** 2 for part in parts))
    assert sum(sizes) / 256 == pytest.approx(float(exact.agop.square().sum()), rel=1e-12)
    assert sum(traces) / 256 == pytest.approx(float(exact.agop.trace()), rel=1e-12)
    actual = sum((trace - float(exact.agop.trace())) ** 2 for trace in traces) / 256
    assert actual > 0
    assert sum(variances) / 256 == pytest.approx(actual, rel=1e-10)


def spread_layer(noise: float) -> LayerFeatures:
    """K (5, 5) with six deviations, a weight (5, 3) and one it began from; all sizes differ."""
    rows = drawn(40, 5, seed=3)
    K, Kb = rows.mT @ rows / 40, rows[:9].mT @ rows[:9] / 9
    parts = [drawn(6, 5, 5, seed=seed) for seed in (4, 5)]
    first, second = (noise * (part + part.mT) for part in parts)
    return LayerFeatures(drawn(5, 3, seed=6), K, drawn(5, 3, seed=7), Kb, deviations=Deviations(first, second, 5))


@pytest.mark.parametrize("kind", ["cosine", "pearson"])
def test_estimates_without_deviations_are_the_exact_numbers(kind):
    layer = spread_layer(0.0)
    exact = LayerFeatures(layer.weight, layer.ptk_covariance, layer.initial_weight, layer.ptk_change)
    for name in ("uncentered", "centered", "double_centered", "ptk_centered"):
        expected = getattr(exact.correlations(kind), name)
        assert getattr(layer.correlations(kind), name) == pytest.approx(expected, rel=1e-10)
        assert getattr(layer.correlation_errors(kind), name) == 0.0
        assert getattr(exact.correlation_errors(kind), name) == 0.0
    for name in QUANTITIES:
        assert getattr(layer, name) == pytest.approx(getattr(exact, name), rel=1e-10)
        assert layer.errors[name] == exact.errors[name] == 0.0


@pytest.mark.parametrize("kind", ["cosine", "pearson"])
def test_errors_are_those_of_numbers_that_are_moved(kind):
    """By differences of the plain correlation of n x n matrices, moved by one deviation after the other."""
    layer = spread_layer(1e-4)

    def plain(weight: Tensor, covariance: Tensor) -> float:
        return float(fl.metrics.correlation(weight.mT @ weight, weight.mT @ covariance @ weight, kind))

    shift = layer.weight - layer.initial_weight
    known = layer.deviations
    cases = {
        "uncentered": (layer.weight, layer.ptk_covariance, known.covariance),
        "centered": (shift, layer.ptk_covariance, known.covariance),
        "double_centered": (shift, layer.ptk_change, known.change),
        "ptk_centered": (layer.initial_weight, layer.ptk_change, known.change),
    }
    for name, (weight, covariance, parts) in cases.items():
        moved = [plain(weight, covariance + part) - plain(weight, covariance - part) for part in parts]
        expected = 0.5 * math.hypot(*moved) * student(5)
        assert getattr(layer.correlation_errors(kind), name) == pytest.approx(expected, rel=1e-3)


def test_errors_of_shares_are_those_of_numbers_that_are_moved():
    layer = spread_layer(1e-4)

    def moved(sign: float, part: int) -> LayerFeatures:
        first = layer.ptk_covariance + sign * layer.deviations.covariance[part]
        second = layer.ptk_change + sign * layer.deviations.change[part]
        return LayerFeatures(layer.weight, first, layer.initial_weight, second)

    for name in ("centered_share", "double_centered_share"):
        steps = [getattr(moved(1.0, part), name) - getattr(moved(-1.0, part), name) for part in range(6)]
        assert layer.errors[name] == pytest.approx(0.5 * math.hypot(*steps) * student(5), rel=1e-3)


def test_one_direction_shows_no_error():
    model, x, start = trained(30)
    layer = fl.neural_features(model, x, initial=start, outputs=fl.Directions(1))["2"]
    assert math.isnan(layer.errors["uncentered"])
    assert math.isnan(layer.errors["centered_share"])
    assert layer.errors["weight_change"] == 0.0
    plain = fl.metrics.correlation(layer.nfm, layer.agop)
    assert layer.uncentered == pytest.approx(float(plain), rel=1e-10)


def test_what_is_all_noise_is_undefined_and_says_so():
    layer = spread_layer(3.0)
    assert math.isnan(layer.uncentered)
    assert "take more of them" in layer.undefined["uncentered"]


def test_readouts_at_every_position_are_recognized():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = drawn(30, 7, 4, seed=8)
    for outputs in (None, fl.Directions(2), fl.Directions(9, torch.Generator().manual_seed(3))):
        found = fl.neural_features(model, x, readout=lambda out: 1.7 * out.flatten(1), outputs=outputs)
        assert [layer.is_readout for layer in found.values()] == [False, False, True]
    assert abs(found["4"].uncentered - 1) <= 3 * found["4"].errors["uncentered"]


def test_units_that_all_feed_one_output_are_no_readout():
    """Gradients of equal size arrive at every unit, and K has rank one."""
    last = nn.Linear(6, 1, bias=False).double()
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0, -1.0]]))
    model = nn.Sequential(nn.Linear(4, 6).double(), last)
    found = fl.neural_features(model, drawn(50, 4), outputs=fl.Directions(4))
    assert [layer.is_readout for layer in found.values()] == [False, True]


def test_the_table_has_errors_of_estimates_alone():
    model, x, start = trained(30)
    assert "±" not in str(fl.neural_features(model, x, initial=start))
    lines = str(fl.neural_features(model, x, initial=start, outputs=fl.Directions(4))).splitlines()
    assert len({len(line.removesuffix("  readout")) for line in lines}) == 1
    assert all(line.count("±") == 3 for line in lines[1:])


def test_little_memory_is_divided_into_fewer_parts():
    model, x, _ = trained(30)
    parts = [
        len(fl.neural_features(model, x, outputs=fl.Directions(6), memory=memory)["0"].deviations.covariance)
        for memory in ("1GiB", "40KB")
    ]
    assert parts == [6, 2]
