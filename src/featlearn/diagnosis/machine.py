"""Whether the network is a kernel machine: compares kernel regression with the network on test points."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.diagnosis.evidence import MACHINE
from featlearn.diagnosis.logistic_flow import LogisticFlow
from featlearn.diagnosis.loss_speed import LossSpeed
from featlearn.diagnosis.run_data import RunData
from featlearn.dynamics import kernel_descent
from featlearn.errors import FeatlearnError
from featlearn.metrics import Agreement, agreement

LONGEST = 1e8
"""Longest time of kernel descent, in units of the inverse largest eigenvalue."""
TIMES = 200
RATIO = 1.25
"""Factor between times at which the outputs of a logistic loss are followed."""
LARGEST, LARGEST_OF_LOGISTIC = 2048, 1024
"""Samples times outputs up to which the kernel between all outputs is used; above, its mean over outputs."""

BEYOND_THE_PROBE = "a network that was trained on more than the probe would need a regression on all of it"
BETWEEN_OUTPUTS = (
    "kernels between different outputs were not recorded, and may be what is missing; watch with at most 2048 / C "
    "samples in probe= and in test="
)


@dataclass(frozen=True)
class KernelMachine:
    """How well regression with the kernels of a run reproduces the network."""

    of: str | None
    """the kernel that reproduces the network: "final", "initial", "optimizer"; None if none does, or if unknown"""
    errors: dict[str, float] = field(default_factory=dict)
    """kernel -> relative error |g - f| / |f - f0| on test points"""
    correlations: dict[str, float] = field(default_factory=dict)
    """kernel -> correlation of the changes g - f0 and f - f0"""
    outputs: str = ""
    """"all" if kernels between all outputs were used, "mean" if only their mean was recorded"""
    reason: str = ""
    """why it is unknown"""


def kernel_machine(run_data: RunData) -> KernelMachine:
    """Kernel descent from f0 to the network's loss on the probe, for each kernel; evaluated on the test points.

    At zero loss this is the regression of Atanasov et al. 2022, Theorem 1. Training that stopped earlier is compared
    with a regression
    stopped at the same loss, so no learning rate is needed.
    """
    first, last = 0, max(run_data.array_steps("test"), default=-1)
    if last < 0:
        return KernelMachine(None, reason="no test points were watched (test=(x, y))")
    if last == 0 or run_data.array("test", first, "f") is None:
        when = "before training only" if last == 0 else "not before training"
        return KernelMachine(None, reason=f"test points were measured {when}")
    if last not in run_data.kernel_steps or first not in run_data.kernel_steps:
        return KernelMachine(None, reason="kernels and outputs of the first or the last measurement are missing")
    f0, f1 = run_data.array("test", first, "f"), run_data.array("test", last, "f")
    y = run_data.targets
    if f0 is None or f1 is None or y is None:
        return KernelMachine(None, reason="outputs of the test points are missing")
    if not bool((f1 != f0).any()):
        return KernelMachine(None, reason="the outputs did not change")
    errors, correlations, whole = {}, {}, True
    for name, place, step in (
        ("final", "kernel", last),
        ("initial", "kernel", first),
        ("optimizer", "optimizer_kernel", last),
    ):
        pair = _path_kernels(run_data, place, step)
        if pair is None:
            continue
        found = _agreement(run_data, recorded_path(run_data, place, step, f0), f0, f1)
        if found is not None:
            errors[name], correlations[name] = float(found.relative_error), float(found.correlation)
            whole = whole and (pair[0].dim() == 4 or y.shape[1] == 1)
    if not errors:
        return KernelMachine(None, reason="no kernel between test points and probe was recorded")
    # the simplest kernel first: if the initial kernel reproduces the network, so does the final one
    of = next((name for name in ("initial", "final", "optimizer") if errors.get(name, math.inf) <= MACHINE.high), None)
    outputs = "all" if whole else "mean"
    if of is not None:
        return KernelMachine(of, errors, correlations, outputs)
    return KernelMachine(None, errors, correlations, outputs, BEYOND_THE_PROBE if whole else BETWEEN_OUTPUTS)


def kernels_at(run_data: RunData, place: str, step: int, largest: int = LARGEST) -> tuple[Tensor, Tensor] | None:
    """Kernels (probe, probe) and (test, probe): between all outputs if recorded, else their mean over outputs."""
    crosses = place if place == "optimizer_kernel" else "test"
    whole = run_data.array(place, step, "full"), run_data.array(crosses, step, "cross_full")
    if whole[0] is not None and whole[1] is not None and whole[0].dim() == whole[1].dim() == 4:
        size = whole[0].shape[0] * whole[0].shape[2]
        if size <= largest:
            return whole[0], whole[1]
    mean, cross = run_data.array(place, step, "mean"), run_data.array(crosses, step, "cross")
    return None if mean is None or cross is None else (mean, cross)


def _path_kernels(run_data: RunData, place: str, step: int) -> tuple[Tensor, Tensor] | None:
    """Return the kernels that a path is followed with; a logistic one takes many products with them."""
    return kernels_at(run_data, place, step, LARGEST_OF_LOGISTIC if run_data.loss_kind.logistic else LARGEST)


class FrozenPath(NamedTuple):
    """Training with one kernel from the first outputs on."""

    losses: Tensor
    """(T,) in the unit of `RunData.loss`"""
    outputs: Tensor
    """(T, P, C)"""
    test_outputs: Tensor | None
    """(T, P', C)"""

    def at(self, level: float) -> tuple[Tensor, Tensor | None]:
        """Outputs of the probe and of the test points where the falling loss reaches a level; the last if it does not.

        Interpolated between times.
        """
        below = (self.losses <= level).nonzero().flatten()
        i = int(below[0]) if len(below) else len(self.losses) - 1
        before = max(i - 1, 0)
        drop = self.losses[before] - self.losses[i]
        share = (self.losses[before] - level) / drop if len(below) and float(drop) > 0 else torch.ones_like(drop)
        found = [
            None if part is None else torch.lerp(part[before], part[i], share)
            for part in (self.outputs, self.test_outputs)
        ]
        assert found[0] is not None
        return found[0], found[1]


def nearest(path: FrozenPath, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Outputs of the probe and of the test points where the path comes closest to the outputs (P, C) of the probe.

    Centered over samples: a constant that is learned first does not decide. Between times the path is a straight line.
    """
    away = outputs - path.outputs
    away = away - away.mean(1, keepdim=True)
    ways = away[:-1] - away[1:]  # (T - 1, P, C) along the path
    shares = ((away[:-1] * ways).sum((1, 2)) / ways.square().sum((1, 2)).clamp_min(1e-300)).clamp(0, 1)
    distances = (away[:-1] - shares[:, None, None] * ways).square().sum((1, 2))
    i = int(distances.argmin())
    found = [
        None if part is None else torch.lerp(part[i], part[i + 1], shares[i].to(part.dtype))
        for part in (path.outputs, path.test_outputs)
    ]
    assert found[0] is not None
    return found[0], found[1]


def frozen_path(run_data: RunData, kernel: Tensor, cross: Tensor | None, f0_test: Tensor | None) -> FrozenPath | None:
    """Descent with a kernel from the first outputs; None if it cannot be computed."""
    start, targets, kind = run_data.outputs(0), LossSpeed(run_data).targets, run_data.loss_kind
    first = None if f0_test is None or cross is None else f0_test.double().reshape(len(f0_test), -1)
    try:
        if kind.logistic:
            return _logistic_path(run_data, kernel, cross, first)
        rows = kernel.transpose(1, 2).reshape(start.numel(), -1) if kernel.dim() == 4 else kernel
        slowest = 1 / _largest_eigenvalue(rows.double())
        path = kernel_descent(
            kernel,
            targets,
            f0=start,
            times=slowest * torch.logspace(-2, math.log10(LONGEST), TIMES, dtype=torch.float64),
            K_test=cross,
            f0_test=first,
        )
    except (FeatlearnError, RuntimeError):  # LinAlgError is one: an eigensolver that does not converge
        return None
    return FrozenPath(torch.stack([kind.mean(f, targets) for f in path.outputs]), path.outputs, path.test_outputs)


def _logistic_path(run_data: RunData, kernel: Tensor, cross: Tensor | None, first: Tensor | None) -> FrozenPath:
    """Descent on a logistic loss, followed no further than the run went."""
    f, targets, kind = run_data.outputs(0), LossSpeed(run_data).targets, run_data.loss_kind
    rows = kernel.transpose(1, 2).reshape(f.numel(), -1) if kernel.dim() == 4 else kernel
    values, vectors = torch.linalg.eigh(rows.double())
    flow = LogisticFlow(values, vectors, targets, kind)
    rows_test = None
    if cross is not None and first is not None:
        whole = cross.dim() == 4
        rows_test = (cross.transpose(1, 2).reshape(first.numel(), -1) if whole else cross).double()
    lowest = math.inf if run_data.loss is None else float(run_data.loss.values.min())
    times = [10**-2 * RATIO**i / float(values[-1]) for i in range(math.ceil(math.log(LONGEST * 100, RATIO)))]
    modes, test, before = torch.zeros(0), first, 0.0
    outputs, tests, losses = [f], [first], [float(kind.mean(f, targets))]
    for i, time in enumerate(times):
        length = time - before
        guess = modes * RATIO if i > 1 else None
        f, slope, modes = flow.step(f, length, guess)
        if rows_test is not None and test is not None:
            change = rows_test @ (slope if rows_test.shape[1] == len(slope) else slope.reshape(-1, 1))
            test = test - length * change.reshape(test.shape)
        outputs.append(f)
        tests.append(test)
        losses.append(float(kind.mean(f, targets)))
        before = time
        if losses[-1] <= lowest:
            break
    return FrozenPath(
        torch.tensor(losses, dtype=torch.float64),
        torch.stack(outputs),
        None if rows_test is None else torch.stack([part for part in tests if part is not None]),
    )


def recorded_path(run_data: RunData, place: str, step: int, f0_test: Tensor) -> FrozenPath | None:
    """Descent with the kernels of a step, probe and test points, computed once; None if there are none."""
    if (place, step) not in run_data.paths:
        pair = _path_kernels(run_data, place, step)
        run_data.paths[place, step] = None if pair is None else frozen_path(run_data, *pair, f0_test)
    found: FrozenPath | None = run_data.paths[place, step]
    return found


def _agreement(run_data: RunData, path: FrozenPath | None, f0: Tensor, f1: Tensor) -> Agreement | None:
    if path is None:
        return None
    end = run_data.outputs(max(run_data.array_steps("test")))
    predicted = path.at(LossSpeed(run_data).loss_of(end))[1]
    assert predicted is not None
    first = f0.double().reshape(len(f0), -1)
    changes = (predicted - first, f1.double().reshape(len(f0), -1) - first)
    # Centered, as the gap is: a constant that every model learns shows nothing.
    found = agreement(*(change - change.mean(0) for change in changes))
    return found if math.isfinite(float(found.relative_error)) else None


def _largest_eigenvalue(kernel: Tensor) -> float:
    """By power iteration, accurate to about 1 %: enough for a time grid, and much faster than a decomposition."""
    vector = torch.ones(len(kernel), dtype=kernel.dtype)
    for _ in range(20):
        vector = kernel @ (vector / vector.norm())
    return float(vector.norm())
