"""fl.estimate_alignment against the alignment of a formed kernel."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl
from featlearn.errors import HeavyTailWarning
from featlearn.quantities.columns import KernelColumns
from tests.references.jacobian import dense_jacobian

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
    "centered": HOT - 1.0 / C,
    "scores": HOT + 0.1 * drawn(P, C),
}


def formed(model: nn.Module, y: Tensor, centered: bool = False) -> float:
    measure = fl.metrics.centered_alignment if centered else fl.metrics.alignment
    return float(measure(fl.ntk(model, X), y))


def by_hand(model: nn.Module, y: Tensor) -> float:
    """The centered alignment from gradients less their mean, the kernel never written as H K H."""
    jacobian = dense_jacobian(model, X)
    rows = torch.cat([part.flatten(2) for part in jacobian.values()], 2)
    rows = rows - rows.mean(0)
    kernel = torch.einsum("pck,qck->pq", rows, rows) / rows.shape[1]
    y = y.double().reshape(P, -1)
    task = (y - y.mean(0)) @ (y - y.mean(0)).T
    return float((kernel * task).sum() / (kernel.norm() * task.norm()))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("outputs", [1, C])
@pytest.mark.parametrize("name", TARGETS)
def test_small_samples_are_exact(name, outputs, centered):
    model, y = network(outputs), TARGETS[name]
    found = fl.estimate_alignment(model, X, y, centered=centered)
    assert float(found) == pytest.approx(formed(model, y, centered), rel=1e-12)
    if centered:
        assert float(found) == pytest.approx(by_hand(model, y), rel=1e-12)
    assert found.stderr == 0.0
    assert float(fl.estimate_alignment(model, X, y, centered=centered, vectors=P)) == float(found)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("outputs", [1, C])
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_columns_come_within_their_error(name, outputs, centered):
    model, y = network(outputs), TARGETS[name]
    found = fl.estimate_alignment(model, X, y, centered=centered, vectors=40)
    truth = formed(model, y, centered)
    assert 0 < float(found.stderr) < 0.05 * truth
    assert abs(float(found) - truth) < 4 * float(found.stderr)
    assert 14 <= found.samples <= 27  # two thirds of the columns, less those that are always taken
    assert 4 <= found.freedom <= found.samples - 1


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("name", ["one column", "two signs", "one-hot", "centered"])
def test_the_numerator_is_exact(name, centered, monkeypatch: pytest.MonkeyPatch):
    """With the exact norm in place of the estimated one, the ratio is exact."""
    model, y = network(), TARGETS[name]
    kernel = fl.ntk(model, X)
    middle = torch.eye(P, dtype=torch.float64) - (1.0 / P if centered else 0.0)
    norm = fl.Estimate(float((middle @ kernel @ middle).norm()), 0.0, 1)
    monkeypatch.setattr("featlearn.quantities.alignment_estimate.norm", lambda survey, what: norm)
    found = fl.estimate_alignment(model, X, y, centered=centered, vectors=10)
    assert float(found) == pytest.approx(formed(model, y, centered), rel=1e-12)


@pytest.mark.parametrize("memory", [None, "12KiB"])
def test_columns_and_diagonal_are_those_of_the_centered_kernel(memory):
    """Two references: H K H of the formed kernel, and gradients less their mean."""
    model = network()
    kernel = fl.ntk(model, X)
    middle = torch.eye(P, dtype=torch.float64) - 1.0 / P
    operator = fl.NTKOperator(model, X, memory=memory)
    with operator.sweeps() as sweeps:
        means = operator.row_means(sweeps)
        columns = KernelColumns(sweeps, "mean", means)
        drawn, wanted = torch.tensor([70, 3, 41]), torch.tensor([0, 3, 8, 70, 89])
        blocks, some = [], []
        (total,) = columns.sums(drawn, lambda *block: blocks.append(block) or (block[0].sum(1),))
        (few,) = columns.sums(drawn, lambda *block: some.append(block) or (block[0].sum(1),), wanted)
        diagonal = columns.diagonal
    torch.testing.assert_close(means.cpu(), kernel.mean(1))
    centered = middle @ kernel @ middle
    torch.testing.assert_close(torch.cat([rows for rows, _ in blocks], 1), centered[drawn])
    torch.testing.assert_close(torch.cat([rows for rows, _ in some], 1), centered[drawn][:, wanted])
    assert torch.equal(torch.cat([places for _, places in some]), wanted)
    torch.testing.assert_close(few, centered[drawn][:, wanted].sum(1))
    torch.testing.assert_close(total, torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(diagonal, centered.diagonal())
    rows = torch.cat([part.flatten(2) for part in dense_jacobian(model, X).values()], 2)
    torch.testing.assert_close(diagonal, (rows - rows.mean(0)).square().sum((1, 2)) / C)


@pytest.mark.parametrize("vectors", [None, 12])
def test_a_constant_kernel_has_no_centered_alignment(vectors):
    """One bias: K is 1 everywhere."""
    found = fl.estimate_alignment(
        nn.Linear(4, 2).double(), X, X[:, 0], parameters="bias", centered=True, vectors=vectors
    )
    assert math.isnan(float(found))


@pytest.mark.parametrize("targets", [LABELS, HOT.double(), X[:, 0]])
def test_targets_come_from_the_loader(targets):
    loader = DataLoader(TensorDataset(X, targets), batch_size=16)
    y = HOT if targets is LABELS else targets
    model = network()
    assert float(fl.estimate_alignment(model, loader)) == pytest.approx(formed(model, y), rel=1e-12)
    one, other = (fl.estimate_alignment(model, data, y, vectors=20) for data in (loader, X))
    assert float(one) == pytest.approx(float(other), rel=1e-10)
    assert float(one.stderr) == pytest.approx(float(other.stderr), rel=1e-6)


def test_the_draw_is_the_same_without_a_generator_and_another_with_one():
    model, y = network(), TARGETS["one-hot"]
    values = [
        float(fl.estimate_alignment(model, X, y, vectors=10, generator=generator))
        for generator in (None, None, torch.Generator().manual_seed(5))
    ]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize("y", [torch.zeros(P), torch.zeros(P, 2)])
def test_targets_of_zeros_have_no_alignment(y):
    assert math.isnan(float(fl.estimate_alignment(network(), X, y)))
    assert math.isnan(float(fl.estimate_alignment(network(), X, y + 0.3, centered=True)))


def test_a_kernel_of_zeros_has_no_alignment():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU()).double()
    x = torch.zeros(P, 4, dtype=torch.float64)
    for vectors in (None, 10):
        assert math.isnan(float(fl.estimate_alignment(model, x, drawn(P), vectors=vectors)))


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


def mlp(inputs: int, width: int, outputs: int, hidden: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
        for _ in range(hidden - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, outputs)).double()


def case(name: str, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs and targets; sizes of samples differ by much in most of them."""
    x, sizes = drawn(samples, 12, seed=3), drawn(samples, seed=4)
    y = x[:, 0] * x[:, 1] + x[:, 2]
    if name == "Gaussian":
        return mlp(12, 40, 1), x, y
    if name == "lognormal 1.2":
        return mlp(12, 40, 1), x * (1.2 * sizes).exp()[:, None], y
    if name == "lognormal 2":
        return mlp(12, 40, 1, 2), x * (2 * sizes).exp()[:, None], y
    if name == "five outliers":
        x[17 :: samples // 5] *= 30
        return mlp(12, 40, 1), x, y
    hot = nn.functional.one_hot((x[:, 0] > 0).long() + (x[:, 1] > 0.5).long(), 3)
    if name == "one-hot":
        return mlp(12, 30, 3, 2), x + 0.5, hot
    if name == "scores":
        return mlp(12, 30, 3, 2), x * (1.2 * sizes).exp()[:, None], x[:, :3] * hot + 0.3 * x[:, 4:7]
    pictures, labels = fl.data.digits()
    x = pictures.double().flatten(1)[:samples]
    return mlp(64, 50, 10), x, nn.functional.one_hot(labels[:samples], 10)


CASES = ["Gaussian", "lognormal 1.2", "five outliers", "lognormal 2", "one-hot", "digits", "scores"]


def covered(name: str, centered: bool, samples: int, vectors: int, trials: int, least: int) -> None:
    model, x, y = case(name, samples)
    kernel = fl.ntk(model, x)
    truth = float((fl.metrics.centered_alignment if centered else fl.metrics.alignment)(kernel, y))
    generator = torch.Generator().manual_seed(0)
    found = [
        fl.estimate_alignment(model, x, y, centered=centered, vectors=vectors, generator=generator)
        for _ in range(trials)
    ]
    off = torch.tensor([(float(e) - truth) / float(e.stderr) for e in found])
    assert int((off.abs() <= 2).sum()) >= least
    assert float(off.square().mean().sqrt()) > 0.5  # errors are not stated too large either


@pytest.mark.filterwarnings("ignore::featlearn.errors.HeavyTailWarning")
@pytest.mark.slow
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_standard_errors_hold_the_truth_in_90_of_100(name, centered):
    covered(name, centered, 2200, 64, 100, 90)


@pytest.mark.filterwarnings("ignore::featlearn.errors.HeavyTailWarning")
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("name", ["lognormal 1.2", "five outliers"])
def test_two_standard_errors_hold_the_truth_of_few_samples(name, centered):
    covered(name, centered, 400, 40, 30, 26)


def test_an_error_that_few_draws_carry_comes_with_a_warning():
    model, x, y = case("lognormal 2", 150)

    def tried() -> None:
        for seed in range(6):
            fl.estimate_alignment(model, x, y, vectors=6, generator=torch.Generator().manual_seed(seed))

    with pytest.warns(HeavyTailWarning, match="the alignment rests on .* degrees of freedom"):
        tried()


def test_a_pair_is_inputs_and_targets():
    model, x, y = network(1), drawn(9, 4), drawn(9, seed=1)
    expected = fl.estimate_alignment(model, x, y, centered=True)
    assert fl.estimate_alignment(model, (x, y), centered=True).value == expected.value
