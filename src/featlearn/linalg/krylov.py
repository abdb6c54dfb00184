"""The largest eigenvalues of a symmetric matrix, from matrix products."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class EigenPairs(NamedTuple):
    """Eigenvalues in descending order, unit eigenvectors, and residuals."""

    values: Tensor
    """(k,)"""
    vectors: Tensor
    """(N, k) orthonormal columns; `fl.NTKOperator.top` returns them as (P, C, k)."""
    residuals: Tensor
    """(k,) |K v - value v|; an eigenvalue lies within this distance of the value."""


def top_eigenpairs(
    product: Callable[[Tensor], Tensor], start: Tensor, count: int, tolerance: float, largest: int
) -> EigenPairs:
    """Apply Rayleigh-Ritz in the block Krylov space of `start` (N, b), b >= count.

    `product(V)` returns K V for blocks (N, b). A block resolves eigenvalues of multiplicity up to b, which kernels of
    several outputs have. Iteration stops when all residuals are below `tolerance` times the largest eigenvalue, when
    the space has `largest` dimensions, or when it stops growing. Musco and Musco (2015) bound the error.
    """
    basis = torch.linalg.qr(start)[0]
    image = product(basis)
    while True:
        pairs = _ritz(basis, image, count)
        size = float(pairs.values[0].abs())
        block = _extension(basis, image[:, -start.shape[1] :], min(largest, len(start)) - basis.shape[1])
        if float(pairs.residuals.max()) <= tolerance * size or block.shape[1] == 0:
            return pairs
        basis, image = torch.cat([basis, block], 1), torch.cat([image, product(block)], 1)


def _ritz(basis: Tensor, image: Tensor, count: int) -> EigenPairs:
    small = basis.mT @ image
    values, rotation = torch.linalg.eigh((small + small.mT) / 2)
    values, rotation = values.flip(0)[:count], rotation.flip(1)[:, :count]
    vectors = basis @ rotation
    return EigenPairs(values, vectors, (image @ rotation - vectors * values).norm(dim=0))


def _extension(basis: Tensor, block: Tensor, room: int) -> Tensor:
    """Return orthonormal columns that extend the basis by the span of the block."""
    size = block.norm(dim=0).max()
    for _ in range(2):  # a second pass is needed if the block lies almost inside the basis
        block = block - basis @ (basis.mT @ block)
    directions, singular, _ = torch.linalg.svd(block, full_matrices=False)
    rank = int((singular > 10 * torch.finfo(block.dtype).eps * size).sum())
    extension: Tensor = directions[:, : min(rank, max(room, 0))]
    extension = extension - basis @ (basis.mT @ extension)
    return torch.linalg.qr(extension)[0] if extension.shape[1] else extension
