"""Train richer or lazier by the scale of the output (Shan & Bordelon 2021b, Sec. 4.2; Chizat et al. 2019)."""

import copy
from typing import Any, Self

from torch import Tensor, nn

from featlearn.dynamics.taylor import single_tensor
from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_number
from featlearn.signatures import name_keywords

__all__ = ["ScaledOutput", "scale_output"]


@name_keywords()
def scale_output(model: nn.Module, factor: float, *, center: bool = True) -> "ScaledOutput":
    """Wrap a model so that it returns factor (f - f0), where f0 is the model as it is now.

    A small factor makes training rich, a large one lazy. Multiply the learning rate by `.rate_factor` = 1 / factor^2:
    then training starts with the same kernel times rate. On squared error it follows exactly the path of f - f0 trained
    on labels y / factor, so the smaller the factor, the further the weights must move. Shan & Bordelon 2021b, Sec. 4.2,
    Eq. 43 to 45, divide by gamma = 1 / factor; their dtheta/dt = -eta grad L leaves out the learning rate
    eta = eta0 gamma^2.

    The kernel grows in rich training, so a step that is stable at the start may be too large later. If the loss jumps,
    use a smaller learning rate and more steps.

    Args:
        model: Module that returns one tensor, or an object with ``.logits``. The wrapper shares its parameters.
        factor: Number > 0 that multiplies the output.
        center: Subtract a frozen copy of the model. Otherwise, the initial output is factor f, and runs with different
            factors start with different losses. The copy stays in eval mode: with dropout or batch statistics, the
            initial difference is zero in eval mode only.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    multiplier = checked_number(factor, "factor")
    if not multiplier > 0:
        raise InputValueError(f"factor={factor!r}, expected a number > 0")
    return ScaledOutput(model, multiplier, center=center)


class ScaledOutput(nn.Module):
    """Module that returns factor (f - f0); see `scale_output`.

    Attributes:
        network: The model f.
        start: The frozen copy f0, or None without centering. It is part of the state dict: a resumed run needs it.
        factor: Multiplier of the output.
    """

    @name_keywords()
    def __init__(self, network: nn.Module, factor: float, *, center: bool = True) -> None:
        super().__init__()
        self.network = network
        self.factor = factor
        self.start = copy.deepcopy(network).requires_grad_(False).eval() if center else None
        self.training = network.training

    @property
    def rate_factor(self) -> float:
        """Factor for the learning rate, 1 / factor^2."""
        return self.factor**-2

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model. The frozen copy stays in eval mode."""
        super().train(mode)
        if self.start is not None:
            self.start.eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return factor (f - f0) of the inputs."""
        output = single_tensor(self.network(*args, **kwargs))
        if self.start is not None:
            output = output - single_tensor(self.start(*args, **kwargs))
        return output * self.factor

    def extra_repr(self) -> str:
        """Return the settings for `print(model)`."""
        return f"factor={self.factor:g}, center={self.start is not None}"
