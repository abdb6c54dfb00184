"""Forward passes of a network."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from featlearn.network import inputs as network_inputs
from featlearn.network.default_readout import output_tensor
from featlearn.network.inputs import Inputs, map_tensors


def call_model(model: nn.Module, x: Inputs) -> Tensor:
    """Return the output of a network, its logits, or its first floating tensor."""
    return output_tensor(network_inputs.call_model(model, copied(x, requires_grad=False)))[1]


def call_traced(model: nn.Module, x: Inputs) -> tuple[Tensor, Any]:
    """Return the output as `call_model`, and the inputs, which require gradients so that the graph shows data."""
    inputs = copied(x, requires_grad=True)
    return output_tensor(network_inputs.call_model(model, inputs))[1], inputs


def copied(x: Inputs, *, requires_grad: bool) -> Any:
    """Return copies of inputs."""
    return map_tensors(x, lambda t: t.detach().clone().requires_grad_(requires_grad and t.is_floating_point()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside, and restore the modes afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
