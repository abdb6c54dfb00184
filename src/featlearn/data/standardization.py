"""Standardize inputs by the statistics of the training set."""

from typing import Literal

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError

__all__ = ["standardize"]


def standardize(x: Tensor, *others: Tensor, by: Literal["pixel", "channel"] = "pixel") -> tuple[Tensor, ...]:
    """Subtract the mean of `x` and divide by its standard deviation, in `x` and in other inputs.

        train_x, test_x = fl.data.standardize(train.x, test.x)

    Args:
        x: Inputs (P, ...) that define mean and deviation (with 1/P).
        others: Further inputs, for example a test set. Only P may differ.
        by: ``"pixel"``: each entry separately (Beaglehole et al. 2024, Fig. 17). ``"channel"``: each channel of images
            (P, channels, height, width), over samples and positions (the public code of Beaglehole et al. 2024,
            Fig. 2).

    Returns:
        One tensor per argument. An entry that is constant over `x` becomes 0, up to rounding, and keeps its scale in
        `others`.
    """
    if by not in ("pixel", "channel"):
        raise InputValueError(f"by={by!r}, expected 'pixel' or 'channel'")
    for name, inputs in [("x", x), *((f"others[{k}]", other) for k, other in enumerate(others))]:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise InputTypeError(
                f"{name} is {getattr(inputs, 'dtype', type(inputs).__name__)}, expected a float tensor"
            )
        if inputs.dim() < 2 or inputs.shape[1:] != x.shape[1:] or (by == "channel" and inputs.dim() != 4):
            expected = "(P, channels, height, width)" if by == "channel" else "(P, ...)"
            raise InputValueError(f"{name} has shape {tuple(inputs.shape)}, expected {expected}; only P may differ")
    if not len(x):
        raise InputValueError(f"x has shape {tuple(x.shape)}, expected at least one sample")
    axes = (0,) if by == "pixel" else (0, 2, 3)
    mean = x.double().mean(axes, keepdim=True)
    deviation = x.double().std(axes, correction=0, keepdim=True)
    # rounding gives constants a relative deviation near 1e-16
    deviation = torch.where(deviation <= 1e-12 * mean.abs(), 1.0, deviation)
    return tuple(((inputs - mean) / deviation).to(inputs.dtype) for inputs in (x, *others))
