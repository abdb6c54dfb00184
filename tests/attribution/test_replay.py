"""Replays of linear models, whose kernel is constant, against training itself; and what is refused."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import featlearn as fl
from featlearn.attribution.recorded import recorded_path
from featlearn.monitoring import replay_record
from tests.attribution.runs import P, Q, data, linear, order, perceptron, train, watched

STEPS = 17
LOSSES = {"mse": 3, "mean": 2, "mean-half": 3, "sum-half": 1, "cross-entropy": 4, "bce": 2, "mean-over-outputs": 1}
SGDS = {
    "plain": partial(SGD, lr=0.02),
    "momentum": partial(SGD, lr=0.01, momentum=0.8),
    "nesterov": partial(SGD, lr=0.01, momentum=0.8, nesterov=True),
    "dampening": partial(SGD, lr=0.02, momentum=0.7),
}


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first.detach(), second.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("make", SGDS.values(), ids=SGDS)
def test_answers_for_a_linear_model_are_those_of_training(
    make: Any, loss: str, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if size:  # and by a kernel that all outputs share
        monkeypatch.setattr(replay_record, "LARGEST_FULL", 0)
    outputs = LOSSES[loss]
    if loss == "sum-half":
        make = partial(make, lr=0.001)
    kind = loss if loss in ("cross-entropy", "bce") else "mse"
    x, y, x2, _ = data(kind, outputs)
    batches = order(STEPS, size)
    run, before = watched(tmp_path, linear(outputs), make, loss, batches)
    replay = fl.replay(run)
    assert replay.self_error < 1e-9

    def trained(targets: Any = y, steps: int = STEPS, factor: float = 1.0, **options: Any) -> Any:
        model = copy.deepcopy(before)
        optimizer = make(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] *= factor
        return train(model, optimizer, loss, x, targets, batches[:steps], **options)(x2)

    same(replay.outputs, trained())
    same(replay.without([0, 7, 11]).outputs, trained(without=[0, 7, 11]))
    same(replay.with_targets(y.flip(0)).outputs, trained(targets=y.flip(0)))
    same(replay.at_rate(0.5).outputs, trained(factor=0.5))
    for step in (0, 4, 9, STEPS):
        same(replay.stopped_at(step).outputs, trained(steps=step))


def test_groups_with_rates_of_their_own_and_a_schedule(tmp_path: Path):
    model, (x, y, x2, _) = linear(2), data("mse", 2)

    def make(parameters: Any) -> SGD:
        weight, bias = parameters
        return SGD([{"params": [weight], "lr": 0.02}, {"params": [bias], "lr": 0.05}])

    before, optimizer = copy.deepcopy(model), make(model.parameters())
    watch = fl.watch(
        model, (x, y), out=tmp_path / "run", test=(x2, None), optimizer=optimizer, loss="mse", replay=(x, y)
    )

    def loop(model: nn.Module, optimizer: SGD, without: Any, watch: Any = None) -> nn.Module:
        for step, batch in enumerate(order(STEPS, 6)):
            for group in optimizer.param_groups:
                group["lr"] *= 1.0 if step % 5 else 0.9
            train(model, optimizer, "mse", x, y, [batch], without=without, watch=watch)
        return model

    with watch:
        loop(model, optimizer, [], watch)
    same(fl.replay(watch.run).without([2]).outputs, loop(before, make(before.parameters()), [2])(x2))


@pytest.mark.parametrize("make", [partial(Adam, lr=1e-3), partial(AdamW, lr=1e-3), partial(RMSprop, lr=1e-3)])
def test_adaptive_optimizers_are_repeated_by_the_kernel_of_their_update(make: Any, tmp_path: Path):
    run, _ = watched(tmp_path, perceptron(1), make, "mse", order(60, None))
    replay = fl.replay(run)
    assert replay.self_error < 0.35
    assert float(replay.without([3]).change.norm()) > 0


def test_recorded_kernels_are_those_of_ntk(tmp_path: Path):
    model = perceptron(3)
    x, _, x2, _ = data("mse", 3)
    start = copy.deepcopy(model)
    run, _ = watched(tmp_path, model, SGDS["plain"], "mse", order(5, 4))
    recorded = recorded_path(run)
    assert recorded.path.steps == [0, 1, 2, 3, 5]
    for network, kernel in ((start, recorded.path.kernels[0]), (model, recorded.path.kernels[-1])):
        rows = torch.cat([x, x2])
        dense = fl.ntk(network, rows, x2=x, outputs="full").permute(0, 2, 1, 3).reshape(3 * (P + Q), 3 * P)
        torch.testing.assert_close(kernel, dense)
        torch.testing.assert_close(
            fl.ntk(network, rows, x2=x), dense.reshape(P + Q, 3, P, 3).diagonal(dim1=1, dim2=3).mean(-1)
        )
    assert [len(batch) for batch in recorded.path.order] == [4] * 5


@pytest.mark.parametrize("make", [SGDS["momentum"], partial(Adam, lr=0.01)])
def test_recording_changes_nothing(make: Any, tmp_path: Path):
    batches = order(30, 4)
    model = perceptron(2)
    plain = copy.deepcopy(model)
    watched(tmp_path, model, make, "mse", batches)
    x, y, _, _ = data("mse", 2)
    train(plain, make(plain.parameters()), "mse", x, y, batches)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


def test_a_run_is_replayed_from_disk(tmp_path: Path):
    run, _ = watched(tmp_path, linear(2), SGDS["plain"], "mse", order(STEPS, 5))
    packed = fl.open_run(run.pack(tmp_path / "run.zip"))
    assert torch.equal(fl.replay(packed).without([1]).outputs, fl.replay(run).without([1]).outputs)


def test_large_rates_do_not_overflow(tmp_path: Path):
    run, _ = watched(tmp_path, perceptron(1), partial(SGD, lr=0.4), "mse", order(60, None))
    answer = fl.replay(run).at_rate(50.0)
    assert bool(answer.outputs.isfinite().all())


def test_answers_say_whether_to_trust_them(tmp_path: Path):
    run, _ = watched(tmp_path, perceptron(1), SGDS["plain"], "mse", order(STEPS, None))
    answer = fl.replay(run).without([1, 2])
    size = float(answer.change.square().mean().sqrt())
    assert float(answer.error) == pytest.approx(float(answer.relative_error) * size)
    assert str(answer).startswith("Without 2 of 13 samples: outputs change by")
    assert ("Do not trust this" in str(answer)) is not answer.trusted


BAD = {
    "without=[]": (lambda r: r.without([]), "expected whole numbers|expected at least one"),
    "outside": (lambda r: r.without([P]), "from 0 to 12"),
    "all": (lambda r: r.without(range(P)), "all 13 training samples"),
    "mask": (lambda r: r.without([True, False]), "expected whole numbers"),
    "few targets": (lambda r: r.with_targets(torch.zeros(3)), "of shape \\(3,\\), expected targets of all 13"),
    "classes": (lambda r: r.with_targets(torch.zeros(P).long()), "targets of y do not fit the loss 'mse'"),
    "step": (lambda r: r.stopped_at(99), "step=99, expected a whole number from 0 to 17"),
    "rate": (lambda r: r.at_rate(-1), "factor=-1, expected a number > 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_questions_are_refused(name: str, tmp_path: Path):
    replay = fl.replay(watched(tmp_path, linear(2), SGDS["plain"], "mse", order(STEPS, 5))[0])
    call, message = BAD[name]
    with pytest.raises(fl.FeatlearnError, match=message):
        call(replay)


def test_what_cannot_be_recorded_is_refused_by_name(tmp_path: Path):
    model, (x, y, _, _) = linear(2), data("mse", 2)

    def watch(optimizer: Any, loss: Any = "mse", **options: Any) -> Any:
        return fl.watch(
            model, (x, y), out=tmp_path / "r", optimizer=optimizer, loss=loss, **{"replay": (x, y)} | options
        )

    sgd = SGD(model.parameters(), lr=0.1)
    with pytest.raises(fl.FeatlearnError, match="optimizer is ASGD, expected one of SGD, Adam"):
        watch(torch.optim.ASGD(model.parameters()))
    with pytest.raises(fl.FeatlearnError, match="needs optimizer="):
        watch(None)
    with pytest.raises(fl.FeatlearnError, match="needs the training loss by name"):
        watch(sgd, loss=lambda f, y: (f - y).abs().mean())
    with pytest.raises(fl.FeatlearnError, match="replay has no targets"):
        watch(sgd, replay=(x, None))
    with pytest.raises(fl.FeatlearnError, match="targets of replay do not fit"), watch(sgd, replay=(x, y[:, 0])):
        pass
    with pytest.raises(fl.FeatlearnError, match="resume=True"):
        watch(sgd, resume=True)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.9}]
    with pytest.raises(fl.FeatlearnError, match="groups of the optimizer differ in momentum"):
        watch(SGD(groups, lr=0.1))
    watch(Adagrad(model.parameters()))


def test_more_samples_than_fit_are_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay_record, "LARGEST_KERNEL", 900)
    model, (x, y, _, _) = linear(2), data("mse", 2)
    options = {"optimizer": SGD(model.parameters(), lr=0.1), "loss": "mse", "replay": (x, y)}
    with (
        pytest.raises(
            fl.FeatlearnError, match=r"each kernel of the 13 samples of replay= takes 1.3 KiB, expected at most"
        ),
        fl.watch(model, (x, y), out=tmp_path / "r", **options),
    ):
        pass


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (None, "without samples=, expected the indices of this step's samples among the 13"),
        ([13], "indices from 13 to 13, expected 0 to 12"),
        ([0.5], "samples is float32 of shape"),
        ("all", "samples is str, expected indices or a slice"),
    ],
)
def test_samples_of_a_step_are_checked(samples: Any, message: str, tmp_path: Path):
    model, (x, y, _, _) = linear(2), data("mse", 2)
    options = {"optimizer": SGD(model.parameters(), lr=0.1), "loss": "mse", "replay": (x, y)}
    with fl.watch(model, (x, y), out=tmp_path / "r", **options) as watch:
        with pytest.raises(fl.FeatlearnError, match=message):
            watch.step(samples=samples)
        watch.step(samples=slice(None))
        with pytest.raises(fl.FeatlearnError, match="expected every step once"):
            watch.step(samples=slice(None), step=9)


def test_runs_without_kernels_are_refused(tmp_path: Path):
    model, (x, y, _, _) = linear(2), data("mse", 2)
    with fl.watch(model, (x, y), out=tmp_path / "r") as watch:
        with pytest.raises(fl.FeatlearnError, match="without replay=, expected"):
            watch.step(samples=[1])
        watch.step(samples=4)
    assert watch.run.scalar("samples")[1].tolist() == [4]
    with pytest.raises(fl.FeatlearnError, match="has no kernels of its training samples"):
        fl.replay(watch.run)
    with pytest.raises(fl.FeatlearnError, match="run is Linear, expected a Run"):
        fl.replay(model)  # type: ignore[arg-type]


def test_a_shared_kernel_is_the_mean_over_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    batches = order(STEPS, 5)
    full = recorded_path(watched(tmp_path / "full", perceptron(3), SGDS["plain"], "mse", batches)[0]).path
    monkeypatch.setattr(replay_record, "LARGEST_FULL", 0)
    shared = recorded_path(watched(tmp_path / "shared", perceptron(3), SGDS["plain"], "mse", batches)[0]).path
    assert full.kernels[0].shape == (3 * (P + Q), 3 * P)
    for reduced, kernel in zip(full.shared().kernels, shared.kernels, strict=True):
        torch.testing.assert_close(reduced, kernel)
    assert full.work(7) == pytest.approx(7 * 3 * (P + Q) * 3 * P * STEPS * 5 / P)
    assert shared.work(7) == pytest.approx(full.work(7) / 3)
    assert shared.shared() is shared
