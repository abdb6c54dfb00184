"""Layers with weights drawn from a generator, scaled in the weights or in the forward pass."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.theory.arguments import checked_count, checked_numbers

Parametrization = Literal["standard", "ntk"]
Distribution = Literal["normal", "uniform"]
Activation = Literal["linear", "relu", "leaky_relu", "tanh", "sigmoid", "swish", "quadratic", "gelu"]
Variances = float | Sequence[float] | None


def _identity(h: Tensor) -> Tensor:
    return h


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": _identity,
    "relu": torch.relu,
    "leaky_relu": nn.functional.leaky_relu,  # slope 0.01
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "swish": nn.functional.silu,  # h sigmoid(h)
    "quadratic": torch.square,  # h^2, without a factor 1/2, as in Beaglehole et al. 2024
    "gelu": nn.functional.gelu,
}


class Linear(nn.Linear):
    """Compute weight (multiplier x) + bias."""

    multiplier = 1.0

    def reset_parameters(self) -> None:
        """Do nothing: `WeightInitialization` draws the weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        # scale the input, so that kernels read the weight unscaled
        scaled = input if self.multiplier == 1.0 else input * self.multiplier
        return nn.functional.linear(scaled, self.weight, self.bias)


class Convolution(nn.Conv2d):
    """Compute weight * (multiplier x) + bias, zero-padded to preserve the size (divided by the stride)."""

    multiplier = 1.0

    def reset_parameters(self) -> None:
        """Do nothing: `WeightInitialization` draws the weights."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (P, inputs, height, width) to (P, outputs, height, width)."""
        return super().forward(input if self.multiplier == 1.0 else input * self.multiplier)


@dataclass(frozen=True)
class WeightInitialization:
    """Weight initialization and parametrization of a network.

    With s = sqrt(variance / fan_in): ``"standard"`` draws weights of deviation s, ``"ntk"`` weights of deviation 1 and
    multiplies by s in the forward pass. Both give the same function for generators in the same state. The tangent
    kernel of a layer is 1 / s^2 times as large in the standard parametrization, so learning rates must be smaller by
    that factor. Biases start at zero, and have no multiplier.
    """

    parametrization: Parametrization = "standard"
    distribution: Distribution = "normal"
    bias: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        _refuse_unknown(self.parametrization, "parametrization", ("standard", "ntk"))
        _refuse_unknown(self.distribution, "distribution", ("normal", "uniform"))
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise InputTypeError(
                f"generator is {type(self.generator).__name__}, expected a torch.Generator or None; "
                "torch.Generator().manual_seed(0)"
            )

    def linear(self, inputs: int, outputs: int, variance: float) -> Linear:
        """Return a linear layer with weights of variance `variance` / inputs."""
        layer = Linear(inputs, outputs, bias=self.bias)
        self._fill(layer, math.sqrt(variance / inputs))
        return layer

    def convolution(self, inputs: int, outputs: int, size: int, variance: float, stride: int = 1) -> Convolution:
        """Return a convolution with weights of variance `variance` / (inputs size^2)."""
        layer = Convolution(inputs, outputs, size, stride, padding=size // 2, bias=self.bias)
        self._fill(layer, math.sqrt(variance / (inputs * size**2)))
        return layer

    def _fill(self, layer: Linear | Convolution, scale: float) -> None:
        with torch.no_grad():
            layer.weight.copy_(self.unit(layer.weight.shape))
            if self.parametrization == "ntk":
                layer.multiplier = scale
            else:
                layer.weight.mul_(scale)
            if layer.bias is not None:
                layer.bias.zero_()

    def unit(self, shape: Sequence[int]) -> Tensor:
        """Draw independent numbers of mean 0 and variance 1."""
        device = "cpu" if self.generator is None else self.generator.device
        if self.distribution == "normal":
            return torch.randn(*shape, generator=self.generator, device=device)
        return torch.rand(*shape, generator=self.generator, device=device).mul_(2).sub_(1).mul_(math.sqrt(3))


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the elementwise function of this name."""
    _refuse_unknown(name, "activation", tuple(ACTIVATIONS))
    return ACTIVATIONS[name]


def checked_variances(value: Variances, default: float) -> tuple[float, float, float]:
    """Return weight variances times fan-in of the first layer, the hidden layers, and the readout."""
    numbers = checked_numbers(default if value is None else value, "weight_variance", above=0.0)
    if numbers.numel() not in (1, 3) or numbers.dim() > 1:
        raise InputValueError(
            f"weight_variance={value!r}, expected a number, or three: first layer, hidden layers, readout"
        )
    first, hidden, last = (float(number) for number in numbers.expand(3))
    return first, hidden, last


def checked_outputs(value: Any) -> int:
    """Return the number of outputs C; 1 for None."""
    return 1 if value is None else checked_count(value, "outputs")


def _refuse_unknown(value: Any, name: str, names: tuple[str, ...]) -> None:
    if value not in names:
        raise InputValueError(f"{name}={value!r}, expected one of {', '.join(names)}")
