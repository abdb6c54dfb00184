"""Compare kernel regression with the network on test points: is the network a kernel machine?"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featlearn.diagnosis.evidence import MACHINE
from featlearn.diagnosis.logistic_flow import LogisticFlow
from featlearn.diagnosis.rates import LossRates
from featlearn.diagnosis.run_data import RunData
from featlearn.dynamics import kernel_descent
from featlearn.errors import FeatlearnError
from featlearn.metrics import Agreement, agreement

LONGEST = 1e8
"""Longest time of kernel descent, in units of the inverse largest eigenvalue."""
TIMES = 200
SIMPLEST = ("initial", "final", "optimizer")
"""Kernels, the simplest first: if the initial kernel reproduces the network, so does the final one."""
RATIO = 1.25
"""Factor between times at which the outputs of a logistic loss are followed."""
LARGEST, LARGEST_OF_LOGISTIC = 2048, 1024
"""Samples times outputs up to which the kernel between all outputs is used; above, its mean over outputs."""

BEYOND_THE_PROBE = "a network that was trained on more than the probe would need a regression on all of it"
BETWEEN_OUTPUTS = (
    "kernels between different outputs were not used, and may be what is missing; watch with at most "
    f"{LARGEST} / C samples in probe= and in test=, for a cross-entropy {LARGEST_OF_LOGISTIC} / C"
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
    """"all" if kernels between all outputs were used, "mean" if only their mean over outputs was"""
    reason: str = ""
    """why it is unknown, or what was left out"""


def kernel_machine(run_data: RunData) -> KernelMachine:
    """Compare the network with kernel descent from its first outputs to its loss on the probe, for each kernel.

    At zero loss this is the regression of Atanasov et al. 2022, Theorem 1. Training that stopped earlier is compared
    with a regression stopped at the same loss, so that no learning rate is needed.
    """
    first, last = 0, max(run_data.array_steps("test"), default=-1)
    if last < 0:
        return KernelMachine(None, reason="no test points were watched (test=(x, y))")
    y = run_data.targets
    if y is None:
        return KernelMachine(None, reason="the run has no targets")
    f0, f1 = run_data.array("test", first, "f"), run_data.array("test", last, "f")
    if last == 0 or f0 is None:
        when = "before training only" if last == 0 else "not before training"
        return KernelMachine(None, reason=f"test points were measured {when}")
    if last not in run_data.kernel_steps or first not in run_data.kernel_steps:
        return KernelMachine(None, reason="kernels and outputs of the first or the last measurement are missing")
    if f1 is None:
        return KernelMachine(None, reason="outputs of the test points are missing")
    if not bool((f1 != f0).any()):
        return KernelMachine(None, reason="the outputs did not change")
    errors, correlations, whole = {}, {}, True
    kernels = (("final", "kernel", last), ("initial", "kernel", first), ("optimizer", "optimizer_kernel", last))
    for name, place, step in kernels:
        pair = kernels_at(run_data, place, step)
        comparison = None if pair is None else _comparison(run_data, *pair, f0, f1)
        if pair is not None and comparison is not None:
            errors[name], correlations[name] = float(comparison.relative_error), float(comparison.correlation)
            whole = whole and (pair[0].dim() == 4 or y.shape[1] == 1)
    if not errors:
        return KernelMachine(None, reason="no kernel between test points and probe was recorded")
    of = next((name for name in SIMPLEST if errors.get(name, math.inf) <= MACHINE.high), None)
    reason = "" if of else BEYOND_THE_PROBE if whole else BETWEEN_OUTPUTS
    return KernelMachine(of, errors, correlations, "all" if whole else "mean", reason)


def kernels_at(run_data: RunData, place: str, step: int) -> tuple[Tensor, Tensor] | None:
    """Return kernels (probe, probe) and (test, probe): between all outputs if recorded, else the mean over outputs."""
    crosses = place if place == "optimizer_kernel" else "test"
    full, cross_full = run_data.array(place, step, "full"), run_data.array(crosses, step, "cross_full")
    if full is not None and cross_full is not None and full.dim() == cross_full.dim() == 4:
        samples, _, outputs, _ = full.shape
        if samples * outputs <= (LARGEST_OF_LOGISTIC if run_data.loss_kind.logistic else LARGEST):
            return full, cross_full
    mean, cross = run_data.array(place, step, "mean"), run_data.array(crosses, step, "cross")
    return None if mean is None or cross is None else (mean, cross)


def _comparison(run_data: RunData, kernel: Tensor, cross: Tensor, f0: Tensor, f1: Tensor) -> Agreement | None:
    """Compare the changes of the outputs on the test points, by descent and of the network; None if that fails."""
    first = f0.double().reshape(len(f0), -1)
    try:
        losses, outputs = (_logistic_path if run_data.loss_kind.logistic else _path)(run_data, kernel, cross, first)
    except (FeatlearnError, RuntimeError):  # LinAlgError is one: an eigensolver that does not converge
        return None
    end = LossRates(run_data).loss_of(run_data.outputs(max(run_data.array_steps("test"))))
    changes = (_at(losses, outputs, end) - first, f1.double().reshape(len(f0), -1) - first)
    # Centered, as the gap is: a constant that every model learns shows nothing.
    found = agreement(*(change - change.mean(0) for change in changes))
    return found if math.isfinite(float(found.relative_error)) else None


def _at(losses: Tensor, outputs: Tensor, level: float) -> Tensor:
    """Return outputs where the falling losses (T,) reach a level, interpolated; the last ones if they do not."""
    below = (losses <= level).nonzero().flatten()
    i = int(below[0]) if len(below) else len(losses) - 1
    before = max(i - 1, 0)
    drop = losses[before] - losses[i]
    share = (losses[before] - level) / drop if len(below) and float(drop) > 0 else torch.ones_like(drop)
    return torch.lerp(outputs[before], outputs[i], share)


def _path(run_data: RunData, kernel: Tensor, cross: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Follow descent on squared error: losses (T,) and outputs (T, P', C) on the test points."""
    start, targets = run_data.outputs(0), LossRates(run_data).targets
    slowest = 1 / _largest_eigenvalue(as_matrix(kernel).double())
    times = slowest * torch.logspace(-2, math.log10(LONGEST), TIMES, dtype=torch.float64)
    path = kernel_descent(kernel, targets, f0=start, times=times, K_test=cross, f0_test=first)
    assert path.test_outputs is not None
    return torch.stack([run_data.loss_kind.mean(f, targets) for f in path.outputs]), path.test_outputs


