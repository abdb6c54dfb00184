"""The wide residual network of Shan & Bordelon 2021b and Atanasov et al. 2022, without normalization."""

import torch
from torch import Tensor, nn

from featlearn.errors import InputValueError
from featlearn.models.layers import (
    Activation,
    Convolution,
    Distribution,
    Parametrization,
    Variances,
    WeightInitialization,
    activation_function,
    checked_outputs,
    checked_variances,
)
from featlearn.shapes import checked_number
from featlearn.theory.arguments import checked_count

__all__ = ["WideResNet"]


class WideResNet(nn.Module):
    """Three groups of b residual blocks with 16 k, 32 k and 64 k channels, without BatchNorm.

    ``first`` is a convolution to 16 channels. A block adds activation, convolution, activation, convolution (3 x 3, the
    ``main`` path) to its input. In the first block of each group, the input passes a 3 x 3 convolution (``shortcut``).
    The second and third groups halve the image. The mean over positions and a linear ``readout`` follow, without an
    activation. The main path has 6 b + 1 convolutions, the shortcuts have 3.

    The architecture is that of the Neural Tangents library, as stated in the papers, except for padding at stride 2:
    here a pixel on each side, there only right and below.

    Shan & Bordelon 2021b (Fig. 2) use k = 3 and b = 2, ``parametrization="ntk"``, 100 images of two classes of
    CIFAR-10, outputs divided by gamma (`fl.steer.scale_output`). Atanasov et al. 2022 (Fig. 1d and J.1) use k = 4 and
    b = 1 in the standard parametrization with `weight_variance` (36, 0.09, 1): sigma = 6 for the first convolution and
    0.3 for the blocks. The variance of the readout is not stated. Their Fig. J.2 varies b, and J.3 varies k at b = 2.

    Args:
        k: Widening factor; fractions give int(16 k) channels.
        b: Blocks per group.
        inputs: Channels of the images.
        outputs: C, for outputs (P, C); None for a single output, (P,).
        activation, parametrization, bias, distribution, generator: as for `MLP`.
        weight_variance: A number, or three: first convolution, other convolutions, readout; 1 by default, as in Neural
            Tangents. With 2, every residual block would double the size of its input.
    """

    def __init__(
        self,
        k: float,
        b: int,
        *,
        inputs: int = 3,
        outputs: int | None = None,
        activation: Activation = "relu",
        parametrization: Parametrization = "standard",
        bias: bool = False,
        weight_variance: Variances = None,
        distribution: Distribution = "normal",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        channels = [int(base * checked_number(k, "k")) for base in (16, 32, 64)]
        if channels[0] < 1:
            raise InputValueError(f"k={k!r}, expected a number >= 1/16, for at least one channel")
        blocks = checked_count(b, "b")
        activation_function(activation)
        initialization = WeightInitialization(parametrization, distribution, bias, generator)
        start, inner, last = checked_variances(weight_variance, 1.0)
        self.scalar = outputs is None
        self.first: Convolution = initialization.convolution(checked_count(inputs, "inputs"), 16, 3, start)
        before, groups = 16, []
        for position, width in enumerate(channels):
            group = []
            for block in range(blocks):
                stride = 2 if position and not block else 1
                group.append(_WideBlock(before, width, stride, not block, initialization, inner, activation))
                before = width
            groups.append(nn.Sequential(*group))
        self.groups = nn.ModuleList(groups)
        self.readout = initialization.linear(before, checked_outputs(outputs), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (P, inputs, height, width) to (P, C) or (P,)."""
        h = self.first(x)
        for group in self.groups:
            h = group(h)
        f: Tensor = self.readout(h.mean((2, 3)))
        return f.squeeze(1) if self.scalar else f


class _WideBlock(nn.Module):
    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        mismatch: bool,
        initialization: WeightInitialization,
        variance: float,
        activation: str,
    ) -> None:
        super().__init__()
        self.activation = activation_function(activation)
        self.main = nn.ModuleList(
            [
                initialization.convolution(inputs, width, 3, variance, stride),
                initialization.convolution(width, width, 3, variance),
            ]
        )
        self.shortcut = initialization.convolution(inputs, width, 3, variance, stride) if mismatch else None

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.main:
            h = layer(self.activation(h))
        return h + (x if self.shortcut is None else self.shortcut(x))
