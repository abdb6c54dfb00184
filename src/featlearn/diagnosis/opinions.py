"""Second opinions on the regime: cheap metrics of others, and what each of them says of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from featlearn.diagnosis.evidence import ALIGNMENT_ROSE, LOW_RANK, STATIONARY, TURNED, Threshold, sample_of
from featlearn.diagnosis.run_data import RunData
from featlearn.linalg.estimate import Estimate


@dataclass(frozen=True)
class Opinion:
    """One metric at the end of a run, and the regime that it speaks for."""

    name: str
    value: float
    says: str
    """lazy, rich, between"""
    about: str
    """what the metric is, with its source"""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g}: {self.says} ({self.about})"


def opinions(run_data: RunData, turning: Estimate, rise: float, *, settled: bool) -> tuple[Opinion, ...]:
    """Return what each recorded metric says.

    Args:
        turning: 1 - cosine of the centered first and last kernel, with its standard error.
        rise: Of centered kernel-task alignment.
        settled: Whether the loss has stopped falling; features at convergence say nothing before.
    """
    angle = sample_of([turning])
    metrics = [
        _opinion(
            "low-rank richness",
            _last(run_data, "richness/low_rank"),
            LOW_RANK,
            -1,
            "1 - CKA of last-layer features with the span of the outputs, Nam et al. 2024; small is rich",
        ),
        _opinion(
            "features at convergence",
            _mean(run_data, "convergence/") if settled else math.nan,
            STATIONARY,
            1,
            "cosine of W^T W with -W^T dL/dW under weight decay, arXiv 2507.05644; 1 at convergence",
        ),
        None
        if angle is None
        else Opinion(
            "kernel rotation",
            angle.mean,
            {-1: "lazy", 0: "between", 1: "rich"}[angle.side(TURNED)],
            "1 - cosine of the centered first and last kernel",
        ),
        # Rich networks also end with less alignment than they had: no rise says nothing.
        _opinion(
            "rise of kernel-task alignment",
            rise,
            ALIGNMENT_ROSE._replace(low=-math.inf),
            1,
            "centered; only a rise says something",
        ),
    ]
    return tuple(opinion for opinion in metrics if opinion is not None)


def _opinion(name: str, value: float, threshold: Threshold, richer: int, about: str) -> Opinion | None:
    """`richer`: 1 where large values are rich, -1 where small ones are."""
    if math.isnan(value):
        return None
    low, high = ("lazy", "rich") if richer > 0 else ("rich", "lazy")
    says = low if value < threshold.low else high if value > threshold.high else "between"
    return Opinion(name, value, says, about)


def _last(run_data: RunData, name: str) -> float:
    curve = run_data.curve(name, least=1)
    return math.nan if curve is None else curve.last


def _mean(run_data: RunData, prefix: str) -> float:
    values: Sequence[float] = [
        value
        for name in run_data.scalar_names
        if name.startswith(prefix) and math.isfinite(value := _last(run_data, name))
    ]
    return sum(values) / len(values) if values else math.nan
