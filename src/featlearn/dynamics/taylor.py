"""The Taylor model of a network: what training would be if the network were a polynomial of its weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.torch_internals import NormWithStatistics, child_table


def linearize(model: nn.Module, order: int = 1) -> nn.Module:
    """The Taylor model of a module at its present weights, of order 1 or 2; a module itself, trained like any other.

    Order 1: f0 + J (theta - theta0), whose tangent kernel never changes, and which trains exactly as its frozen kernel
    says. Order 2 adds 1/2 (theta - theta0)^T H (theta - theta0): its kernel moves, at first as that of a
    smooth network; gates of a ReLU network switch, which the expansion around one point does not see.

    The module given is not touched. Its trainable parameters are parameters of the new module, under
    `network.<name>`, and start where they are; theta0 are its buffers, `start.<name>`, which move with it to another
    format or device and are part of its state dict: loading one loads the expansion point too. Frozen parameters and
    buffers are those of now. The output must be one tensor, or an object with `.logits`.

    Normalizations that update running statistics do so outside of any polynomial: call `.eval()` on the model, also for
    training it.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if order not in (1, 2):
        raise InputValueError(f"order={order!r}, expected 1 or 2")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputValueError(
            "the model has no trainable parameter, expected at least one with requires_grad=True to expand in"
        )
    return TaylorModel(model, order)


class TaylorModel(nn.Module):
    """f0 + J d (+ 1/2 d^T H d) with d the way the weights have gone."""

    def __init__(self, model: nn.Module, order: int) -> None:
        super().__init__()
        self.network = copy.deepcopy(model)
        self.order = order
        self.training = model.training
        moving = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        self._names = tuple(moving)
        self.start = nn.Module()
        for name, parameter in moving.items():
            *path, last = name.split(".")
            place = self.start
            for part in path:
                if part not in child_table(place):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_buffer(last, parameter.detach().clone())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Taylor polynomial at these inputs."""
        self._refuse_running_statistics()
        fixed = {name: self.start.get_buffer(name) for name in self._names}
        way = {name: self.network.get_parameter(name) - fixed[name] for name in self._names}

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            with ElementaryOps():
                found = torch.func.functional_call(self.network, weights, args, kwargs)
            return _one_tensor(found)

        def first_order(weights: dict[str, Tensor]) -> Any:
            return torch.func.jvp(outputs, (weights,), (way,))  # f, J d

        if self.order == 1:
            f, slope = first_order(fixed)
            line: Tensor = f + slope
            return line
        values, slopes = torch.func.jvp(first_order, (fixed,), (way,))[:2]
        parabola: Tensor = values[0] + values[1] + slopes[1] / 2
        return parabola

    def _refuse_running_statistics(self) -> None:
        for name, module in self.network.named_modules():
            if isinstance(module, NormWithStatistics) and module.training and module.running_mean is not None:
                raise InputValueError(
                    f"{type(module).__name__} {name!r} is in training mode and would update its running statistics, "
                    "expected fixed ones; call .eval() on the Taylor model, also for training it"
                )


def _one_tensor(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise InputTypeError(
            f"the model gives {type(output).__name__}, expected one tensor or an object with .logits; wrap the model "
            "in a module that picks the tensor"
        )
    return found
