"""fl.estimate_alignment against the alignment of a formed kernel."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl
from tests.linalg.test_sketch import assert_covers

P, C = 90, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def network(outputs: int = C) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


X = drawn(P, 4) + 0.5
LABELS = (X[:, 0] > 0.5).long() + (X[:, 1] > 1.0).long()
HOT = nn.functional.one_hot(LABELS, C)
TARGETS = {
    "one column": X[:, 0] * X[:, 1],
    "two signs": HOT[:, 0] * 2.0 - 1.0,
    "one-hot": HOT,
    "centred": HOT - 1.0 / C,
    "scores": HOT + 0.1 * drawn(P, C),
}


def formed(model: nn.Module, y: Tensor) -> float:
    return float(fl.metrics.alignment(fl.ntk(model, X), y))


@pytest.mark.parametrize("outputs", [1, C])
@pytest.mark.parametrize("name", TARGETS)
def test_small_samples_are_exact(name, outputs):
    model, y = network(outputs), TARGETS[name]
    found = fl.estimate_alignment(model, X, y)
    assert float(found) == pytest.approx(formed(model, y), rel=1e-12)
    assert found.stderr == 0.0
    assert float(fl.estimate_alignment(model, X, y, probes=P)) == float(found)


@pytest.mark.parametrize("outputs", [1, C])
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_columns_come_within_their_error(name, outputs):
    model, y = network(outputs), TARGETS[name]
    found = fl.estimate_alignment(model, X, y, probes=40)
    truth = formed(model, y)
    assert 0 < float(found.stderr) < 0.05 * truth
    assert abs(float(found) - truth) < 4 * float(found.stderr)
    assert found.samples == 27  # two thirds of the columns


@pytest.mark.parametrize("name", ["one column", "two signs", "one-hot", "centred"])
def test_the_numerator_is_exact(name, monkeypatch: pytest.MonkeyPatch):
    """With the exact norm in place of the estimated one, the ratio is exact."""
    model, y = network(), TARGETS[name]
    norm = fl.Estimate(float(fl.ntk(model, X).norm()), 0.0, 1)
    monkeypatch.setattr("featlearn.quantities.alignment_estimate.norm", lambda sketch: norm)
    assert float(fl.estimate_alignment(model, X, y, probes=10)) == pytest.approx(formed(model, y), rel=1e-12)


@pytest.mark.parametrize("targets", [LABELS, HOT.double(), X[:, 0]])
def test_targets_come_from_the_loader(targets):
    loader = DataLoader(TensorDataset(X, targets), batch_size=16)
    y = HOT if targets is LABELS else targets
    model = network()
    assert float(fl.estimate_alignment(model, loader)) == pytest.approx(formed(model, y), rel=1e-12)
    one, other = (fl.estimate_alignment(model, data, y, probes=20) for data in (loader, X))
    assert float(one) == pytest.approx(float(other), rel=1e-10)
    assert float(one.stderr) == pytest.approx(float(other.stderr), rel=1e-6)


def test_the_draw_is_the_same_without_a_generator_and_another_with_one():
    model, y = network(), TARGETS["one-hot"]
    values = [
        float(fl.estimate_alignment(model, X, y, probes=10, generator=generator))
        for generator in (None, None, torch.Generator().manual_seed(5))
    ]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("y", [torch.zeros(P), torch.zeros(P, 2)])
def test_targets_of_zeros_have_no_alignment(y):
    assert math.isnan(float(fl.estimate_alignment(network(), X, y)))


def test_a_kernel_of_zeros_has_no_alignment():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU()).double()
    x = torch.zeros(P, 4, dtype=torch.float64)
    for probes in (None, 10):
        assert math.isnan(float(fl.estimate_alignment(model, x, drawn(P), probes=probes)))


@pytest.mark.parametrize(
    ("data", "y", "words"),
    [
        (X, None, "y is None and data is a batch"),
        (DataLoader(X, batch_size=9), None, "inputs alone"),
        (X, LABELS, "one-hot"),
        (X, drawn(P + 1), r"\(P,\) = \(90,\)"),
        (X, torch.full((P,), math.nan), "nan"),
        (DataLoader(TensorDataset(X, LABELS + 2), batch_size=9), None, "classes from 0 to C - 1 = 2"),
    ],
)
def test_targets_that_do_not_fit_are_refused(data, y, words):
    with pytest.raises(fl.FeatlearnError, match=words):
        fl.estimate_alignment(network(), data, y)


def covered(name: str, outputs: int, probes: int, trials: int) -> None:
    """A network wide enough for what the approximation lacks not to lie in a handful of samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, outputs)).double()
    x = drawn(200, 12, seed=3) + 0.5
    y = {
        "one column": x[:, 0] * x[:, 1],
        "one-hot": nn.functional.one_hot((x[:, 0] > 0.5).long(), 2),
        "scores": x[:, :3],
    }
    truth = float(fl.metrics.alignment(fl.ntk(model, x), y[name]))
    generator = torch.Generator().manual_seed(0)
    estimates = [fl.estimate_alignment(model, x, y[name], probes=probes, generator=generator) for _ in range(trials)]
    assert_covers(estimates, truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one column", "one-hot", "scores"])
@pytest.mark.parametrize("outputs", [1, C])
def test_the_standard_error_covers_the_truth(name, outputs):
    covered(name, outputs, 48, 200)


def test_the_standard_error_covers_the_truth_in_a_few_trials():
    covered("scores", 1, 36, 40)
