"""What a kernel says: pure functions of tensors, for one kernel or a stack of them.

Kernels are (..., P, P); leading axes (time, layers, seeds) are kept. Sums run in float64 whatever the input; results
are float64 tensors on the kernel's device. A quantity that is undefined (a zero kernel, a constant target after
centring) is nan.
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
from featlearn.metrics.richness import features_at_convergence, low_rank_richness
from featlearn.metrics.spectrum import PowerLaw, Spectrum, effective_rank, power_law, spectrum

__all__ = [
    "Agreement",
    "Interference",
    "PowerLaw",
    "Spectrum",
    "agreement",
    "alignment",
    "centered_alignment",
    "class_alignment",
    "correlation",
    "effective_rank",
    "feature_rate",
    "features_at_convergence",
    "interference",
    "kernel_distance",
    "kernel_velocity",
    "log_slope",
    "low_rank_richness",
    "power_law",
    "specialization",
    "spectrum",
    "time_to",
]
