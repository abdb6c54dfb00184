"""Closed forms for whole training runs of linear networks on whitened inputs."""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.theory.arguments import checked_number, checked_numbers, checked_rows
from featlearn.theory.deep_linear.early_kernel import TwoLayerStart
from featlearn.theory.deep_linear.linear_network import checked_depth, checked_outputs, checked_path_times
from featlearn.theory.deep_linear.max_alignment import traced_metric
from featlearn.theory.deep_linear.path import LinearPath, Task
from featlearn.theory.deep_linear.strength import remaining, strength


def solve(X: Tensor, y: Tensor, *, times: Any, c0: Any, weight_layers: int, rate: float = 1.0) -> LinearPath:
    """Return a balanced linear network of any depth on whitened inputs, each mode on its own.

    See Atanasov et al. 2022, Sec. 4, App. E.1, H.

    The layers are W^l = sum_a u_a r_(l+1)^a r_l^aT along the singular vectors of the teacher, which is where small
    weights come to; u_a^L follows `strength` from c0.

    Args:
        X, y: (P, D) and (P,) or (P, C); X^T X a multiple of a projector. What of y is not linear in X stays in
            the loss.
        times: (T,), with df/dt = -rate K (f - y).
        c0: strength at time 0, a number or one for each mode (R,), in the order of the singular values of the teacher,
            largest first; (q0 + r0) / 2 for a two-layer network with small weights.
        weight_layers: number of weight matrices.
        rate: see `fl.dynamics.rate`; 1/P is that of Atanasov et al. 2022.
    """
    depth, moments = checked_depth(weight_layers), checked_path_times(times)
    rows = checked_rows(X)
    task = Task.of(rows, checked_outputs(y, rows))
    size, moments = task.whitened(), moments.to(rows.device)
    start = checked_numbers(c0, "c0").to(rows.device)
    if start.dim() > 0 and start.shape != task.s.shape:
        raise InputValueError(
            f"c0 has shape {tuple(start.shape)}, expected a number or one for each mode, (R,) = {tuple(task.s.shape)}"
        )
    speed = checked_number(rate, "rate", above=0.0) * size
    scaled = (speed * moments)[:, None]
    c = strength(scaled, task.s, start, depth)
    left = remaining(scaled, task.s, start, depth)

    def metrics(at: Tensor) -> Tensor:
        strengths = strength((speed * at)[:, None], task.s, start, depth).abs()
        return torch.stack([traced_metric(each, task.v, task.targets.shape[1], depth) for each in strengths])

    weights = torch.einsum("cr,tr,rd->tcd", task.z, c, task.v)
    missed = (rows @ task.teacher.T - task.targets).square().sum()
    missed = torch.where(missed > 1e-24 * task.targets.square().sum(), missed, torch.zeros_like(missed))  # rounding
    return task.path(
        moments,
        weights,
        metrics,
        loss=size * left.square().sum(1) + missed,
        strength=c,
    )


def silent_alignment(X: Tensor, y: Tensor, W0: Tensor, a0: Tensor, *, times: Any, rate: float = 1.0) -> LinearPath:
    """Return a two-layer linear network f = a^T W x from its own small weights, on whitened inputs: both phases.

    See Atanasov et al. 2022, Sec. 3.

    The kernel first turns while the loss stays, and then grows. M(t) is `two_layer_kernel`, the function that is
    learned (r beta + p) . x, with errors O(sigma^2) relative to s. `W0` (N, D) and `a0` (N,) or (1, N); y (P,); the
    rest as for `solve`.
    """
    rows = checked_rows(X)
    targets = checked_outputs(y, rows)
    if targets.numel() != len(rows):
        raise InputValueError(f"y has shape {tuple(targets.shape)}, expected (P,): one output; use flow for more")
    task, moments = Task.of(rows, targets), checked_path_times(times).to(rows.device)
    size = task.whitened()
    readout = a0[0] if isinstance(a0, Tensor) and a0.dim() == 2 and len(a0) == 1 else a0
    start = TwoLayerStart.of(W0, readout, task.teacher[0] / task.s[0], task.s[0], task.second / size)
    speed = checked_number(rate, "rate", above=0.0) * size
    weights = start.strength(speed * moments)[:, None] * start.beta + start.across(speed * moments)
    return task.path(
        moments,
        weights[:, None],
        lambda at: torch.stack([start.metric(time, saturating=True) for time in speed * at]),
    )
