"""Outputs of a model in eval mode, in whatever shape it returns them."""

from torch import Tensor, nn

from featlearn.errors import InputTypeError
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, ModelWithInputs, Readout, batch_size, describe, read_output
from featlearn.network.isolation import undisturbed
from featlearn.network.state import Inventory


def raw_outputs(model: nn.Module, x: Inputs, readout: Readout | None) -> Tensor:
    """Return the outputs on x in eval mode, in the shape that the model or its readout gives."""
    network, samples = unwrapped(model), batch_size(x)
    with undisturbed(Inventory(network)) as isolation:
        raw, inputs = ModelWithInputs(
            model=network, x=x, samples=samples, readout=readout, rewind=isolation.rewind
        ).call(slice(None))
        found = read_output(raw, inputs, readout)
    if not isinstance(found, Tensor):
        raise InputTypeError(f"the readout gives {describe(found)}, expected a tensor with the samples first")
    return found.detach().clone()
