"""Second opinions on the regime: metrics that need neither a kernel nor the first weights."""

import math
from dataclasses import dataclass

from featlearn.diagnosis.evidence import LOW_RANK, STATIONARY
from featlearn.diagnosis.run_data import RunData


@dataclass(frozen=True)
class Opinion:
    """One metric at the end of a run, and the regime that it indicates."""

    name: str
    value: float
    says: str
    """lazy, rich, between"""
    about: str
    """what the metric is, with its source"""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g}: {self.says} ({self.about})"


def opinions(run_data: RunData, *, settled: bool) -> dict[str, Opinion]:
    """Return the recorded metrics by name; features at convergence only if the loss has stopped falling."""
    verdicts = {}
    rank = run_data.last("richness/low_rank")
    if math.isfinite(rank):
        says = "rich" if rank < LOW_RANK.low else "lazy" if rank > LOW_RANK.high else "between"
        about = "1 - CKA of last-layer features with the span of the outputs, Nam et al. 2024; small is rich"
        verdicts["low-rank richness"] = Opinion("low-rank richness", rank, says, about)
    layers = [run_data.last(name) for name in run_data.scalar_names if name.startswith("convergence/")]
    known = [value for value in layers if math.isfinite(value)]
    if known and settled:
        mean = sum(known) / len(known)
        says = "lazy" if mean < STATIONARY.low else "rich" if mean > STATIONARY.high else "between"
        about = "cosine of W^T W with -W^T dL/dW under weight decay, arXiv 2507.05644; 1 at convergence"
        verdicts["features at convergence"] = Opinion("features at convergence", mean, says, about)
    return verdicts
