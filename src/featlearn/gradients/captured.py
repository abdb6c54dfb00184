"""One batch of samples: its outputs, its graph, and how every parameter is read from it."""

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from featlearn.errors import UnsupportedModelError
from featlearn.gradients.readings import GraphReading, ParameterUses, common_matrix_view
from featlearn.graph.graph import Graph, GraphStructure, Node, build_graph
from featlearn.graph.layout import Layout
from featlearn.graph.sample_axis import Axes
from featlearn.graph.uses import FoundUses, find_uses
from featlearn.network.inputs import ModelWithInputs
from featlearn.ops import is_built_in
from featlearn.ops.reading import Reading, read_use
from featlearn.separation.proof import SeparationProof
from featlearn.separation.repeated_pass import ProvedPass, RepeatedPass
from featlearn.torch_internals import hooks_made


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
