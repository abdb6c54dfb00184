"""The largest eigenvalues of a symmetric matrix that is known by its products alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class EigenPairs(NamedTuple):
    """Eigenvalues, largest first, their unit vectors, and how well each pair fits."""

    values: Tensor
    """(k,)"""
    vectors: Tensor
    """(N, k) orthonormal columns; `fl.NTKOperator.top` gives them as (P, C, k)."""
    residuals: Tensor
    """(k,) |K v - value v|: an eigenvalue lies no further than this from the value."""


def top_eigenpairs(
    product: Callable[[Tensor], Tensor], start: Tensor, count: int, tolerance: float, largest: int
) -> EigenPairs:
    """Rayleigh-Ritz in the block Krylov space of `start` (N, b), b >= count, by `product(V)` = K V on (N, b) blocks.

    A block finds eigenvalues that are equal, up to b of them, where a single vector finds one: kernels of several
    outputs have them. Ends when all residuals are below `tolerance` times the largest eigenvalue, when the space has
    `largest` dimensions, or when it does not grow any more. Musco and Musco (2015) bound the error.
    """
    basis = torch.linalg.qr(start)[0]
    image = product(basis)
    while True:
        found = _ritz(basis, image, count)
        size = float(found.values[0].abs())
        block = _extension(basis, image[:, -start.shape[1] :], min(largest, len(start)) - basis.shape[1])
        if float(found.residuals.max()) <= tolerance * size or block.shape[1] == 0:
            return found
        basis, image = torch.cat([basis, block], 1), torch.cat([image, product(block)], 1)


def _ritz(basis: Tensor, image: Tensor, count: int) -> EigenPairs:
    small = basis.mT @ image
    values, rotation = torch.linalg.eigh((small + small.mT) / 2)
    values, rotation = values.flip(0)[:count], rotation.flip(1)[:, :count]
    vectors = basis @ rotation
    return EigenPairs(values, vectors, (image @ rotation - vectors * values).norm(dim=0))


def _extension(basis: Tensor, block: Tensor, room: int) -> Tensor:
    """Orthonormal columns that continue the basis in the direction of the block; those it holds already fall away."""
    size = block.norm(dim=0).max()
    for _ in range(2):  # once is not enough where a block lies almost inside the basis
        block = block - basis @ (basis.mT @ block)
    left, singular, _ = torch.linalg.svd(block, full_matrices=False)
    kept = int((singular > 10 * torch.finfo(block.dtype).eps * size).sum())
    extension: Tensor = left[:, : min(kept, max(room, 0))]
    extension = extension - basis @ (basis.mT @ extension)
    return torch.linalg.qr(extension)[0] if extension.shape[1] else extension
