"""The rank-one spike gamma y y^T in the spectrum of the final kernel, and the threshold above which it is the largest
eigenvalue."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_number, checked_numbers
from featlearn.theory.ofe.problem import KernelProblem, checked_task
from featlearn.theory.ofe.secular import rank_one_update, secular_roots


class Spike(NamedTuple):
    """Spectrum of K0 + gamma y y^T."""

    eigenvalues: Tensor
    """(P,), descending; the first is the spike once gamma is above the threshold."""
    overlaps: Tensor
    """(P,): (v_k . y)^2 / |y|^2, in the same order; they add up to 1."""
    eigenvectors: Tensor
    """(P, P), columns in the same order."""


def spike(K0: Tensor, y: Tensor, gamma: float) -> Spike:
    """Eigenvalues of the final kernel K0 + gamma y y^T, and the share of the task in each eigenvector.

    See Shan & Bordelon 2021a, Fig. 2A, B.

    The eigenvalues solve the secular equation 1 = gamma sum_i y_i^2 / (c - lambda_i), with y_i = u_i . y in the
    eigenbasis of K0, and (v_c . y)^2 = 1 / (gamma^2 sum_i y_i^2 / (c - lambda_i)^2): one root above each lambda_i with
    y_i != 0, below the next. Every root is found to relative precision, however large gamma is. K0 is (P, P), y (P,),
    gamma >= 0.
    """
    problem = checked_task(K0, y)
    weight = checked_number(gamma, "gamma", least=0.0)
    inside = problem.vectors.T @ problem.targets[:, 0]
    values, vectors, overlaps = rank_one_update(problem.values, inside, weight)
    return Spike(
        values.flip(0), (overlaps.square() / inside.square().sum()).flip(0), (problem.vectors @ vectors).flip(1)
    )


def top_overlap(K0: Tensor, y: Tensor, gamma: Numbers) -> Tensor:
    """(v . y)^2 / |y|^2 for the top eigenvector v of K0 + gamma y y^T, of the shape of gamma.

    See Shan & Bordelon 2021a, Fig. 2C.

    Never falls with gamma. At finite P there is no singularity: it rises over a width that is proportional to |y_1|,
    the task's share in the top mode of K0, about `threshold`; only for y_1 = 0 it jumps there. For gamma = 0 the share
    of y in the top eigenspace. K0 is (P, P), y (P,), gamma >= 0.
    """
    problem = checked_task(K0, y)
    rates = checked_numbers(gamma, "gamma", least=0.0).to(problem.kernel.device)
    inside = (problem.vectors.T @ problem.targets[:, 0]) / problem.targets.norm()
    pole = int((inside.square() > 0).nonzero().max())  # the largest eigenvalue that y touches
    offsets = problem.values - problem.values[pole]
    weights = rates.reshape(-1, 1) * (inside * problem.targets.norm()).square()  # (G, P)
    moved = weights[:, pole] > 0
    weights = weights[moved]
    nearest = torch.full((len(weights),), pole, device=weights.device)
    # poles above that y does not touch have no weight, but the root must not stop at them
    reach = weights.sum(1)
    clear = torch.where(weights == 0, torch.zeros_like(offsets), offsets)
    distance = secular_roots(clear, weights, nearest, torch.ones_like(reach), reach)
    # (v . y)^2 = (sum y^2 / away)^2 / sum (y / away)^2, in which gamma cancels, and the scale of away
    share = inside.abs() * (distance[:, None] / (distance[:, None] - clear))
    overlap = (inside.abs() * share).sum(1).square() / share.square().sum(1)
    top = problem.values == problem.values[-1]
    result = torch.full((rates.numel(),), float(inside[top].square().sum()), dtype=torch.float64, device=rates.device)
    result[moved] = torch.where(distance > offsets[-1], overlap, result[moved])
    return result.clamp(max=1.0).reshape(rates.shape)


def threshold(K0: Tensor, y: Tensor) -> Tensor:
    """(): where the spike crosses the top mode of K0: gamma* = 1 / sum_{i > 1} y_i^2 / (lambda_1 - lambda_i).

    The sharp transition of Shan & Bordelon 2021a, Fig. 2C: where the top mode (mostly constant) is far above the others
    and carries little of the task, gamma* is about lambda_1 / |y|^2. The value 0.3 of Shan & Bordelon 2021a is a
    statement about the units of K0 and y. Modes that share the top eigenvalue to rounding are left out of the sum. nan
    where y lies within the top eigenspace: it is the top mode at every gamma. K0 is (P, P), y (P,). See
    `rate_for_overlap` where y_1 is not small, `bulk_threshold` for random kernels.
    """
    problem = checked_task(K0, y)
    power = (problem.vectors.T @ problem.targets[:, 0]).square()
    below, power = _below_top(problem, power)
    total = (power / below).sum()
    return ratio(torch.ones_like(total), total)


def _below_top(problem: KernelProblem, power: Tensor) -> tuple[Tensor, Tensor]:
    below = problem.values[-1] - problem.values
    inside = below > len(below) * torch.finfo(torch.float64).eps * problem.values[-1]
    return below[inside], power[inside]


def rate_for_overlap(K0: Tensor, y: Tensor, overlap: float = 0.5) -> Tensor:
    """(): the smallest feature rate at which `top_overlap` reaches `overlap`, by default one half.

    0 where K0 itself does; where the overlap jumps past it, the place of the jump. K0 is (P, P), y (P,),
    0 < overlap < 1. The overlap is that of Shan & Bordelon 2021a, Sec. 4.
    """
    problem = checked_task(K0, y)
    target = checked_number(overlap, "overlap", above=0.0)
    if target >= 1:
        raise InputValueError(
            f"overlap={overlap!r}, expected a number between 0 and 1: 1 is reached at no finite gamma"
        )
    size = problem.targets.norm()
    inside = (problem.vectors.T @ problem.targets[:, 0]) / size
    pole = int((inside.square() > 0).nonzero().max())
    touched = inside.square() > 0
    offsets, inside = (problem.values - problem.values[pole])[touched], inside[touched]
    start = float(problem.values[-1] - problem.values[pole])

    def reached(distance: float) -> bool:
        share = inside.abs() * (distance / (distance - offsets))
        return float((inside.abs() * share).sum().square()) >= target * float(share.square().sum())

    def rate(distance: float) -> Tensor:
        return torch.reciprocal((inside.square() / (distance - offsets)).sum() * size.square())

    top = problem.values[touched] == problem.values[-1]
    if start > 0 and reached(start):
        return rate(start)
    if start == 0 and float(inside[top].square().sum()) >= target:
        return torch.zeros((), dtype=torch.float64, device=inside.device)
    spread = max(float(problem.values[-1]), torch.finfo(torch.float64).tiny)
    low, high = math.log(max(start, 1e-300 * spread)), math.log(spread) + 1.0
    while not reached(math.exp(high)):
        high += 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(math.exp(middle)) else (middle, high)
    return rate(math.exp(high))


def bulk_threshold(aspect: Numbers, *, scale: Numbers = 1.0, power: Numbers = 1.0) -> Tensor:
    """Return the feature rate above which a task leaves the bulk of a random kernel (Baik, Ben Arous, Peche).

    For K0 = scale * Z Z^T / N with Z (P, N) of independent entries of variance 1, aspect = P / N, and a task y with
    power = |y|^2 in no special direction: gamma* power = 1 / G(lambda_+) = scale * sqrt(aspect) (1 + sqrt(aspect)), G
    the Stieltjes transform at the edge lambda_+ of the Marchenko-Pastur bulk. Below, the top eigenvector of K0 + gamma
    y y^T has no overlap with y as P grows; see `bulk_spike`. Not in the papers, which speak of a sharp transition
    "reminiscent of the spiked matrix model" (Shan & Bordelon 2021a, Sec. 4). Numbers or tensors that broadcast.
    """
    ratios, size, task = _bulk(aspect, scale, power)
    return size * ratios.sqrt() * (1 + ratios.sqrt()) / task


class BulkSpike(NamedTuple):
    """The top eigenvalue and eigenvector of a large random kernel with a spike."""

    eigenvalue: Tensor
    overlap: Tensor
    """(v . y)^2 / |y|^2"""


def bulk_spike(gamma: Numbers, aspect: Numbers, *, scale: Numbers = 1.0, power: Numbers = 1.0) -> BulkSpike:
    """Top eigenvalue of K0 + gamma y y^T and its overlap with y, for the kernels of `bulk_threshold` as P grows.

    Above the threshold G(c) = 1 / (gamma |y|^2) and the overlap is -1 / (gamma^2 |y|^4 G'(c)); with theta = gamma |y|^2
    / scale: c = scale * theta (1 + 1 / (theta - aspect)), overlap 1 - aspect / (theta - aspect)^2. Below, the edge of
    the bulk, scale * (1 + sqrt(aspect))^2, and 0. The spike is that of Shan & Bordelon 2021a, Sec. 4.
    """
    ratios, size, task = _bulk(aspect, scale, power)
    theta = checked_numbers(gamma, "gamma", least=0.0) * task / size
    above = theta > ratios.sqrt() * (1 + ratios.sqrt())
    beyond = torch.where(above, theta - ratios, torch.ones_like(theta - ratios))
    edge = (1 + ratios.sqrt()).square()
    value = size * torch.where(above, theta * (1 + 1 / beyond), edge)
    return BulkSpike(value, torch.where(above, 1 - ratios / beyond.square(), 0.0))


def _bulk(aspect: Numbers, scale: Numbers, power: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    named = {"aspect": aspect, "scale": scale, "power": power}
    first, second, third = (checked_numbers(value, name, above=0.0) for name, value in named.items())
    return first, second, third
