"""The sample axis of autograd nodes, proved from the ops above them.

The samples lie in the first axis of the outputs. Flow rules say where they lie in the operands
of each op. Followed from the outputs down, they prove the sample axis of a node for this batch, without a backward
pass. Below an op without a rule nothing is proved, and a backward pass decides (`featlearn.audit.gradient_check`).
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from featlearn.graph.graph import Graph, Node, Value
from featlearn.graph.layout import Layout, sample_dimension
from featlearn.ops.registry import Flow, SampleAxis, Step, backward_flow
from featlearn.torch_internals import saved

Placed = tuple[torch.Size, Layout | None]
"""The shape of an output, and where the samples lie in it if that is known."""


def proved_layouts(graph: Graph, samples: int, wanted: Collection[Node]) -> dict[Node, Layout]:
    """Return the sample axes of some nodes, as far as the ops above them determine them."""
    outputs = graph.output_shape(graph.root)
    layouts: dict[Value, Layout | None] = {graph.root: Layout(1, samples, outputs.numel() // samples)}
    proved: dict[Node, Layout] = {}
    leaves = set(graph.leaves.values())
    for node in reversed(graph.order):  # every op after all that consume it
        if node not in graph.names_below:
            continue
        used = [number for number in range(len(graph.described[node])) if (node, number) in layouts]
        if not used:
            continue  # only reached as a weight
        layout = layouts[node, used[0]]
        if node in wanted and layout is not None and used == [0]:
            proved[node] = layout
        flow = backward_flow(graph.names[node])
        if used != [0] and flow is not None and not flow.gives_pieces:
            flow = None
        placed = [(graph.output_shape((node, number)), layouts[node, number]) for number in used]
        argument = partial(saved, node)
        for operand, child in enumerate(graph.inputs[node]):
            if child[0] in graph.names_below and child[0] not in leaves:
                below = operand_layout(flow, argument, placed, operand, graph.output_shape(child)) if flow else None
                # All consumers of a value must agree on it.
                layouts[child] = below if layouts.get(child, below) == below else None
    return proved


def operand_layout(
    flow: Flow, argument: Callable[[str], Any], outputs: Sequence[Placed], operand: int, shape: torch.Size
) -> Layout | None:
    """Return where the samples lie in an operand, given where they lie in the outputs that are used.

    None if the rule does not say it, or says something else for each output.
    """
    layouts = set()
    for output, layout in outputs:
        place = None if layout is None else sample_dimension(output, layout)
        if layout is None or place is None:
            return None
        layouts.add(flow.rule(Step(argument, output, SampleAxis(*place), layout, operand, shape)))
    return layouts.pop() if len(layouts) == 1 else None
