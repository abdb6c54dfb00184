"""The boundary checks of the latent-variable model."""

from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import checked_finite


def checked_network(u: Any, W: Any) -> tuple[Tensor, Tensor]:
    """Readout (d,) and input layer (d, d0), finite, in double, on one device."""
    readout, weight = checked_finite(u, "u"), checked_finite(W, "W")
    if readout.dim() != 1 or weight.dim() != 2 or len(weight) != len(readout) or 0 in weight.shape:
        raise InputValueError(
            f"u has shape {tuple(readout.shape)} and W {tuple(weight.shape)}, expected (d,) and (d, d0): the readout "
            "and the input layer of f(x) = scale u . W x"
        )
    return readout, weight.to(readout.device)


def checked_points(value: Any, weight: Tensor, name: str) -> Tensor:
    """Inputs (d0,) or (N, d0) of the network, finite, in double."""
    points = checked_finite(value, name).to(weight.device)
    if points.dim() not in (1, 2) or points.shape[-1] != weight.shape[1] or points.numel() == 0:
        raise InputValueError(
            f"{name} has shape {tuple(points.shape)}, expected (d0,) = ({weight.shape[1]},) or (N, d0): what W acts on"
        )
    return points


def length(vectors: Tensor) -> Tensor:
    """Euclidean norm over the last axis, without squares that underflow or overflow."""
    largest = vectors.abs().amax(-1, keepdim=True)
    safe = torch.where(largest == 0, 1.0, largest)
    norm: Tensor = safe[..., 0] * torch.linalg.vector_norm(vectors / safe, dim=-1)
    return norm
