"""Outputs of a model in eval mode, in whatever shape it returns them."""

from torch import Tensor, nn

from featlearn.errors import InputTypeError
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, ModelWithInputs, Readout, batch_size, read_any_shape
from featlearn.network.isolation import undisturbed
from featlearn.network.state import Inventory
from featlearn.shapes import describe


def raw_outputs(model: nn.Module, x: Inputs, readout: Readout | None) -> Tensor:
    """Return the outputs on x in eval mode, in the shape that the model or its readout gives."""
    network, samples = unwrapped(model), batch_size(x)
    with undisturbed(Inventory(network)) as isolation:
        raw, inputs = ModelWithInputs(
            model=network, x=x, samples=samples, readout=readout, rewind=isolation.rewind
        ).call(slice(None))
        outputs = read_any_shape(raw, inputs, readout)
    if not isinstance(outputs, Tensor):
        raise InputTypeError(f"the readout gives {describe(outputs)}, expected a tensor with the samples first")
    return outputs.detach().clone()
