"""Follow a signal through the graph: which op comes before which, and what enters attention as query, key or value.

Only the graph is read, so the attention code of a model does not matter, nor whether its projections are fused.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from operator import is_

from featlearn.graph.graph import Graph, Node, Value

# Matrix products and which of their operands are multiplied, left and right.
_PRODUCTS = {"BmmBackward0": (0, 1), "MmBackward0": (0, 1), "BaddbmmBackward0": (1, 2), "AddmmBackward0": (1, 2)}
_SOFTMAX = frozenset(["SoftmaxBackward0", "SafeSoftmaxBackward0"])  # torch's own written-out attention has the second
# Ops whose other operand, a weight that does not train, mixes features.
_CONVOLUTIONS = frozenset(["ConvolutionBackward0", "ConvolutionOverrideableBackward0", "CudnnConvolutionBackward0"])


@dataclass(frozen=True)
class Attention:
    """The values that enter one attention op as queries, keys and values."""

    q: Value
    k: Value
    v: Value
    mixing: Node
    """The op that mixes the values: the fused op, or the second product where attention is written out."""


def _fused(node: Node) -> bool:
    return str(node.name()).startswith(("ScaledDotProduct", "EfficientAttention", "FlashAttention"))


def attentions(graph: Graph, weight_uses: Collection[Node]) -> list[Attention]:
    """List every attention in the graph: fused, or written out as softmax(q k^T) v, all three made from samples.

    `weight_uses`: ops that multiply by a weight. A softmax between two of them is an activation or a router.
    """

    def consumers(node: Node) -> list[Node]:
        return [edge.consumer for edge in graph.consumers.get(node, ())]

    def product(node: Node, neighbors: Callable[[Node], list[Node]]) -> Node | None:
        reached = _reached(neighbors(node), neighbors, lambda other: other.name() in _PRODUCTS)
        return next((other for other in reached if other.name() in _PRODUCTS), None)

    result = []
    for node in graph.names_below:
        if _fused(node):
            q, k, v = (node.next_functions[operand] for operand in range(3))
            result.append(Attention(q, k, v, node))
        elif node.name() in _SOFTMAX:
            scores, mixing = product(node, _children), product(node, consumers)
            if scores is None or mixing is None or scores in weight_uses or mixing in weight_uses:
                continue
            left, right = _PRODUCTS[scores.name()]
            operands = [mixing.next_functions[operand] for operand in _PRODUCTS[mixing.name()]]
            # The probabilities are the other one.
            values = [value for value in operands if node not in _reached([value[0]], _children, partial(is_, node))]
            if len(values) == 1:
                result.append(Attention(scores.next_functions[left], scores.next_functions[right], values[0], mixing))
    return [a for a in result if all(value[0] is not None for value in (a.q, a.k, a.v))]


class FeaturePaths:
    """Paths from an op down to ops that meet a weight, on which features are not mixed.

    They go through everything but products. Of two matrices made from samples the right one carries the features: the
    values, in attention. A constant on the right mixes features and ends the path.
    """

    def __init__(self, graph: Graph, stops: Collection[Node], attentions: Collection[Attention]) -> None:
        self.graph, self.stops = graph, stops
        self._values = {attention.mixing: attention.v for attention in attentions}

    def sources(self, starts: Collection[Value]) -> list[Node]:
        """Return the stops that a signal at `starts` comes from without passing another stop."""
        return [node for node in self._down(starts) if node in self.stops]

    def between(self, starts: Collection[Value], end: Node) -> set[Node]:
        """Return every op on a path from `starts` down to one of the stops, without that stop."""
        down = {node for node in self._down(starts) if node not in self.stops}

        def above(node: Node) -> list[Node]:
            return [edge.consumer for edge in self.graph.consumers.get(node, ()) if edge.consumer in down]

        return set(_reached(above(end), above))

    def _down(self, starts: Collection[Value]) -> list[Node]:
        return _reached([node for node, _ in starts], self._following, self.stops.__contains__)

    def _following(self, node: Node) -> list[Node]:
        if node in self._values:
            return [self._values[node][0]]
        if node.name() in _CONVOLUTIONS:
            return []
        if node.name() in _PRODUCTS:
            _, right = _PRODUCTS[node.name()]
            child = node.next_functions[right][0]
            return [] if child is None else [child]
        return _children(node)


def nearest(start: Value, stops: Collection[Node]) -> list[Node]:
    """Return the nodes of `stops` that a value is made from without passing another of them."""
    return [node for node in _reached([start[0]], _children, stops.__contains__) if node in stops]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _reached(
    starts: Iterable[Node | None],
    neighbors: Callable[[Node], list[Node]],
    is_end: Callable[[Node], bool] = lambda node: False,
) -> list[Node]:
    """Return all nodes on paths from some nodes, nearest first. Paths end at nodes of which `is_end` holds."""
    nodes = dict.fromkeys(node for node in starts if node is not None)
    waiting = list(nodes)
    for node in waiting:  # grows meanwhile
        following = [] if is_end(node) else [other for other in neighbors(node) if other not in nodes]
        nodes |= dict.fromkeys(following)
        waiting += dict.fromkeys(following)
    return waiting
