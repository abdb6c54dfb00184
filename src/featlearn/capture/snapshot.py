"""One chunk of samples, captured: per-sample gradients of any parameters, for any output directions.

Quantities see only `Factors` and `Dense` of `featlearn.linalg.factors`; how an op produced them stays in here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.capture.fallback import sample_gradients
from featlearn.capture.graph import Graph, Node, Value, backward, build_graph, gradients_at
from featlearn.capture.probe import Probe
from featlearn.capture.pullback import Access, Coordinates, coordinates, pulled_back
from featlearn.capture.recipe import Recipe
from featlearn.capture.sightings import Chosen, Sightings, Unconfirmed, expect_same, mixed, sightings
from featlearn.capture.stacks import Stack, mixed_at, stacked, used_positions, weighted
from featlearn.capture.uses import ParameterUses, Pattern, Reading, SampleAxes, parameter_uses
from featlearn.errors import UnsupportedModelError
from featlearn.linalg.collapse import Collapse
from featlearn.linalg.factors import Dense, Factor, Factors, Gradients, as_dense, merged
from featlearn.linalg.later import Later
from featlearn.linalg.rates import LITTLE
from featlearn.linalg.windows import Windows
from featlearn.ops import Direct, Layout, Outer, is_built_in

Expected = Callable[[Graph], Pattern | None]
"""The sample axes that a graph should have."""


def _nothing(graph: Graph) -> None:
    """Nothing is expected."""
    del graph


class Snapshot:
    """The outputs of one chunk of samples with their graph, read."""

    def __init__(
        self, probe: Probe, indices: Tensor | slice, parameters: Mapping[str, Tensor], generator: torch.Generator,
        distrusted: Mapping[str, str], expected: Expected = _nothing, exemplary: bool = False,
        recipe: Recipe | None = None,
    ) -> None:  # fmt: skip
        self.probe = probe
        self.count = len(range(probe.samples)[indices]) if isinstance(indices, slice) else len(indices)
        self.parameters = parameters
        self._asked_for = indices
        if self.count == 1:  # shows no sample axis; a copy beside it does, and is dropped from every result
            self._asked_for = torch.arange(probe.samples, device="cpu")[indices].repeat(2)
        self.outputs = self._forward()
        self.graph: Graph | None = None
        self.access: dict[str, Access] = {}
        self._distrusted: dict[str, str] = {}
        self.assumed = False
        self.pattern: Pattern | None = None
        self.unconfirmed: Unconfirmed | None = None
        """Set where sample axes are taken over from another graph."""
        self.audit_anew: Callable[[], Mapping[str, str]] = dict
        """Asked for what it distrusts where sample axes are not confirmed: the audit may have been taken over, too."""
        self.later: Later | None = None
        """Where what is to be confirmed is only asked for."""
        if recipe is not None:
            self.graph, self.access = recipe.read(self.outputs, parameters)
        elif self.outputs.requires_grad:
            self._read(generator, distrusted, expected, exemplary)
        self.accumulate = torch.promote_types(self.outputs.dtype, torch.float32)
        self.precision = self.graph.precision if self.graph is not None else torch.finfo(self.outputs.dtype).eps

    @property
    def indices(self) -> Tensor:
        """The samples of the probe that were run."""
        chosen = self._asked_for
        return torch.arange(self.probe.samples, device="cpu")[chosen] if isinstance(chosen, slice) else chosen

    def _forward(self) -> Tensor:
        outputs = self.probe.outputs(self._asked_for)
        # A parameter returned as it is has no node of its own.
        return outputs.view_as(outputs) if outputs.is_leaf else outputs

    def _read(
        self, generator: torch.Generator, distrusted: Mapping[str, str], expected: Expected = _nothing,
        exemplary: bool = False,
    ) -> None:  # fmt: skip
        """Find every use of every parameter; with `expected` sample axes nothing is asked of the network."""
        self.graph = build_graph(self.outputs, self.parameters)
        _refuse_hidden(self.graph)
        axes = SampleAxes(self.outputs, self.graph, generator, expected(self.graph), exemplary)
        for name, uses in parameter_uses(axes).items():
            self.access[name] = Access(uses, None if uses.refusal else coordinates(self.graph, name, uses.readings))
        self.distrust(distrusted)
        self.pattern, self.assumed = axes.pattern() if exemplary else None, axes.assumed

    @property
    def used(self) -> dict[Node, Layout]:
        """The nodes that use parameters, with their sample axes."""
        read = (access.uses.readings for access in self.access.values())
        return {reading.use.node: reading.use.layout for readings in read for reading in readings}

    def sightings(self, direction: Tensor) -> Sightings:
        """What these samples see of a direction."""
        assert self.graph is not None
        return sightings(self.outputs, self.graph.order, self.used, direction)

    def _at_places(self, grads: Mapping[Value, list[Tensor | None]], places: Tensor | slice) -> Chosen:
        """Gradients of some samples at all uses, directions mixed; copies, since what arrives is dropped when used."""
        assert self.graph is not None
        used = self.used
        return {
            number: mixed_at(grads[node, 0], used[node], places)
            for number, node in enumerate(self.graph.order)
            if (node, 0) in grads
        }

    def _confirm(self, grads: Mapping[Value, list[Tensor | None]], directions: Tensor) -> Callable[[], None] | None:
        """Ask whether sample axes that were taken over are those of this batch: a smaller one must see the same.

        None if they are not; otherwise what is left to be asked, when a GPU has been given all the rest.
        """
        unconfirmed, self.unconfirmed = self.unconfirmed, None
        if unconfirmed is None:
            return lambda: None
        if unconfirmed.direction is not None and not torch.equal(unconfirmed.direction, mixed(directions)):
            return None
        later = Later() if self.later is None else self.later
        here = self._at_places(grads, unconfirmed.places)

        def ask() -> None:
            expect_same(later, unconfirmed.seen(), here, self.precision)

        if self.later is not None:
            return ask
        ask()
        return (lambda: None) if later.hold() else None

    def precision_of(self, name: str) -> float:
        """Machine epsilon of the coarsest type between a parameter and the outputs."""
        return self.precision if self.graph is None else self.graph.precisions.get(name, self.precision)

    def distrust(self, reasons: Mapping[str, str]) -> None:
        """Send parameters to the fallback."""
        self._distrusted = {**self._distrusted, **reasons}
        for name, reason in reasons.items():
            if name in self.access:
                self.access[name] = Access(ParameterUses((), reason, self.access[name].uses.nodes), None)

    def gradients(
        self, names: Collection[str], directions: Tensor, dense: Collection[str] = ()
    ) -> dict[str, Gradients]:
        """Per-sample gradients of direction . f for every row of `directions` (K, C); those in `dense` are formed."""
        return dict(self.each_gradient(names, directions, dense))

    def each_gradient(
        self, names: Collection[str], directions: Tensor, dense: Collection[str] = (),
        collapse: Collapse | None = None, apart: bool = False, last: bool = False,
    ) -> Iterator[tuple[str, Gradients]]:  # fmt: skip
        """The same one by one: what is made of one parameter can be dropped before the next.

        With `collapse`, one direction may stand for all: Gram matrices are only right when summed over directions.
        `apart`: directions will be multiplied one by one, and lie in memory that way. `last`: nothing else will be
        asked of this snapshot, so that activations are dropped when they have served.
        """
        read, lost = self._sorted(names)
        final = last and not lost and self._fetched(read)
        grads = self._use_gradients(read, directions, apart, final)
        ask = self._confirm(grads, directions)
        if ask is None:
            self.distrust(self.audit_anew())  # samples may have become coupled
            self.outputs = self._forward() if final else self.outputs
            self._read(torch.Generator("cpu").manual_seed(0), self._distrusted)
            read, lost = self._sorted(names)
            grads = self._use_gradients(read, directions, apart)
        yield from self._each_read(read, grads, dense, collapse)
        if lost:
            for name, gradients in sample_gradients(self, lost, directions).items():
                yield name, gradients.take(slice(0, self.count))
        if ask is not None:
            ask()

    def each_direction(self, names: Collection[str], directions: Tensor) -> Iterator[Iterator[tuple[str, Gradients]]]:
        """The same for one direction after the other, where the sample axes are only asked for, or known.

        All parameters that are used must be readable.
        """
        read, lost = self._sorted(names)
        assert not lost
        unconfirmed, self.unconfirmed = self.unconfirmed, None
        seen: dict[int, list[Tensor | None]] = defaultdict(list)
        for k in range(len(directions)):
            last = k == len(directions) - 1 and self._fetched(read)
            grads = self._use_gradients(read, directions[k : k + 1], apart=False, last=last)
            for number, gradient in self._at_places(grads, unconfirmed.places).items() if unconfirmed else ():
                seen[number].append(gradient)
            yield self._each_read(read, grads)
        if unconfirmed is not None:
            assert self.later is not None
            here = {number: weighted(gradients) for number, gradients in seen.items()}
            expect_same(self.later, unconfirmed.seen(), here, self.precision)

    def _each_read(
        self, read: list[str], grads: dict[Value, list[Tensor | None]], dense: Collection[str] = (),
        collapse: Collapse | None = None,
    ) -> Iterator[tuple[str, Gradients]]:  # fmt: skip
        """Parameters that can be read, one by one; `grads` is emptied on the way."""
        formed: dict[int, Tensor] = {}
        # Biases before weights: what arrives at an op is dropped with its last use, and weights take most of it.
        read.sort(key=lambda name: self.access[name].coordinates is not None)
        waiting = Counter(reading.use.node for name in read for reading in self.access[name].uses.readings)
        for name in read:
            access = self.access[name]
            waiting.subtract(reading.use.node for reading in access.uses.readings)
            spent = {reading.use.node for reading in access.uses.readings if not waiting[reading.use.node]}
            arrived = {value: grads.pop(value) if value[0] in spent else grads[value]
                       for value in {(reading.use.node, 0) for reading in access.uses.readings}}  # fmt: skip
            found: Gradients
            if access.coordinates is not None:
                factors = self._factors(access.uses.readings, access.coordinates, arrived)
                if collapse is not None:
                    factors = collapse.apply(name, factors)
                found = as_dense(factors) if name in dense else factors
                del factors
            else:
                found = self._pulled_back(name, access.uses.readings, arrived, formed)
            del arrived
            yield name, found.take(slice(0, self.count))
            del found

    def _sorted(self, names: Collection[str]) -> tuple[list[str], list[str]]:
        """Those that can be read, and those that go to the fallback."""
        here = [name for name in names if name in self.access]
        return (
            [name for name in here if self.access[name].refusal is None],
            [name for name in here if self.access[name].refusal is not None],
        )

    def arriving(self, readings: Sequence[Reading], direction: Tensor) -> list[Tensor]:
        """Gradients of direction . f at the outputs of outer uses: (samples, positions, units) for each of them.

        `direction` is (C,), or (samples, C) for a direction of its own in every sample.
        """
        values: list[Value] = list(dict.fromkeys((reading.use.node, 0) for reading in readings))
        if direction.dim() == 2 and len(self.outputs) > self.count:
            direction = direction.repeat(2, 1)  # a single sample stands beside its copy
        found = gradients_at(self.outputs, values, direction.to(self.outputs).expand_as(self.outputs))
        units = []
        for reading in readings:
            form, grad = reading.form, found[reading.use.node, 0]
            assert isinstance(form, Outer)
            units.append(form.grads(self._arrived(reading, grad)).detach()[: self.count].flatten(2).to(self.accumulate))
        return units

    def _fetched(self, names: Collection[str]) -> bool:
        """Whether all that these parameters are read from is held by their readings: built-in rules fetch it at once.

        The ops that a parameter passes before its use are on no way from the outputs to a use, and keep what they have.
        """
        readings = (reading for name in names for reading in self.access[name].uses.readings)
        return all(is_built_in(reading.use.node.name()) for reading in readings)

    def _use_gradients(
        self, names: list[str], directions: Tensor, apart: bool, last: bool = False
    ) -> dict[Value, list[Tensor | None]]:
        """Gradients at the output of every node that uses one of these parameters, direction by direction."""
        nodes = {reading.use.node: None for name in names for reading in self.access[name].uses.readings}
        values: list[Value] = [(node, 0) for node in nodes]
        found: dict[Value, list[Tensor | None]] = defaultdict(list)
        if not values:
            return found
        if _worth_batching(self, directions) and self._batched_gradients(values, directions, found):
            return found
        stacks: dict[Value, Tensor] = {}
        for k, direction in enumerate(directions):
            cotangent = direction.to(self.outputs, non_blocking=True).expand_as(self.outputs)
            final = last and k == len(directions) - 1
            for value, gradient in gradients_at(self.outputs, values, cotangent, last=final).items():
                if gradient is not None and len(directions) > 1 and gradient.shape[:1] == self.outputs.shape[:1]:
                    # Side by side at once: then no direction's is held twice. What is the same for all samples is held
                    # for one of them.
                    rows = gradient[:1] if gradient.stride(0) == 0 else gradient
                    if value not in stacks:
                        sizes = (len(directions), len(rows)) if apart else (len(rows), len(directions))
                        whole = gradient.new_empty(*sizes, *gradient.shape[1:])
                        stacks[value] = whole if apart else whole.transpose(0, 1)
                    if stacks[value].shape[1] >= len(rows):
                        gradient = stacks[value][k].copy_(rows).expand_as(gradient)
                found[value].append(gradient)
        return found

    def _batched_gradients(
        self, values: list[Value], directions: Tensor, found: dict[Value, list[Tensor | None]]
    ) -> bool:
        """All directions in one pass; False where an op on the way cannot be vectorised."""
        cotangents = directions.to(self.outputs, non_blocking=True)[:, None].expand(-1, *self.outputs.shape)
        edges = [GradientEdge(*value) for value in values]
        try:
            stacks = backward([self.outputs], edges, [cotangents], batched=True)
        except (UnsupportedModelError, torch.OutOfMemoryError):
            return False
        for value, stack in zip(values, stacks, strict=True):
            found[value] = [None] * len(directions) if stack is None else Stack(stack)
        return True

    def _factors(
        self, readings: tuple[Reading, ...], where: Coordinates, grads: Mapping[Value, list[Tensor | None]]
    ) -> Factors:
        parts = []
        for reading in readings:
            assert isinstance(reading.form, Outer)
            part = self._factor(reading, reading.form, grads)
            flipped = replace(part, rows_first=part.rows_first != where.flipped[reading.value])
            parts.append(flipped)
        return Factors(merged(parts), where.blocks, where.first, where.second, where.view, where.order)

    def _factor(self, reading: Reading, form: Outer, grads: Mapping[Value, list[Tensor | None]]) -> Factor:
        arrived = grads[reading.use.node, 0]
        rows = form.rows()
        held: Tensor | Windows = rows
        if isinstance(rows, Windows):
            held = replace(rows, image=rows.image.detach().to(self.accumulate))
        elif rows.is_floating_point():
            held = rows.detach().to(self.accumulate)
        if isinstance(arrived, Stack) and (whole := arrived.viewed(form.grads)) is not None:
            return Factor(held, whole.detach().to(self.accumulate), form.rows_first, form.row_size)
        found = [form.grads(self._arrived(reading, grad)).detach() for grad in arrived]
        if not isinstance(held, Windows) and (used := used_positions(found)) is not None:
            held, found = held[:, used], [grad[:, used] for grad in found]
        return Factor(held, stacked(found, self.accumulate), form.rows_first, form.row_size)

    def _arrived(self, reading: Reading, grad: Tensor | None) -> Tensor:
        """What arrives at a use: zeros where the outputs do not depend on it."""
        return self.outputs.new_zeros(reading.use.output) if grad is None else grad

    def _pulled_back(
        self, name: str, readings: tuple[Reading, ...], grads: Mapping[Value, list[Tensor | None]],
        formed: dict[int, Tensor],
    ) -> Dense:  # fmt: skip
        """Form the gradient of every operand and pull it back to the parameter."""
        graph = self.graph
        assert graph is not None
        operands: dict[Value, Tensor] = {}
        for reading in readings:
            if id(reading) not in formed:
                formed[id(reading)] = self._operand_gradient(reading, grads)
            term = formed[id(reading)]
            operands[reading.value] = operands[reading.value] + term if reading.value in operands else term
        return Dense(pulled_back(graph.leaves[name], self.parameters[name], operands).to(self.accumulate))

    def _operand_gradient(self, reading: Reading, grads: Mapping[Value, list[Tensor | None]]) -> Tensor:
        """(samples, directions, *operand shape)"""
        use, form, graph = reading.use, reading.form, self.graph
        assert graph is not None
        dtype = graph.output_dtype(reading.value)
        if isinstance(form, Direct):
            terms = [form.gradient(self._arrived(reading, grad)) for grad in grads[use.node, 0]]
            return torch.stack(terms, 1).detach().to(dtype)
        factor = self._factor(reading, form, grads)
        first, second = form.row_size, form.grad_size
        if not form.rows_first:
            first, second = second, first
        whole = as_dense(Factors((factor,), form.blocks, first, second)).gradient
        return whole.reshape(*whole.shape[:2], *use.shape).to(dtype)


def _worth_batching(snapshot: Snapshot, directions: Tensor) -> bool:
    """On a GPU small passes leave it idle, and all directions go together if their gradients fit; a CPU loops."""
    outputs, graph = snapshot.outputs, snapshot.graph
    if not outputs.is_cuda or len(directions) == 1 or graph is None:
        return False
    needed = graph.output_bytes * len(directions)
    return needed < LITTLE or needed < torch.cuda.mem_get_info(outputs.device)[0] // 4


def _refuse_hidden(graph: Graph) -> None:
    if "CheckpointFunctionBackward" in graph.node_names:
        raise UnsupportedModelError(
            "the model uses reentrant checkpointing, which hides its parameters from the graph; "
            "pass use_reentrant=False to torch.utils.checkpoint"
        )
