"""Numerical integration of flows: explicit where that is fast, implicit where they are stiff.

The fastest mode limits the step of an explicit method, even after that mode has decayed. Its cost grows with
`stiffness` = rate * (largest eigenvalue) * time. The cost of an implicit method does not, but it solves dense systems.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from featlearn.errors import InputValueError

Method = Literal["DOP853", "LSODA"]
Velocity = Callable[[float, Tensor], Tensor]

# Stiffness up to which the explicit method takes seconds; it is the more accurate method.
QUICK = 1e4
# Measured: the explicit method calls the right-hand side twice per unit of stiffness. The implicit method calls it
# about 2,000 times for any stiffness, and factorizes its Jacobian (2/3 n^3 operations) about 100 times.
CALLS, IMPLICIT_CALLS, FACTORIZATIONS = 2.0, 2e3, 100
# Operations that take as long as a call from Python.
OVERHEAD = 1e6
# Operations in about two hours on one core.
LONGEST = 1e14
# A dense Jacobian of 5,000 unknowns takes 0.2 GB, and its copies as much again.
LARGEST = 5_000


def largest_rate(kernel: Tensor) -> Tensor:
    """Return an upper bound (...) on the largest eigenvalue of kernels (..., N, N)."""
    return torch.minimum(torch.linalg.matrix_norm(kernel), kernel.abs().sum(-1).amax(-1))


def method(stiffness: float, unknowns: int, operations: float) -> Method:
    """Choose the faster method for a flow whose right-hand side takes `operations`. Raise if both take too long."""
    explicit = CALLS * stiffness * (operations + OVERHEAD)
    implicit = IMPLICIT_CALLS * (operations + OVERHEAD) + FACTORIZATIONS * 2 / 3 * unknowns**3
    if unknowns > LARGEST:
        implicit = torch.inf
    if min(explicit, implicit) > LONGEST:
        raise InputValueError(
            f"rate * largest eigenvalue * time = {stiffness:.2g} for {unknowns} outputs, which would take hours to "
            "integrate, expected a flow that is less stiff; use earlier times or fewer samples, or one kernel with "
            "loss='mse', which has a closed form"
        )
    return "DOP853" if stiffness <= QUICK or explicit <= implicit else "LSODA"


def integrated(velocity: Velocity, jacobian: Velocity, start: Tensor, times: Tensor, method: Method) -> Tensor:
    """Integrate a flow and return states (T, *shape) at increasing `times`, from `start` at the first time.

    `jacobian` returns the derivative of the flat velocity by the flat state, (n, n), for the implicit method.
    """
    from scipy.integrate import solve_ivp

    def state(flat: Any) -> Tensor:
        return torch.from_numpy(flat).to(start.device).reshape(start.shape)

    options: dict[str, Any] = (
        {} if method == "DOP853" else {"jac": lambda t, flat: jacobian(t, state(flat)).cpu().numpy()}
    )
    moments = times.cpu().numpy()
    if len(moments) == 1:
        return start[None]
    with numpy.errstate(over="ignore", invalid="ignore"):  # checked below
        solved = solve_ivp(
            lambda t, flat: velocity(t, state(flat)).flatten().cpu().numpy(),
            (moments[0], moments[-1]),
            start.flatten().cpu().numpy(),
            method,
            moments,
            rtol=1e-10,
            atol=1e-12,
            **options,
        )
    path = torch.from_numpy(solved.y.T.copy()).to(start.device)
    if not solved.success or not bool(torch.isfinite(path).all()):
        raise InputValueError(
            f"the flow could not be integrated to t = {moments[-1]:.3g}: {solved.message}; expected positive kernels, "
            "whose flow does not grow without bound"
        )
    return path.reshape(len(times), *start.shape)
