"""Training with a frozen, rescaled, or evolving kernel, and kernel regression.

Convention: df/dt = -rate * K (f - y), reported loss |f - y|^2; `rate` computes the rate from a trainer's learning rate
    and loss. A rescaled kernel (aKGD of Shan & Bordelon 2021a) is a rescaled rate.
"""

from featlearn.dynamics.descent import Trajectory, kernel_descent
from featlearn.dynamics.evolving import evolving_kernel_descent
from featlearn.dynamics.rate import rate
from featlearn.dynamics.regression import kernel_regression
from featlearn.dynamics.taylor import linearize

__all__ = ["Trajectory", "evolving_kernel_descent", "kernel_descent", "kernel_regression", "linearize", "rate"]
