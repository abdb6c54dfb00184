"""Follow a signal through the graph: which op comes before which, and what enters attention as query, key or value.

Only the graph is read, so the attention code of a model does not matter, nor whether its projections are fused.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

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

    result = []
    for node in graph.names_below:
        if _fused(node):
            q, k, v = (node.next_functions[operand] for operand in range(3))
            result.append(Attention(q, k, v, node))
        elif node.name() in _SOFTMAX:
            scores = next(_reached(node, _children, _PRODUCTS), None)
            mixing = next(_reached(node, consumers, _PRODUCTS), None)
            if scores is None or mixing is None or scores in weight_uses or mixing in weight_uses:
                continue
            left, right = _PRODUCTS[scores.name()]
            values = [
                mixing.next_functions[operand]
                for operand in _PRODUCTS[mixing.name()]
                if node not in _below(mixing.next_functions[operand][0], node)  # the probabilities are the other one
            ]
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
        above: set[Node] = set()
        stack = [end]
        while stack:
            for edge in self.graph.consumers.get(stack.pop(), ()):
                if edge.consumer in down and edge.consumer not in above:
                    above.add(edge.consumer)
                    stack.append(edge.consumer)
        return above

    def _down(self, starts: Collection[Value]) -> list[Node]:
        seen: dict[Node, None] = {}
        stack = [node for node, _ in starts if node is not None]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen[node] = None
            if node not in self.stops:
                stack += self._following(node)
        return list(seen)

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
    reached, seen = [], set()
    stack = [start[0]]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in stops:
            reached.append(node)
        else:
            stack += _children(node)
    return reached


def _below(node: Node | None, end: Node) -> set[Node]:
    """Return every node under this one, itself included, down to `end`."""
    seen: set[Node] = set()
    stack = [node] if node is not None else []
    while stack:
        top = stack.pop()
        if top not in seen:
            seen.add(top)
            if top is not end:
                stack += _children(top)
    return seen


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _reached(start: Node, neighbors: Callable[[Node], list[Node]], names: Collection[str]) -> Iterator[Node]:
    """Yield nodes with one of these names, nearest first. Paths end at them."""
    level, seen = [start], {start}
    while level:
        following = list(dict.fromkeys(n for node in level for n in neighbors(node) if n not in seen))
        seen.update(following)
        yield from (node for node in following if node.name() in names)
        level = [node for node in following if node.name() not in names]
