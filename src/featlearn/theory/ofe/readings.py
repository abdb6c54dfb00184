"""Loss, kernel and alignment read from frames, each from terms of its own size."""

from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.shapes import ratio
from featlearn.theory.ofe.eigenmodes import Eigenmodes
from featlearn.theory.ofe.frames import Frames


class Readings(NamedTuple):
    """Numbers along the flow, (T,) each."""

    loss: Tensor
    """|Delta|^2"""
    alignment: Tensor
    """<K, Y Y^T> / (|K|_F |Y Y^T|_F), nan where K or y vanishes."""
    norm: Tensor
    """|K|_F"""
    trace: Tensor
    """Tr K"""


def readings(modes: Eigenmodes, frames: Frames, targets: Tensor) -> Readings:
    """Return the numbers at every frame; targets (P, C)."""
    S, X, c = frames.inverse, frames.others, modes.rates[:, None]
    loss = (frames.decayed.mT @ frames.decayed * S).sum((1, 2))
    heads = modes.rates[frames.pivots]  # (T, r): rates of the pivots
    at_pivots = X.new_zeros(X.shape[:2]).scatter(1, frames.pivots, 1.0)
    square, once, twice = (X.mT @ (weight * X) for weight in (1.0, c, c.square()))
    # K in the eigenbasis of C has three blocks: pivots, pivots with others, others
    pivots = (square @ S) * (heads[:, :, None] * heads[:, None]).sqrt()
    mixed = (heads * (S @ once @ S).diagonal(dim1=1, dim2=2)).sum(1)
    still = torch.ones_like(modes.values)
    still[modes.touched] = 0.0
    untouched = still * modes.values
    other = (1 - at_pivots) * modes.rates
    rest = other.square().sum(1) - 2 * (S * twice).sum((1, 2)) + ((S @ once) * (S @ once).mT).sum((1, 2))
    norm = (pivots.square().sum((1, 2)) + 2 * mixed + rest + untouched.square().sum()).clamp_min(0).sqrt()
    trace = pivots.diagonal(dim1=1, dim2=2).sum(1) + other.sum(1) - (S * once).sum((1, 2)) + untouched.sum()
    overlap = _overlap(modes, frames, targets, untouched, at_pivots)
    task = (targets.T @ targets).norm()
    return Readings(loss, ratio(overlap, norm * task), norm, trace)


def _overlap(modes: Eigenmodes, frames: Frames, targets: Tensor, untouched: Tensor, at_pivots: Tensor) -> Tensor:
    """(T,): Tr Y^T K Y = |(1 - Pi) C^1/2 Y|^2, with u = w_others - X w_pivots: |u|^2 - u^T X S X^T u."""
    inside = modes.vectors.T @ targets  # (P, C)
    constant = (untouched[:, None] * inside.square()).sum()
    w = inside.new_zeros(len(modes.rates), inside.shape[1])
    w[: modes.moving] = modes.values[modes.touched].sqrt()[:, None] * inside[modes.touched]
    heads = w[frames.pivots]  # (T, r, C)
    u = (1 - at_pivots)[..., None] * w - frames.others @ heads
    drawn = frames.others.mT @ u
    return constant + u.square().sum((1, 2)) - (drawn * (frames.inverse @ drawn)).sum((1, 2))


def kernels(modes: Eigenmodes, frames: Frames) -> Tensor:
    """(T, P, P): K = C^1/2 (1 - Pi) C^1/2."""
    S, F, m = frames.inverse, frames.basis, modes.moving
    root = modes.rates.sqrt()
    scaled = root[:, None] * F  # C^1/2 F
    inside = torch.diag_embed(modes.rates.expand(len(F), -1)) - scaled @ S @ scaled.mT
    # between pivots 1 - Pi = X^T X S, which the difference would lose where it is small
    block = (frames.others.mT @ frames.others) @ S
    heads = root[frames.pivots]
    time_index = torch.arange(len(F), device=F.device)[:, None, None]
    inside[time_index, frames.pivots[:, :, None], frames.pivots[:, None]] = block * heads[:, :, None] * heads[:, None]
    full = torch.diag_embed(modes.values.expand(len(F), -1)).contiguous()
    full[:, modes.touched[:, None], modes.touched] = inside[:, :m, :m]
    return modes.vectors @ ((full + full.mT) / 2) @ modes.vectors.T
