"""The thresholds, on the runs from which they come: the tables in the documentation are what the rule says now."""

import contextlib
import io
import math
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks import calibrate_diagnosis
from featlearn.diagnosis.evidence import (
    ALIGNMENT_ROSE,
    CLEARLY_MOVED,
    KERNEL_MOVED,
    SHAPE_SPEED,
    SPEED,
    Threshold,
    sample,
)
from featlearn.diagnosis.judgement import regime_of

TOP = Path(__file__).parents[2]
LINES = calibrate_diagnosis.rows(TOP / "benchmarks" / "diagnosis_calibration.jsonl")
CHOSEN = [line for line in LINES if not line["held_out"]]


@pytest.mark.parametrize("held_out", [False, True])
def test_the_page_shows_what_is_said_of_these_runs(held_out: bool):
    page = (TOP / "docs" / "how-to" / "read-a-diagnosis.md").read_text()
    some = [line for line in LINES if line["held_out"] == held_out]
    for show in (calibrate_diagnosis.show_settings, calibrate_diagnosis.show_confusion):
        with contextlib.redirect_stdout(io.StringIO()) as told:
            show(some)
        assert told.getvalue().strip() in page


def test_no_run_is_given_the_opposite_of_its_regime():
    said = [(line["by_construction"], calibrate_diagnosis.said(line)) for line in LINES]
    assert len(said) == 340
    assert ("lazy", "rich") not in said
    assert ("rich", "lazy") not in said


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("speedup", SPEED), ("kernel_moved", KERNEL_MOVED), ("alignment_rise", ALIGNMENT_ROSE),
     ("speedup_rescaled", SHAPE_SPEED)],
)  # fmt: skip
def test_no_number_that_a_threshold_comes_from_speaks_for_the_wrong_regime(name: str, threshold: Threshold):
    values = {
        made: [line["numbers"][name] for line in CHOSEN if line["by_construction"] == made] for made in ("lazy", "rich")
    }
    assert all(math.isfinite(value) for some in values.values() for value in some)
    assert max(values["lazy"]) < threshold.high
    if name in ("speedup", "kernel_moved"):  # the others have no vote against rich
        assert min(values["rich"]) > threshold.low


NAMES = ("kernel_moved", "speedup", "alignment_rise", "loss_left")


@pytest.mark.parametrize("missing", [*combinations(NAMES[:3], 1), *combinations(NAMES[:3], 2), NAMES[:3]])
def test_less_evidence_never_says_more(missing: tuple[str, ...]):
    """Without a number, the verdict is that of all numbers, or that it cannot be told."""
    kept = 0
    for line in LINES:
        known = [None if name in missing else sample([line["numbers"].get(name, math.nan)]) for name in NAMES]
        told = regime_of(*known)
        assert told in (calibrate_diagnosis.said(line), "cannot tell")
        kept += told != "cannot tell"
    assert kept > 140 if len(missing) == 1 else kept == 0


def test_without_the_speed_a_kernel_must_have_moved_further_than_in_any_run_that_was_not_rich():
    moved = [line["numbers"]["kernel_moved"] for line in LINES
             if calibrate_diagnosis.said(line) in ("lazy", "mixed")]  # fmt: skip
    assert 0.17 < max(moved) < CLEARLY_MOVED.high
