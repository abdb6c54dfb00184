"""Second opinions: which metric speaks for what."""

import math
from pathlib import Path

import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import ALIGNMENT_ROSE, LOW_RANK, STATIONARY, TURNED
from featlearn.diagnosis.opinions import opinions
from featlearn.diagnosis.run_data import RunData
from featlearn.linalg.estimate import Estimate
from featlearn.record import Run, RunWriter, open_run


def written(path: Path, **scalars: list[float]) -> Run:
    writer = RunWriter(path, {"name": path.name})
    for step in range(3):
        values = {name.replace("__", "/"): numbers[step] for name, numbers in scalars.items()}
        writer.scalars(step, {"probe/loss": 1.0 - 0.3 * step, **values})
    writer.close()
    return open_run(path)


def said(run: Run, turning: float = math.nan, rise: float = math.nan, error: float = math.nan) -> dict[str, str]:
    rotation = Estimate(turning, error, 20)
    return {opinion.name: opinion.says for opinion in opinions(RunData(run), rotation, rise, settled=True)}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (LOW_RANK.low / 2, "rich"),
        (LOW_RANK.high * 1.1, "lazy"),
        ((LOW_RANK.low + LOW_RANK.high) / 2, "between"),
    ],
)
def test_small_low_rank_richness_is_rich(tmp_path: Path, value: float, says: str):
    run = written(tmp_path / "run", richness__low_rank=[0.9, 0.8, value])
    assert said(run) == {"low-rank richness": says}


@pytest.mark.parametrize(
    ("turning", "says"),
    [
        (TURNED.low / 2, "lazy"),
        (2 * TURNED.high, "rich"),
        ((TURNED.low + TURNED.high) / 2, "between"),
    ],
)
def test_a_kernel_that_rotated_is_rich(tmp_path: Path, turning: float, says: str):
    assert said(written(tmp_path / "run"), turning) == {"kernel rotation": says}


def test_rotation_has_the_word_of_its_gauge(tmp_path: Path):
    """0.15 is above the threshold, but two standard errors are not: the gauge says "between", and so does this."""
    assert said(written(tmp_path / "run"), 0.15, error=0.04) == {"kernel rotation": "between"}
    assert said(written(tmp_path / "sure"), 0.15, error=0.01) == {"kernel rotation": "rich"}


@pytest.mark.parametrize(("rise", "says"), [(-0.2, "between"), (0.0, "between"), (2 * ALIGNMENT_ROSE.high, "rich")])
def test_alignment_that_did_not_rise_speaks_for_nothing(tmp_path: Path, rise: float, says: str):
    assert said(written(tmp_path / "run"), rise=rise) == {"rise of kernel-task alignment": says}


def test_features_at_convergence_are_the_mean_over_layers(tmp_path: Path):
    run = written(
        tmp_path / "run",
        convergence__a=[0.1, 0.5, 0.9],
        convergence__b=[0.1, 0.5, 0.8],
        convergence__dead=[math.nan] * 3,
    )
    unknown = Estimate(math.nan, math.nan, 1)
    (found,) = opinions(RunData(run), unknown, math.nan, settled=True)
    assert (found.name, found.value) == ("features at convergence", pytest.approx(0.85))
    assert found.says == ("rich" if STATIONARY.high < 0.85 else "between")
    assert opinions(RunData(run), unknown, math.nan, settled=False) == ()  # far from convergence it says nothing


def test_they_are_evidence_of_their_own_and_do_not_decide(tmp_path: Path):
    """A gap that is lazy beside a metric that says rich: both are told."""
    run = written(tmp_path / "run", richness__low_rank=[0.9, 0.5, LOW_RANK.low / 2], gap__probe=[math.nan, 0.01, 0.01])
    found = diagnose(run)
    assert found.regime == "lazy"
    assert found.opinions["low-rank richness"].says == "rich"
    (item,) = [item for item in found.evidence if item.topic == "second opinions"]
    assert item.verdict == "rich"
    assert item.says.startswith(f"low-rank richness {LOW_RANK.low / 2:.3g}: rich (1 - CKA")
