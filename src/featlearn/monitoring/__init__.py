"""What `fl.watch` does: record kernels, features and weights of a training run without changing it."""

from featlearn.monitoring.step_view import StepView
from featlearn.monitoring.watch import Watch

__all__ = ["StepView", "Watch"]
