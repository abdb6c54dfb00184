"""What is said by what is known: the regime in a sentence, and layers of which little was recorded."""

import math
from pathlib import Path

import numpy
import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import Sample
from featlearn.diagnosis.judgement import _sentence, regime_of, votes_of
from featlearn.record import RunWriter


def one(value: float | None) -> Sample | None:
    return None if value is None else Sample(value, math.nan, 1)


@pytest.mark.parametrize(
    ("moved", "speed", "rise", "regime", "says"),
    [
        (0.2, 20.0, 0.2, "rich", "The kernel left its first state behind"),
        (0.05, 20.0, 0.0, "rich", "The loss fell faster than the first kernel predicts"),
        (0.01, 1.1, 0.0, "lazy", "The first kernel predicts how the loss fell"),
        (0.01, None, 0.0, "lazy", "The kernel hardly moved, and alignment hardly changed"),
        (0.3, None, 0.2, "rich", "The kernel left its first state behind"),
        (0.15, None, 0.2, "cannot tell", "how much faster than its first kernel it learned"),
        (0.3, None, 0.05, "cannot tell", "how much faster than its first kernel it learned"),
        (0.05, 20.0, None, "rich", "The loss fell faster"),  # whatever alignment did
        (0.05, 1.1, None, "cannot tell", "how much alignment rose"),
        (0.05, 5.0, None, "mixed", "lie in between"),
        (0.2, 1.1, 0.2, "mixed", "do not agree"),
        (0.05, 5.0, 0.05, "mixed", "lie in between"),
        (None, 20.0, None, "cannot tell", "how far the kernel moved and how much alignment rose"),
    ],
)
def test_the_headline_says_what_is_known(moved, speed, rise, regime: str, says: str):
    votes = votes_of(one(moved), one(speed), one(rise))
    assert regime_of(one(moved), one(speed), one(rise), one(0.1)) == regime
    assert says in _sentence(regime, votes, one(0.1))


def test_lazy_training_whose_layers_correlate_more_is_not_said_to_have_learned_few_features(tmp_path: Path):
    votes = votes_of(one(0.01), one(1.1), one(0.0))
    assert "few features" in _sentence("lazy", votes, one(0.1))
    said = _sentence("lazy", votes, one(0.1), ["b", "a"])
    assert "few features" not in said
    assert said.endswith("yet the neural feature correlation rose in b, a.")
    writer = RunWriter(tmp_path / "run", {"name": "run"})
    for step in (0, 10):
        writer.scalars(step, {
            "probe/loss": 1.0 - 0.09 * step, "ntk/centered_distance": 0.001 * step, "ntk/centered_alignment": 0.3,
            "features/a/uncentered": 0.3 + 0.02 * step, "weights/a/distance": 0.02 * step,
            "features/b/uncentered": 0.3 + 0.03 * step, "weights/b/distance": 0.02 * step,
            "features/c/uncentered": 0.3 + 0.04 * step, "weights/c/distance": 0.001 * step,
        })  # fmt: skip
    writer.close()
    found = diagnose(tmp_path / "run")
    assert found.regime == "lazy"
    assert found.headline.endswith("yet the neural feature correlation rose in b, a.")


def test_what_was_not_recorded_of_layers_is_named_and_fits_are_better_or_worse(tmp_path: Path):
    writer = RunWriter(tmp_path / "run", {"name": "run"})
    writer.array("targets", 0, y=numpy.eye(3)[[0, 1, 2, 0, 1]])
    for step in (0, 10):
        writer.scalars(step, {
            "probe/loss": 1.0 - 0.09 * step, "ntk/specialization": 1.02 - 0.05 * step,
            "features/head/uncentered": 0.3, "layers/v--out/alignment": 0.2 + 0.01 * step,
            "layers/a--b/alignment": 0.2, "weights/out/norm": 1.0,
            **{f"weights/{layer}/distance": 0.1 * step for layer in ("head", "v", "lstm")},
        })  # fmt: skip
    writer.close()
    found = diagnose(tmp_path / "run")
    text = " ".join(str(found).split())
    assert "head: +0.00 (not measured: v, lstm)" in text or "head: +0.00 (not measured: lstm, v)" in text
    assert "v--out: alignment; ln |U W| changed by +0.41 (alignment, 0.2 to 0.3) and by norms that were not" in text
    assert found.mechanism["a--b"].name == "cannot tell"
    assert "fits its own target worse by 0.72, at the start better by 0.03" in text
    assert "nan" not in text
