"""The runs on which the verdict is calibrated and judged: they run, are counted, and have references that are right."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.verdict.constructions import SQUARED, Descent, Samples, Trial
from benchmarks.verdict.networks import Difference, Square, mlp
from benchmarks.verdict.reference import kernels, linearization_gap, shrunk
from benchmarks.verdict.run import constructions, main, suite_jobs
from benchmarks.verdict.training import copied, measured_loss


class Product(nn.Module):
    """f = a (w.x)"""

    def __init__(self, a: float, w: list[float]) -> None:
        super().__init__()
        self.a, self.w = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(w))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * (x @ self.w)[:, None]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_two_runs_are_trained_diagnosed_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "table.jsonl"
    arguments = ["held-out", "--only", "diagonal linear network, large", "--out", str(table), "--first"]
    main([*arguments, "1"])
    first = table.read_text()
    main([*arguments, "2", "--load", "1"])
    assert table.read_text().startswith(first)
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [1001, 1002]
    for line in lines:
        assert "failed" not in line
        assert line["regime_by_theory"] == "lazy"
        assert line["regime"] in ("lazy", "mixed", "rich", "lazy then rich", "cannot tell")
        assert line["loss_left"] < 0.3
        assert line["reference_gap_test"] < 1e-3
        assert line["measured_steps"][0] == 0
        assert line["curve"][-1][0] == line["steps"]
    main([*arguments, "2", "--table"])
    assert "2 runs" in capsys.readouterr().out


def test_suites_are_large_enough_and_share_nothing():
    held_out, calibration = suite_jobs("held-out"), suite_jobs("calibration")
    assert len(held_out) >= 120
    assert len({job.construction for job in held_out}) >= 20
    assert {job.construction for job in held_out}.isdisjoint(job.construction for job in calibration)
    assert {job.seed for job in held_out}.isdisjoint(job.seed for job in calibration)
    assert len({job.key for job in held_out}) == len(held_out)
    assert len(suite_jobs("grokking")) >= 5
    assert all(one.regime in ("lazy", "rich") for one in constructions("held-out").values())


def test_the_gap_of_a_product_is_the_closed_form(x: torch.Tensor):
    # f = a w.x: only the product of both changes is beyond the linearization
    model = Product(2.0, [1.0, -1.0, 0.5])
    start = copied(model)
    change = torch.tensor([0.2, 0.1, -0.3], dtype=torch.float64)
    with torch.no_grad():
        model.a.add_(0.5)
        model.w.add_(change)
    missed = 0.5 * x @ change
    whole = 2.5 * x @ (start["w"] + change) - 2.0 * x @ start["w"]
    expected = (missed - missed.mean()).norm() / (whole - whole.mean()).norm()
    assert linearization_gap(model, start, copied(model), x) == pytest.approx(float(expected), rel=1e-12)


def test_averages_that_settle_are_no_gap(x: torch.Tensor):
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).double()
    start = copied(model)
    model(5 * x + 1)  # in train mode: moves the averages
    with torch.no_grad():
        model[1].weight.add_(1.0)
    assert linearization_gap(model, start, copied(model), x) < 1e-12


def test_common_shrinking_is_a_gap_only_before_it_is_taken_out(x: torch.Tensor):
    torch.manual_seed(0)
    model = Difference(mlp([3, 5, 1], Square, bias=False)).double()
    start = copied(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        model.plus[2].weight.add_(1e-6)
    now = copied(model)
    assert linearization_gap(model, start, now, x) > 0.5
    assert linearization_gap(model, shrunk(start, now), now, x) < 1e-4


def test_kernels_of_the_start_and_of_now_are_centered_and_told_apart(x: torch.Tensor):
    model = Product(2.0, [1.0, -1.0, 0.5])
    start = copied(model)
    with torch.no_grad():
        model.a.add_(1.0)
    first, last = kernels(model, [start, copied(model)], x)
    centered = x - x.mean(0)
    inner, along = centered @ centered.mT, centered @ start["w"]
    torch.testing.assert_close(first, 4 * inner + along.outer(along))
    torch.testing.assert_close(last, 9 * inner + along.outer(along))


def test_what_is_left_of_the_loss_leaves_out_a_constant(x: torch.Tensor):
    model = Product(1.0, [0.0, 0.0, 0.0])
    y = x[:, :1] + 100.0
    trial = Trial(model, Samples(x, y), Samples(x, y), SQUARED, Descent(), 1)
    first = measured_loss(trial)
    with torch.no_grad():
        model.w[0] = 0.5
    assert measured_loss(trial).left(first) == pytest.approx(0.25, rel=1e-12)
