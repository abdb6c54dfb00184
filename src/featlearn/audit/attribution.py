"""Does every gradient at an op belong to the sample it is ascribed to? Asked of every sample of a batch.

A backward pass with random weights of its own for every sample and direction must give, entry by entry, the weighted
sum of the passes without them. It shows wrong axes, samples in another order and samples that influence each other,
however small a sample's gradient is.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.gradients.captured import Chunk
from featlearn.gradients.formed import Backpropagated
from featlearn.graph.graph import Node, numbers
from featlearn.graph.layout import Layout, splits
from featlearn.graph.sample_axis import sample_error


def expect_confirmed(deferred: DeferredChecks, chunk: Chunk, found: Backpropagated) -> None:
    """Require of every op in doubt that its sample axis is confirmed."""
    slack = chunk.precision**0.5
    for node, _ in found.coded:
        error = _error(chunk, found, node, _layout(chunk, node))
        deferred.expect(lambda error: error < slack, error)


def corrected_axes(chunk: Chunk, found: Backpropagated) -> dict[Node, Layout | None]:
    """Ops whose sample axis is not confirmed -> the axis that is, None where none is."""
    nodes = [node for node, _ in found.coded]
    errors = numbers([_error(chunk, found, node, _layout(chunk, node)) for node in nodes])
    slack = chunk.precision**0.5
    return {
        node: _confirmed(chunk, found, node, slack)
        for node, error in zip(nodes, errors, strict=True)
        if not error < slack
    }


def parameters_at(chunk: Chunk, nodes: Collection[Node]) -> dict[str, str]:
    """Parameters that one of these ops uses, with the reason why they cannot be read."""
    reason = "the samples lie in no regular order at {}"
    return {
        name: reason.format(reading.use.node.name())
        for name, uses in chunk.uses.items()
        for reading in uses.readings
        if reading.use.node in nodes
    }


def _layout(chunk: Chunk, node: Node) -> Layout:
    layout = chunk.axes[node]
    assert layout is not None
    return layout


def _confirmed(chunk: Chunk, found: Backpropagated, node: Node, slack: float) -> Layout | None:
    assert chunk.graph is not None
    for layout in splits(chunk.graph.output_shape((node, 0)), len(chunk.outputs)):
        if float(_error(chunk, found, node, layout)) < slack:
            return layout
    return None


def _error(chunk: Chunk, found: Backpropagated, node: Node, layout: Layout) -> Tensor:
    """The largest difference of any sample, relative to the largest entry of that sample."""
    assert found.weights is not None
    mixed: Tensor | None = None
    for k, gradient in enumerate(found.grads[node, 0]):
        if gradient is not None:
            term = layout.split(gradient.detach()) * found.weights[:, k].to(gradient)[:, None]
            mixed = term if mixed is None else mixed.add_(term)
    coded = found.coded[node, 0]
    if coded is None:
        return torch.zeros(()) if mixed is None else mixed.abs().amax().double().sign()
    split = layout.split(coded.detach())
    return sample_error(torch.zeros_like(split) if mixed is None else mixed, split)
