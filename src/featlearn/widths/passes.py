"""Forward passes of a network."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from featlearn.network.inputs import Inputs, map_tensors, read_output


def call_model(model: nn.Module, x: Inputs) -> Tensor:
    """Return the output of a network, or its logits."""
    x = map_tensors(x, lambda tensor: tensor.detach().clone())
    raw = model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, Mapping) else model(x)
    output: Tensor = read_output(raw, x, None)
    return output


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
