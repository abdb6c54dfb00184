"""Training with a frozen kernel, as a flow or step by step, for any loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.dynamics.flow import Velocity, integrated, largest_rate, method
from featlearn.dynamics.form import BatchedProblem, as_times, eigenbasis, problem
from featlearn.dynamics.rate import checked_rate
from featlearn.errors import InputValueError
from featlearn.losses import Loss, LossFunction, check_targets, form, function
from featlearn.signatures import name_keywords


@dataclass(frozen=True)
class Trajectory:
    """Outputs over time."""

    times: Tensor
    """(T,)"""
    outputs: Tensor
    """(T, P) or (T, P, C), on the training points."""
    loss: Tensor
    """(T,): |f - y|^2, the summed cross-entropy, or the value of the user's own loss."""
    test_outputs: Tensor | None
    """(T, P2) or (T, P2, C); None without a test kernel."""


@name_keywords()
def kernel_descent(
    K: Tensor,
    y: Tensor,
    *,
    times: Tensor | Sequence[float],
    rate: float = 1.0,
    f0: Tensor | None = None,
    discrete: bool = False,
    loss: Loss = "mse",
    K_test: Tensor | None = None,
    f0_test: Tensor | None = None,
) -> Trajectory:
    """Compute kernel gradient descent, df/dt = -rate K (f - y) from f0.

    See Shan & Bordelon 2021a, Eq. 3; the print leaves out f0.

    Directions in the null space of K are not learned. The null space depends on the precision of K: eigenvalues below
    1.2e-7 of the largest are rounding in a float32 kernel, below 1e-12 in a float64 one. Pass the kernel in the dtype
    it was measured in: converted to float64, the rounding errors of a float32 kernel would count as signal.

    Args:
        K: Kernel shared by all outputs (P, P), per output (C, P, P), or for all pairs of outputs (P, P, C, C).
        y: Targets (P,) or (P, C): one-hot rows or probabilities (P, C) for `"cross-entropy"`, a probability per output
            for `"bce"`.
        times: Times of the flow, or numbers of steps for `discrete=True`. With squared errors, infinity is the end of
            training, that is, `kernel_regression` on the test points.
        rate: Rate of the flow; see `fl.dynamics.rate`. The rescaled kernel of Shan & Bordelon 2021a (aKGD) is
            `rate * K1.norm() / K0.norm()`, with the final or the largest kernel norm.
        f0: Outputs at time 0; zero by default.
        discrete: Iterate f <- f - rate K (f - y). Raises if rate * (largest eigenvalue) >= 2, which diverges.
        loss: Name in `fl.losses`, a module, or a function of (outputs, y). All squared errors follow the equation
            above; they differ in `rate`. `"cross-entropy"` replaces f by softmax(f) and `"bce"` by sigmoid(f), both
            solved numerically. A function L that is a sum over samples follows df/dt = -rate K dL/df, where `rate` is
            the learning rate.
        K_test: Kernel of test points with training points, (P2, P), (C, P2, P) or (P2, P, C, C). In directions where K
            is zero but K_test is not, test outputs move at a constant speed. Once rate * time exceeds the inverse of
            the smallest eigenvalue that the precision of K resolves, these directions count as not learned.
        f0_test: Outputs of the test points at time 0.
    """
    kind = form(loss)
    kernel_problem = problem(K, y, f0, K_test, f0_test)
    moments, speed = _checked_times(times, discrete).to(kernel_problem.kernel.device), checked_rate(rate)
    if kind == "mse":
        return _squared_error(kernel_problem, moments, speed, discrete)
    if kind == "cross-entropy" and kernel_problem.single:
        raise InputValueError("y has shape (P,), expected one-hot rows or probabilities (P, C) for cross-entropy")
    if kind is not None:
        check_targets(kind, kernel_problem.back(kernel_problem.start), y)
    slope = _autograd_slope(function(loss), kernel_problem.single) if kind is None else _LOGISTIC[kind]
    return _nonlinear(kernel_problem, moments, speed, discrete, slope)


