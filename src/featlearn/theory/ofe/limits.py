"""The limit of optimal feature evolution at infinite time."""

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import ratio
from featlearn.theory.arguments import Numbers, checked_number, checked_numbers
from featlearn.theory.ofe.eigenmodes import conserved_modes, eigenbasis_start
from featlearn.theory.ofe.frames import frames_at_the_end
from featlearn.theory.ofe.problem import KernelProblem, checked_problem
from featlearn.theory.ofe.readings import Readings, kernels, readings


def final_kernel(
    K0: Tensor, y: Tensor, gamma: float, *, f0: Tensor | None = None, rank_tolerance: float | None = None
) -> Tensor:
    """(P, P): the kernel after training, K0 + gamma (y - f0)(y - f0)^T; arguments of `solve`.

    See Shan & Bordelon 2021a, Sec. 4; 2021b, Eq. 7.

    The papers' formula holds where the loss vanishes: K0 positive definite, or y - f0 in its range. Otherwise the loss
    stops at `final_loss` and the kernel, which keeps its rank, is C - gamma Delta Delta^T with what is left of Delta.
    """
    problem = checked_problem(K0, y, f0, rank_tolerance)
    feature_rate = checked_number(gamma, "gamma", least=0.0)
    if _learnable(problem):
        return problem.kernel + feature_rate * problem.residual @ problem.residual.T
    modes = conserved_modes(problem, feature_rate)
    return kernels(modes, frames_at_the_end(modes))[0]


def final_loss(
    K0: Tensor, y: Tensor, gamma: Numbers, *, f0: Tensor | None = None, rank_tolerance: float | None = None
) -> Tensor:
    """Return the loss at infinite time, of the shape of gamma: 0 unless K0 is singular and y - f0 is not in its range.

    For one output the smallest eigenvalue of C = K0 + gamma Delta_0 Delta_0^T whose eigenvector overlaps Delta_0,
    divided by gamma; for gamma = 0 what Delta_0 has outside the range of K0. Not in Shan & Bordelon 2021a, 2021b.
    Arguments as in `solve`.
    """
    problem = checked_problem(K0, y, f0, rank_tolerance)
    rates = checked_numbers(gamma, "gamma", least=0.0)
    if _learnable(problem):
        return torch.zeros_like(rates)
    return torch.stack([_end(problem, rate).loss for rate in rates.flatten().tolist()]).reshape(rates.shape)


def final_alignment(
    K0: Tensor, y: Tensor, gamma: Numbers, *, f0: Tensor | None = None, rank_tolerance: float | None = None
) -> Tensor:
    """Kernel-task alignment of `final_kernel`, of the shape of gamma (Shan & Bordelon 2021a, Eq. 7).

    A = (A0 k + g) / sqrt(k^2 + 2 A0 k g + g^2) with k = |K0|_F, g = gamma |y|^2 for one output and f0 = 0: increasing
    in gamma, to 1. For y (P, C) alignment is with Y Y^T. nan where K0 + gamma y y^T or y vanishes. Its inverse is
    `fl.metrics.feature_rate`. Arguments as in `solve`.
    """
    problem = checked_problem(K0, y, f0, rank_tolerance)
    rates = checked_numbers(gamma, "gamma", least=0.0).to(problem.kernel.device)
    if not _learnable(problem):
        alignments = [_end(problem, rate).alignment for rate in rates.flatten().tolist()]
        return torch.stack(alignments).reshape(rates.shape)
    Y, D = problem.targets, problem.residual
    overlap = (Y * (problem.kernel @ Y)).sum() + rates * (D.T @ Y).square().sum()
    square = problem.kernel.square().sum() + 2 * rates * (D * (problem.kernel @ D)).sum()
    norm = (square + rates.square() * (D.T @ D).square().sum()).sqrt()
    return ratio(overlap, norm * (Y.T @ Y).norm())


def late_amplification(
    K0: Tensor, y: Tensor, gamma: Numbers, *, f0: Tensor | None = None, rank_tolerance: float | None = None
) -> Tensor:
    """1 + gamma (y - f0)^T K0^-1 (y - f0), of the shape of gamma; y is (P,).

    The loss ends as this factor times sum_k d_k^2 exp(-2 rate c_k t), which is what Shan & Bordelon 2021a, App. A.1 and
    2021b, App. B give for it ("zeroth order"): on digits, P = 1000, gamma = 1 the factor is in the hundreds. Infinite
    where K0 is singular and y - f0 is not in its range: there the loss does not vanish. Arguments as in `solve`.
    """
    problem = checked_problem(K0, y, f0, rank_tolerance)
    if not problem.single:
        raise InputValueError(
            f"y has shape {tuple(y.shape)}, expected (P,): the factor is a matrix for several outputs"
        )
    rates = checked_numbers(gamma, "gamma", least=0.0).to(problem.kernel.device)
    if not _learnable(problem):
        return torch.where(rates == 0, torch.ones_like(rates), torch.inf)
    power = eigenbasis_start(problem).inside.square().sum(1)
    return 1 + rates * (power[problem.values > 0] / problem.values[problem.values > 0]).sum()


def _learnable(problem: KernelProblem) -> bool:
    """Return whether the loss goes to zero: nothing of Delta_0 lies outside the range of K0."""
    return not bool((eigenbasis_start(problem).inside[problem.values == 0] != 0).any())


def _end(problem: KernelProblem, gamma: float) -> Readings:
    modes = conserved_modes(problem, gamma)
    return Readings(*(part[0] for part in readings(modes, frames_at_the_end(modes), problem.targets)))
