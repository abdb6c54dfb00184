"""Which loss was trained on, and how far it fell."""

import math
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn.diagnosis import diagnose
from featlearn.diagnosis.loss_kind import BINARY, CROSS_ENTROPY, SQUARE, LossKind
from featlearn.diagnosis.rates import LossRates
from featlearn.diagnosis.run_data import RunData
from featlearn.record import Run, RunWriter, open_run


def scalars(path: Path, lines: dict[int, dict[str, float]], **config) -> Run:
    writer = RunWriter(path, {"name": path.name, **config})
    for step, values in lines.items():
        writer.scalars(step, values)
    writer.close()
    return open_run(path)


LOSSES = {
    SQUARE: lambda step: 2.0 / (1 + step),
    CROSS_ENTROPY: lambda step: 1.1 * math.exp(-step / 9),
    BINARY: lambda step: 0.7 - 0.02 * step,
}


@pytest.mark.parametrize("kind", LOSSES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("factor", [1.0, 17.0])
def test_the_loss_is_the_one_that_goes_in_proportion_to_what_was_passed(tmp_path: Path, kind: LossKind, factor: float):
    lines = {
        step: {f"probe/{one.scalar}": loss(step) for one, loss in LOSSES.items()}
        | ({"loss": factor * LOSSES[kind](step)} if step else {})
        for step in range(20)
    }
    run_data = RunData(scalars(tmp_path / "run", lines))
    assert run_data.loss_kind is kind
    assert run_data.loss is not None
    assert run_data.loss.values.tolist() == [LOSSES[kind](step) for step in range(20)]


def test_what_was_declared_comes_first_and_without_any_the_one_that_fell_furthest(tmp_path: Path):
    lines = {step: {f"probe/{one.scalar}": loss(step) for one, loss in LOSSES.items()} for step in range(20)}
    assert RunData(scalars(tmp_path / "told", lines, loss_convention="bce")).loss_kind is BINARY
    assert RunData(scalars(tmp_path / "mean", lines, loss_convention="mean-half")).loss_kind is SQUARE
    assert RunData(scalars(tmp_path / "none", lines)).loss_kind is SQUARE  # 0.05 of the first, against 0.12 and 0.46


@pytest.mark.parametrize("declared", [None, "bce"])
def test_multi_label_training_is_found_to_be_binary_cross_entropy(tmp_path: Path, declared: str | None):
    """Trained and watched, and the loss by hand with numpy."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 5), (torch.randn(20, 3) > 0).float()
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with fl.watch(
        model,
        (x, y),
        out=tmp_path / "run",
        optimizer=optimizer,
        loss=declared,
        budget=None,
        quantities=["kernel", "gap"],
    ) as watch:
        for _ in range(40):
            optimizer.zero_grad()
            loss = 3 * nn.functional.binary_cross_entropy_with_logits(model(x), y)
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    run_data = RunData(watch.run)
    assert run_data.loss_kind is BINARY
    f, wanted = run_data.outputs(0).numpy(), y.numpy()
    by_hand = numpy.mean(wanted * numpy.log1p(numpy.exp(-f)) + (1 - wanted) * numpy.log1p(numpy.exp(f)))
    assert run_data.loss is not None
    assert run_data.loss.first == pytest.approx(by_hand, rel=1e-6)
    assert LossRates(run_data).loss_of(run_data.outputs(0)) == pytest.approx(by_hand, rel=1e-6)


def unfit(path: Path) -> Run:
    """A probe that is none of the training data: its loss rises, that of the steps falls."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(6, 1, dtype=torch.float64, generator=generator)
    root = torch.randn(6, 8, dtype=torch.float64, generator=generator)
    writer = RunWriter(path, {"name": path.name})
    writer.array("targets", 0, y=y.numpy())
    for step in range(0, 60, 6):
        f = -0.02 * step * y
        writer.array("kernel", step, mean=(root @ root.T).numpy())
        writer.array("outputs", step, f=f.numpy())
        values = {"probe/loss": float((f - y).square().mean()), "ntk/norm": 1.0, "ntk/centered_alignment": 0.2}
        values |= {"loss": math.exp(-step / 12), "gap/probe": 0.01} if step else {}
        writer.scalars(step, values)
    writer.close()
    return open_run(path)


def test_the_loss_that_was_passed_is_never_contradicted(tmp_path: Path):
    run = unfit(tmp_path / "run")
    run_data, found = RunData(run), diagnose(run)
    assert run_data.loss is not None
    assert run_data.loss.values.min() == run_data.loss.first
    left = math.exp(-(48 + 54 - 6 - 12) / 2 / 12)  # geometric means of the last and the first two of nine
    assert run_data.loss_left == pytest.approx(left)
    assert float(found.numbers["loss_left"]) == pytest.approx(left)
    assert found.regime == "lazy"
    text = " ".join(found.full.split())
    assert "at its lowest the learnable loss was 0.03 of the first" in text
    for words in (
        "the loss did not fall",
        "the loss has hardly fallen",
        "the loss has not halved",
        "the loss fell only",
    ):
        assert words not in text


def test_the_loss_that_fell_furthest_counts(tmp_path: Path):
    lines = {step: {"probe/loss": 1.0 - 0.08 * step, "loss": 5.0 - 0.1 * step} for step in range(10)}
    assert RunData(scalars(tmp_path / "run", lines)).loss_left == pytest.approx(0.28)
    late = {step: values for step, values in lines.items() if step}
    # no probe before training: the last two of nine losses of steps by the first two, geometric means
    assert RunData(scalars(tmp_path / "late", late)).loss_left == pytest.approx(math.sqrt(4.2 * 4.1 / (4.9 * 4.8)))
    assert math.isnan(RunData(scalars(tmp_path / "none", {0: {"lr": 1.0}})).loss_left)


def test_noise_of_small_batches_is_no_fall(tmp_path: Path):
    """Losses of single samples, a factor of a hundred apart, of a network that does not learn; and of one that does."""
    noise = torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square().tolist()
    steps = list(range(1, 25))
    still = {0: {"probe/loss": 1.0}} | {
        step: {"probe/loss": 1.0 - 1e-4 * step, "loss": noise[step - 1], "gap/probe": 0.01} for step in steps
    }
    assert min(noise) < 0.1 * noise[0]
    run = scalars(tmp_path / "still", still)
    assert RunData(run).loss_left == pytest.approx(1.0, abs=3e-3)
    assert diagnose(run).regime == "cannot tell"
    learns = {step: values | {"loss": values.get("loss", 1.0) * 1e-4 ** (step / 24)} for step, values in still.items()}
    assert RunData(scalars(tmp_path / "learns", learns)).loss_left < 0.05
