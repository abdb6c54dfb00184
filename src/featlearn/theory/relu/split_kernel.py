"""The two parts of the tangent kernel, from the weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite


class SplitKernel(NamedTuple):
    """The two parts of the NTK."""

    readout: Tensor
    """K_V (P, P2), the same for every output."""
    hidden: Tensor
    """K_W (P, P2), or (C, P, P2) of each output with itself."""


def split_kernel(
    X: Tensor, W: Tensor, V: Tensor, X2: Tensor | None = None, *, hidden_scale: float = 1.0, readout_scale: float = 1.0
) -> SplitKernel:
    """K_V and K_W of f = b V relu(a W x) from its weights.

    See Shan & Bordelon 2021a, Eq. 17-19 (corrected); 2021b, Eq. 13-15.

        K_V = b^2 phi . phi',        K_W^cc = a^2 b^2 (x . x') (D V_c) . (D' V_c)

    X (P, D), W (M, D), V (M,) or (C, M); a = `hidden_scale`, b = `readout_scale`, both N^(-1/2) in Shan & Bordelon
    2021a. `fl.ntk(by="layer")` measures the same for any model.

    Errata: Shan & Bordelon 2021a, Eq. 18 has a factor |V_c|^2; D in Eq. 19 is the derivative of relu alone, N^(-1/2)
    being pulled out.
    """
    left, first, readout = checked_finite(X, "X"), checked_finite(W, "W"), checked_finite(V, "V")
    right = left if X2 is None else checked_finite(X2, "X2").to(left.device)
    shapes = [tuple(tensor.shape) for tensor in (left, first, readout, right)]
    fits = left.dim() == first.dim() == right.dim() == 2 and left.shape[1] == first.shape[1] == right.shape[1]
    if not fits or readout.dim() not in (1, 2) or readout.shape[-1] != len(first):
        raise InputValueError(
            f"X, W, V and X2 have shapes {', '.join(map(str, shapes))}, expected (P, D), (M, D), (M,) or "
            "(C, M), and (P2, D)"
        )
    first, readout = first.to(left.device), readout.to(left.device)
    preactivations = [hidden_scale * tensor @ first.T for tensor in (left, right)]
    features, other = (torch.relu(tensor) for tensor in preactivations)
    gates, beyond = ((tensor > 0).double() for tensor in preactivations)
    weighted = (gates * readout.square()[..., None, :]) @ beyond.T
    scale = readout_scale**2
    return SplitKernel(scale * features @ other.T, scale * hidden_scale**2 * (left @ right.T) * weighted)
