"""Training with a frozen kernel, as a flow or step by step, on squared error or cross-entropy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from featlearn.dynamics.form import Problem, eigenbasis, problem
from featlearn.errors import InputValueError
from featlearn.shapes import checked_tensor


@dataclass(frozen=True)
class Trajectory:
    """Outputs over time."""

    times: Tensor
    """(T,)"""
    outputs: Tensor
    """(T, P) or (T, P, C), on the training points."""
    loss: Tensor
    """(T,): |f - y|^2, or the summed cross-entropy."""
    test_outputs: Tensor | None
    """(T, P2) or (T, P2, C), where a test kernel was given."""


def kernel_descent(
    K: Tensor, y: Tensor, *, times: Tensor | Sequence[float], rate: float = 1.0, f0: Tensor | None = None,
    discrete: bool = False, loss: Literal["mse", "cross-entropy"] = "mse", K_test: Tensor | None = None,
    f0_test: Tensor | None = None,
) -> Trajectory:  # fmt: skip
    """Kernel gradient descent: df/dt = -rate K (f - y) from f0 (000 Eq. 3 with f0, which the print leaves out).

    Args:
        K: one kernel for all outputs (P, P), one for each (C, P, P), or all pairs (P, P, C, C).
        y: targets (P,) or (P, C); for cross-entropy one-hot rows or probabilities (P, C).
        times: times of the flow; numbers of steps for `discrete=True`.
        rate: see `fl.dynamics.rate`. The rescaled kernel of 000 (aKGD) is `rate * K1.norm() / K0.norm()`, with the
            final or with the largest kernel norm.
        f0: outputs at time 0, zero by default.
        discrete: f <- f - rate K (f - y). Refused where rate * (largest eigenvalue) >= 2, which diverges.
        loss: `"cross-entropy"`: df/dt = -rate K (softmax(f) - y), solved numerically.
        K_test: kernel of test points with training points, (P2, P), (C, P2, P) or (P2, P, C, C).
        f0_test: outputs of the test points at time 0.
    """
    if loss not in ("mse", "cross-entropy"):
        raise InputValueError(f"loss={loss!r}, expected 'mse' or 'cross-entropy'")
    given = problem(K, y, f0, K_test, f0_test)
    moments = _checked_times(times, discrete).to(given.kernel.device)
    if not rate >= 0:
        raise InputValueError(f"rate={rate!r}, expected a number >= 0")
    if loss == "cross-entropy":
        return _cross_entropy(given, moments, rate, discrete)
    values, vectors = eigenbasis(given.kernel)
    if discrete:
        _refuse_unstable(rate, float(values.max()))
    distance = vectors.mT @ (given.targets - given.start)  # what is left to learn, in the eigenbasis
    learned = _learned(values, rate, moments, discrete)  # (T, B, N): the share learned, divided by the eigenvalue
    coefficients = learned[..., None] * distance
    outputs = given.start + vectors @ (values[..., None] * coefficients)
    test = None
    if given.test_kernel is not None and given.test_start is not None:
        test = given.back(given.test_start + given.test_kernel @ (vectors @ coefficients))
    square = (outputs - given.targets).square().sum((1, 2, 3))
    return Trajectory(moments, given.back(outputs), square, test)


def _learned(values: Tensor, rate: float, times: Tensor, discrete: bool) -> Tensor:
    """(1 - exp(-rate lambda t)) / lambda, or (1 - (1 - rate lambda)^t) / lambda; rate t where lambda vanishes."""
    t = times[:, None, None]
    if discrete:
        step = 1 - rate * values
        sign = torch.where((step < 0) & (t % 2 == 1), -1.0, 1.0)
        # Through the logarithm, small rate * lambda keep their digits.
        share = torch.where(step > 0.5, -torch.expm1(t * torch.log1p(-rate * values)), 1 - sign * step.abs().pow(t))
    else:
        share = -torch.expm1(-rate * values * t)
    return torch.where(values == 0, rate * t.expand_as(share), share / torch.where(values == 0, 1.0, values))


def _refuse_unstable(rate: float, largest: float) -> None:
    if rate * largest >= 2:
        raise InputValueError(
            f"rate * largest eigenvalue = {rate * largest:.3g}, expected less than 2: descent with this step diverges; "
            f"use a rate below {2 / largest:.3g}, or discrete=False for the flow"
        )


def _checked_times(times: Any, discrete: bool) -> Tensor:
    given = times if isinstance(times, Tensor) else torch.as_tensor(times, dtype=torch.float64)
    moments = checked_tensor(given, "times").reshape(-1)
    if not len(moments) or not bool((moments >= 0).all()) or not bool((moments.diff() >= 0).all()):
        raise InputValueError("times are empty, negative or out of order, expected increasing times >= 0")
    if discrete and not bool((moments == moments.round()).all()):
        raise InputValueError("times are not whole numbers, expected numbers of steps for discrete=True")
    return moments


def _cross_entropy(given: Problem, times: Tensor, rate: float, discrete: bool) -> Trajectory:
    """Train and test outputs move together: d/dt (f, f_test) = -rate (K, K_test) (softmax(f) - y)."""
    if given.single:
        raise InputValueError("y has shape (P,), expected one-hot rows or probabilities (P, C) for cross-entropy")
    rows = torch.cat([k for k in (given.kernel, given.test_kernel) if k is not None], 1)
    start = torch.cat([f for f in (given.start, given.test_start) if f is not None], 1)
    size = given.kernel.shape[1]
    wanted = given.back(given.targets)

    def velocity(state: Tensor) -> Tensor:
        logits = given.back(state[:, :size])
        return -rate * (rows @ _forth(given, logits.softmax(-1) - wanted))

    path = _steps(velocity, start, times) if discrete else _flow(velocity, start, times)
    outputs = given.back(path[:, :, :size])
    loss = -(wanted * outputs.log_softmax(-1)).sum((-2, -1))
    test = None if given.test_kernel is None else given.back(path[:, :, size:])
    return Trajectory(times, outputs, loss, test)


def _forth(given: Problem, values: Tensor) -> Tensor:
    """(P, C) -> (B, N, R), the inverse of `Problem.back`."""
    if given.kind == "full":
        return values.reshape(1, -1, 1)
    return values.T[..., None] if given.kind == "each" else values[None]


def _steps(velocity: Any, state: Tensor, times: Tensor) -> Tensor:
    path, done = [], 0
    for moment in times.long().tolist():
        for _ in range(moment - done):
            state = state + velocity(state)
        done = moment
        path.append(state)
    return torch.stack(path)


def _flow(velocity: Any, start: Tensor, times: Tensor) -> Tensor:
    from scipy.integrate import solve_ivp

    def right_side(_: float, flat: Any) -> Any:
        state = torch.from_numpy(flat).to(start.device).reshape(start.shape)
        return velocity(state).flatten().cpu().numpy()

    moments = times.cpu().numpy()
    if moments[-1] == 0:
        return start.expand(len(times), *start.shape)
    begin = start.flatten().cpu().numpy().astype(numpy.float64)
    solved = solve_ivp(right_side, (0.0, moments[-1]), begin, "DOP853", moments, rtol=1e-10, atol=1e-12)
    if not solved.success:
        raise InputValueError(f"the flow could not be integrated to t = {moments[-1]:.3g}: {solved.message}")
    return torch.from_numpy(solved.y.T.copy()).to(start.device).reshape(len(times), *start.shape)
