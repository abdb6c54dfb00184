"""Runs that are lazy first and rich later: the training samples are fitted long before the test points are."""

import math
from typing import Any

import torch
from torch import nn

from benchmarks.verdict import networks as net
from benchmarks.verdict import tasks
from benchmarks.verdict.constructions import MSE, SQUARED, Construction, Descent, Trial

FIRST_SEED = 501


def diagonal(seed: int, _: Any) -> Trial:
    """Kernel regression misses two thirds of a sparse teacher with a third of the samples; small weights find it."""
    task = tasks.sparse_linear(seed, 40, dimension=120)
    return Trial(net.DiagonalLinear(120, 10.0), *task, SQUARED, Descent(share=0.2, shrinking=6.0), 2000, stop=0.0)


def matrix(seed: int, _: Any) -> Trial:
    """x^T (U U^T - V V^T) x from large U = V, on fewer samples than a symmetric matrix has entries."""
    half = net.mlp([12, 12, 1], net.Square, bias=False)
    with torch.no_grad():
        half[0].weight.copy_(10 * torch.eye(12))
        half[-1].weight.fill_(1.0)
    half[-1].requires_grad_(False)
    task = tasks.quadratic(seed, 50, dimension=12, rank=1)
    return Trial(net.Difference(half), *task, SQUARED, Descent(share=0.2, shrinking=7.0), 2000, stop=0.0)


def parity(seed: int, _: Any) -> Trial:
    """The product of two of 20 signs."""
    x = torch.randn(200, 20, generator=tasks.generator(seed)).sign()
    task = tasks.split(x, x[:, :1] * x[:, 1:2], 140, 60, seed)
    model = net.small(net.Difference(net.mlp([20, 100, 1])), 8.0)
    return Trial(model, *task, SQUARED, Descent(0.9, share=0.3, shrinking=5.0), 2500, stop=0.0)


def product(seed: int, _: Any) -> Trial:
    """The product of two of 15 Gaussian coordinates; the probe is a part of the training samples."""
    task = tasks.chain(seed, 200, dimension=15, degree=2)
    model = net.small(net.Difference(net.mlp([15, 100, 1], nn.GELU)), 8.0)
    return Trial(model, *task, SQUARED, Descent(0.9, share=0.3, shrinking=6.0), 2500, probe=100, stop=0.0)


def addition(seed: int, _: Any) -> Trial:
    """a + b modulo 17 by squares of hidden units (Gromov 2023), large weights and weight decay."""
    p = 17
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    x = nn.functional.one_hot(pairs, p).float().flatten(1) * math.sqrt(p / 2)
    y = tasks.one_hot(pairs.sum(1) % p, p) * math.sqrt(p)
    train, test = tasks.split(x, y, 220, 60, seed)
    model = net.small(net.Difference(net.scaled_mlp([2 * p, 96, p], 96**-0.5, net.Square, bias=False)), 3.0)
    return Trial(model, train, test, MSE, Descent(0.9, share=0.3, shrinking=5.0), 3000, probe=60, stop=0.0)


DECAY = (
    "large weights fit the training samples as a kernel machine; weight decay then shrinks them until features are "
    "learned, by which time the loss on training samples has long been small (Lyu et al. 2024; Kumar et al. 2024)"
)

CONSTRUCTIONS = tuple(
    Construction(name, "lazy then rich", DECAY, make, seeds=2)
    for name, make in (
        ("grokking, diagonal linear network", diagonal),
        ("grokking, factored matrix", matrix),
        ("grokking, product of two signs", parity),
        ("grokking, product of two Gaussian coordinates", product),
        ("grokking, addition modulo 17", addition),
    )
)
