"""Second opinions: which metric speaks for what."""

import math
from pathlib import Path

import pytest

from featlearn.diagnosis import diagnose
from featlearn.diagnosis.evidence import LOW_RANK, STATIONARY
from featlearn.diagnosis.opinions import opinions
from featlearn.diagnosis.run_data import RunData
from featlearn.record import Run, RunWriter, open_run


def written(path: Path, **scalars: list[float]) -> Run:
    writer = RunWriter(path, {"name": path.name})
    for step in range(3):
        values = {name.replace("__", "/"): numbers[step] for name, numbers in scalars.items()}
        writer.scalars(step, {"probe/loss": 1.0 - 0.3 * step, **values})
    writer.close()
    return open_run(path)


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
    (opinion,) = opinions(RunData(run), settled=True).values()
    assert (opinion.name, opinion.says) == ("low-rank richness", says)


def test_features_at_convergence_are_the_mean_over_layers(tmp_path: Path):
    run = written(
        tmp_path / "run",
        convergence__a=[0.1, 0.5, 0.9],
        convergence__b=[0.1, 0.5, 0.8],
        convergence__dead=[math.nan] * 3,
    )
    (found,) = opinions(RunData(run), settled=True).values()
    assert (found.name, found.value) == ("features at convergence", pytest.approx(0.85))
    assert found.says == ("rich" if STATIONARY.high < 0.85 else "between")
    assert opinions(RunData(run), settled=False) == {}  # far from convergence it says nothing


def test_they_are_evidence_of_their_own_and_do_not_decide(tmp_path: Path):
    """A gap that is lazy beside a metric that says rich: both are told."""
    run = written(tmp_path / "run", richness__low_rank=[0.9, 0.5, LOW_RANK.low / 2], gap__probe=[math.nan, 0.01, 0.01])
    found = diagnose(run)
    assert found.regime == "lazy"
    assert found.opinions["low-rank richness"].says == "rich"
    (item,) = [item for item in found.evidence if item.topic == "second opinions"]
    assert item.verdict == "rich"
    assert item.says.startswith(f"low-rank richness {LOW_RANK.low / 2:.3g}: rich (1 - CKA")
