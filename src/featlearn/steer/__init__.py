"""Steering: training that learns features on purpose."""

from featlearn.steer.adaptive_slo import AdaptiveSLO, hidden_correlations
from featlearn.steer.layer_groups import speed_groups
from featlearn.steer.slo import SLO

__all__ = ["SLO", "AdaptiveSLO", "hidden_correlations", "speed_groups"]
