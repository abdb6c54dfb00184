"""Squared norms of per-sample gradients, whatever way they are held."""

import pytest
import torch
from torch import Tensor

from featlearn.contraction.factors import Dense, Factor, Factors, as_dense, weighted_squared_norms


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def factors(positions: int, n: int, m: int, blocks: int = 1, parts: int = 1) -> Factors:
    found = tuple(
        Factor(drawn(5, positions, blocks, n) + k, drawn(3, 5, positions, blocks, m), False, n) for k in range(parts)
    )
    return Factors(found, blocks, m, n)


GRADIENTS = {
    "dense": Dense(drawn(5, 3, 7)),
    "no positions": factors(0, 6, 4),
    "one position": factors(1, 6, 4),
    "few positions": factors(2, 6, 8),
    "many positions": factors(9, 2, 3),
    "blocks": factors(2, 8, 6, blocks=3),
    "two parts": factors(2, 6, 4, parts=2),
    "indexed": Factors((Factor(torch.arange(10).reshape(5, 2) % 4, drawn(3, 5, 2, 1, 6), True, 4),), 1, 4, 6),
}


@pytest.mark.parametrize("scratch", [1, 10**9])
@pytest.mark.parametrize("name", GRADIENTS)
def test_norms_are_those_of_the_gradient_itself(name, scratch):
    gradients = GRADIENTS[name]
    whole = as_dense(gradients).gradient
    torch.testing.assert_close(gradients.squared_norms(scratch), whole.square().sum(2))
    weights = drawn(whole.shape[2]).square()
    found = weighted_squared_norms(gradients, weights, scratch)
    torch.testing.assert_close(found, (whole.square() * weights).sum(2))
    torch.testing.assert_close(weighted_squared_norms(gradients, 0.25, scratch), whole.square().sum(2) / 4)
