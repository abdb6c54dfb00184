"""Squared norms of per-sample gradients: the diagonal of a Gram matrix without the rest."""

import torch
from torch import Tensor

from featlearn.contraction.factors import Dense, Factor, Factors, Gradients, as_dense


def squared_norms(gradients: Gradients, scratch: int) -> Tensor:
    """(samples, directions): the squared norm of every gradient. `scratch` bounds the bytes of temporaries."""
    if isinstance(gradients, Dense):
        return gradients.gradient.square().sum(2)
    if len(gradients.parts) == 1 and not gradients.parts[0].indexed:
        (part,) = gradients.parts
        # positions^2 (n + m) for the Grams of rows and gradients against positions n m for the gradient itself
        n, m = part.row_size, part.grads.shape[-1]
        if part.positions * (n + m) <= n * m:
            return _by_grams(part, scratch)
    size = gradients.blocks * gradients.first * gradients.second * gradients.directions
    step = max(1, scratch // (2 * size * gradients.parts[0].grads.element_size()))
    pieces = [gradients.take(slice(i, i + step)) for i in range(0, gradients.samples, step)]
    return torch.cat([as_dense(piece).gradient.square().sum(2) for piece in pieces])


def _by_grams(part: Factor, scratch: int) -> Tensor:
    directions, samples, positions, blocks, _ = part.grads.shape
    size = blocks * positions * (part.row_size + positions * 3 * directions) * part.grads.element_size()
    step = max(1, scratch // max(1, size))  # a gate of zeros lets no gradient through: no positions
    pieces = []
    for i in range(0, samples, step):
        piece = part.take(slice(i, i + step))
        rows, grads = piece.rows, piece.grads
        if positions == 1:
            pieces.append(torch.einsum("ptb,kptb->pk", rows.square().sum(-1), grads.square().sum(-1)))
        else:
            rows, grads = rows.transpose(1, 2), grads.transpose(2, 3)
            pieces.append(((rows @ rows.mT) * (grads @ grads.mT)).sum((2, 3, 4)).mT)
    return torch.cat(pieces)


def weighted_squared_norms(gradients: Gradients, weights: Tensor | float, scratch: int) -> Tensor:
    """(samples, directions): sum_j weights_j gradient_j^2, weights one number or one for each entry."""
    if not isinstance(weights, Tensor):
        return squared_norms(gradients, scratch) * weights
    step = gradients.samples
    if isinstance(gradients, Factors):
        item = gradients.parts[0].grads.element_size()
        step = max(1, scratch // (3 * weights.numel() * gradients.directions * item))
    pieces = [as_dense(gradients.take(slice(i, i + step))).gradient for i in range(0, gradients.samples, step)]
    return torch.cat([piece.square() @ weights.flatten().to(piece) for piece in pieces])
