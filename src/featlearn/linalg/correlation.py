"""Cosine similarity and Pearson correlation."""

from typing import Literal

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.shapes import deviations, ratio, scaled

Kind = Literal["cosine", "pearson"]


def correlation(first: Tensor, second: Tensor, kind: str = "cosine", axes: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Compute <A, B> / (|A| |B|) over `axes`; for `"pearson"`, subtract the means first.

    The result is on the device of `first`. nan if an array is zero or, for Pearson, constant up to rounding.
    """
    if kind not in ("cosine", "pearson"):
        raise InputValueError(f"kind={kind!r}, expected 'cosine' or 'pearson'")
    pair = (first, second.to(first.device))
    if kind == "pearson":
        pair = (deviations(pair[0], axes), deviations(pair[1], axes))
    a, b = (scaled(part, axes)[0] for part in pair)
    sizes = torch.linalg.vector_norm(a, dim=axes) * torch.linalg.vector_norm(b, dim=axes)
    return ratio((a * b).sum(axes), sizes)
