"""Mean 0 and standard deviation 1, by the statistics of one set."""

from typing import Literal

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError

__all__ = ["standardize"]


def standardize(x: Tensor, *others: Tensor, by: Literal["pixel", "channel"] = "pixel") -> tuple[Tensor, ...]:
    """Inputs less their mean and divided by their standard deviation, and others by the same two.

        train_x, test_x = fl.data.standardize(train.x, test.x)

    Args:
        x: inputs (P, ...): mean and deviation (with 1/P) are theirs.
        others: further inputs, a test set for example, of the same shape but for P.
        by: ``"pixel"``: each entry by itself (Beaglehole et al. 2024, Fig. 17). ``"channel"``: each channel of images
            (P, channels, height, width), over samples and positions (the public code of Beaglehole et al. 2024,
            Fig. 2).

    Returns:
        As many tensors as were given. An entry that is constant over x has no scale: it becomes 0 there, up to
        rounding, and keeps the scale it had in others.
    """
    if by not in ("pixel", "channel"):
        raise InputValueError(f"by={by!r}, expected 'pixel' or 'channel'")
    for name, inputs in [("x", x), *((f"others[{k}]", other) for k, other in enumerate(others))]:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise InputTypeError(
                f"{name} is {getattr(inputs, 'dtype', type(inputs).__name__)}, expected a float tensor"
            )
        if inputs.dim() < 2 or inputs.shape[1:] != x.shape[1:] or (by == "channel" and inputs.dim() != 4):
            wanted = "(P, channels, height, width)" if by == "channel" else "(P, ...)"
            raise InputValueError(f"{name} has shape {tuple(inputs.shape)}, expected {wanted}, alike but for P")
    if not len(x):
        raise InputValueError(f"x has shape {tuple(x.shape)}, expected one sample at least")
    axes = (0,) if by == "pixel" else (0, 2, 3)
    mean = x.double().mean(axes, keepdim=True)
    deviation = x.double().std(axes, correction=0, keepdim=True)
    # rounding leaves a constant with a deviation near 1e-16 of its size, which is none
    deviation = torch.where(deviation <= 1e-12 * mean.abs(), 1.0, deviation)
    return tuple(((inputs - mean) / deviation).to(inputs.dtype) for inputs in (x, *others))
