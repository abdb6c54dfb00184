"""Forecasts of how far replays and attributions can be trusted, fitted to small networks that were retrained."""

import math
from dataclasses import dataclass

from featlearn.linalg.estimate import Estimate

TRUSTED = 0.4
"""Largest forecast of the error of an answer, relative to the change, that is trusted."""
LARGEST_SELF_ERROR = 0.5
RUNS = 38
"""Number of runs that the numbers below are fitted to."""
Forecast = tuple[dict[str, float], float, float]
"""What is lost: gap^2 times a number for the optimizer, plus a number times the error of the replay of the run itself.
Then the standard deviation of what is left."""
RELIABILITY: Forecast = ({"SGD": 0.12, "momentum": 0.17, "adaptive": 0.03}, 0.48, 0.071)
"""Share by which the reliability of scores is below their agreement with replays."""
WITHOUT_RUN = (0.2, 0.16)
"""The same where only a trained network is known: the share that is lost, and its standard deviation."""
ERRORS: dict[str, Forecast] = {
    "samples": ({"SGD": 0.68, "momentum": 0.59, "adaptive": 0.49}, 1.09, 0.18),
    "stop": ({"SGD": 0.13, "momentum": 0.28, "adaptive": 0.04}, 0.24, 0.21),
    "rate": ({"SGD": 0.41, "momentum": 0.82, "adaptive": 0.67}, 0.62, 0.24),
}
"""Error of an answer relative to the change, by what is asked."""


@dataclass(frozen=True)
class RunFacts:
    """What forecasts depend on."""

    gap: float
    """Linearization gap at the end; nan, which counts as 1, if it was not recorded."""
    optimizer: str
    """`"SGD"`, `"momentum"` or `"adaptive"`."""
    self_error: float
    """Distance of the replay of the run itself from its outputs at the end, relative to their change."""


def forecast_change_error(kind: str, facts: RunFacts) -> Estimate:
    """Forecast the error of an answer to a question of a kind, `"samples"`, `"stop"` or `"rate"`."""
    error, deviation = _lost(ERRORS[kind], facts)
    return Estimate(error, deviation, RUNS)


def forecast_reliability(agreement: float, facts: RunFacts | None) -> Estimate:
    """Forecast the linear datamodeling score of an attribution, from the agreement of its scores with replays."""
    lost, deviation = WITHOUT_RUN if facts is None else _lost(RELIABILITY, facts)
    return Estimate(max(agreement, 0.0) * (1 - lost), deviation, RUNS)


def _lost(forecast: Forecast, facts: RunFacts) -> tuple[float, float]:
    by_gap, by_self_error, deviation = forecast
    gap = 1.0 if math.isnan(facts.gap) else min(facts.gap, 1.0)
    own = LARGEST_SELF_ERROR if math.isnan(facts.self_error) else min(facts.self_error, LARGEST_SELF_ERROR)
    lost = by_gap[facts.optimizer] * gap**2 + by_self_error * own
    # Little can go wrong in lazy training.
    return min(max(lost, 0.0), 1.0), max(deviation * min(1.0, 2 * gap), 0.02)
