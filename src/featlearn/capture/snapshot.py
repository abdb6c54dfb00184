"""One chunk of samples, captured: per-sample gradients of any parameters, for any output directions.

Quantities see only `Factors` and `Dense` of `featlearn.linalg.factors`; how an op produced them stays in here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.capture.fallback import sample_gradients
from featlearn.capture.graph import Graph, Value, build_graph, gradients_at
from featlearn.capture.probe import Probe
from featlearn.capture.pullback import Coordinates, coordinates, pulled_back
from featlearn.capture.uses import ParameterUses, Reading, SampleAxes, parameter_uses
from featlearn.errors import UnsupportedModelError
from featlearn.linalg.factors import Dense, Factor, Factors, Gradients, as_dense, merged
from featlearn.ops import Direct, Outer


@dataclass(frozen=True)
class Access:
    """How the per-sample gradients of one parameter are had."""

    uses: ParameterUses
    coordinates: Coordinates | None
    """Set where every use is an outer product in the same coordinates: nothing needs to be formed."""

    @property
    def refusal(self) -> str | None:
        """Why the parameter goes to the fallback, None if it does not."""
        return self.uses.refusal


class Snapshot:
    """The outputs of one chunk of samples with their graph, read."""

    def __init__(
        self, probe: Probe, indices: Tensor, parameters: Mapping[str, Tensor], generator: torch.Generator,
        distrusted: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.probe = probe
        self.count = len(indices)
        # A single sample shows no sample axis; a copy beside it does, and is dropped from every result.
        self.indices = indices if self.count > 1 else indices.repeat(2)
        self.parameters = parameters
        outputs = probe.outputs(self.indices)
        # A parameter returned as it is has no node of its own.
        self.outputs = outputs.view_as(outputs) if outputs.is_leaf else outputs
        self.graph: Graph | None = build_graph(self.outputs, parameters) if self.outputs.requires_grad else None
        self.access: dict[str, Access] = {}
        if self.graph is not None:
            _refuse_hidden(self.graph)
            for name, uses in parameter_uses(SampleAxes(self.outputs, self.graph, generator)).items():
                self.access[name] = Access(uses, None if uses.refusal else coordinates(self.graph, name, uses.readings))
            self.distrust(distrusted)
        self.accumulate = torch.promote_types(self.outputs.dtype, torch.float32)
        self.precision = self.graph.precision if self.graph is not None else torch.finfo(self.outputs.dtype).eps

    def precision_of(self, name: str) -> float:
        """Machine epsilon of the coarsest type between a parameter and the outputs."""
        return self.precision if self.graph is None else self.graph.precisions.get(name, self.precision)

    def distrust(self, reasons: Mapping[str, str]) -> None:
        """Send parameters to the fallback."""
        for name, reason in reasons.items():
            if name in self.access:
                self.access[name] = Access(ParameterUses((), reason, self.access[name].uses.nodes), None)

    def gradients(
        self, names: Collection[str], directions: Tensor, dense: Collection[str] = ()
    ) -> dict[str, Gradients]:
        """Per-sample gradients of direction . f for every row of `directions` (K, C); those in `dense` are formed."""
        return dict(self.each_gradient(names, directions, dense))

    def each_gradient(
        self, names: Collection[str], directions: Tensor, dense: Collection[str] = ()
    ) -> Iterator[tuple[str, Gradients]]:
        """The same one by one: what is made of one parameter can be dropped before the next."""
        here = [name for name in names if name in self.access]
        read = [name for name in here if self.access[name].refusal is None]
        lost = [name for name in here if self.access[name].refusal is not None]
        grads = self._use_gradients(read, directions)
        formed: dict[int, Tensor] = {}
        for name in read:
            access = self.access[name]
            found: Gradients
            if access.coordinates is not None:
                factors = self._factors(access.uses.readings, access.coordinates, grads)
                found = as_dense(factors) if name in dense else factors
            else:
                found = self._pulled_back(name, access.uses.readings, grads, formed)
            yield name, found.take(slice(0, self.count))
        if lost:
            for name, gradients in sample_gradients(self, lost, directions).items():
                yield name, gradients.take(slice(0, self.count))

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
            grad = self.outputs.new_zeros(reading.use.output) if grad is None else grad
            units.append(form.grads(grad).detach()[: self.count].flatten(2).to(self.accumulate))
        return units

    def _use_gradients(self, names: list[str], directions: Tensor) -> dict[Value, list[Tensor | None]]:
        """Gradients at the output of every node that uses one of these parameters, direction by direction."""
        nodes = {reading.use.node: None for name in names for reading in self.access[name].uses.readings}
        values: list[Value] = [(node, 0) for node in nodes]
        found: dict[Value, list[Tensor | None]] = defaultdict(list)
        if not values:
            return found
        for direction in directions:
            cotangent = direction.to(self.outputs).expand_as(self.outputs)
            for value, gradient in gradients_at(self.outputs, values, cotangent).items():
                found[value].append(gradient)
        return found

    def _factors(
        self, readings: tuple[Reading, ...], where: Coordinates, grads: Mapping[Value, list[Tensor | None]]
    ) -> Factors:
        parts = []
        for reading in readings:
            assert isinstance(reading.form, Outer)
            part = self._factor(reading, reading.form, grads)
            flipped = Factor(part.rows, part.grads, part.rows_first != where.flipped[reading.value], part.row_size)
            parts.append(flipped)
        return Factors(merged(parts), where.blocks, where.first, where.second, where.view, where.order)

    def _factor(self, reading: Reading, form: Outer, grads: Mapping[Value, list[Tensor | None]]) -> Factor:
        shape, example = reading.use.output, self.outputs
        stacked = torch.stack([
            form.grads(example.new_zeros(shape) if grad is None else grad).to(self.accumulate)
            for grad in grads[reading.use.node, 0]
        ])  # fmt: skip
        rows = form.rows().detach()
        return Factor(rows.to(self.accumulate) if rows.is_floating_point() else rows, stacked.detach(),
                      form.rows_first, form.row_size)  # fmt: skip

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
            zero = self.outputs.new_zeros(use.output)
            terms = [form.gradient(zero if grad is None else grad) for grad in grads[use.node, 0]]
            return torch.stack(terms, 1).detach().to(dtype)
        factor = self._factor(reading, form, grads)
        first, second = form.row_size, form.grad_size
        if not form.rows_first:
            first, second = second, first
        whole = as_dense(Factors((factor,), form.blocks, first, second)).gradient
        return whole.reshape(*whole.shape[:2], *use.shape).to(dtype)


def _refuse_hidden(graph: Graph) -> None:
    if "CheckpointFunctionBackward" in graph.node_names:
        raise UnsupportedModelError(
            "the model uses reentrant checkpointing, which hides its parameters from the graph; "
            "pass use_reentrant=False to torch.utils.checkpoint"
        )
