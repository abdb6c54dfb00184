"""Training with a kernel measured at several times."""

from typing import Any

import torch
from torch import Tensor

from featlearn.dynamics.descent import Trajectory
from featlearn.dynamics.flow import Method, integrated, largest_rate, method
from featlearn.dynamics.form import as_times, outputs_at_start
from featlearn.dynamics.rate import checked_rate
from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite, checked_kernel, checked_targets, symmetric
from featlearn.signatures import name_keywords


@name_keywords()
def evolving_kernel_descent(
    kernels: Tensor,
    times: Tensor,
    y: Tensor,
    *,
    kernels_test: Tensor | None = None,
    rate: float = 1.0,
    f0: Tensor | None = None,
    f0_test: Tensor | None = None,
) -> Trajectory:
    """Integrate df/dt = -rate K(t) (f - y) for kernels (T, P, P) measured at `times` (T,), interpolated linearly.

    See Atanasov et al. 2022, Eq. 11 to 17: the time-ordered exponential (Peano-Baker series).

    The product is time-ordered: the printed exponential of the integral is exact only if the kernels commute. `y` is
    (P,) or (P, C), and all outputs share the kernel. `kernels_test` (T, P2, P) adds test outputs. The trajectory is
    given at `times`, which must be finite. It starts at the first time from f0, which has the shape of y.
    """
    stack, moments, speed = checked_kernel(kernels, "kernels"), as_times(times), checked_rate(rate)
    if stack.dim() != 3 or moments.shape != stack.shape[:1] or len(moments) < 2 or not bool((moments.diff() > 0).all()):
        raise InputValueError(
            f"kernels have shape {tuple(stack.shape)} and times {tuple(moments.shape)}, "
            "expected (T, P, P) and (T,) with T > 1 increasing times"
        )
    if not bool(torch.isfinite(moments).all()):
        raise InputValueError("times are infinite, expected finite times")
    stack, moments = symmetric(stack, "kernels"), moments.to(stack.device)
    targets, single = checked_targets(y, stack), y.dim() == 1
    checked_finite(y, "y")
    samples, outputs = targets.shape
    start = outputs_at_start(f0, "f0", samples, outputs, single, stack)
    rows = stack
    if kernels_test is not None:
        cross = _checked_cross(kernels_test, stack)
        rows = torch.cat([stack, cross], 1)
        start = torch.cat([start, outputs_at_start(f0_test, "f0_test", cross.shape[1], outputs, single, stack)])
    elif f0_test is not None:
        raise InputValueError("f0_test is passed without kernels_test, expected both or none")
    path = _ordered(rows, moments, targets, start, speed)
    path, targets = (path[..., 0], targets[:, 0]) if single else (path, targets)
    outputs_train, test = path[:, :samples], path[:, samples:]
    loss = (outputs_train - targets).square().flatten(1).sum(1)
    return Trajectory(moments, outputs_train, loss, None if kernels_test is None else test)


def _checked_cross(kernels_test: Any, stack: Tensor) -> Tensor:
    cross = checked_finite(kernels_test, "kernels_test").to(stack.device)
    moments, samples = stack.shape[:2]
    if cross.dim() != 3 or len(cross) != moments or cross.shape[2] != samples:
        raise InputValueError(
            f"kernels_test have shape {tuple(cross.shape)}, expected (T, P2, P) = ({moments}, P2, {samples})"
        )
    return cross


def _ordered(rows: Tensor, times: Tensor, targets: Tensor, start: Tensor, rate: float) -> Tensor:
    """Integrate interval by interval, since the kernel's slope jumps at the measured times."""
    path = [start]
    fastest = largest_rate(rows[:, : len(targets)])
    operations = 4.0 * rows[0].numel() * targets.shape[1]
    for i in range(len(times) - 1):
        stiffness = rate * float((times[i + 1] - times[i]) * fastest[i : i + 2].max())
        solver = method(stiffness, len(start), operations)
        interval = rows[i : i + 2], times[i : i + 2]
        # outputs are independent: the implicit method integrates them one by one, to solve small systems
        width = targets.shape[1] if solver == "DOP853" else 1
        parts = zip(targets.split(width, 1), path[-1].split(width, 1), strict=True)
        path.append(torch.cat([_over_interval(*interval, *part, rate, solver) for part in parts], 1))
    return torch.stack(path)


def _over_interval(rows: Tensor, times: Tensor, targets: Tensor, start: Tensor, rate: float, solver: Method) -> Tensor:
    """Return outputs at the second of two times from `start` at the first; rows (2, P + P2, P) are interpolated."""
    samples, (begin, end) = len(targets), times.tolist()

    def velocity(t: float, state: Tensor) -> Tensor:
        share, residual = (t - begin) / (end - begin), state[:samples] - targets
        moved: Tensor = (1 - share) * (rows[0] @ residual) + share * (rows[1] @ residual)
        return -rate * moved

    def jacobian(t: float, state: Tensor) -> Tensor:
        matrix = state.new_zeros(len(state), len(state))
        matrix[:, :samples] = -rate * torch.lerp(rows[0], rows[1], (t - begin) / (end - begin))
        return matrix

    return integrated(velocity, jacobian, start, times, solver)[-1]
