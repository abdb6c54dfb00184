"""Samples on a line through the origin are one sample (Xu & Ziyin 2024, Prop. 1, corrected)."""

from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite

STRAIGHT = 1e-9
"""Distance from the line, in units of the farthest sample, up to which samples count as lying on it."""


class Line(NamedTuple):
    """The one sample that trains like all of them."""

    x: Tensor
    """(d0,): sqrt(E[a^2]) n"""
    y: Tensor
    """E[a y] / sqrt(E[a^2])"""
    floor: Tensor
    """E[y^2] - y_eff^2, the part of the mean squared error that no weights can remove"""
    positions: Tensor
    """(N,): a, with X = a n and the farthest sample on the positive side"""


def reduce_line(X: Tensor, y: Tensor) -> Line:
    """For samples X = a n on a line, mean_k (f(x_k) - y_k)^2 = (f(x) - y_eff)^2 + floor for every u and W.

    See Xu & Ziyin 2024, Prop. 1, Eq. 17 (corrected).

    So gradient flow on the mean squared error of all samples is that of one, and `solve(u, W, line.x, line.y, ...)` is
    exact; the mean squared error is its loss plus `floor`, and f(x_k) = a_k f(x) / |x|.

    Errata: Xu & Ziyin 2024 have vectors in place of a, and App. A.1 sums where it must average (gradients N times too
    large). Footnote 3, targets that are vectors, holds only for special readouts and is not offered.

    Args:
        X: (N, d0) samples; all multiples of one vector, else an error.
        y: (N,) targets.
    """
    samples, targets = checked_finite(X, "X"), checked_finite(y, "y")
    if samples.dim() != 2 or 0 in samples.shape or targets.shape != samples.shape[:1]:
        raise InputValueError(
            f"X has shape {tuple(samples.shape)} and y {tuple(targets.shape)}, expected (N, d0) and (N,): one number "
            "per sample; targets that are vectors have no such solution"
        )
    targets = targets.to(samples.device)
    size = samples.abs().max()
    if float(size) == 0:
        raise InputValueError("all samples are zero, expected one at least that reaches the network")
    scaled = samples / size
    axis = torch.linalg.svd(scaled, full_matrices=False).Vh[0]
    positions = scaled @ axis
    farthest = positions.abs().argmax()
    axis, positions = axis * positions[farthest].sign(), positions * positions[farthest].sign()
    off = (scaled - torch.outer(positions, axis)).norm(dim=1).max() / positions[farthest]
    if float(off) > STRAIGHT:
        raise InputValueError(
            f"X has a sample {float(off):.1e} of its extent away from a line through the origin, expected X = a n; "
            "integrate(...) solves the flow for any samples"
        )
    spread = positions.square().mean().sqrt()
    target = (positions * targets).mean() / spread
    floor = (targets - positions / spread * target).square().mean()
    return Line(size * spread * axis, target, floor, size * positions)
