"""Gaussian inputs with a decaying covariance in a random eigenbasis, as in Fig. 5 to 10 of Beaglehole et al. 2024."""

import torch
from torch import Tensor

import featlearn as fl
from featlearn.quantities.gradient_products import haar_rotation
from featlearn_papers.frame.context import Context
from featlearn_papers.paper_003.chain import ChainTask

BASIS = 2
"""stream of the eigenbasis; that of the inputs is 0"""


def eigenvalues(dimension: int, decay: float) -> Tensor:
    """Of the covariance: 1 / (1 + k^decay), k from 1; all 1 without decay, where this would be 1/2."""
    if decay == 0:
        return torch.ones(dimension, dtype=torch.float64)
    return fl.data.power_law_spectrum(dimension, decay)


def eigenbasis(context: Context, dimension: int, rotated: bool = True) -> Tensor:
    """(d, d), eigenvectors in columns: random ones, the same for all spectra of a seed, or the axes."""
    if not rotated:
        return torch.eye(dimension, dtype=torch.float64)
    return haar_rotation(dimension, context.generator(BASIS))


def rotated_chain(
    context: Context,
    samples: int,
    unseen: int,
    variances: Tensor,
    basis: Tensor,
    *,
    degree: int = 5,
    dtype: torch.dtype = torch.float32,
) -> ChainTask:
    """The chain monomial of the first coordinates, in units of its deviation, of inputs N(0, U diag(variances) U^T).

    With the axes for its basis U it is `fl.data.chain_monomial` with that spectrum.
    """
    dimension = len(variances)
    z = torch.randn(samples + unseen, dimension, dtype=torch.float64, generator=context.generator())
    x = (z * variances.sqrt()) @ basis.mT
    covariance = (basis * variances) @ basis.mT
    ring = torch.zeros(dimension, dimension, dtype=torch.float64)
    for k in range(degree):
        ring[k, (k + 1) % degree] += 1
        ring[(k + 1) % degree, k] += 1
    # y = x^T (S / 2) x has the variance Tr(S C S C) / 2, C the covariance
    gradients = ring @ covariance @ ring
    variance = float((gradients * covariance).sum()) / 2
    y = fl.data.ChainMonomial(degree, variance**0.5)(x)
    x, y = x.to(context.device, dtype), y.to(context.device, dtype)
    return ChainTask(x[:samples], y[:samples], x[samples:], y[samples:], (gradients / variance).to(context.device))
