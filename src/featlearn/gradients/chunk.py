"""One batch of samples: its outputs, its graph, and per-sample gradients of any parameters for any output directions.

Quantities see only `Factors` and `Dense` of `featlearn.contraction.factors`; how an op produced them stays in here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.contraction.factors import Dense, Factor, Factors, Gradients, as_dense, merged
from featlearn.contraction.hardware import LITTLE
from featlearn.contraction.proportional_outputs import ProportionalOutputs
from featlearn.contraction.windows import Windows
from featlearn.errors import UnsupportedModelError
from featlearn.gradients.graph_reading import GraphReading
from featlearn.gradients.pullback import MatrixView, ParameterUses, common_matrix_view, pull_back
from featlearn.gradients.stacks import StackedGradients, in_type, stacked, used_positions
from featlearn.graph.graph import Graph, GraphStructure, Node, Value, backward, backward_to, build_graph
from featlearn.graph.layout import Layout
from featlearn.graph.repeated_pass import ProvedPass, RepeatedPass
from featlearn.graph.sample_axis import Axes
from featlearn.graph.separation import SeparationProof
from featlearn.graph.uses import FoundUses, find_uses
from featlearn.network.inputs import ModelWithInputs
from featlearn.ops import Direct, Outer, is_built_in
from featlearn.ops.reading import Reading, read_use
from featlearn.torch_internals import hooks_made

UseGradients = Mapping[Value, Sequence[Tensor | None]]
"""Op that uses a parameter -> gradients at its output, one for each direction; None where it has none."""


class Backpropagated(NamedTuple):
    """What backward passes from the outputs have given."""

    grads: dict[Value, Sequence[Tensor | None]]
    coded: Mapping[Value, Tensor | None]
    """Gradients of sum_k weights[p, k] direction_k . f_p at the ops that were asked for."""
    weights: Tensor | None
    """(samples, directions), None where nothing was asked for."""


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

    def backpropagate(
        self,
        nodes: Collection[Node],
        directions: Tensor,
        *,
        apart: bool = False,
        last: bool = False,
        coded: Collection[Node] = (),
        generator: torch.Generator | None = None,
    ) -> Backpropagated:
        """Gradients at ops that use parameters, one backward pass for each direction (K, C).

        One pass more gives the ops in `coded` a random mixture with weights of its own for every sample. `apart`:
        directions will be multiplied one by one, and lie in memory that way. `last`: activations are dropped when they
        have served.
        """
        values: list[Value] = [(node, 0) for node in nodes]
        if not values:
            return Backpropagated({}, {}, None)
        if not coded:
            return Backpropagated(dict(self._use_gradients(values, directions, apart, last)), {}, None)
        weights = torch.randn(
            len(self.outputs), len(directions), generator=generator, dtype=torch.float64, device="cpu"
        )
        cotangent = (weights @ directions.double().cpu()).to(self.outputs)
        found, _ = backward_to(self.outputs, [(node, 0) for node in coded], {}, cotangent)
        grads = dict(self._use_gradients(values, directions, apart, last))
        return Backpropagated(grads, found, weights.to(self.outputs))

    def formed(
        self,
        names: Sequence[str],
        grads: dict[Value, Sequence[Tensor | None]],
        dense: Collection[str] = (),
        proportional: ProportionalOutputs | None = None,
    ) -> Iterator[tuple[str, Gradients]]:
        """Per-sample gradients of parameters that can be read, one by one; `grads` is emptied on the way.

        Those in `dense` are formed. With `proportional`, one direction may stand for all: Gram matrices are only right
        when summed over directions.
        """
        operands: dict[int, Tensor] = {}
        # Biases before weights: what arrives at an op is dropped with its last use, and weights take most of it.
        groups = self._groups_of_operands([name for name in names if self.uses[name].matrix_view is None])
        groups += [[name] for name in names if self.uses[name].matrix_view is not None]
        last = {reading.use.node: group[0] for group in groups for reading in self.uses[group[0]].readings}
        for group in groups:
            name, uses = group[0], self.uses[group[0]]
            values = dict.fromkeys([(reading.use.node, 0) for reading in uses.readings])
            arrived = {value: grads.pop(value) if last[value[0]] == name else grads[value] for value in values}
            formed: dict[str, Gradients] = {}
            if uses.matrix_view is not None:
                factors = self._factors(uses.readings, uses.matrix_view, arrived)
                if proportional is not None:
                    factors = proportional.apply(name, factors)
                formed[name] = as_dense(factors) if name in dense else factors
                del factors
            else:
                formed.update(self._pull_back(group, uses.readings, arrived, operands))
            del arrived
            for name in group:
                gradients = formed.pop(name)
                yield name, gradients if gradients.samples == self.count else gradients.take(slice(0, self.count))
                del gradients

    def _groups_of_operands(self, names: Sequence[str]) -> list[list[str]]:
        """Group parameters with the same operands while they have no more entries than these, which are held anyway."""
        groups: list[list[str]] = []
        open_groups: dict[tuple[int, ...], tuple[list[str], int]] = {}
        for name in names:
            readings, entries = self.uses[name].readings, self.parameters[name].numel()
            key = tuple(map(id, readings))
            group, room = open_groups.get(key, ([], 0))
            if not group or entries > room:
                group, room = [], sum(reading.use.shape.numel() for reading in readings)
                groups.append(group)
            group.append(name)
            open_groups[key] = group, room - entries
        return groups

    def preactivation_gradients(self, readings: Sequence[Reading], direction: Tensor) -> list[Tensor]:
        """Gradients of direction . f at the outputs of outer uses: (samples, positions, units) for each of them.

        `direction` is (C,), or (samples, C) for a direction of its own in every sample.
        """
        values: list[Value] = list(dict.fromkeys((reading.use.node, 0) for reading in readings))
        if direction.dim() == 2 and len(self.outputs) > self.count:
            direction = direction.repeat(2, 1)  # a single sample stands beside its copy
        found, _ = backward_to(self.outputs, values, {}, direction.to(self.outputs).expand_as(self.outputs))
        units = []
        for reading in readings:
            form, grad = reading.form, found[reading.use.node, 0]
            assert isinstance(form, Outer)
            units.append(form.grads(self._arrived(reading, grad)).detach()[: self.count].flatten(2).to(self.accumulate))
        return units

    def _use_gradients(self, values: list[Value], directions: Tensor, apart: bool, last: bool) -> UseGradients:
        """Gradients at node outputs, direction by direction."""
        if _worth_batching(self, directions) and (batched := self._batched_gradients(values, directions)) is not None:
            return batched
        found: dict[Value, list[Tensor | None]] = defaultdict(list)
        stacks: dict[Value, Tensor] = {}
        count, samples = directions.shape[0], self.outputs.shape[0]  # len() of a tensor takes five calls
        placed = directions.to(self.outputs, non_blocking=True)
        for k in range(count):
            cotangent = placed[k].expand_as(self.outputs)
            final = last and k == count - 1
            at_values, _ = backward_to(self.outputs, values, {}, cotangent, last=final)
            for value, gradient in at_values.items():
                if gradient is not None and count > 1 and gradient.shape[:1] == (samples,):
                    # Side by side at once: then no direction's is held twice. What is the same for all samples is held
                    # for one of them.
                    rows = gradient[:1] if gradient.stride(0) == 0 else gradient
                    held = rows.shape[0]
                    if value not in stacks:
                        sizes = (count, held) if apart else (held, count)
                        whole = gradient.new_empty(*sizes, *gradient.shape[1:])
                        stacks[value] = whole if apart else whole.transpose(0, 1)
                    if stacks[value].shape[1] >= held:
                        gradient = stacks[value][k].copy_(rows).expand_as(gradient)
                found[value].append(gradient)
        return dict(found)

    def _batched_gradients(self, values: list[Value], directions: Tensor) -> UseGradients | None:
        """All directions in one pass; None where an op on the path cannot be vectorized."""
        count, outputs = directions.shape[0], self.outputs  # len() of a tensor takes five calls
        cotangents = directions.to(outputs, non_blocking=True)[:, None].expand(-1, *outputs.shape)
        edges = [GradientEdge(*value) for value in values]
        try:
            found = backward([outputs], edges, [cotangents], batched=True)
        except (UnsupportedModelError, torch.OutOfMemoryError):
            return None
        nothing: list[Tensor | None] = [None] * count
        return {
            v: nothing if whole is None else StackedGradients(whole) for v, whole in zip(values, found, strict=True)
        }

    def _factors(self, readings: Sequence[Reading], where: MatrixView, grads: UseGradients) -> Factors:
        parts = []
        for reading in readings:
            assert isinstance(reading.form, Outer)
            part = self._factor(reading, reading.form, grads, flipped=where.flipped[reading.value])
            scale = where.scales[reading.value]
            parts.append(part if scale == 1.0 else replace(part, grads=scale * part.grads))
        return Factors(merged(parts), where.blocks, where.first, where.second, where.view, where.order)

    def _factor(self, reading: Reading, form: Outer, grads: UseGradients, *, flipped: bool = False) -> Factor:
        arrived, rows_first = grads[reading.use.node, 0], form.rows_first != flipped
        rows = form.rows()
        held: Tensor | Windows = rows
        if isinstance(rows, Windows):
            held = replace(rows, image=in_type(rows.image, self.accumulate))
        elif rows.is_floating_point():
            held = in_type(rows, self.accumulate)
        if isinstance(arrived, StackedGradients) and (whole := arrived.viewed(form.grads)) is not None:
            return Factor(held, in_type(whole, self.accumulate), rows_first, form.row_size)
        found = [in_type(form.grads(self._arrived(reading, grad))) for grad in arrived]
        if not isinstance(held, Windows) and (used := used_positions(found)) is not None:
            held, found = held[:, used], [grad[:, used] for grad in found]
        return Factor(held, stacked(found, self.accumulate), rows_first, form.row_size)

    def _arrived(self, reading: Reading, grad: Tensor | None) -> Tensor:
        """What arrives at a use: zeros where the outputs do not depend on it."""
        return self.outputs.new_zeros(reading.use.output) if grad is None else grad

    def _pull_back(
        self, names: Sequence[str], readings: tuple[Reading, ...], grads: UseGradients, formed: dict[int, Tensor]
    ) -> dict[str, Dense]:
        """Form the gradient of every operand, and pull it back to the parameters that are behind all of them."""
        graph = self.graph
        assert graph is not None
        operands: dict[Value, Tensor] = {}
        for reading in readings:
            if id(reading) not in formed:
                formed[id(reading)] = self._operand_gradient(reading, grads)
            term = formed[id(reading)]
            operands[reading.value] = operands[reading.value] + term if reading.value in operands else term
        gradients = pull_back({name: graph.leaves[name] for name in names}, operands)
        return {name: Dense(in_type(gradient, self.accumulate)) for name, gradient in gradients.items()}

    def _operand_gradient(self, reading: Reading, grads: UseGradients) -> Tensor:
        """(samples, directions, *operand shape)"""
        use, form, graph = reading.use, reading.form, self.graph
        assert graph is not None
        dtype = graph.output_dtype(reading.value)
        if isinstance(form, Direct):
            terms = [form.gradient(self._arrived(reading, grad)) for grad in grads[use.node, 0]]
            whole = terms[0].unsqueeze(1) if len(terms) == 1 else torch.stack(terms, 1)
            return in_type(whole, dtype)
        factor = self._factor(reading, form, grads)
        first, second = form.row_size, form.grad_size
        if not form.rows_first:
            first, second = second, first
        formed = as_dense(Factors((factor,), form.blocks, first, second)).gradient
        return formed.reshape(*formed.shape[:2], *use.shape).to(dtype)


def _worth_batching(chunk: Chunk, directions: Tensor) -> bool:
    """On a GPU small passes leave it idle, and all directions go together if their gradients fit; a CPU loops."""
    outputs, graph = chunk.outputs, chunk.graph
    count = directions.shape[0]
    if not outputs.is_cuda or count == 1 or graph is None:
        return False
    needed = graph.structure.output_bytes * count
    return needed < LITTLE or needed < torch.cuda.mem_get_info(outputs.device)[0] // 4


def _refuse_hidden(graph: Graph) -> None:
    if "CheckpointFunctionBackward" in graph.structure.names:
        raise UnsupportedModelError(
            "the model uses reentrant checkpointing, which hides its parameters from the graph; "
            "pass use_reentrant=False to torch.utils.checkpoint"
        )
