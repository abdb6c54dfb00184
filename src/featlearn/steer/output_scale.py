"""Richer or lazier by the scale of the output (Shan & Bordelon 2021b, Sec. 4.2; Chizat et al.)."""

import copy
from typing import Any, Self

from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.shapes import checked_number

__all__ = ["ScaledOutput", "scale_output"]


def scale_output(model: nn.Module, gamma: float, center: bool = True) -> "ScaledOutput":
    """A new module around the same parameters that gives (f - f0) / gamma, f0 being the network as it is now.

    Trained with the learning rate times `.rate_factor` = gamma^2 it starts with the same kernel per rate, and follows,
    on squared error, exactly the path of f - f0 trained on labels gamma y: the larger gamma, the further the weights
    must go, and the richer the training; small gamma is lazy. The print of Shan & Bordelon 2021b, Sec. 4.2 leaves the
    learning rate out of dtheta/dt = -eta grad L, eta = eta0 gamma^2. This gamma is neither the feature rate of
    `theory.ofe` nor the multiplier of Xu & Ziyin 2024, which is its inverse.

    The kernel grows in rich training, so a step that is stable at the start may be too large later: if the loss jumps,
    use a smaller learning rate and more steps.

    Args:
        model: gives one tensor, or an object with `.logits`. It is not copied: training one trains the other.
        gamma: divisor of the output, > 0.
        center: subtract a frozen copy of the network. Without it the output starts at f / gamma, and runs with
            different gamma start with different losses. The copy is in eval mode for good: with dropout or batch
            statistics the difference starts at zero in eval mode only.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    divisor = checked_number(gamma, "gamma")
    if not divisor > 0:
        raise InputValueError(f"gamma={gamma!r}, expected a number > 0: the output is divided by it")
    return ScaledOutput(model, divisor, center)


class ScaledOutput(nn.Module):
    """(f - f0) / gamma; see `scale_output`. `network` is the model that was given, `start` the frozen copy."""

    def __init__(self, network: nn.Module, gamma: float, center: bool = True) -> None:
        super().__init__()
        self.network = network
        self.gamma = gamma
        self.start = copy.deepcopy(network).requires_grad_(False).eval() if center else None
        """A part of the state dict: a run that is continued needs the f0 it began with."""
        self.training = network.training

    @property
    def rate_factor(self) -> float:
        """gamma^2: multiply the learning rate by it."""
        return self.gamma**2

    def train(self, mode: bool = True) -> Self:
        """Train mode for the network; f0 stays what it was."""
        super().train(mode)
        if self.start is not None:
            self.start.eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(f - f0) / gamma of these inputs."""
        output = _one_tensor(self.network(*args, **kwargs))
        if self.start is not None:
            output = output - _one_tensor(self.start(*args, **kwargs))
        return output / self.gamma

    def extra_repr(self) -> str:
        """What `print(model)` shows beside the parts."""
        return f"gamma={self.gamma:g}, center={self.start is not None}"


def _one_tensor(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise InputTypeError(
            f"the model gives {type(output).__name__}, expected one tensor or an object with .logits; wrap the model "
            "in a module that picks the tensor"
        )
    return found
