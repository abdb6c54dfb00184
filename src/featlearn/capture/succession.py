"""The way of a signal through the graph: which op comes before which, and what enters attention as what.

Only the graph is asked, so it does not matter which attention code a model has, or whether its projections are fused.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from featlearn.capture.graph import Graph, Node, Value

Role = Literal["q", "k", "v"]

# Matrix products and which of their operands are multiplied.
_PRODUCTS = {"BmmBackward0": (0, 1), "MmBackward0": (0, 1), "BaddbmmBackward0": (1, 2)}
_SOFTMAX = frozenset(["SoftmaxBackward0"])


@dataclass(frozen=True)
class Attention:
    """What one attention op takes: the values that enter as queries, keys and values."""

    node: Node
    q: Value
    k: Value
    v: Value


def fused(node: Node) -> bool:
    """Whether a node is attention in one op."""
    return str(node.name()).startswith(("ScaledDotProduct", "EfficientAttention", "FlashAttention"))


def attentions(graph: Graph) -> list[Attention]:
    """Every attention in the graph: fused, or written out as softmax(q k^T) v."""

    def consumers(node: Node) -> list[Node]:
        return [edge.consumer for edge in graph.consumers.get(node, ())]

    found = []
    for node in graph.names_below:
        if fused(node):
            q, k, v = (node.next_functions[operand] for operand in range(3))
            found.append(Attention(node, q, k, v))
        elif node.name() in _SOFTMAX:
            scores = next(_reached(node, _children, _PRODUCTS), None)
            mixing = next(_reached(node, consumers, _PRODUCTS), None)
            if scores is None or mixing is None:
                continue
            first, second = _PRODUCTS[scores.name()]
            values = [
                mixing.next_functions[operand]
                for operand in _PRODUCTS[mixing.name()]
                if node not in _below(mixing.next_functions[operand][0], node)  # the probabilities are the other one
            ]
            if len(values) == 1:
                found.append(Attention(node, scores.next_functions[first], scores.next_functions[second], values[0]))
    return [a for a in found if all(value[0] is not None for value in (a.q, a.k, a.v))]


def sources(starts: Collection[Value], stops: Collection[Node], *, features: bool = False) -> list[Node]:
    """The nodes of `stops` that a signal at `starts` comes from without passing another of them.

    `features`: only ways on which what was a feature stays one: attention is passed from its values, and not through
    the weights it gives to positions.
    """
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [node for node, _ in starts if node is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in stops:
            found[node] = None
        elif not features:
            stack += _children(node)
        elif fused(node):
            stack += [child for child, _ in node.next_functions[2:3] if child is not None]
        elif node.name() not in _SOFTMAX:
            stack += _children(node)
    return list(found)


def between(graph: Graph, start: Node, end: Node) -> set[Node]:
    """Every node on a way from `start` down to `end`, without these two."""
    above: set[Node] = set()
    stack = [end]
    while stack:
        top = stack.pop()
        if top not in above:
            above.add(top)
            if top is not start:
                stack += [edge.consumer for edge in graph.consumers.get(top, ())]
    return (above & _below(start, end)) - {start, end}


def _below(node: Node | None, end: Node) -> set[Node]:
    """Every node under this one, itself included, down to `end`."""
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


def _reached(start: Node, neighbours: Callable[[Node], list[Node]], names: Collection[str]) -> Iterator[Node]:
    """Nodes with one of these names, nearest first; ways end at them."""
    level, seen = [start], {start}
    while level:
        following = [n for node in level for n in neighbours(node) if n not in seen]
        seen.update(following)
        yield from (node for node in following if node.name() in names)
        level = [node for node in dict.fromkeys(following) if node.name() not in names]
