"""The recorded linearization gap: which number stands for a run, and with which error."""

import math
from pathlib import Path

import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.gap_curve import gap_curve
from featlearn.diagnosis.run_data import RunData
from featlearn.record import Run, RunWriter, open_run

STEPS = (1, 2, 5)


def written(path: Path, *, first: bool = True, samples: int = 30, **curves: list[float]) -> Run:
    writer = RunWriter(path, {"name": path.name, "probe": {"samples": samples}})
    if first:
        writer.scalars(0, {"probe/loss": 1.0})
    for i, step in enumerate(STEPS):
        values = {f"gap/{name}": numbers[i] for name, numbers in curves.items() if i < len(numbers)}
        writer.scalars(step, {"probe/loss": 1 / (1 + step), **values})
    writer.close()
    return open_run(path)


def test_test_points_come_before_the_probe(tmp_path: Path):
    probe = {"probe": [0.01, 0.02, 0.3], "probe_error": [0.001, 0.002, 0.03]}
    test = {"test": [0.02, 0.03, 0.5], "test_error": [0.002, 0.003, 0.05]}
    both = gap_curve(RunData(written(tmp_path / "both", **probe, **test)))
    assert (float(both), float(both.value.stderr), both.value.samples) == (0.5, 0.05, 30)
    assert both.steps == [1, 2, 5]
    assert both.values == [0.01, 0.02, 0.3]
    alone = gap_curve(RunData(written(tmp_path / "alone", **probe)))
    assert (float(alone), float(alone.value.stderr)) == (0.3, 0.03)
    assert alone.test is None


def test_layers_that_only_shrank_are_not_taken_for_learning(tmp_path: Path):
    """Weight decay: the smaller of the gaps with and without common shrinking, and both are said."""
    run = written(
        tmp_path / "run",
        probe=[0.1, 0.4, 0.8],
        unshrunk=[math.nan, 0.1, 0.05],
        probe_error=[0.01] * 3,
        unshrunk_error=[math.nan, 0.03, 0.02],
    )
    found = diagnose(run)
    assert (float(found.gap), float(found.gap.value.stderr)) == (0.05, 0.02)
    assert found.regime == "lazy"
    assert any("on the probe it misses 0.8, without that 0.05" in item.says for item in found.evidence)
    # layers that shrank and grew again: the number is an old one
    grown = written(tmp_path / "grown", probe=[0.1, 0.4, 0.8], unshrunk=[math.nan, 0.1])
    assert float(gap_curve(RunData(grown))) == 0.8
    larger = written(tmp_path / "larger", probe=[0.1, 0.4, 0.8], unshrunk=[0.9, 0.9, 0.9])
    assert float(gap_curve(RunData(larger))) == 0.8


def test_a_single_measurement_after_the_start_is_enough(tmp_path: Path):
    found = gap_curve(RunData(written(tmp_path / "run", probe=[0.2])))
    assert float(found) == pytest.approx(0.2)
    assert math.isnan(float(found.value.stderr))


def test_a_run_that_does_not_begin_at_its_start_has_no_gap(tmp_path: Path):
    found = diagnose(written(tmp_path / "run", first=False, probe=[0.2, 0.3, 0.4]))
    assert not found.gap.known
    assert math.isnan(float(found.gap))
    assert (found.gap.steps, found.gap.values) == ([], [])
    assert found.regime == "cannot tell"
    assert "the run does not begin at its start" in found.headline


def test_a_run_that_broke_down_at_once_says_so(tmp_path: Path):
    writer = RunWriter(tmp_path / "run", {"name": "run", "probe": {"samples": 30}})
    for step, loss in ((0, 1.0), (1, 1e7), (2, math.nan)):
        writer.scalars(step, {"probe/loss": loss, **({"gap/probe": 40.0} if step else {})})
    writer.close()
    found = gap_curve(RunData(open_run(tmp_path / "run")))
    assert not found.known
    assert found.reason == "training broke down before a linearization gap was measured"


@pytest.mark.parametrize(
    ("samples", "curves", "why"),
    [
        (30, {}, "the linearization gap was not recorded"),
        (30, {"probe": [math.nan] * 3}, "no more than rounding, or by the same for all samples"),
        (2, {}, "fewer than 3 samples has no error; give a larger probe"),
    ],
)
def test_why_there_is_no_gap_is_said(tmp_path: Path, samples: int, curves: dict[str, list[float]], why: str):
    found = diagnose(written(tmp_path / "run", samples=samples, **curves))
    assert found.regime == "cannot tell"
    assert why in found.headline
    assert why in found.gap.reason
    assert any(why in item.says for item in found.evidence)
