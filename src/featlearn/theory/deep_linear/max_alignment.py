"""Alignment of the final kernel of a linear network with its task.

See Atanasov et al. 2022, App. E.2 (dashed lines in the figures).
"""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import ratio
from featlearn.theory.arguments import checked_count, checked_numbers, checked_rows
from featlearn.theory.deep_linear.linear_network import checked_depth, checked_outputs
from featlearn.theory.deep_linear.minimum_norm import modes, teacher


def max_alignment(X: Tensor, y: Tensor, weight_layers: int) -> Tensor:
    """Kernel-task alignment of `final_ntk`: the dashed lines of Atanasov et al. 2022, Fig. 1, C.2, E.1, H.1.

    One output, y a linear function of X: A = (k |y|^2 + g) / sqrt(k^2 |y|^4 + 2 k |y|^2 g + |G|_F^2) with G = X X^T,
    g = y^T G y / |y|^2, k = (L-1) / s^2. Other y: the kernel is that of its least-squares fit, the alignment that with
    y itself. For y (P, C): the traced kernel 1/C sum_c K^cc with the task kernel Y Y^T. nan for y = 0 and where the
    kernel vanishes. Whitened inputs need only ranks and singular values: `whitened_max_alignment`.
    """
    depth = checked_depth(weight_layers)
    rows = checked_rows(X)
    targets = checked_outputs(y, rows)
    columns = targets.reshape(len(rows), -1)
    _, s, v = modes(teacher(rows, columns))
    metric = traced_metric(s, v, columns.shape[1], depth)
    return metric_alignment(metric, rows.T @ rows, rows.T @ columns, columns)


def whitened_max_alignment(
    weight_layers: int, rank: Any, singular_values: Tensor | None = None, *, outputs: int | None = None
) -> Tensor:
    """`max_alignment` on whitened inputs: L / sqrt(L^2 - 1 + r) for one output, r = min(D, P) the rank of X.

    With C outputs (Atanasov et al. 2022, App. E.2, has no formula): `singular_values` (R,) those of the teacher,
    `outputs` C, by default R. The traced kernel has the eigenvalues 1/C sum_l t_(L-l) s_a^(2(l-1)/L) along the modes,
    t_k = sum_b s_b^(2k/L) and t_0 = C, and t_(L-1)/C along the other r - R directions; for two layers s_a + sum s / C
    and sum s / C. `rank`: a number or a tensor, >= R. y must be a linear function of X.
    """
    depth = checked_depth(weight_layers)
    ranks = checked_numbers(rank, "rank", above=0.0)
    s = torch.ones(1, dtype=torch.float64) if singular_values is None else singular_values
    s = checked_numbers(s, "singular_values", least=0.0).to(ranks.device)
    count = s.numel() if outputs is None else checked_count(outputs, "outputs")
    if s.dim() != 1 or count < len(s) or bool((ranks < len(s)).any()):
        raise InputValueError(
            f"singular_values have shape {tuple(s.shape)}, outputs={outputs!r}, rank={rank!r}, expected (R,) with "
            "R <= outputs and R <= rank"
        )
    inside, outside = _traced_spectrum(s, depth, count)
    overlap = (inside * s.square()).sum()
    size = (inside.square().sum() + (ranks - len(s)) * outside.square()).sqrt() * s.square().norm()
    return ratio(overlap.expand_as(size), size)


def traced_metric(s: Tensor, v: Tensor, outputs: int, depth: int) -> Tensor:
    """Compute 1/C sum_c M^cc (D, D) of a balanced network with modes of strength s (R,) along the inputs v (R, D)."""
    inside, outside = _traced_spectrum(s, depth, outputs)
    spikes: Tensor = (v.T * (inside - outside)) @ v
    return spikes + outside * torch.eye(v.shape[1], dtype=s.dtype, device=s.device)


def metric_alignment(metric: Tensor, second: Tensor, moment: Tensor, targets: Tensor) -> Tensor:
    """<X M X^T, Y Y^T> / (|X M X^T| |Y Y^T|) from M, X^T X and X^T Y: no P x P matrix."""
    overlap = (moment * (metric @ moment)).sum()
    product = metric @ second
    size = (product * product.T).sum().clamp(min=0).sqrt()
    return ratio(overlap, size * (targets.T @ targets).norm())


def _traced_spectrum(s: Tensor, depth: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues of 1/C sum_c M^cc along the modes, and across them."""
    traces = [(s ** (2 * k / depth)).sum() / outputs if k else torch.ones_like(s[0]) for k in range(depth)]
    inside = sum((traces[depth - layer] * s ** (2 * (layer - 1) / depth) for layer in range(2, depth + 1)), 0 * s)
    return inside + traces[depth - 1], traces[depth - 1]
