"""The Taylor model of a network: what training would be if the network were a polynomial of its weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import InputTypeError, InputValueError
from featlearn.linalg.elementary import ElementaryOps


def linearize(model: nn.Module, order: int = 1) -> nn.Module:
    """The Taylor model of a module at its present weights, of order 1 or 2; a module itself, trained like any other.

    Order 1: f0 + J (theta - theta0), whose tangent kernel never changes, and which trains exactly as its frozen kernel
    says. Order 2 adds 1/2 (theta - theta0)^T H (theta - theta0): its kernel moves, at first as that of the network.

    The module given is not touched. Its trainable parameters are parameters of the new module, under
    `network.<name>`, and start where they are; frozen parameters, buffers and the train or eval mode are those of now.
    The output must be a tensor.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if order not in (1, 2):
        raise InputValueError(f"order={order!r}, expected 1 or 2")
    return TaylorModel(model, order)


class TaylorModel(nn.Module):
    """f0 + J d (+ 1/2 d^T H d) with d the way the weights have gone."""

    def __init__(self, model: nn.Module, order: int) -> None:
        super().__init__()
        self.network = copy.deepcopy(model)
        self.order = order
        # In a tuple, so that what stays is neither a parameter nor a submodule of this one.
        self._start = (copy.deepcopy(model).requires_grad_(False),)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Taylor polynomial at these inputs."""
        (start,) = self._start
        base = {name: p.detach() for name, p in start.named_parameters()}
        moving = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        way = {name: p - base[name] for name, p in moving.items()}
        fixed = {name: base[name] for name in moving}

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            with ElementaryOps():
                found: Tensor = torch.func.functional_call(start, weights, args, kwargs)
            return found

        def first_order(weights: dict[str, Tensor]) -> Any:
            return torch.func.jvp(outputs, (weights,), (way,))  # f, J d

        if self.order == 1:
            f, slope = first_order(fixed)
            line: Tensor = f + slope
            return line
        values, slopes = torch.func.jvp(first_order, (fixed,), (way,))[:2]
        parabola: Tensor = values[0] + values[1] + slopes[1] / 2
        return parabola
