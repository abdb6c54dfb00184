"""Optimal feature evolution with the numbers of a measured run."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from featlearn.dynamics.rate import rate as descent_rate
from featlearn.errors import InputValueError
from featlearn.losses import form
from featlearn.metrics import alignment
from featlearn.theory.network_path import Assumption, NetworkPath, assumption
from featlearn.theory.ofe.solution import Solution, solve
from featlearn.theory.prediction import run_curves

GROWTH = 5.0
"""Largest growth of the kernel for which the theory was right within a third in trials: see `from_run`."""


def from_run(run: Any, *, rate: float | None = None, loss: Any = None, times: Any = None) -> NetworkPath:
    """Predict a watched run by optimal feature evolution, with the feature rate that the run had.

    See Shan & Bordelon 2021a, Sec. 4; 2021b, Sec. 4.1.

    The kernel and the outputs at the first measurement are the start; gamma is the rate at which the kernel of the
    theory ends with the alignment of the run's last kernel. This is not a theory of networks: it says what would happen
    if features moved as the task asks. It was right within a few percent where the kernel grew by 2.4 times, and off by
    7.5 times where it grew by 68 times.

    Args:
        run: A run, or its path. The probe should be the training set.
        rate: Learning rate of the training; by default that of the run, where it was trained by SGD.
        loss: Loss of the training, a squared error of `fl.losses`; by default that of the run.
        times: (T,) in steps; by default the steps at which the kernel was measured.

    Returns:
        A path with `.times .outputs .loss .kernel(t) .kernel_norm .alignment .assumptions`; its `.readings` hold
        `gamma` and `measured`, the curves of the run in the same units: pass them to `path.overlay(...)`.
    """
    run = _opened(run)
    steps = run.arrays.get("kernel", [])
    if len(steps) < 2 or "outputs" not in run.arrays or "targets" not in run.arrays:
        raise InputValueError(
            f"the run has {len(steps)} kernels, expected at least two and targets; watch it with targets, "
            "fl.watch(model, probe=(x, y), ...)"
        )
    targets = _tensor(run.array("targets", run.arrays["targets"][0])["y"])
    if not targets.is_floating_point():
        raise InputValueError("the run has class labels as targets, expected numbers: this theory has a squared error")
    first, last = (_tensor(run.array("kernel", step)["mean"]).double() for step in (steps[0], steps[-1]))
    targets = targets.double().reshape(len(first), -1)
    outputs = {
        step: _tensor(run.array("outputs", step)["f"]).double().reshape_as(targets) for step in run.arrays["outputs"]
    }
    f0 = outputs[steps[0]] if steps[0] in outputs else next(iter(outputs.values()))
    speed = _rate(run, rate, loss, targets)
    moments = torch.tensor(steps).double() if times is None else torch.as_tensor(times).double()
    gamma = _gamma(first, last, f0 - targets, targets)

    def solution(at: Tensor) -> Solution:
        return solve(first, targets, gamma, at - steps[0], f0=f0, rate=speed)

    path = solution(moments.clamp_min(steps[0]))
    growth = float(last.norm() / first.norm())
    risen = float(alignment(last, targets) - alignment(first, targets))
    left = {step: float((f - targets).square().sum()) for step, f in outputs.items()}
    return NetworkPath(
        theory="ofe",
        times=moments,
        outputs=path.outputs,
        targets=targets,
        kernels=lambda at: solution(at.clamp_min(steps[0])).kernel(at.clamp_min(steps[0]) - steps[0]),
        assumptions=[
            assumption("alignment rose", risen, 1.0, "change of the kernel-task alignment", least=0.0),
            assumption("the kernel grew little", growth, GROWTH, "norm of the last kernel over the first"),
            _pace(left, solution),
        ],
        readings={
            "gamma": gamma,
            "measured": {name: curve for name, curve in run_curves(run).items() if name in path.curves()},
        },
    )


def _opened(run: Any) -> Any:
    if isinstance(run, str | os.PathLike):
        from featlearn.record.reader import open_run

        return open_run(run)
    return run


def _tensor(array: Any) -> Tensor:
    return torch.as_tensor(array)


def _rate(run: Any, rate: float | None, loss: Any, targets: Tensor) -> float:
    """Return the rate of df/dt = -rate K (f - y)."""
    loss = run.config.get("loss_convention") if loss is None else loss
    if loss is None or form(loss) != "mse":
        raise InputValueError(
            f"the run's loss is {loss!r}, expected a squared error; name it as watch(loss=...) or from_run(loss=...)"
        )
    if rate is None:
        optimizer = run.config.get("optimizer") or {}
        groups = optimizer.get("groups", [])
        plain = optimizer.get("class") == "SGD" and len({group["lr"] for group in groups}) == 1
        if not plain or any(group.get("momentum") for group in groups):
            raise InputValueError(
                f"the run was trained by {optimizer.get('class', 'an unknown optimizer')}, expected SGD with one rate "
                "and no momentum; pass rate="
            )
        rate = groups[0]["lr"]
    return descent_rate(rate, loss, len(targets), targets.shape[1])


def _gamma(first: Tensor, last: Tensor, residual: Tensor, targets: Tensor) -> float:
    """Return the rate with which first + gamma residual residual^T has the alignment of the last kernel, or 0."""
    goal, spike = float(alignment(last, targets)), residual @ residual.T

    def reached(gamma: float) -> float:
        return float(alignment(first + gamma * spike, targets))

    if goal <= reached(0.0):
        return 0.0
    low, high = 0.0, float(first.norm() / spike.norm())
    for _ in range(60):
        if reached(high) >= goal:
            break
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < goal else (low, middle)
    return high


def _pace(left: dict[int, float], solution: Callable[[Tensor], Solution]) -> Assumption:
    """Compare the first fall of the loss with the prediction, which shows a wrong rate or other training samples."""
    steps = sorted(left)
    start = left[steps[0]]
    fallen = next((step for step in steps if left[step] < 0.9 * start), steps[-1])
    predicted = float(solution(torch.tensor([float(fallen)]).double()).loss[0])
    share = (start - left[fallen]) / (start - predicted) if start > predicted else float("nan")
    return assumption(
        "the rate fits", share, 1.5, f"fall of the loss by step {fallen} over the predicted fall", least=1 / 1.5
    )
