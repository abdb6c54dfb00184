"""Statements with their number, threshold and its source; and the thresholds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from featlearn.linalg.estimate import Estimate

Record = TypeVar("Record", bound=Any)


class Threshold(NamedTuple):
    """Two numbers that separate low, between and high, with their source."""

    low: float
    high: float
    source: str


CALIBRATED = (
    "regime: from runs whose regime is known by construction, none of them among those by which the verdict is tested; "
    "docs/how-to/read-a-diagnosis.md has the tables"
)
GAP = Threshold(0.15, 0.25, CALIBRATED)
"""Linearization gap at the end. Lazy calibration runs had at most 0.089, rich ones at least 0.60; along the output
scale it goes from one to the other in two decades, and an output times 3 has 0.24 to 0.28."""
TURNED = Threshold(0.02, 0.1, CALIBRATED)
"""1 - cosine of the first and the last kernel, centered."""
FEATURES_MOVED = Threshold(0.02, 0.02, "features: by choice, a relative change of 2 %")
"""Relative change of the representation that enters the last trained map."""
STATISTICS_MOVED = Threshold(0.05, 0.05, "statistics: by choice, buffers alone change the features by 5 %")
LINEAR_IN_WEIGHTS = 1e-3
"""A gap below this share of the relative change of the weights is that of a model linear in its trained weights."""
MOVED_OUTPUTS = 0.3
"""Change of the predictions, relative to what was to be learned, from which enough was learned to judge the regime."""
SAME_SHAPE = Threshold(
    0.001,
    0.02,
    "shape: rich runs turned by at least 0.0047; below the first number a kernel has "
    "only grown, below the second it has mostly grown",
)
GREW = Threshold(2.0, 2.0, "growth: by choice")
LOW_RANK = Threshold(0.2, 0.5, "low-rank richness: by choice; 0 is neural collapse")
STATIONARY = Threshold(0.3, 0.7, "features at convergence: by choice; 1 is a stationary point of the decayed loss")
FITTED = Threshold(
    0.25, 0.25, "lazy then rich: by choice, the loss fell to a quarter of the first while the gap was lazy"
)
ALIGNMENT_ROSE = Threshold(0.02, 0.09, CALIBRATED)
"""Rise of centered kernel-task alignment. Lazy runs had at most 0.084, most of them less than 0.02; rich ones had any
value, also negative ones."""
OVERSHOT = Threshold(10.0, 10.0, "overshoot: by choice, the linearization misses ten times what changed")
"""With a loss that has hardly fallen, such a gap is that of weights that were thrown far away, not of features."""
FALLEN = Threshold(0.7, 0.7, "loss: by choice; before it has fallen, features may still come")
NORM_GREW = Threshold(
    10.0,
    10.0,
    "silent alignment: by definition, the kernel passes 10 % of its final norm (Atanasov et al. 2022, Fig. 1, App. J); "
    "a rise of alignment is what counts as one for the regime",
)
MACHINE = Threshold(
    0.1,
    0.1,
    "kernel machine: in Atanasov et al. 2022, Fig. 1, the final kernel is off by 0.03, the initial one by 0.3",
)
LAYER_CHANGED = Threshold(0.05, 0.05, "mechanism: by choice, a change of alignment or norms by 5 %")
SETTLED = Threshold(0.1, 0.1, "settled: by choice, a tenth of the norm of the last kernel")
MOVED = Threshold(0.1, 0.1, "weights: by choice, a tenth of the first norm")
LEARNED = Threshold(0.02, 0.02, "layers: by choice, training made 2 % of the agreement of weights and gradients")
"""Centered share of a layer (Beaglehole et al. 2024). It goes as the fourth power of how far the weight moved, and is
0.02 where that is about a third of the weight. Lazy runs had at most 0.004, rich ones up to 1, whatever the correlation
was before training."""


@dataclass(frozen=True)
class Evidence:
    """One statement of a diagnosis."""

    topic: str
    """regime, silent alignment, kernel machine, mechanism, ..."""
    says: str
    """the statement in words, including the number"""
    value: float = math.nan
    """the number, a mean over runs; nan if unknown"""
    threshold: str = ""
    """what the number was compared with; empty where it only informs"""
    source: str = ""
    """source of the threshold"""
    spread: float = math.nan
    """standard deviation over runs; nan for one run"""
    runs: int = 1
    """number of runs that it is based on"""
    verdict: str = ""
    """what it indicates: lazy, rich, between, yes, no, ...; empty for information only"""

    def __str__(self) -> str:
        return f"{self.says} [{self.threshold}]" if self.threshold else self.says


class Sample(NamedTuple):
    """Mean and spread of a number over runs."""

    mean: float
    spread: float
    runs: int
    run_error: float = math.nan
    """Mean standard error of the number of one run, from its probe and its sparse measurements; nan if unknown"""

    @property
    def error(self) -> float:
        """Standard error of the mean: from the spread over runs, and not below that of single runs; nan if unknown."""
        known = [error for error in (self.spread, self.run_error) if math.isfinite(error)]
        return max(known) / math.sqrt(self.runs) if known else math.nan

    @property
    def words(self) -> str:
        """The number with the standard error that it is judged by, and the number of runs if there are several."""
        error = f" ± {self.error:.2g}" if math.isfinite(self.error) else ""
        return f"{self.mean:.3g}{error}" + (f" (mean of {self.runs} runs)" if self.runs > 1 else "")

    @property
    def estimate(self) -> Estimate:
        """As an estimate with its standard error."""
        return Estimate(self.mean, self.error, self.runs)

    def side(self, threshold: Threshold, rounding: float = 0.0) -> int:
        """Return -1 below, 1 above, 0 between: by two standard errors of the mean, where known, and the rounding."""
        margin = (2 * self.error if math.isfinite(self.error) else 0.0) + rounding
        if self.mean + margin < threshold.low:
            return -1
        return 1 if self.mean - margin > threshold.high else 0


def sample(values: Sequence[float | Estimate], *, logarithmic: bool = False) -> Sample | None:
    """Return mean and spread of the finite values over runs; None if there are none.

    Errors of estimates are averaged. `logarithmic` takes the geometric mean.
    """
    finite = [value for value in values if math.isfinite(float(value)) and (float(value) > 0 or not logarithmic)]
    if not finite:
        return None
    errors = [float(value.stderr) for value in finite if isinstance(value, Estimate) and math.isfinite(value.stderr)]
    numbers = [math.log(float(value)) if logarithmic else float(value) for value in finite]
    mean, spread = statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    if logarithmic:
        mean, spread = math.exp(mean), math.exp(mean) * spread
    return Sample(mean, spread, len(numbers), statistics.fmean(errors) if errors else math.nan)


NOT_KNOWN = Estimate(math.nan, math.nan, 1)


def estimate_of(number: Sample | None) -> Estimate:
    """Return the estimate of a sample; nan for None."""
    return NOT_KNOWN if number is None else number.estimate


def mean(values: Sequence[float | Estimate]) -> float:
    """Return the mean of the finite values; nan if there are none."""
    return float(estimate_of(sample(values)))


def mean_record(records: Sequence[Record], **others: object) -> Record:
    """Return the first of some dataclasses with the means over all in its numbers; `others`: further fields."""
    names = [field.name for field in fields(records[0]) if isinstance(getattr(records[0], field.name), float)]
    means = {name: mean([getattr(record, name) for record in records]) for name in names}
    return replace(records[0], **means, **others)


def evidence(topic: str, says: str, value: Sample, against: str, threshold: Threshold, verdict: str) -> Evidence:
    """Return the statement on a number over runs, with the threshold that it was compared with."""
    return Evidence(topic, says, value.mean, against, threshold.source, value.spread, value.runs, verdict)


def unknown(topic: str, what: str) -> Evidence:
    """Return the statement that something is unknown, and why."""
    return Evidence(topic, f"cannot tell {what}", runs=0, verdict="cannot tell")
