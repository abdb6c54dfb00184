"""Gram matrices in tiles."""

from typing import Any

import pytest
import torch

from featlearn.contraction import blocking, gram
from featlearn.contraction.factors import Factor, Factors


@pytest.mark.parametrize("samples", [8, 9, 11, 15, 16])
def test_products_in_tiles_are_those_of_the_whole(samples: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(blocking, "SIDE", 2)
    generator = torch.Generator().manual_seed(samples)
    rows, grads = (torch.randn(samples, n, dtype=torch.float64, generator=generator) for n in (5, 3))
    out = torch.randn(samples, samples, dtype=torch.float64, generator=generator)
    expected = out + -0.7 * (rows @ rows.T) * (grads @ grads.T)
    blocking.add_in_tiles(out, blocking.Matrices(rows, (grads,)), -0.7)
    torch.testing.assert_close(out.tril(), expected.tril(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("directions", [1, 3])
@pytest.mark.parametrize("samples", [8, 11])
def test_factors_in_tiles(samples: int, directions: int, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, which the machine may not have."""
    monkeypatch.setattr(blocking, "SIDE", 2)
    seen: list[int] = []
    plain = blocking.add_in_tiles
    monkeypatch.setattr(gram, "add_in_tiles", lambda *a: seen.append(1) or plain(*a))
    generator = torch.Generator().manual_seed(samples)
    held = torch.randn(samples, 1, 1, 4, dtype=torch.float64, generator=generator)
    grads = torch.randn(directions, samples, 1, 1, 3, dtype=torch.float64, generator=generator)
    factors = Factors((Factor(held, grads, True, 4),), 1, 4, 3)
    found, expected = (torch.zeros(samples, samples, dtype=torch.float64) for _ in range(2))
    gram.add_gram(expected, factors, factors, "sum", symmetric=True, scratch=2**20, route=gram.Route.PAIRS)
    assert not seen
    monkeypatch.setattr(blocking, "on_gpu", lambda out: True)
    gram.add_gram(found, factors, factors, "sum", symmetric=True, scratch=2**20, route=gram.Route.PAIRS)
    assert len(seen) == 1
    for kernel in (found, expected):
        gram.mirror(kernel, "sum")
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    gram.add_gram(found, factors, factors, "sum", symmetric=True, scratch=64, route=gram.Route.PAIRS)
    assert len(seen) == 1  # no memory for them


@pytest.mark.parametrize("constant", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("mode", ["sum", "each"])
def test_gradients_that_are_the_same_for_all_samples(constant: tuple[bool, bool], mode: Any):
    """At the last layer of a perceptron; on both sides of a cross kernel or on one."""
    generator = torch.Generator().manual_seed(0)

    def side(samples: int, same: bool) -> Factors:
        rows = torch.randn(samples, 1, 1, 4, dtype=torch.float64, generator=generator)
        grads = torch.randn(2, 1 if same else samples, 1, 1, 3, dtype=torch.float64, generator=generator)
        return Factors((Factor(rows, grads.expand(2, samples, 1, 1, 3), True, 4),), 1, 4, 3)

    left, right = side(7, constant[0]), side(5, constant[1])
    shape = (7, 5) if mode == "sum" else (2, 7, 5)
    found, expected = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    for out, route in ((found, gram.Route.PAIRS), (expected, gram.Route.GRADIENTS)):
        gram.add_gram(out, left, right, mode, symmetric=False, scratch=2**20, route=route)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
