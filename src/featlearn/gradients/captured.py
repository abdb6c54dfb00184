"""One batch of samples: its outputs, its graph, and how every parameter is read from it.

A `GraphReading` keeps how uses are read by the numbers of nodes, for graphs of the same structure. Nothing in it
follows from the values of tensors: saved tensors are fetched anew for every graph.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.errors import UnsupportedModelError
from featlearn.graph.graph import (
    REARRANGEMENTS,
    Axes,
    Edge,
    FoundUses,
    Graph,
    GraphStructure,
    Layout,
    Node,
    Value,
    backward,
    build_graph,
    find_uses,
)
from featlearn.network.inputs import ModelWithInputs
from featlearn.ops import Outer, is_built_in
from featlearn.ops.registry import Reading, read_use
from featlearn.separation import ProvedPass, RepeatedPass, SeparationProof
from featlearn.torch_internals import hooks_made, saved


class MatrixView(NamedTuple):
    """A common view (blocks, first, second) of one parameter, in which all of its uses are outer products."""

    blocks: int
    first: int
    second: int
    flipped: Mapping[Value, bool]
    """Operands that are the transpose of that view."""
    scales: Mapping[Value, float]
    """What the operands are multiplied by: NTK and mean-field layers have weights like W / sqrt(n)."""
    fixed: bool
    """Whether they are multiplied by nothing. Factors are read from the graph."""
    view: tuple[Any, ...] = ()
    """How the parameter was rearranged into this view; () if its entries keep their order."""
    order: Tensor | None = None
    """Where each entry of the parameter stands in the view, where that is not its own place."""


class ParameterUses(NamedTuple):
    """All uses of one parameter, each read by the rule of its op; or why they cannot be read."""

    readings: tuple[Reading, ...]
    """One for every use; empty where they cannot be read."""
    fallback_reason: str | None
    """Why the parameter goes to the fallback, None if it does not."""
    nodes: tuple[str, ...]
    """Names of the nodes that use the parameter, for the plan."""
    matrix_view: MatrixView | None
    """Set where every use is an outer product in the same matrix view: nothing needs to be formed."""


def common_matrix_view(graph: Graph, name: str, readings: tuple[Reading, ...]) -> MatrixView | None:
    """The view in which every use is an outer product and a rearrangement of the parameter, times a number."""
    leaf = graph.leaves[name]
    views: set[tuple[Any, ...]] = set()
    flipped: dict[Value, bool] = {}
    scales: dict[Value, float] = {}
    fixed = True
    for reading in readings:
        form = reading.form
        chain, factors = _rearrangements(reading.value[0], leaf)
        if not isinstance(form, Outer) or chain is None:
            return None
        fixed &= not factors
        scales[reading.value] = math.prod(factors, start=1.0)
        transposed = _transposed(graph, chain, leaf)
        sizes = (form.row_size, form.grad_size) if form.rows_first else (form.grad_size, form.row_size)
        if transposed:
            sizes = sizes[::-1]
        flipped[reading.value] = bool(transposed)
        signature = () if transposed is not None else tuple(_signature(graph, node) for node in chain)
        views.add((form.blocks, *sizes, signature))
    if len(views) != 1:
        return None
    (blocks, first, second, signature) = views.pop()
    order = _entry_order(graph, leaf, *next(iter(scales.items()))) if signature else None
    return MatrixView(blocks, first, second, flipped, scales, fixed, signature, order)


def _entry_order(graph: Graph, leaf: Node, value: Value, scale: float) -> Tensor:
    """Where each entry of the parameter stands when rearranged: the numbers of the places, sent back through it."""
    size, shape = graph.output_shape(value).numel(), graph.output_shape(value)
    places = torch.arange(size, device=leaf.variable.device)
    order, base = torch.zeros_like(places), 2**7  # digits that every floating type holds exactly
    weight = 1
    while weight < size:
        digits = (places // weight % base).reshape(shape).to(graph.output_dtype(value))
        (found,) = backward([GradientEdge(*value)], [leaf.variable], [digits])
        assert found is not None
        order += weight * (found.detach().flatten() / scale).round().long()
        weight *= base
    return order


def _rearrangements(node: Node, leaf: Node) -> tuple[list[Node] | None, list[float]]:
    """The nodes from an operand down to the parameter that rearrange their one input, and what they multiply it by.

    None if another kind of node is among them.
    """
    chain, factors = [], []
    while node is not leaf:
        factor = _factor_of(node)
        if factor is not None:
            factors.append(factor[0])
            node = node.next_functions[factor[1]][0]
        elif node.name() in REARRANGEMENTS:
            chain.append(node)
            node = node.next_functions[0][0]
        else:
            return None, factors
    return chain, factors


def _factor_of(node: Node) -> tuple[float, int] | None:
    """The number by which a node multiplies one of its inputs, and which one; None if it does anything else."""
    name = node.name()
    if name == "NegBackward0":
        return -1.0, 0
    if name not in ("MulBackward0", "DivBackward0"):
        return None
    inputs = [child for child, _ in node.next_functions]
    if sum(child is not None for child in inputs) != 1:
        return None
    place = 0 if inputs[0] is not None else 1
    other = saved(node, "other" if place == 0 else "self")
    # A number of Python is a tensor without axes on the CPU; one on a device would have to be waited for.
    if not isinstance(other, Tensor) or other.dim() or other.device.type != "cpu" or other.is_complex():
        return None
    number = float(other)
    if not math.isfinite(number) or not number or (name == "DivBackward0" and place == 1):
        return None
    return (number if name == "MulBackward0" else 1 / number), place


_ORDER_KEEPING = ("Alias", "Clone", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")


def _transposed(graph: Graph, chain: list[Node], leaf: Node) -> bool | None:
    """Whether a chain leaves the order of the elements (False) or transposes a matrix (True); None for all else."""
    shape, turns = graph.output_shape((leaf, 0)), 0
    for node in reversed(chain):
        output = graph.output_shape((node, 0))
        if not node.name().startswith(_ORDER_KEEPING):
            if len(shape) != 2 or output != shape[::-1]:
                return None
            # On a matrix a permutation is either a transpose or nothing; for a square one its arguments decide.
            turns += _swaps(node)
        elif turns % 2 and output != shape:
            return None
        shape = output
    return turns % 2 == 1


def _swaps(node: Node) -> int:
    name = node.name()
    if name.startswith("Permute"):
        return int([d % 2 for d in saved(node, "dims")] == [1, 0])
    if name.startswith(("Transpose", "Swapaxes")):
        return int(saved(node, "dim0") % 2 != saved(node, "dim1") % 2)
    return 1


def _signature(graph: Graph, node: Node) -> tuple[Any, ...]:
    """Equal for nodes that rearrange in the same way. Views and squeezes keep the order: their shape says it all."""
    arguments = [saved(node, key) for key in ("dims", "dim0", "dim1")]
    return (
        node.name(),
        *(tuple(a) if isinstance(a, list | tuple) else a for a in arguments),
        graph.output_shape((node, 0)),
    )


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


class Chunk:
    """The outputs of one batch of samples with their graph.

    `proof` records the ops of the forward pass, to see whether they keep the samples apart. `like`: a pass of which
    that is proved, with which it is compared. `structure`: that of an earlier graph, which is the same after the same
    calls.
    """

    def __init__(
        self,
        batch: ModelWithInputs,
        indices: Tensor | slice,
        parameters: Mapping[str, Tensor],
        *,
        proof: SeparationProof | None = None,
        like: ProvedPass | None = None,
        structure: GraphStructure | None = None,
    ) -> None:
        self.batch, self.parameters = batch, parameters
        self.count = len(range(batch.samples)[indices]) if isinstance(indices, slice) else len(indices)
        self._asked_for = indices
        if self.count == 1:  # shows no sample axis; a copy beside it does, and is dropped from every result
            self._asked_for = torch.arange(batch.samples, device="cpu")[indices].repeat(2)
        before = hooks_made()  # of every hook that is put on a tensor, a node or a module
        self.proved: ProvedPass | None = None
        """Set where it is proved that no sample has had an influence on another."""
        if proof is not None:
            outputs = batch.outputs(self._asked_for, proof.noting)
            self.proved = proof.proved(outputs)
        elif like is not None:
            repeated = RepeatedPass(like, batch.held, max(self.count, 2))
            outputs = batch.outputs(self._asked_for, repeated.noting)
            self.proved = like if repeated.holds(outputs) else None
        else:
            outputs = batch.outputs(self._asked_for)
        self.hooked = hooks_made() != before
        """Whether the forward pass has put hooks on anything. They may change gradients, and no graph shows them."""
        # A parameter returned as it is has no node of its own.
        self.outputs = outputs.view_as(outputs) if outputs.is_leaf else outputs
        self.graph: Graph | None = None
        self.structured = False
        """Whether its graph has the structure that was given."""
        if self.outputs.requires_grad:
            if structure is not None and self.proved is not None and not self.hooked:
                self.graph = structure.graph(self.outputs, parameters)
            self.structured = self.graph is not None
            self.graph = self.graph or build_graph(self.outputs, parameters)
            _refuse_hidden(self.graph)
        self.runs_own_backward = self.hooked or (self.graph is not None and not self.graph.structure.of_torch)
        """Whether a backward pass runs code that is not torch's."""
        self.accumulate = torch.promote_types(self.outputs.dtype, torch.float32)
        self.precision = (
            self.graph.structure.precision if self.graph is not None else torch.finfo(self.outputs.dtype).eps
        )
        self.axes: Axes = {}
        self.several_outputs: frozenset[Node] = frozenset()
        self.uses: dict[str, ParameterUses] = {}
        self._found: FoundUses | None = None
        self._to_fallback: dict[str, str] = {}
        self.unproved: frozenset[Node] = frozenset()
        """Ops whose sample axis is still to be confirmed by a backward pass."""

    @property
    def indices(self) -> Tensor:
        """The samples of the batch that were run."""
        chosen = self._asked_for
        return torch.arange(self.batch.samples, device="cpu")[chosen] if isinstance(chosen, slice) else chosen

    def read(self, axes: Axes, several_outputs: frozenset[Node] = frozenset()) -> None:
        """Find every use of every parameter, and read it by the rule of its op."""
        assert self.graph is not None
        self._read(axes, several_outputs, find_uses(self.graph, axes))

    def read_like(self, known: GraphReading) -> None:
        """Read every parameter as in a graph of the same structure."""
        graph = self.graph
        assert graph is not None
        several, self.unproved = (
            frozenset(map(graph.order.__getitem__, numbers)) for numbers in (known.several_outputs, known.unproved)
        )
        self._read(known.axes_in(graph), several, known.uses_in(graph), known)

    def reading(self) -> GraphReading | None:
        """How this chunk is read, for graphs of the same structure; None where that may change with values."""
        graph, found = self.graph, self._found
        assert graph is not None
        assert found is not None
        return GraphReading.of(graph, self.axes, self.several_outputs, self.unproved, found, self.uses)

    def _read(
        self, axes: Axes, several_outputs: frozenset[Node], found: FoundUses, known: GraphReading | None = None
    ) -> None:
        graph = self.graph
        assert graph is not None
        self.axes, self.several_outputs, self._found = axes, several_outputs, found
        readings: dict[str, list[Reading]] = defaultdict(list)
        reasons, nodes = dict(found.mixed), defaultdict(list)
        for edge, users in found.edges:
            # Parameters without entries have a kernel of zeros.
            names = [name for name in users if self.parameters[name].numel()]
            if not names:
                continue
            reading = read_use(graph, edge, axes.get(edge.consumer), edge.consumer in several_outputs)
            for name in names:
                nodes[name].append(graph.names[edge.consumer])
                if isinstance(reading, str):
                    reasons.setdefault(name, reading)
                else:
                    readings[name].append(reading)
        self.uses = {}
        for name in (name for name in graph.leaves if self.parameters[name].numel()):
            own, where = tuple(readings[name]), None
            if own and name not in reasons:
                kept = known is not None and known.knows(name, own)
                where = known.matrix_view_of(name, own) if kept and known else common_matrix_view(graph, name, own)
            self.uses[name] = ParameterUses(own, reasons.get(name), tuple(nodes[name]), where)
        self.send_to_fallback(self._to_fallback)

    def send_to_fallback(self, reasons: Mapping[str, str]) -> None:
        """Send parameters to the fallback."""
        self._to_fallback = {**self._to_fallback, **reasons}
        for name, reason in reasons.items():
            if name in self.uses:
                self.uses[name] = ParameterUses((), reason, self.uses[name].nodes, None)

    def precision_of(self, name: str) -> float:
        """Machine epsilon of the coarsest type between a parameter and the outputs."""
        return self.precision if self.graph is None else self.graph.structure.precisions.get(name, self.precision)

    def readable(self, names: Collection[str]) -> tuple[list[str], list[str]]:
        """Those that can be read, and those that go to the fallback."""
        uses = self.uses
        read = [name for name in names if name in uses and uses[name].fallback_reason is None]
        return read, [name for name in names if name in uses and uses[name].fallback_reason is not None]

    def use_layouts(self, names: Collection[str]) -> dict[Node, Layout]:
        """The ops that use some parameters, with their sample axes."""
        return {reading.use.node: reading.use.layout for name in names for reading in self.uses[name].readings}

    def unchecked(self, unseen: Collection[str]) -> list[str]:
        """Return parameters that were `unseen` in an audit, and those read by a user's rules.

        All of them where the forward pass put hooks on tensors: gradients at an op are asked for before its hooks.
        """
        return [
            name
            for name, uses in self.uses.items()
            if uses.fallback_reason is None and (self.hooked or name in unseen or not all(map(is_built_in, uses.nodes)))
        ]

    def is_fetched(self, names: Collection[str]) -> bool:
        """Whether all that these parameters are read from is held by their readings: built-in rules fetch it at once.

        The ops that a parameter passes before its use are on no path from the outputs to a use, and keep what they
        have.
        """
        return all(map(is_built_in, {node for name in names for node in self.uses[name].nodes}))


def _refuse_hidden(graph: Graph) -> None:
    if "CheckpointFunctionBackward" in graph.structure.names:
        raise UnsupportedModelError(
            "the model uses reentrant checkpointing, which hides its parameters from the graph; "
            "pass use_reentrant=False to torch.utils.checkpoint"
        )
