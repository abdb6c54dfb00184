"""A plain convolutional network."""

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

__all__ = ["CNN"]


class CNN(nn.Module):
    """Size-preserving convolutions ``hidden.0`` ..., the mean over positions, and a linear ``readout``.

    Shan & Bordelon 2021b (Fig. 3B) use two layers of 33 channels with 7 x 7 filters on CIFAR-10, the defaults here,
    trained at learning rate 20 with ``parametrization="ntk"``. The paper does not state the readout; the mean over
    positions is our choice.

    Args:
        inputs: Channels of the images, 3 for CIFAR-10 and 1 for MNIST.
        outputs: C, for outputs (P, C); None for a single output, (P,).
        width: channels of every convolution.
        hidden_layers: Number of convolutions.
        kernel_size: Odd size of the filters.
        activation, parametrization, bias, weight_variance, distribution, generator: as for `MLP`; fan_in of a
            convolution is channels x kernel_size^2.
    """

    def __init__(
        self,
        inputs: int = 3,
        outputs: int | None = 10,
        *,
        width: int = 33,
        hidden_layers: int = 2,
        kernel_size: int = 7,
        activation: Activation = "relu",
        parametrization: Parametrization = "standard",
        bias: bool = False,
        weight_variance: Variances = None,
        distribution: Distribution = "normal",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if checked_count(kernel_size, "kernel_size") % 2 == 0:
            raise InputValueError(f"kernel_size={kernel_size}, expected an odd number: even sizes shift the image")
        self.activation = activation_function(activation)
        self.scalar = outputs is None
        initialization = WeightInitialization(parametrization, distribution, bias, generator)
        default = 2.0 if activation in ("relu", "leaky_relu") else 1.0
        first, inner, last = checked_variances(weight_variance, default)
        channels = [checked_count(inputs, "inputs")]
        channels += [checked_count(width, "width")] * checked_count(hidden_layers, "hidden_layers")
        self.hidden = nn.ModuleList(
            initialization.convolution(channels[k], channels[k + 1], kernel_size, inner if k else first)
            for k in range(hidden_layers)
        )
        self.readout = initialization.linear(width, checked_outputs(outputs), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (P, inputs, height, width) to (P, C) or (P,)."""
        for layer in self.hidden:
            x = self.activation(layer(x))
        f: Tensor = self.readout(x.mean((2, 3)))
        return f.squeeze(1) if self.scalar else f
