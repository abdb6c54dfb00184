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

    ``first`` is a convolution to 16 channels; a block adds activation, convolution, activation, convolution (3 x 3, the
    ``main`` path) to its input, or, in the first block of each group, to a 3 x 3 convolution of it (``shortcut``). The
    second and the third group halve the image. Then the mean over positions and a linear ``readout``, without an
    activation before it. 6 b + 1 convolutions are on the main path, and 3 in the shortcuts.

    The form is that of the Neural Tangents library, as the papers say, but for one detail: at a stride of 2 images are
    padded here by one pixel on each side, there only to the right and below.

    Shan & Bordelon 2021b (Fig. 2) use k = 3 and b = 2, ``parametrization="ntk"``, 100 images of two classes of
    CIFAR-10, outputs divided by gamma (`fl.steer.scale_output`). Atanasov et al. 2022 (Fig. 1d and J.1) use k = 4 and
    b = 1 in the standard parametrization with `weight_variance` (36, 0.09, 1): sigma = 6 for the first convolution and
    0.3 for the blocks. They do not state that of the readout. Their Fig. J.2 varies b, and J.3 varies k at b = 2.

    Args:
        k: widening factor, also a fraction: int(16 k) channels.
        b: blocks in each group.
        inputs: channels of the images.
        outputs: C, for outputs (P, C); None gives one output without an axis, (P,).
        activation, parametrization, bias, distribution, generator: as for `MLP`.
        weight_variance: one number or three: first convolution, all others, readout; 1 by default, as in the library
            named above. With 2, residual blocks would double the size of their input several times over.
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
        channels = [int(each * checked_number(k, "k")) for each in (16, 32, 64)]
        if channels[0] < 1:
            raise InputValueError(f"k={k!r}, expected a number >= 1/16, for one channel at least")
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
        """From images (P, inputs, height, width) to (P, C), or (P,)."""
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
