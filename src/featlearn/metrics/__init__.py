"""Metrics of kernels: pure functions of tensors, for one kernel or a stack of kernels.

Kernels are (..., P, P); leading axes (time, layers, seeds) are kept. Sums run in float64 for any input dtype. Results
are float64 tensors on the kernel's device. Undefined quantities (a zero kernel, a constant target after centering) are
nan.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from featlearn.metrics.alignment import (
    Interference,
    alignment,
    centered_alignment,
    class_alignment,
    correlation,
    interference,
    specialization,
)
from featlearn.metrics.change import feature_rate, kernel_distance, kernel_velocity
from featlearn.metrics.richness import features_at_convergence, low_rank_richness
from featlearn.metrics.spectrum import PowerLaw, Spectrum, effective_rank, power_law, spectrum

if TYPE_CHECKING:
    from featlearn.metrics.curves import Agreement as Agreement
    from featlearn.metrics.curves import agreement as agreement
    from featlearn.metrics.curves import log_slope as log_slope
    from featlearn.metrics.curves import time_to as time_to
    from featlearn.metrics.resampling import RiskCurve as RiskCurve
    from featlearn.metrics.resampling import learning_curve as learning_curve
    from featlearn.metrics.risk import Condition as Condition
    from featlearn.metrics.risk import PredictedRisk as PredictedRisk
    from featlearn.metrics.risk import condition as condition
    from featlearn.metrics.risk import effective_dimension as effective_dimension
    from featlearn.metrics.risk import predicted_risk as predicted_risk

_LATE = {
    "Agreement": "curves",
    "agreement": "curves",
    "log_slope": "curves",
    "time_to": "curves",
    "RiskCurve": "resampling",
    "learning_curve": "resampling",
    "Condition": "risk",
    "PredictedRisk": "risk",
    "condition": "risk",
    "effective_dimension": "risk",
    "predicted_risk": "risk",
}

__all__ = [
    "Agreement",
    "Condition",
    "Interference",
    "PowerLaw",
    "PredictedRisk",
    "RiskCurve",
    "Spectrum",
    "agreement",
    "alignment",
    "centered_alignment",
    "class_alignment",
    "condition",
    "correlation",
    "effective_dimension",
    "effective_rank",
    "feature_rate",
    "features_at_convergence",
    "interference",
    "kernel_distance",
    "kernel_velocity",
    "learning_curve",
    "log_slope",
    "low_rank_richness",
    "power_law",
    "predicted_risk",
    "specialization",
    "spectrum",
    "time_to",
]


def __getattr__(name: str) -> object:
    """Load a metric on first use."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
