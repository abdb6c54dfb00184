"""Taylor models: a network replaced by a polynomial in its weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.torch_internals import NormWithStatistics, child_table


def linearize(model: nn.Module, order: int = 1) -> nn.Module:
    """Return the Taylor model of a module at its current weights, of order 1 or 2, as a trainable module.

    Order 1 is f0 + J (theta - theta0): its tangent kernel is constant, and frozen-kernel training predicts it exactly.
    Order 2 adds 1/2 (theta - theta0)^T H (theta - theta0). For smooth networks, its kernel initially moves like the
    network's. ReLU gates that switch are not part of the expansion.

    The input module is not changed. Copies of its trainable parameters are parameters of the new module, under
    `network.<name>`. theta0 is stored in buffers `start.<name>`: it follows `.to()`, and loading a state dict restores
    the expansion point too. Frozen parameters and buffers are copied. The output must be a tensor, or an object with
    `.logits`.

    Updates of running statistics are not polynomial in the weights: call `.eval()` on the model, also for training it.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if order not in (1, 2):
        raise InputValueError(f"order={order!r}, expected 1 or 2")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputValueError("the model has no trainable parameter, expected at least one with requires_grad=True")
    return TaylorModel(model, order)


class TaylorModel(nn.Module):
    """The model f0 + J d (+ 1/2 d^T H d), where d is the displacement of the weights."""

    def __init__(self, model: nn.Module, order: int) -> None:
        super().__init__()
        self.network = copy.deepcopy(model)
        self.order = order
        self.training = model.training
        moving = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        self._names = tuple(moving)
        self.start = nn.Module()
        for name, parameter in moving.items():
            *parents, last = name.split(".")
            container = self.start
            for part in parents:
                if part not in child_table(container):
                    container.add_module(part, nn.Module())
                container = container.get_submodule(part)
            container.register_buffer(last, parameter.detach().clone())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Evaluate the Taylor polynomial."""
        self._refuse_running_statistics()
        fixed = {name: self.start.get_buffer(name) for name in self._names}
        displacement = {name: self.network.get_parameter(name) - fixed[name] for name in self._names}

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            with ElementaryOps():
                output = torch.func.functional_call(self.network, weights, args, kwargs)
            return single_tensor(output)

        def first_order(weights: dict[str, Tensor]) -> Any:
            return torch.func.jvp(outputs, (weights,), (displacement,))  # f, J d

        if self.order == 1:
            f, slope = first_order(fixed)
            linear: Tensor = f + slope
            return linear
        values, slopes = torch.func.jvp(first_order, (fixed,), (displacement,))[:2]
        quadratic: Tensor = values[0] + values[1] + slopes[1] / 2
        return quadratic

    def _refuse_running_statistics(self) -> None:
        for name, module in self.network.named_modules():
            if isinstance(module, NormWithStatistics) and module.training and module.running_mean is not None:
                raise InputValueError(
                    f"{type(module).__name__} {name!r} is in training mode and would update its running statistics, "
                    "expected fixed ones; call .eval() on the Taylor model, also for training it"
                )


def single_tensor(output: Any) -> Tensor:
    """Return the tensor in an output: the output, or its logits."""
    tensor = getattr(output, "logits", output)
    if not isinstance(tensor, Tensor):
        raise InputTypeError(
            f"the model returns {type(output).__name__}, expected a tensor or an object with .logits; wrap the model "
            "in a module that picks the tensor"
        )
    return tensor
