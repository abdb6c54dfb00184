"""Steering: make training richer or lazier."""

from featlearn.steer.adaptive_slo import AdaptiveSLO, hidden_correlations
from featlearn.steer.initialization import scale_init
from featlearn.steer.layer_groups import speed_groups
from featlearn.steer.output_scale import ScaledOutput, scale_output
from featlearn.steer.parametrization import parametrize
from featlearn.steer.safe_lr import safe_lr
from featlearn.steer.slo import SLO
from featlearn.steer.whitening import Whitened, whiten

__all__ = [
    "SLO",
    "AdaptiveSLO",
    "ScaledOutput",
    "Whitened",
    "hidden_correlations",
    "parametrize",
    "safe_lr",
    "scale_init",
    "scale_output",
    "speed_groups",
    "whiten",
]
