"""The conserved matrix C = K0 + gamma Delta_0 Delta_0^T in its eigenbasis."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.theory.ofe.problem import KernelProblem
from featlearn.theory.ofe.secular import NEGLIGIBLE, rank_one_update


@dataclass(frozen=True)
class Eigenmodes:
    """Eigenvectors of C, and the rows that carry the motion of the residual.

    The residual is written Delta = Z B^T with independent columns Z (P, r), r the rank of Delta_0; B never changes. Its
    motion is that of the column space of rows F: one row for each mode that Delta_0 touches, which decays at the rate
    c_k, and rows that do not decay, where the loss can vanish (see `featlearn.theory.ofe.frames`).
    """

    values: Tensor
    """(P,): c_k, ascending."""
    vectors: Tensor
    """(P, P): v_k, columns."""
    turn: Tensor
    """(C, r): B."""
    touched: Tensor
    """(m,): the modes with v_k . Delta_0 != 0."""
    rates: Tensor
    """(n,): c_k of the touched modes, then 0 for the rows that do not decay."""
    rows: Tensor
    """(n, r): v_k . Z, then an orthonormal basis."""
    logs: Tensor
    """(n,): logarithm of what multiplies each row of F at time 0: sqrt(gamma / c_k), then 1 / sqrt(1 + gamma g)."""

    @property
    def moving(self) -> int:
        """Number of rows that belong to modes."""
        return len(self.touched)


def conserved_modes(problem: KernelProblem, gamma: float) -> Eigenmodes:
    """Decompose C; one rank-one update for each independent column of Delta_0, so that large gamma costs no digits."""
    inside, turn, vectors = eigenbasis_start(problem)
    if gamma * float(inside.square().sum()) <= 1e30 * NEGLIGIBLE * float(problem.values[-1]):
        gamma = 0.0  # the kernel moves by less than any double can say
    still, logs = _still(problem.values, inside, gamma)
    values = problem.values
    if gamma > 0:
        for j in range(inside.shape[1]):
            update = rank_one_update(values, inside[:, j].contiguous(), gamma)
            values, vectors = update.values, vectors @ update.vectors
            inside = update.vectors.T @ inside
            inside[:, j] = update.overlaps
    touched = (inside != 0).any(1).nonzero()[:, 0]
    if gamma > 0:
        touched = touched[values[touched] > 0]
    rates = values[touched]
    moving = (gamma / rates).log() / 2 if gamma > 0 else torch.full_like(rates, -torch.inf)
    return Eigenmodes(
        values,
        vectors,
        turn,
        touched,
        torch.cat([rates, torch.zeros_like(logs)]),
        torch.cat([inside[touched], still]),
        torch.cat([moving, logs]),
    )


class EigenbasisStart(NamedTuple):
    """Delta_0 = Z B^T in an eigenbasis u_i of K0."""

    inside: Tensor
    """(P, r): u_i . Z"""
    turn: Tensor
    """(C, r): B"""
    vectors: Tensor
    """(P, P): u_i, columns."""


def eigenbasis_start(problem: KernelProblem) -> EigenbasisStart:
    """Delta_0 in bases that tell the null space of K0 from its range.

    Each of the first columns of Z has a direction of its own outside the range, the others have nothing there, exactly:
    what is there by rounding is zero.
    """
    columns, turn = _independent(problem.residual)
    inside, null = problem.vectors.T @ columns, problem.values == 0
    if inside.shape[1] == 0 or not bool(null.any()):
        return EigenbasisStart(inside, turn, problem.vectors)
    left, sizes, right = torch.linalg.svd(inside[null], full_matrices=True)
    rounding = max(problem.residual.shape) * torch.finfo(torch.float64).eps * inside.norm()
    sizes = torch.where(sizes > rounding, sizes, 0.0)
    inside = inside @ right.T
    outside = torch.zeros_like(inside[null])
    outside[: len(sizes), : len(sizes)] = torch.diag(sizes)
    inside[null] = outside
    vectors = problem.vectors.clone()
    vectors[:, null] = vectors[:, null] @ left
    return EigenbasisStart(inside, turn @ right.T, vectors)


def _independent(residual: Tensor) -> tuple[Tensor, Tensor]:
    """Delta_0 = Z B^T: independent columns Z (P, r), and B (C, r) with orthonormal columns."""
    if residual.shape[1] == 1:
        independent = int(bool((residual != 0).any()))
        return residual[:, :independent], torch.ones(1, independent, dtype=residual.dtype, device=residual.device)
    left, sizes, right = torch.linalg.svd(residual, full_matrices=False)
    independent = sizes > max(residual.shape) * torch.finfo(torch.float64).eps * sizes[0]
    return left[:, independent] * sizes[independent], right[independent].T


def _still(values: Tensor, inside: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Rows that do not decay: (I + gamma Z^T K0^-1 Z)^-1 = rows^T diag(exp(2 logs)) rows.

    Where K0 is singular this is the limit: nothing along the columns that have a part outside its range, and the same
    with the pseudo-inverse on the others.
    """
    null = values == 0
    directions = torch.eye(inside.shape[1], dtype=inside.dtype, device=inside.device)
    if gamma == 0:
        return directions, torch.zeros(len(directions), dtype=inside.dtype, device=inside.device)
    directions = directions[~(inside[null] != 0).any(0)]
    scaled = (inside[~null] @ directions.T) / values[~null].sqrt()[:, None]
    # singular values of K0^-1/2 Z, so that small ones keep their digits
    _, sizes, right = torch.linalg.svd(scaled, full_matrices=len(scaled) < len(directions))
    sizes = torch.cat([sizes, sizes.new_zeros(len(right) - len(sizes))])
    return right @ directions, -torch.log1p(gamma * sizes.square()) / 2