def _squared_error(problem: BatchedProblem, times: Tensor, rate: float, discrete: bool) -> Trajectory:
    values, vectors, cutoff = eigenbasis(problem)
    if discrete:
        _refuse_unstable(rate, float(values.max()))
    distance = vectors.mT @ (problem.targets - problem.start)  # remaining error, in the eigenbasis
    share = _share(values, rate, times, discrete)  # (B, N, T)
    outputs = problem.start + _combined(vectors, share, distance)
    if not bool(torch.isfinite(outputs).all()):
        raise InputValueError(
            f"the outputs overflow: K has the eigenvalue {float(values.min()):.3g}, expected a positive kernel; a "
            "difference of kernels has none to descend with, except for a short time"
        )
    test = None
    if problem.test_kernel is not None and problem.test_start is not None:
        seen = values != 0
        rows = problem.test_kernel @ vectors
        # entries of K_test along the null space of K that are this small are rounding, too
        rows = torch.where(seen[:, None] | (rows.abs() > cutoff[..., None]), rows, 0.0)
        # Train outputs move by `share`, coefficients by share / eigenvalue. The limit for eigenvalue 0 is rate * t.
        unseen = torch.where(rate * times * cutoff < 1, rate * times, 0.0)[:, None]
        coefficients = torch.where(seen[..., None], share / torch.where(seen, values, 1.0)[..., None], unseen)
        test = problem.back(problem.test_start + _combined(rows, coefficients, distance))
    square = (outputs - problem.targets).square().sum((1, 2, 3))
    return Trajectory(times, problem.back(outputs), square, test)


def _combined(rows: Tensor, weights: Tensor, columns: Tensor) -> Tensor:
    """Map rows (B, M, N), weights (B, N, T), columns (B, N, R) to (T, B, M, R), with all times in one product."""
    weighted = weights[..., None] * columns[:, :, None]
    products: Tensor = rows @ weighted.flatten(2)
    return products.reshape(*products.shape[:2], *weighted.shape[2:]).permute(2, 0, 1, 3)


def _share(values: Tensor, rate: float, times: Tensor, discrete: bool) -> Tensor:
    """Return 1 - exp(-rate lambda t), or 1 - (1 - rate lambda)^t: (B, N, T); 0 for eigenvalue 0 at all times."""
    speeds = (rate * values)[..., None]
    if discrete:
        step = 1 - speeds
        sign = torch.where((step < 0) & (times % 2 == 1), -1.0, 1.0)
        # The logarithm avoids cancellation for small rate * lambda.
        share = torch.where(step > 0.5, -torch.expm1(times * torch.log1p(-speeds)), 1 - sign * step.abs().pow(times))
    else:
        share = -torch.expm1(-speeds * times)
    return torch.where(speeds == 0, 0.0, share)


def _refuse_unstable(rate: float, largest: float) -> None:
    if rate * largest >= 2:
        raise InputValueError(
            f"rate * largest eigenvalue = {rate * largest:.3g}, expected less than 2: descent with this step diverges; "
            f"use a rate below {2 / largest:.3g}, or discrete=False for the flow"
        )


def _checked_times(times: Any, discrete: bool) -> Tensor:
    moments = as_times(times)
    if not len(moments) or not bool((moments >= 0).all()) or not bool((moments[1:] >= moments[:-1]).all()):
        raise InputValueError("times are empty, negative, nan or out of order, expected increasing times >= 0")
    if discrete and not bool((moments == moments.round()).all()):
        raise InputValueError("times are not whole numbers, expected numbers of steps for discrete=True")
    return moments


class _Slope(NamedTuple):
    """Value and derivatives of a loss with respect to outputs f (..., P, C), for targets y (P, C)."""

    slope: Callable[[Tensor, Tensor], Tensor]
    """(f, y) -> (..., P, C), the first derivative"""
    curvature: Callable[[Tensor, Tensor], Tensor]
    """(f, y) -> (P, C, C), the second derivative per sample"""
    values: Callable[[Tensor, Tensor], Tensor]
    """(f, y) -> (...), the loss"""


def _softmax_curvature(f: Tensor, y: Tensor) -> Tensor:
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def _sigmoid_curvature(f: Tensor, y: Tensor) -> Tensor:
    p = f.sigmoid()
    return torch.diag_embed(p * (1 - p))


_LOGISTIC = {
    "cross-entropy": _Slope(
        lambda f, y: f.softmax(-1) - y,
        _softmax_curvature,
        lambda f, y: -(y * f.log_softmax(-1)).sum((-2, -1)),
    ),
    "bce": _Slope(
        lambda f, y: f.sigmoid() - y,
        _sigmoid_curvature,
        lambda f, y: (torch.nn.functional.softplus(f) - y * f).sum((-2, -1)),
    ),
}


