"""Silent alignment, on linear networks where it is known to happen."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.events import CrossingTime, events
from featlearn.diagnosis.run_data import RunData
from featlearn.record import RunWriter, open_run
from featlearn.steer import scale_init, whiten
from tests.diagnosis.recording import record, written


def linear_run(path: Path, sigma: float, steps: int, lr: float):
    """Two linear layers on whitened inputs with a teacher of norm one (002 Sec. 3)."""
    generator = torch.Generator().manual_seed(0)
    x = whiten(torch.randn(60, 12, dtype=torch.float64, generator=generator), mean_eigenvalue=1.0).x
    teacher = torch.randn(12, 1, dtype=torch.float64, generator=generator)
    y = x @ (teacher / teacher.norm())
    model = nn.Sequential(nn.Linear(12, 30, bias=False), nn.Linear(30, 1, bias=False)).double()
    scale_init(model, sigma, redraw=True, generator=generator)
    return record(path, model, x, y, lr=lr, steps=steps, loss="mean-half", until=1e-3)


def test_small_weights_align_in_silence(tmp_path: Path):
    found = diagnose(linear_run(tmp_path / "run", 1e-2, 1200, 0.02))
    assert found.silent is True
    assert found.regime == "rich"
    assert found.times["alignment_90"] <= found.times["norm_10"] < found.times["loss_half"]
    assert "silent: " in next(item.says for item in found.evidence if item.topic == "silent alignment")


def test_large_weights_do_not(tmp_path: Path):
    found = diagnose(linear_run(tmp_path / "run", 2.0, 600, 0.005))
    assert found.silent is False
    assert math.isnan(found.times["norm_10"])


def test_event_times_are_those_of_the_curves(tmp_path: Path):
    steps = list(range(0, 101, 10))
    y = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    share = torch.tensor(steps, dtype=torch.float64) / 100
    f = share[:, None, None] * y
    alignment, norm = (0.2 + 0.6 * (3 * share).clamp(max=1)).tolist(), (0.01 + share**2).tolist()
    kernels = torch.eye(3, dtype=torch.float64).expand(len(steps), 3, 3)
    run = written(
        tmp_path / "run", steps, kernels, f, y, scalars={"ntk/centered_alignment": alignment, "ntk/norm": norm}
    )
    found = events(RunData(run))
    assert found.loss_half.at == pytest.approx(100 * (1 - math.sqrt(0.5)), abs=0.1)
    assert found.alignment_90.at == pytest.approx(30.0, abs=1e-9)
    assert found.norm_10.at == pytest.approx(100 * math.sqrt(0.091), abs=0.1)
    assert found.growth == pytest.approx(101)
    # 90 % of alignment at 30, 10 % of the norm at 30.2, half of the loss at 29.3: it was not silent
    assert found.silent is False


def scalar_run(path: Path, lines: dict[int, dict[str, float]]):
    writer = RunWriter(path, {"name": path.name})
    for step, values in lines.items():
        writer.scalars(step, values)
    writer.close()
    return open_run(path)


def test_what_grows_or_falls_by_factors_is_interpolated_by_factors(tmp_path: Path):
    lines = {s: {"probe/loss": 3 * math.exp(-s / 90), "ntk/norm": 2 * math.exp(s / 80)} for s in (0, 64, 96, 300, 400)}
    found = events(RunData(scalar_run(tmp_path / "run", lines)))
    assert found.loss_half.at == pytest.approx(90 * math.log(2), rel=1e-12)
    assert (found.loss_half.after, found.loss_half.by) == (0, 64)
    assert found.norm_10.at == pytest.approx(400 - 80 * math.log(10), rel=1e-12)
    assert (found.norm_10.after, found.norm_10.by) == (96, 300)


def test_an_event_in_a_gap_is_between_its_measurements_and_order_inside_one_is_not_told(tmp_path: Path):
    def run(name: str, steps: list[int]):
        lines = {
            s: {
                "probe/loss": math.exp(-((s / 50) ** 4)),
                "ntk/norm": 1 + max(0, 50 * (1 - math.exp(2 - s / 20))),
                "ntk/centered_alignment": 0.1 + 0.4 * (1 - math.exp(-s / 8)),
            }
            for s in steps
        }
        return scalar_run(tmp_path / name, lines)

    thin, dense = diagnose(run("thin", [0, 3, 90, 120])), diagnose(run("dense", list(range(0, 121, 3))))
    assert dense.silent is True
    assert thin.silent is None
    said = next(item.says for item in thin.evidence if item.topic == "silent alignment")
    assert "the order of events lies in a gap between measurements" in said
    assert "half of the loss between steps 3 and 90" in said
    # in different gaps the order is known
    assert diagnose(run("enough", [0, 3, 27, 90, 120])).silent is True


def test_a_kernel_has_settled_from_the_first_step_after_which_it_stays_near_the_last(tmp_path: Path):
    """It passes near the last kernel once, and leaves it again."""
    last, away = torch.eye(4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    distances = [1.0, 0.05, 0.6, 0.09, 0.02, 0.0]
    kernels = torch.stack([last + d * float(last.norm()) / float(away.norm()) * away for d in distances])
    y = torch.arange(4.0, dtype=torch.float64)[:, None]
    outputs = torch.stack([y * (1 - 0.5**i) for i in range(6)])
    steps = [0, 1, 2, 4, 8, 16]
    settled = diagnose(written(tmp_path / "run", steps, kernels, outputs, y))
    assert settled.times["kernel_settled"] == 4
    moving = diagnose(written(tmp_path / "moving", steps[:3], kernels[:3], outputs[:3], y))
    assert math.isnan(moving.times["kernel_settled"])
    assert "cannot tell when the kernel settled: it still moved at the end" in " ".join(moving.full.split())
    still = diagnose(written(tmp_path / "still", steps, kernels[-1:].expand(6, 4, 4), outputs, y))
    assert still.times["kernel_settled"] == 0


def test_the_reason_why_alignment_was_not_silent_is_the_one_that_holds(tmp_path: Path):
    steps = range(0, 101, 5)
    lines = {
        s: {
            "probe/loss": math.exp(-((s / 60) ** 3)),
            "ntk/norm": math.exp(s / 15),
            "ntk/centered_alignment": 0.1 + 0.05 * (1 - math.exp(-s / 8)),
        }
        for s in steps
    }
    found = diagnose(scalar_run(tmp_path / "run", lines))
    assert found.silent is False
    item = next(item for item in found.evidence if item.topic == "silent alignment")
    assert "not silent: alignment changed by 0.05, and a rise counts from 0.09" in item.says
    assert "risen by at least 0.09" in item.threshold


def test_an_event_in_a_gap_has_no_time(tmp_path: Path):
    y = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    for name, steps, time in (
        ("gap", [0, 10, 100], math.nan),
        ("dense", [0, 80, 100], 80 + 20 * math.log(2) / math.log(4)),
    ):
        f = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)[:, None, None] * y
        run = written(tmp_path / name, steps, torch.eye(3, dtype=torch.float64).expand(3, 3, 3), f, y)
        found = diagnose(run)
        assert found.times["loss_half"] == pytest.approx(time, nan_ok=True)
        assert ("between steps 10 and 100" in " ".join(found.full.split())) == (name == "gap")


def test_where_nothing_happened_nothing_is_listed(tmp_path: Path):
    y = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
    kernels = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    found = diagnose(written(tmp_path / "run", [0, 10], kernels, 0.1 * y.expand(2, 3, 1), y))
    said = next(item.says for item in found.evidence if item.topic == "silent alignment")
    assert said == "cannot tell whether alignment was silent: the loss on the probe has not halved"


@pytest.mark.parametrize(
    ("after", "by", "wide"), [(0, 1, False), (1, 2, False), (10, 15, False), (0, 2, True), (10, 16, True)]
)
def test_steps_that_follow_each_other_leave_no_gap(after: float, by: float, wide: bool):
    assert CrossingTime((after + by) / 2, after, by).wide is wide
