"""What a kernel says: pure functions of tensors, for one kernel or a stack of them.

Kernels are (..., P, P); leading axes (time, layers, seeds) are kept. Sums run in float64 whatever the input; results
are float64 tensors on the kernel's device. A quantity that is undefined (a zero kernel, a constant target after
centering) is nan.
"""

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
from featlearn.metrics.curves import Agreement, agreement, log_slope, time_to
from featlearn.metrics.resampling import RiskCurve, learning_curve
from featlearn.metrics.richness import features_at_convergence, low_rank_richness
from featlearn.metrics.risk import Condition, PredictedRisk, condition, effective_dimension, predicted_risk
from featlearn.metrics.spectrum import PowerLaw, Spectrum, effective_rank, power_law, spectrum

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
