"""The multilayer perceptron."""

from collections.abc import Sequence

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

__all__ = ["MLP"]


class MLP(nn.Module):
    """Linear layers with an activation between them: `hidden_layers` of them, named ``hidden.0`` ..., and ``readout``.

    Papers count depth differently. Here, `hidden_layers` counts nonlinear layers, and there is one more weight layer.
    Settings of the figures:

    | figure | set-up |
    | --- | --- |
    | Shan & Bordelon 2021a, Fig. 1, 4A, 5; 2021b, Fig. 1, 3A | 784 inputs, two hidden layers of 500, 10 outputs, ReLU, ``"ntk"``, `weight_variance` (1, 2, 1) |
    | Shan & Bordelon 2021a, Fig. 6; 2021b, Fig. 5 | the same with 1 to 4 hidden layers |
    | Shan & Bordelon 2021a, Fig. 3, 4B; 2021b, Fig. 4; Atanasov et al. 2022, Fig. 3, E.1, E.3 | ``activation="linear"`` |
    | Shan & Bordelon 2021b, Fig. 6, 7 | 1000 inputs, one hidden layer of 2000, ReLU, `weight_variance` 1 |
    | Atanasov et al. 2022, Fig. 1a-c, 4, E.2 | one hidden layer of 100, ReLU, `weight_variance` sigma^2 |
    | Beaglehole et al. 2024, Fig. 1, 4 to 11 | 32 inputs, two hidden layers of 128 or 256, ``"uniform"`` with `weight_variance` 1/3 |
    | Beaglehole et al. 2024, Fig. 2A, B; 17 | five (four) hidden layers of 256, likewise |
    | Xu & Ziyin 2024, Fig. 1, 7 | one input, one hidden layer of 10000, five activations |
    | Xu & Ziyin 2024, Fig. 2 (6) | 784 inputs, three (five) hidden layers, ReLU, `weight_variance` 2, times sigma (`fl.steer.scale_init`) |
    | Xu & Ziyin 2024, Fig. 4, 5 | 3072 inputs, one hidden layer, through `fl.steer.parametrize` |

    Args:
        inputs: d; images are flattened, which gives 784 for MNIST and 3072 for CIFAR-10.
        outputs: C, for outputs (P, C); None for a single output, (P,), as targets y = +-1 have.
        width: Width of all hidden layers, or a sequence with a width per layer.
        hidden_layers: H; by default 2, or the number of widths.
        activation: linear, relu, leaky_relu (slope 0.01), tanh, sigmoid, swish (h sigmoid(h)), quadratic (h^2) or gelu.
        parametrization: ``"standard"``, weights of variance v / fan_in, or ``"ntk"``, weights of variance 1 and a
            factor sqrt(v / fan_in) in the forward pass: `fl.theory.infinite_width.ntk` is the kernel of the latter for
            large widths. `fl.steer.parametrize` and `redraw` of `fl.steer.scale_init` are for the standard one.
        bias: Whether layers have a bias, initialized to zero; the papers have none.
        weight_variance: v, a number, or three: first layer, hidden layers, readout. By default 2 for relu and
            leaky_relu, otherwise 1.
        distribution: ``"normal"``, or ``"uniform"`` on an interval around 0 with the same variance. The default of
            torch.nn.Linear, "scale 1" in Beaglehole et al. 2024, is uniform with `weight_variance` 1/3.
        generator: Source of the weights, drawn from the first layer to the last; torch's global generator by default.
    """  # noqa: E501

    def __init__(
        self,
        inputs: int,
        outputs: int | None,
        *,
        width: int | Sequence[int] = 500,
        hidden_layers: int | None = None,
        activation: Activation = "relu",
        parametrization: Parametrization = "standard",
        bias: bool = False,
        weight_variance: Variances = None,
        distribution: Distribution = "normal",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation_function(activation)
        self.scalar = outputs is None
        initialization = WeightInitialization(parametrization, distribution, bias, generator)
        default = 2.0 if activation in ("relu", "leaky_relu") else 1.0
        first, inner, last = checked_variances(weight_variance, default)
        sizes = [checked_count(inputs, "inputs"), *_widths(width, hidden_layers)]
        self.hidden = nn.ModuleList(
            initialization.linear(sizes[k], sizes[k + 1], inner if k else first) for k in range(len(sizes) - 1)
        )
        self.readout = initialization.linear(sizes[-1], checked_outputs(outputs), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map (P, ...), flattened to (P, inputs), to (P, C) or (P,)."""
        h = x.flatten(1)
        for layer in self.hidden:
            h = self.activation(layer(h))
        f: Tensor = self.readout(h)
        return f.squeeze(1) if self.scalar else f


def _widths(width: int | Sequence[int], hidden_layers: int | None) -> list[int]:
    if isinstance(width, Sequence):
        widths = [checked_count(size, "width") for size in width]
        if hidden_layers not in (None, len(widths)):
            raise InputValueError(
                f"{len(widths)} widths and hidden_layers={hidden_layers}, expected a width per hidden layer"
            )
        return widths
    return [checked_count(width, "width")] * checked_count(
        2 if hidden_layers is None else hidden_layers, "hidden_layers", 0
    )
