"""How the parameters of a graph are read, kept by the numbers of its nodes for graphs of the same structure.

Nothing in it follows from the values of tensors: saved tensors are fetched anew for every graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featlearn.gradients.pullback import MatrixView, ParameterUses
from featlearn.graph.graph import Edge, Graph, GraphStructure, Node
from featlearn.graph.layout import Layout
from featlearn.graph.uses import FoundUses
from featlearn.ops import Outer
from featlearn.ops.reading import Reading

_BY_VALUE = frozenset(["IndexBackward0"])
"""Nodes whose sample axis follows from the values of a tensor."""


@dataclass(frozen=True)
class GraphReading:
    """Sample axes, uses and matrix views of a graph."""

    structure: GraphStructure
    axes: Mapping[int, Layout | None]
    several_outputs: frozenset[int]
    unproved: frozenset[int]
    uses: tuple[tuple[tuple[int, int], int, int, frozenset[str]], ...]
    """(number of the operand's node, output), number of the node that takes it, as which input, parameters."""
    mixed: Mapping[str, str]
    matrix_views: Mapping[str, tuple[tuple[object, ...], MatrixView | None]]
    """Parameter -> forms of its uses, and its matrix view."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        axes: Mapping[Node, Layout | None],
        several_outputs: frozenset[Node],
        unproved: frozenset[Node],
        found: FoundUses,
        parameters: Mapping[str, ParameterUses],
    ) -> "GraphReading | None":
        """What is known of a graph; None where part of it follows from values."""
        if not _BY_VALUE.isdisjoint(graph.structure.names):
            return None
        number = graph.number
        return cls(
            structure=graph.structure,
            axes={number[node]: layout for node, layout in axes.items()},
            several_outputs=frozenset(map(number.__getitem__, several_outputs)),
            unproved=frozenset(map(number.__getitem__, unproved)),
            uses=tuple(
                ((number[edge.value[0]], edge.value[1]), number[edge.consumer], edge.operand, names)
                for edge, names in found.edges
            ),
            mixed=found.mixed,
            matrix_views={
                name: (_forms(one.readings), one.matrix_view)
                for name, one in parameters.items()
                if one.matrix_view is None or one.matrix_view.fixed
            },
        )

    def axes_in(self, graph: Graph) -> dict[Node, Layout | None]:
        """The sample axes of a graph of this structure."""
        return {graph.order[k]: layout for k, layout in self.axes.items()}

    def uses_in(self, graph: Graph) -> FoundUses:
        """The uses of a graph of this structure."""
        order = graph.order
        edges = [
            (Edge((order[value], output), order[consumer], operand), names)
            for (value, output), consumer, operand, names in self.uses
        ]
        return FoundUses(tuple(edges), self.mixed)

    def knows(self, name: str, readings: Sequence[Reading]) -> bool:
        """Whether the matrix view of a parameter is that which is kept."""
        return name in self.matrix_views and self.matrix_views[name][0] == _forms(readings)

    def matrix_view_of(self, name: str, readings: Sequence[Reading]) -> MatrixView | None:
        """The matrix view of a parameter."""
        found = self.matrix_views[name][1]
        if found is None:
            return None
        flipped = dict(zip([reading.value for reading in readings], found.flipped.values(), strict=False))
        return found._replace(flipped=flipped, scales=dict.fromkeys(flipped, 1.0))


def _forms(readings: Sequence[Reading]) -> tuple[object, ...]:
    return tuple(
        [
            (form.rows_first, form.row_size, form.grad_size, form.blocks)
            if isinstance(form := reading.form, Outer)
            else ()
            for reading in readings
        ]
    )
