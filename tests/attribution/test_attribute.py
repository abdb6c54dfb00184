"""Attributions of linear models, whose replays are exact, against training on every subset; and what is refused."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import featlearn as fl
from featlearn.attribution.attribute import rank_correlation
from featlearn.attribution.model_path import model_path
from featlearn.attribution.objective import objective_of
from tests.attribution.runs import P, Q, data, linear, order, perceptron, watched

SMALL = 7


def small_run(folder: Path, **options: Any) -> tuple[fl.attribute, nn.Module, tuple[Tensor, ...]]:
    x, y, x2, y2 = data("cross-entropy", 3)
    x, y = x[:SMALL], y[:SMALL]
    model = linear(3)
    before, optimizer = copy.deepcopy(model), SGD(model.parameters(), lr=0.1)
    watch = fl.watch(
        model, (x, y), out=folder / "r", test=(x2, y2), optimizer=optimizer, loss="cross-entropy", replay=(x, y)
    )
    with watch:
        for _ in range(20):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            watch.step(loss=loss, samples=range(SMALL))
    return watch.run, before, (x, y, x2, y2)


def margins(f: Tensor, y: Tensor) -> Tensor:
    others = torch.stack([torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(f, y.tolist(), strict=True)])
    return f[range(len(y)), y] - others.logsumexp(1)


def test_scores_are_the_mean_effects_over_all_subsets(tmp_path: Path):
    run, before, (x, y, x2, y2) = small_run(tmp_path)
    present: list[list[Tensor]] = [[] for _ in range(SMALL)]
    absent: list[list[Tensor]] = [[] for _ in range(SMALL)]
    held_out: list[list[Tensor]] = [[] for _ in range(SMALL)]
    for subset in itertools.product([False, True], repeat=SMALL):
        if not any(subset):
            continue
        kept = torch.tensor(subset)
        model = copy.deepcopy(before)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            loss = nn.functional.cross_entropy(model(x[kept]), y[kept])
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        value, at_train = margins(model(x2).detach(), y2), margins(model(x).detach(), y)
        for index in range(SMALL):
            (present if kept[index] else absent)[index].append(value)
            if not kept[index]:
                held_out[index].append(at_train[index])
    expected = torch.stack(
        [torch.stack(p).mean(0) - torch.stack(a).mean(0) for p, a in zip(present, absent, strict=True)], 1
    )
    attribution = fl.attribute(run)
    assert attribution.scores.shape == (Q, SMALL)
    error = (attribution.scores - expected).norm() / expected.norm()
    assert error < 0.1
    exact = torch.stack([torch.stack(values).mean() for values in held_out])
    deviations = torch.stack([torch.stack(values).std() for values in held_out])
    drawn = 200  # about half of 400 random subsets lack a sample
    assert bool(((attribution.held_out_margins - exact).abs() < 4 * deviations / drawn**0.5).all())


def test_a_measure_is_a_margin_a_loss_or_an_output(tmp_path: Path):
    run, _, (_, _, x2, y2) = small_run(tmp_path)
    by_margin, by_loss = fl.attribute(run), fl.attribute(run, measure="loss")
    assert float((by_margin.scores * by_loss.scores).sum()) > 0  # both are positive where a sample helps
    outputs = torch.stack([fl.attribute(run, measure=c).scores for c in range(3)])
    assert outputs.std(0).min() > 0
    assert torch.equal(fl.attribute(run, test=(x2, y2)).scores, by_margin.scores)
    assert fl.attribute(run, test=x2).scores.equal(by_margin.scores)


def test_kernels_of_a_constant_kernel_are_equal(tmp_path: Path):
    run, _, _ = small_run(tmp_path)
    path, first, last = (fl.attribute(run, kernel=kernel).scores for kernel in ("path", "first", "last"))
    torch.testing.assert_close(first, path, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, path, rtol=1e-4, atol=1e-5)


def test_a_network_without_a_run_is_attributed_by_its_kernel(tmp_path: Path):
    run, _, (x, y, x2, y2) = small_run(tmp_path)
    network = run.network.model
    attribution = fl.attribute(network, (x, y), (x2, y2), loss="cross-entropy")
    assert attribution.kernel == "last"
    correlation = rank_correlation(attribution.scores, fl.attribute(run).scores)
    assert correlation.mean() > 0.8


def test_the_path_of_a_network_ends_at_its_loss():
    x, y, x2, _ = data("mse", 2)
    model = linear(2)
    with torch.no_grad():
        design = torch.cat([x, torch.ones(P, 1)], 1)
        best = torch.linalg.lstsq(design, y).solution
        model.weight.copy_(0.7 * best[:4].T), model.bias.copy_(0.7 * best[4])
    path, outputs = model_path(model, x, y, x2, loss="mse")
    torch.testing.assert_close(outputs.double(), model(x2), rtol=1e-4, atol=1e-5)
    kernel = (torch.cat([x, x2]) @ x.T + 1).float()
    torch.testing.assert_close(path.kernels[0], kernel)
    (f,) = path.replay(torch.ones(P, 1)).values()
    wanted = nn.functional.mse_loss(model(x), y)
    assert nn.functional.mse_loss(f[:P, :, 0], y) <= wanted
    # gradient descent with momentum on the weights themselves
    copy_of = nn.Linear(4, 2)
    nn.init.zeros_(copy_of.weight), nn.init.zeros_(copy_of.bias)
    optimizer = SGD(copy_of.parameters(), lr=float(path.rates[0]), momentum=0.9)
    for _ in path.order:
        loss = nn.functional.mse_loss(copy_of(x.float()), y.float())
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    torch.testing.assert_close(f[P:, :, 0], copy_of(x2.float()).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", ["mse", "mean", "mean-half", "sum-half", "cross-entropy", "bce", "mean-over-outputs"])
def test_objectives_are_those_of_autograd(loss: Any):
    samples, outputs = 6, 3
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(samples, outputs, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.rand(samples, outputs, generator=generator, dtype=torch.float64)
    y = y / y.sum(1, keepdim=True)
    objective = objective_of(loss, outputs)
    value = fl.losses.function(loss)(f, y)
    (slope,) = torch.autograd.grad(value, f)
    share = 1 / samples if objective.averaged else 1.0
    torch.testing.assert_close(share * objective.slopes(f[:, :, None], y[:, :, None])[..., 0].detach(), slope)
    torch.testing.assert_close(share * objective.values(f[:, :, None], y[:, :, None]).sum(), value)


def test_wrong_labels_come_first(tmp_path: Path):
    """Three Gaussian classes, 6 of 60 labels changed."""
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    x = torch.randn(60, 4) + 5 * torch.eye(4)[labels]
    wrong = torch.randperm(60)[:6]
    y = labels.clone()
    y[wrong] = (y[wrong] + 1) % 3
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = SGD(model.parameters(), lr=0.2)
    options: Any = {"optimizer": optimizer, "loss": "cross-entropy", "replay": (x, y), "quantities": ["gap"]}
    with fl.watch(model, (x, y), out=tmp_path / "r", **options) as watch:
        for _ in range(60):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            watch.step(loss=loss, samples=slice(None))
    order = fl.attribute(watch.run).label_errors()
    assert sorted(order[:6].tolist()) == sorted(wrong.tolist())


def test_bad_input_is_refused(tmp_path: Path):
    run, _, (x, y, x2, y2) = small_run(tmp_path)
    model = perceptron(3)
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("source is int, expected an nn.Module, a Run, or the path of a run", 3, {}),
        ("train= is missing", model, {}),
        ("test= is missing", model, {"train": (x, y)}),
        ("loss= is missing", model, {"train": (x, y), "test": x2}),
        ("kernel='path' of a network", model, {"train": (x, y), "test": x2, "loss": "mse", "kernel": "path"}),
        ("kernel='next', expected", run, {"kernel": "next"}),
        ("measure='accuracy', expected 'margin', 'loss'", run, {"measure": "accuracy"}),
        ("measure=3, expected an output from 0 to 2", run, {"measure": 3}),
        ("loss='mse', expected that of the run, 'cross-entropy'", run, {"loss": "mse"}),
        ("train= has other inputs than the run recorded", run, {"train": (x + 1, y)}),
        ("train= has other targets than the run recorded", run, {"train": (x, y.flip(0))}),
        ("test= has other inputs", run, {"test": x}),
        ("targets of test do not fit", run, {"test": (x2, y2.double())}),
        ("targets of train do not fit", model, {"train": (x, y), "test": x2, "loss": "mse"}),
    ]
    for message, source, arguments in refused:
        with pytest.raises(fl.FeatlearnError, match=message):
            fl.attribute(source, **arguments)


def test_a_run_may_be_given_by_its_path(tmp_path: Path):
    run, *_ = small_run(tmp_path)
    expected = fl.attribute(run).scores
    assert fl.attribute(run.path).scores.equal(expected)
    assert fl.attribute(str(run.path)).scores.equal(expected)


def test_runs_without_recorded_kernels_need_a_network(tmp_path: Path):
    x, y, x2, y2 = data("mse", 2)
    model = perceptron(2)
    with fl.watch(model, (x, y), out=tmp_path / "r") as watch:
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        watch.step()
    arguments: Any = {"train": (x, y), "test": (x2, y2), "loss": "mse"}
    last = fl.attribute(watch.run, **arguments)
    assert last.scores.equal(fl.attribute(model, **arguments).scores)
    assert not last.scores.equal(fl.attribute(watch.run, kernel="first", **arguments).scores)
    run = fl.open_run(watch.run.path)
    for source, pairs in ((run, arguments), (run, {}), (watch.run, {})):
        with pytest.raises(fl.FeatlearnError, match="the run 'r' was recorded without replay=; record it with"):
            fl.attribute(source, **pairs)
    assert last.scores.equal(fl.attribute(run, model=model, **arguments).scores)


def test_the_text_says_how_far_to_trust_it(tmp_path: Path):
    batches = order(20, None)
    run, _ = watched(tmp_path, perceptron(1), lambda p: SGD(p, lr=0.01), "mse", batches)
    attribution = fl.attribute(run)
    lines = str(attribution).splitlines()
    assert lines[0] == "Effects of 13 training samples on 5 test points, by the kernels along the run."
    assert f": {float(attribution.reliability):.2f} (±" in lines[1]
    best, worst = attribution.top(2, 3)
    assert attribution.scores[2, best[0]] == attribution.scores[2].max()
    assert attribution.scores[2, worst[0]] == attribution.scores[2].min()
