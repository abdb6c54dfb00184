"""Numbers of one run: their errors, when the loss has settled, and from which step a run was rich."""

import math
from pathlib import Path

import numpy
import pytest
import torch

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import FITTED, GAP
from featlearn.diagnosis.findings import FOLDS, LATER, Findings, jackknife
from featlearn.metrics import kernel_distance
from featlearn.record import Run, RunWriter, open_run
from tests.diagnosis.recording import written


def two_kernels(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    first, last = torch.randn(2, samples, 6, dtype=torch.float64, generator=generator)
    return first @ first.T, last @ last.T


def centered_distance(a: numpy.ndarray, b: numpy.ndarray) -> float:
    centering = numpy.eye(len(a)) - 1 / len(a)
    a, b = centering @ a @ centering, centering @ b @ centering
    return float(1 - (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


@pytest.mark.parametrize("samples", [5, 16, 23])
def test_the_error_is_that_of_leaving_out_groups_of_samples(samples: int):
    """Brute force with numpy: the jackknife over min(16, P) groups of every so manyth sample."""
    first, last = two_kernels(samples)
    found = jackknife(lambda a, b: float(kernel_distance(a, b, centered=True)), first, last)
    a, b = first.numpy(), last.numpy()
    assert float(found) == pytest.approx(centered_distance(a, b), rel=1e-10)
    count = min(FOLDS, samples)
    without = []
    for fold in range(count):
        kept = [i for i in range(samples) if i % count != fold]
        without.append(centered_distance(a[numpy.ix_(kept, kept)], b[numpy.ix_(kept, kept)]))
    variance = (count - 1) / count * sum((value - sum(without) / count) ** 2 for value in without)
    assert float(found.stderr) == pytest.approx(math.sqrt(variance), rel=1e-8)
    assert found.samples == samples


def test_the_error_is_about_the_spread_over_probes():
    """Turning of kernels of many probes from one distribution: the mean error is near their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    values, errors = [], []
    for _ in range(60):
        x = torch.randn(40, 6, dtype=torch.float64, generator=generator)
        found = jackknife(lambda a, b: float(kernel_distance(a, b, centered=True)), x @ x.T, x @ turn @ turn.T @ x.T)
        values.append(float(found))
        errors.append(float(found.stderr))
    assert 0.7 < float(numpy.mean(errors)) / float(numpy.std(values, ddof=1)) < 1.5


def test_two_samples_show_no_error():
    first, last = two_kernels(2)
    assert math.isnan(float(jackknife(lambda a, b: float(b.norm() / a.norm()), first, last).stderr))


def test_turning_and_growth_of_a_run_are_those_of_its_first_and_last_kernel(tmp_path: Path):
    first, last = two_kernels(9)
    y = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    middle = torch.eye(9, dtype=torch.float64)
    outputs = torch.stack([share * y for share in (0.0, 0.5, 0.9)])
    found = diagnose(written(tmp_path / "run", [0, 4, 9], torch.stack([first, middle, 3 * last]), outputs, y))
    assert float(found.turning) == pytest.approx(centered_distance(first.numpy(), last.numpy()), rel=1e-6)
    assert float(found.growth) == pytest.approx(3 * float(last.norm() / first.norm()), rel=1e-6)
    assert 0 < float(found.turning.stderr) < 1
    assert 0 < float(found.growth.stderr) < float(found.growth)


def scalars(path: Path, steps: list[int], **curves: list[float]) -> Run:
    writer = RunWriter(path, {"name": path.name})
    for i, step in enumerate(steps):
        values = {name.replace("__", "/"): curve[i] for name, curve in curves.items()}
        writer.scalars(step, {name: value for name, value in values.items() if math.isfinite(value)})
    writer.close()
    return open_run(path)


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        ([1.0, 0.9, 0.85, 0.82, 0.82, 0.819], True),  # as far as it can fall
        ([1.0, 0.999, 0.998, 0.997, 0.996, 0.995], False),  # a plateau before anything is learned
        ([1.0, 0.999, 0.99, 0.97, 0.9, 0.8], False),  # it has just begun
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], False),  # nothing was learned
        ([1.0, 1.1, 1.2, 1.2, 1.2, 1.2], False),
        ([1.0, 0.8, 0.75, 0.76, 0.77, 0.78], True),
    ],
)
def test_a_loss_is_settled_where_it_fell_and_falls_no_more(tmp_path: Path, losses: list[float], settled: bool):
    steps = list(range(0, 60, 10))
    run = scalars(tmp_path / "run", steps, probe__loss=losses, gap__probe=[math.nan, *[0.01] * 5])
    assert Findings(run).settled_loss is settled
    left = min(losses)
    assert diagnose(run).regime == ("lazy" if settled or left <= 0.7 else "cannot tell")


STEPS = [0, 1, 3, 10, 30, 100, 300, 1000, 3000]
FIT = [1.0, 0.9, 0.7, 0.3, 0.05, 0.01, 0.005, 0.004, 0.003]


def late(path: Path, gaps: list[float], fit: list[float] = FIT, steps: list[int] = STEPS) -> Run:
    return scalars(path, steps, probe__loss=fit, gap__probe=[math.nan, *gaps])


def test_a_run_that_fitted_lazily_and_became_rich_later_is_lazy_then_rich(tmp_path: Path):
    low, high = GAP.low / 3, 3 * GAP.high
    gaps = [low, low, low, low, low, GAP.high - 0.05, GAP.high + 0.15, high]
    found = diagnose(late(tmp_path / "run", gaps))
    assert found.regime == "lazy then rich"
    # a quarter of the way from step 300 to 1000
    assert found.times["rich_from"] == pytest.approx(300 + 0.25 * 700)
    assert found.headline == "lazy at first, then it learned features, from step 475 on."
    said = next(item for item in found.evidence if item.verdict == "lazy then rich")
    assert said.says == "the gap is rich from step 475 on, after the data were fitted"


def test_the_step_is_the_one_from_which_on_it_was_rich(tmp_path: Path):
    """A large gap in the first steps, where little had changed, is not when features came."""
    low, high = GAP.low / 3, 3 * GAP.high
    found = Findings(late(tmp_path / "run", [high, low, low, low, low, low, low, high]))
    assert 1000 < found.rich_from < 3000


@pytest.mark.parametrize(
    "why",
    [
        "it was rich when it fitted",
        "it was rich soon after",
        "it never fitted",
        "it stopped too soon",
        "no gap",
    ],
)
def test_other_runs_are_not_lazy_then_rich(tmp_path: Path, why: str):
    low, high = GAP.low / 3, 3 * GAP.high
    gaps, fit, steps = [low] * 5 + [high] * 3, FIT, STEPS
    if why == "it was rich when it fitted":
        gaps = [low, low, low, high, high, high, high, high]
    elif why == "it was rich soon after":
        gaps = [low, low, low, low, high, high, high, high]
    elif why == "it never fitted":
        fit = [max(loss, 2 * FITTED.high) for loss in FIT]
    elif why == "it stopped too soon":
        steps = [0, 1, 3, 10, 30, 40, 50, 60, int(LATER * 30) - 1]
    found = diagnose(late(tmp_path / "run", gaps if why != "no gap" else [math.nan] * 8, fit, steps))
    assert found.regime == ("cannot tell" if why == "no gap" else "rich")
    assert math.isnan(found.times["rich_from"])


def test_a_constant_that_is_learned_first_is_no_fit(tmp_path: Path):
    """By hand: nearly all of the first loss is a constant, which step 3 has learned; the rest comes with features."""
    y = torch.tensor([[9.0], [10.0], [11.5]], dtype=torch.float64)
    low, high = GAP.low / 3, 3 * GAP.high
    writer = RunWriter(tmp_path / "run", {"name": "run", "loss_convention": "mean"})
    writer.array("targets", 0, y=y.numpy())
    shares = [0.0, 0.0, 0.0, 0.01, 0.02, 0.5, 0.8, 0.99, 1.0]
    for i, (step, share) in enumerate(zip(STEPS, shares, strict=True)):
        f = (0.0 if step < 3 else y.mean()) + share * (y - y.mean()) + torch.zeros_like(y)
        writer.array("outputs", step, f=f.numpy())
        gap = {} if step == 0 else {"gap/probe": low if i < 5 else high}
        writer.scalars(step, {"probe/loss": float((f - y).square().mean()), **gap})
    writer.close()
    found = Findings(open_run(tmp_path / "run"))
    assert found.run_data.loss is not None
    assert found.run_data.loss.values[2] < FITTED.high * found.run_data.loss.first
    assert found.run_data.centered_loss is not None
    variance = float((y - y.mean()).square().mean())
    expected = [variance * (1 - share) ** 2 for share in shares]
    assert found.run_data.centered_loss.values.tolist() == pytest.approx(expected, rel=1e-9)
    assert math.isnan(found.rich_from)
    assert diagnose(open_run(tmp_path / "run")).regime == "rich"


def test_a_step_is_given_only_if_every_run_has_one(tmp_path: Path):
    low, high = GAP.low / 3, 3 * GAP.high
    grokked, rich = late(tmp_path / "a", [low] * 6 + [high] * 2), late(tmp_path / "b", [high] * 8)
    assert math.isfinite(diagnose([grokked, grokked]).times["rich_from"])
    both = diagnose([grokked, rich])
    assert math.isnan(both.times["rich_from"])
    assert both.regime == "rich"
    assert not any(item.verdict == "lazy then rich" for item in both.evidence)
