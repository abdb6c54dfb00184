"""How a graph was read, by the numbers of its nodes: every graph with the same signature is read the same way."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from featlearn.capture.graph import Graph, Node, Signature, walked
from featlearn.capture.pullback import Access, coordinates
from featlearn.capture.reordering import ordered_by_data
from featlearn.capture.uses import ParameterUses, Reading
from featlearn.ops import Direct, Layout, Outer, Use, is_built_in, rule_for


class UnfamiliarGraphError(Exception):
    """The graph is not the one that a recipe is for."""


@dataclass(frozen=True)
class KnownUse:
    """One use of parameters."""

    value: tuple[int, int]
    """The operand: number of a node, and which of its outputs."""
    consumer: int
    operand: int
    layout: Layout


@dataclass(frozen=True)
class Recipe:
    """Where the parameters of a graph are used, and what else follows from its signature."""

    signature: Signature
    uses: tuple[KnownUse, ...]
    places: Mapping[str, tuple[int, ...]]
    """Parameter -> which of the uses are its own."""
    bare: Graph
    """The graph without its nodes."""

    def nodes(self, outputs: Tensor, parameters: Mapping[str, Tensor]) -> tuple[Node, ...]:
        """The nodes behind these outputs, in order; raises where they are not those that are known."""
        if not outputs.requires_grad:
            raise UnfamiliarGraphError
        order, signature = walked(outputs, parameters)
        if signature != self.signature:
            raise UnfamiliarGraphError
        return order

    def used(self, order: tuple[Node, ...]) -> dict[Node, Layout]:
        """The nodes that use parameters, with their sample axes."""
        return {order[use.consumer]: use.layout for use in self.uses}

    def read(self, outputs: Tensor, parameters: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Access]]:
        """The graph and its readings; raises where it is not the one that is known."""
        order = self.nodes(outputs, parameters)
        nodes, _, leaves = self.signature
        graph = replace(
            self.bare, root=(outputs.grad_fn, outputs.output_nr), order=order,
            leaves={name: order[number] for name, number in leaves},  # type: ignore[attr-defined]
            described={node: known[2] for node, known in zip(order, nodes, strict=True)},  # type: ignore[call-overload]
        )  # fmt: skip
        readings = [_reading(graph, use) for use in self.uses]
        access = {}
        for name, places in self.places.items():
            own = tuple(readings[place] for place in places)
            access[name] = Access(ParameterUses(own), coordinates(graph, name, own))
        return graph, access


def _reading(graph: Graph, known: KnownUse) -> Reading:
    node, value = graph.order[known.consumer], (graph.order[known.value[0]], known.value[1])
    use = Use(node, known.operand, graph.output_shape(value), graph.output_shape((node, 0)), known.layout)
    rule = rule_for(node.name()) if is_built_in(node.name()) else None
    form = None if rule is None else rule(use)
    if not isinstance(form, Outer | Direct):
        raise UnfamiliarGraphError
    return Reading(value, use, form)


def recipe_of(graph: Graph, access: Mapping[str, Access]) -> Recipe | None:
    """The recipe of a graph that was read; None where more than its signature decides, or not all could be read."""
    readings = {id(r): r for one in access.values() for r in one.uses.readings}
    axes = {r.use.node: r.use.layout for r in readings.values()}
    lasting = all(map(is_built_in, graph.node_names)) and not ordered_by_data(graph, axes)
    if not lasting or any(one.refusal is not None for one in access.values()):
        return None
    numbers = {node: number for number, node in enumerate(graph.order)}
    where = {key: place for place, key in enumerate(readings)}
    uses = tuple(
        KnownUse((numbers[r.value[0]], r.value[1]), numbers[r.use.node], r.use.operand, r.use.layout)
        for r in readings.values()
    )
    bare = replace(
        graph, root=(None, 0), leaves={}, consumers={}, names_below={}, variables=frozenset(), order=(), described={}
    )
    places = {name: tuple(where[id(r)] for r in one.uses.readings) for name, one in access.items()}
    return Recipe(graph.signature, uses, places, bare)