def _autograd_slope(loss: LossFunction, single: bool) -> _Slope:
    """Return the derivatives of a user's loss, by autograd."""

    def value(f: Tensor, y: Tensor) -> Tensor:
        return loss(f[..., 0], y[..., 0]) if single else loss(f, y)

    def slope(f: Tensor, y: Tensor) -> Tensor:
        leaf = f.detach().requires_grad_(True)
        with torch.enable_grad():
            return torch.autograd.grad(value(leaf, y), leaf)[0]

    def curvature(f: Tensor, y: Tensor) -> Tensor:
        leaf = f.detach().requires_grad_(True)
        with torch.enable_grad():
            (first,) = torch.autograd.grad(value(leaf, y), leaf, create_graph=True)
            columns = first.sum(0)  # the slope of a sample depends on its outputs only
            rows = [torch.autograd.grad(column, leaf, retain_graph=True)[0] for column in columns]
        return torch.stack(rows, 1)

    return _Slope(slope, curvature, lambda f, y: torch.stack([value(row, y) for row in f]))


def _nonlinear(problem: BatchedProblem, times: Tensor, rate: float, discrete: bool, loss: _Slope) -> Trajectory:
    """Integrate d/dt (f, f_test) = -rate (K, K_test) dL/df."""
    if not bool(torch.isfinite(times).all()):
        raise InputValueError("times are infinite, expected finite ones: only squared errors have a closed form")
    rows = torch.cat([k for k in (problem.kernel, problem.test_kernel) if k is not None], 1)
    start = torch.cat([f for f in (problem.start, problem.test_start) if f is not None], 1)
    size = problem.kernel.shape[1]

    def outputs(state: Tensor) -> Tensor:
        values = problem.back(state[..., :size, :])
        return values[..., None] if problem.single else values

    targets = outputs(problem.targets)

    def velocity(_: float, state: Tensor) -> Tensor:
        return -rate * (rows @ problem.forth(loss.slope(outputs(state), targets)))

    def jacobian(_: float, state: Tensor) -> Tensor:
        return -rate * _by_logits(problem, rows, state, loss.curvature(outputs(state), targets))

    if discrete:
        path = _steps(velocity, start, times)
    else:
        largest = float(loss.curvature(outputs(start), targets).abs().amax()) if loss not in _LOGISTIC.values() else 0.5
        stiffness = rate * float(times[-1]) * float(largest_rate(problem.kernel).max()) * largest
        solver = method(stiffness, start.numel(), 2.0 * rows.numel() * start.shape[-1])
        moments, indices = torch.cat([times.new_zeros(1), times]).unique(return_inverse=True)
        path = integrated(velocity, jacobian, start, moments, solver)[indices[1:]]
    test = None if problem.test_kernel is None else problem.back(path[:, :, size:])
    return Trajectory(times, problem.back(path[:, :, :size]), loss.values(outputs(path), targets), test)


def _by_logits(problem: BatchedProblem, rows: Tensor, state: Tensor, slopes: Tensor) -> Tensor:
    """Return the derivative of rows @ dL/df by the flat state, (n, n); columns of test points are zero.

    `slopes` (P, C, C) are the second derivatives of the loss by the outputs of every sample.
    """
    size = problem.kernel.shape[1]
    if problem.kind == "each":
        block = torch.einsum("cij,jcd->cidj", rows, slopes)
    elif problem.kind == "full":
        block = torch.einsum("ijc,jcd->ijd", rows[0].unflatten(1, slopes.shape[:2]), slopes)
    else:
        block = torch.einsum("ij,jcd->icjd", rows[0], slopes)
    problems, _, columns = state.shape
    matrix = state.new_zeros(*state.shape, *state.shape)
    matrix[..., :size, :] = block.reshape(*state.shape, problems, size, columns)
    return matrix.reshape(state.numel(), state.numel())


def _steps(velocity: Velocity, state: Tensor, times: Tensor) -> Tensor:
    path, done = [], 0
    for moment in times.long().tolist():
        for _ in range(moment - done):
            state = state + velocity(0.0, state)
        done = moment
        path.append(state)
    return torch.stack(path)