def _logistic_path(run_data: RunData, kernel: Tensor, cross: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Follow descent on a logistic loss, no further than the run went."""
    f, targets, kind = run_data.outputs(0), LossRates(run_data).targets, run_data.loss_kind
    values, vectors = torch.linalg.eigh(as_matrix(kernel).double())
    flow, rows = LogisticFlow(values, vectors, targets, kind), as_matrix(cross).double()
    lowest = math.inf if run_data.loss is None else float(run_data.loss.values.min())
    modes, before = None, 0.0
    tests, losses = [first], [float(kind.mean(f, targets))]
    for i in range(math.ceil(math.log(LONGEST * 100, RATIO))):
        time = 10**-2 * RATIO**i / float(values[-1])
        length, before = time - before, time
        f, slope, modes = flow.step(f, length, modes * RATIO if modes is not None and i > 1 else None)
        change = rows @ (slope if rows.shape[1] == len(slope) else slope.reshape(-1, 1))
        tests.append(tests[-1] - length * change.reshape(first.shape))
        losses.append(float(kind.mean(f, targets)))
        if losses[-1] <= lowest:
            break
    return torch.tensor(losses, dtype=torch.float64), torch.stack(tests)


def as_matrix(kernel: Tensor) -> Tensor:
    """Return a kernel as a matrix, with a row for each sample and output if it is between all outputs."""
    if kernel.dim() == 2:
        return kernel
    samples, others, outputs, _ = kernel.shape
    return kernel.transpose(1, 2).reshape(samples * outputs, others * outputs)


def _largest_eigenvalue(kernel: Tensor) -> float:
    """Return the largest eigenvalue by power iteration, accurate to about 1%: enough for a grid of times."""
    vector = torch.ones(len(kernel), dtype=kernel.dtype)
    for _ in range(20):
        vector = kernel @ (vector / vector.norm())
    return float(vector.norm())
