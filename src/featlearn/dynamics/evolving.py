"""Training with a kernel that is known at several times."""

import torch
from torch import Tensor

from featlearn.dynamics.descent import Trajectory
from featlearn.errors import InputValueError
from featlearn.shapes import checked_kernel, checked_targets, checked_tensor


def evolving_kernel_descent(
    kernels: Tensor, times: Tensor, y: Tensor, *, kernels_test: Tensor | None = None, rate: float = 1.0,
    f0: Tensor | None = None, f0_test: Tensor | None = None,
) -> Trajectory:  # fmt: skip
    """df/dt = -rate K(t) (f - y) for kernels (T, P, P) measured at `times` (T,), linear in between (002 Eq. 17).

    The product is time-ordered: the printed exponential of the integral is exact only where the kernels commute. `y` is
    (P,) or (P, C), the kernel shared by all outputs. `kernels_test` (T, P2, P) moves the test points along. The
    trajectory is given at `times`, and starts at the first of them from f0.
    """
    stack, moments = checked_kernel(kernels, "kernels"), checked_tensor(times, "times").to(kernels.device)
    if stack.dim() != 3 or moments.shape != stack.shape[:1] or len(moments) < 2 or not bool((moments.diff() > 0).all()):
        raise InputValueError(
            f"kernels have shape {tuple(stack.shape)} and times {tuple(moments.shape)}, "
            "expected (T, P, P) and (T,) with T > 1 increasing times"
        )
    targets = checked_targets(y, stack)
    single = checked_tensor(y, "y").dim() == 1
    samples = len(targets)
    start = _start(f0, "f0", targets)
    rows = stack
    if kernels_test is not None:
        cross = checked_tensor(kernels_test, "kernels_test").to(stack.device)
        if cross.dim() != 3 or len(cross) != len(stack) or cross.shape[2] != samples:
            raise InputValueError(
                f"kernels_test have shape {tuple(cross.shape)}, expected (T, P2, P) = ({len(stack)}, P2, {samples})"
            )
        rows = torch.cat([stack, cross], 1)
        start = torch.cat([start, _start(f0_test, "f0_test", targets.new_zeros(cross.shape[1], targets.shape[1]))])
    path = _ordered(rows, moments, targets, start, rate)
    outputs, test = path[:, :samples], path[:, samples:]
    loss = (outputs - targets).square().sum((1, 2))
    if single:
        outputs, test = outputs[..., 0], test[..., 0]
    return Trajectory(moments, outputs, loss, None if kernels_test is None else test)


def _start(given: Tensor | None, name: str, like: Tensor) -> Tensor:
    if given is None:
        return torch.zeros_like(like)
    values = checked_tensor(given, name).to(like.device)
    values = values[:, None] if values.dim() == 1 else values
    if values.shape != like.shape:
        raise InputValueError(f"{name} has shape {tuple(given.shape)}, expected {tuple(like.shape)}, as y has")
    return values


def _ordered(rows: Tensor, times: Tensor, targets: Tensor, start: Tensor, rate: float) -> Tensor:
    """Integrate interval by interval: the kernel's slope jumps at the given times."""
    from scipy.integrate import solve_ivp

    samples, path, state = len(targets), [start], start
    for i in range(len(times) - 1):
        begin, end = float(times[i]), float(times[i + 1])

        def velocity(t: float, flat: object, i: int = i, begin: float = begin, end: float = end) -> object:
            share = (t - begin) / (end - begin)
            residual = torch.as_tensor(flat).to(start).reshape(start.shape)[:samples] - targets
            moved = (1 - share) * (rows[i] @ residual) + share * (rows[i + 1] @ residual)
            return (-rate * moved).flatten().cpu().numpy()

        solved = solve_ivp(velocity, (begin, end), state.flatten().cpu().numpy(), "DOP853", rtol=1e-10, atol=1e-12)
        if not solved.success:
            raise InputValueError(f"the flow could not be integrated to t = {end:.3g}: {solved.message}")
        state = torch.from_numpy(solved.y[:, -1].copy()).to(start).reshape(start.shape)
        path.append(state)
    return torch.stack(path)
