"""ResNet-18 for small images."""

from typing import Literal

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

__all__ = ["ResNet18"]

Norm = Literal["batch", "group", "none"]


class ResNet18(nn.Module):
    """A convolution, four groups of two residual blocks of 64, 128, 256 and 512 channels, mean and linear ``readout``.

    Xu & Ziyin 2024 (Fig. 3) train it on CIFAR-10 by a public recipe: a first 3 x 3 convolution at stride 1 without
    pooling, and every layer multiplied by sigma (`fl.steer.scale_init`). A block is convolution, norm, activation,
    convolution, norm, plus its input, then the activation. Where sizes change, the input passes a 1 x 1 convolution and
    a norm (``shortcut``).

    Args:
        outputs: C, for outputs (P, C); None for a single output, (P,).
        norm: ``"batch"`` as in the recipe; a kernel is measured in eval mode, with the running statistics.
            ``"group"``, GroupNorm in groups of 16 channels (a single group if there are fewer), does not couple
            samples. ``"none"``: no norm; outputs then grow from block to block.
        inputs: Channels of the images.
        width: Channels of the first group; the others have 2, 4, and 8 times as many.
        activation, parametrization, distribution, generator: as for `MLP`. The recipe draws ``"uniform"`` with
            `weight_variance` 1/3, the default of torch.
        bias: Whether convolutions and the readout have a bias. The recipe has one in the readout only. Norms always
            have gain and shift.
        weight_variance: A number, or three: first convolution, other convolutions, readout; 2 by default.
    """

    def __init__(
        self,
        outputs: int | None = 10,
        *,
        norm: Norm = "batch",
        inputs: int = 3,
        width: int = 64,
        activation: Activation = "relu",
        parametrization: Parametrization = "standard",
        bias: bool = False,
        weight_variance: Variances = None,
        distribution: Distribution = "normal",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("batch", "group", "none"):
            raise InputValueError(f"norm={norm!r}, expected 'batch', 'group' or 'none'")
        initialization = WeightInitialization(parametrization, distribution, bias, generator)
        start, inner, last = checked_variances(weight_variance, 2.0)
        self.activation, self.scalar = activation_function(activation), outputs is None
        before = checked_count(width, "width")
        self.first = initialization.convolution(checked_count(inputs, "inputs"), before, 3, start)
        self.norm = _norm(norm, before)
        groups = []
        for position in range(4):
            channels, stride = width * 2**position, 2 if position else 1
            first = _ResidualBlock(before, channels, stride, initialization, inner, activation, norm)
            groups.append(
                nn.Sequential(first, _ResidualBlock(channels, channels, 1, initialization, inner, activation, norm))
            )
            before = channels
        self.groups = nn.ModuleList(groups)
        self.readout = initialization.linear(before, checked_outputs(outputs), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (P, inputs, height, width) to (P, C) or (P,)."""
        h = self.activation(self.norm(self.first(x)))
        for group in self.groups:
            h = group(h)
        f: Tensor = self.readout(h.mean((2, 3)))
        return f.squeeze(1) if self.scalar else f


class _ResidualBlock(nn.Module):
    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        initialization: WeightInitialization,
        variance: float,
        activation: str,
        norm: Norm,
    ) -> None:
        super().__init__()
        self.activation = activation_function(activation)
        self.first = initialization.convolution(inputs, width, 3, variance, stride)
        self.first_norm = _norm(norm, width)
        self.second = initialization.convolution(width, width, 3, variance)
        self.second_norm = _norm(norm, width)
        same = inputs == width and stride == 1
        self.shortcut = None if same else initialization.convolution(inputs, width, 1, variance, stride)
        self.shortcut_norm = nn.Identity() if same else _norm(norm, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first_norm(self.first(x)))
        h = self.second_norm(self.second(h))
        return self.activation(h + self.shortcut_norm(x if self.shortcut is None else self.shortcut(x)))


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(max(1, channels // 16) if channels % 16 == 0 else 1, channels)
    return nn.Identity()
