"""Forward passes of a network."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from featlearn.network import inputs as network_inputs
from featlearn.network.default_readout import output_tensor
from featlearn.network.inputs import Inputs, map_tensors


def call_model(model: nn.Module, x: Inputs) -> Tensor:
    """Return the output of a network, its logits, or its first floating tensor."""
    x = map_tensors(x, lambda tensor: tensor.detach().clone())
    return output_tensor(network_inputs.call_model(model, x))[1]


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
