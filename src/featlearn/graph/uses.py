"""Every use of every parameter.

From a parameter upwards, values without a sample axis form a region that parameters alone (or several samples
together) made: transposes, normalized weights, generated weights. Each edge that leaves the region into a node whose
output has a sample axis is a use. Every path from a parameter to the outputs leaves the region for the first time
through exactly one edge, so the sum over uses, each pulled back through the region, is the whole per-sample gradient.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from featlearn.graph.graph import Edge, Graph, Node
from featlearn.graph.layout import Layout
from featlearn.graph.sample_axis import Axes
from featlearn.torch_internals import saved

_REARRANGING = "Alias Clone Permute ReshapeAlias Squeeze Swapaxes T ToCopy Transpose Unsqueeze UnsafeView View"
# They only rearrange their one input, so no sample can have touched their output if none touched their input,
# and sums of products over their output are those over their input.
REARRANGEMENTS = frozenset(f"{name}Backward{number}" for name in _REARRANGING.split() for number in range(4))


@dataclass(frozen=True)
class Use:
    """One operand of one autograd node whose output has a sample axis."""

    node: Any
    """The autograd node that consumes the operand (`torch.autograd.graph.Node`)."""
    operand: int
    """Which of the node's inputs it is: an index into `node.next_functions`."""
    shape: torch.Size
    """The operand's shape."""
    output: torch.Size
    """The shape of the node's output."""
    layout: Layout
    """The sample axis of the output."""

    def saved(self, name: str) -> Any:
        """Return what an op of torch saved in the forward pass under this name, None if nothing.

        Call it while the rule runs, not inside the functions that the rule returns. A backward pass may have freed it
        by then.
        """
        return saved(self.node, name)


class FoundUses(NamedTuple):
    """The edges through which parameters meet the samples."""

    edges: tuple[tuple[Edge, frozenset[str]], ...]
    """Each with the parameters that reach its value without meeting a sample."""
    mixed: Mapping[str, str]
    """Parameters that reach the same operand with and without samples, with the reason."""

    @property
    def nodes(self) -> list[Node]:
        """List every node that uses a parameter, once."""
        return list(dict.fromkeys(edge.consumer for edge, _ in self.edges))


def find_uses(graph: Graph, axes: Axes) -> FoundUses:
    """Find every edge from a value without samples to a node with samples, in one walk from the leaves."""
    names = {node: name for name, node in graph.leaves.items()}
    without: set[Node] = set()
    reach: dict[Node, frozenset[str]] = defaultdict(frozenset)
    by_samples: dict[Node, frozenset[str]] = defaultdict(frozenset)
    edges: list[tuple[Edge, frozenset[str]]] = []
    mixed: dict[str, str] = {}
    for node in graph.order:
        if node not in graph.names_below:
            continue
        if node in names:
            without.add(node)
            reach[node] = frozenset([names[node]])
            continue
        children = [(k, child, n) for k, (child, n) in enumerate(graph.inputs[node]) if child in graph.names_below]
        if node is not graph.root[0] and _is_without_samples(graph, node, axes, without):
            without.add(node)
            reach[node] = frozenset().union(*(reach[child] for _, child, _ in children))
            # What met samples and has lost their axis again is counted where it met them.
            by_samples[node] = frozenset().union(
                *(by_samples[child] if child in without else graph.names_below[child] for _, child, _ in children)
            )
            continue
        for operand, child, number in children:
            if child in without and reach[child]:
                edges.append((Edge((child, number), node, operand), reach[child]))
                if both := reach[child] & by_samples[child]:
                    mixed |= dict.fromkeys(both, f"part of it meets the samples before {graph.names[node]}")
    return FoundUses(tuple(edges), mixed)


def _is_without_samples(graph: Graph, node: Node, axes: Axes, without: set[Node]) -> bool:
    children = graph.inputs[node]
    if graph.names[node] in REARRANGEMENTS and all(child in without for child, _ in children if child is not None):
        return True
    return node in axes and axes[node] is None
