"""The tangent kernels of a linear network with several outputs, from its weights.

See Shan & Bordelon 2021a, App. A.3; 2021b, App. C.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.theory.arguments import checked_numbers, checked_rows
from featlearn.theory.deep_linear.linear_network import checked_weights


class LayerTerm(NamedTuple):
    """Contribution of a weight matrix to the kernel: K^cc'(x, x') = `coefficients`[c, c'] `gram`[x, x']."""

    coefficients: Tensor
    """alpha (C, C): [B B^T], B the product of the layers above; the identity for the last."""
    gram: Tensor
    """(P, P2): inner products of what arrives at the layer."""


def subkernel_terms(weights: Sequence[Tensor], X: Tensor, X2: Tensor | None = None) -> list[LayerTerm]:
    """Return the terms of `subkernels`, first layer first.

    Only the scalars alpha(c, c) tell one output's kernel K^cc from another's: a linear network cannot specialize its
    kernels beyond weighting the same Gram matrices (Shan & Bordelon 2021a, Sec. 6, where "develop specialized kernels"
    should read "cannot develop").

    See Shan & Bordelon 2021a, Eq. 44, 45; 2021b, Eq. 54, 55: the class-symmetry ansatz, alpha_l(c, c) equal for all c.
    """
    layers = checked_weights(weights)
    left = checked_rows(X, columns=layers[0].shape[1]).to(layers[0].device)
    right = left if X2 is None else checked_rows(X2, "X2", layers[0].shape[1]).to(layers[0].device)
    grams = []
    for layer in layers:
        grams.append(left @ right.T)
        left, right = left @ layer.T, right @ layer.T
    back = torch.eye(len(layers[-1]), dtype=left.dtype, device=left.device)
    coefficients = []
    for layer in reversed(layers):
        coefficients.append(back @ back.T)
        back = back @ layer
    return [LayerTerm(alpha, gram) for alpha, gram in zip(reversed(coefficients), grams, strict=True)]


def subkernels(weights: Sequence[Tensor], X: Tensor, X2: Tensor | None = None, *, scale: Any = 1.0) -> Tensor:
    """Every subkernel K^cc' of f = scale W^L ... W^1 x, at any weights.

    See Shan & Bordelon 2021a, Eq. 36-43; 2021b, Eq. 46-53 (corrected).

        K^cc'(x, x') = scale^2 sum_l alpha_l(c, c') f_(l-1)(x) . f_(l-1)(x'),       f_l = W^l ... W^1 x,

    alpha_l = B B^T with B = W^L ... W^(l+1), the identity for l = L.

    Args:
        weights: [W^1 (N1, D), ..., W^L (C, N)], first layer first, as in nn.Linear; a last one (N,) is (1, N).
        X, X2: inputs (P, D) and (P2, D), by default the same.
        scale: the factor before the weights: N^(-(L+1)/2) for the L hidden layers of width N of Shan & Bordelon 2021a.

    Returns (P, P2, C, C), axes as `fl.ntk(outputs="full")`.

    Erratum: in the print alpha_l goes with f_l . f_l; it is alpha_(l+1), counted as there.
    """
    terms = subkernel_terms(weights, X, X2)
    kernel = sum(term.gram[:, :, None, None] * term.coefficients for term in terms[1:])
    first = terms[0].gram[:, :, None, None] * terms[0].coefficients
    return checked_numbers(scale, "scale").to(first.device).square() * (first + kernel)
