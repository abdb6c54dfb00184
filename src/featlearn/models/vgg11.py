"""VGG-11 without normalization."""

import torch
from torch import Tensor, nn

from featlearn.errors import InputValueError
from featlearn.models.layers import (
    Activation,
    Distribution,
    Parametrization,
    Variances,
    WeightInitialization,
    activation_function,
    checked_outputs,
    checked_variances,
)
from featlearn.theory.arguments import checked_count

__all__ = ["VGG11"]

_WIDTHS = (1, 2, 4, 4, 8, 8, 8, 8)  # in units of the first layer
_POOLED = (0, 1, 3, 5, 7)  # layers after which the image is halved


class VGG11(nn.Module):
    """Eight convolutions ``hidden.0`` ... of 3 x 3, two linear layers ``head.0``, ``head.1`` and a linear ``readout``.

    The convolutions have 64, 128, 256, 256, 512, 512, 512, 512 channels, each with an activation. Max pooling of 2 x 2
    after the first, second, fourth, sixth, and eighth reduces 32 x 32 to 1 x 1. Larger images are averaged over
    positions.

    Beaglehole et al. 2024 (Fig. 2C) train it on CIFAR-10 with the default initialization of torch
    (``distribution="uniform"``, `weight_variance` 1/3), without BatchNorm. The usual version has dropout, biases, and
    an average to 7 x 7 positions, which for 32 x 32 images copies a single position 49 times. By default, this class
    has none of these.

    Args:
        outputs: C, for outputs (P, C); None for a single output, (P,).
        inputs: Channels of the images, which are at least 32 x 32.
        width: Channels of the first convolution; the others scale with it.
        head: Width of the two linear layers; None omits them.
        dropout: Dropout probability in the head.
        activation, parametrization, bias, distribution, generator: as for `MLP`.
        weight_variance: A number, or three: first convolution, other convolutions, readout; 2 by default.
    """

    def __init__(
        self,
        outputs: int | None = 10,
        *,
        inputs: int = 3,
        width: int = 64,
        head: int | None = 4096,
        dropout: float = 0.0,
        activation: Activation = "relu",
        parametrization: Parametrization = "standard",
        bias: bool = False,
        weight_variance: Variances = None,
        distribution: Distribution = "normal",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        initialization = WeightInitialization(parametrization, distribution, bias, generator)
        start, inner, last = checked_variances(weight_variance, 2.0)
        self.activation, self.scalar = activation_function(activation), outputs is None
        self.dropout = nn.Dropout(dropout)
        channels = [checked_count(inputs, "inputs"), *(factor * checked_count(width, "width") for factor in _WIDTHS)]
        self.hidden = nn.ModuleList(
            initialization.convolution(channels[k], channels[k + 1], 3, inner if k else start)
            for k in range(len(_WIDTHS))
        )
        sizes = [channels[-1], *([] if head is None else 2 * [checked_count(head, "head")])]
        self.head = nn.ModuleList(initialization.linear(sizes[k], sizes[k + 1], inner) for k in range(len(sizes) - 1))
        self.readout = initialization.linear(sizes[-1], checked_outputs(outputs), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (P, inputs, height, width) to (P, C) or (P,)."""
        if min(x.shape[-2:]) < 32:
            raise InputValueError(
                f"x has shape {tuple(x.shape)}, expected images of at least 32 x 32: they are halved 5x"
            )
        for k, layer in enumerate(self.hidden):
            x = self.activation(layer(x))
            x = nn.functional.max_pool2d(x, 2) if k in _POOLED else x
        h = x.mean((2, 3))
        for layer in self.head:
            h = self.dropout(self.activation(layer(h)))
        f: Tensor = self.readout(h)
        return f.squeeze(1) if self.scalar else f
