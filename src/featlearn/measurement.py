"""One call: a network in isolation, its samples captured chunk by chunk, every chunk checked. Gone when it ends."""

import gc
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from featlearn.audit.audit import (
    AUDITED,
    Audit,
    audited,
    check_readings,
    correct_axes,
    expect_confirmed,
    read_by,
    refuse_underflow,
    refuse_unequal_sums,
)
from featlearn.audit.independence import Part, expect_independent, piece_count, refuse_coupled, run_parts
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Gradients
from featlearn.contraction.proportional_outputs import ProportionalOutputs
from featlearn.errors import ChangedOutputsError, InputValueError, UnsupportedModelError
from featlearn.gradients.captured import Chunk, GraphReading
from featlearn.gradients.fallback import sample_gradients
from featlearn.gradients.formed import backpropagate, formed_gradients
from featlearn.graph.graph import backward_to
from featlearn.network.inputs import ModelWithInputs
from featlearn.network.isolation import CompilerNotLoadedError, load_compiler
from featlearn.readouts import DefaultReadout
from featlearn.request import Request
from featlearn.separation import ProvedPass, SeparationProof


def fixed_generator() -> torch.Generator:
    """Random numbers that are the same in every measurement."""
    return torch.Generator("cpu").manual_seed(0)


class KnownReading(NamedTuple):
    """How the graph of a batch was read, for batches of the same kind and number of samples."""

    reading: GraphReading
    proof: ProvedPass | None
    """The pass that it repeats."""
    audit: Audit
    """The audit that it was read by."""


@dataclass(frozen=True, kw_only=True)
class OutputFacts:
    """What a model gives for inputs of one kind."""

    classes: int
    """C, the number of outputs."""
    dtype: torch.dtype
    """The precision in which kernels are accumulated."""
    device: torch.device
    """Where the outputs, and so the kernels, live."""
    launch_bytes: int
    """Bytes of one sample's activations on a GPU, 0 on a CPU: see `piece_count`."""


@dataclass
class KnownInputs:
    """What earlier measurements of a model have shown for inputs of one kind."""

    facts: OutputFacts | None = None
    is_recorded: bool = False
    """Whether the ops of a pass of a few samples were recorded."""
    proof: ProvedPass | None = None
    """The recorded pass, if its ops prove that samples do not influence each other and larger batches repeat it."""
    readings: dict[int, KnownReading] = field(default_factory=dict)
    """By number of samples."""


class Audits:
    """What is kept of a model between measurements: an audit for each graph, and facts for each kind of inputs.

    Everything that may change with the weights or the samples is checked in each measurement.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[str, ...], Audit] = {}
        """Audits by the names of all nodes of a graph."""
        self.inputs: defaultdict[object, KnownInputs] = defaultdict(KnownInputs)
        """By kind of inputs and of weights."""
        self.default: DefaultReadout | None = None
        """The readout that stands in for None; it is stated once."""
        self.passes_targets = False
        """True if the model gives all its logits only when it is called with targets."""
        self._weights: dict[object, int] = {}

    def weight_kind(self, kind: object) -> int:
        """Return a number that stands for the names, shapes and types of all weights: it is quick to compare."""
        return self._weights.setdefault(kind, len(self._weights))

    def forget_outputs(self) -> None:
        """Drop the number, precision and device of outputs."""
        for known in self.inputs.values():
            known.facts = None

    def forget_inputs(self) -> None:
        """Drop everything but the audits of graphs."""
        self.inputs.clear()


@dataclass(kw_only=True)
class Measurement:
    """A model in isolation with its batches, ready to be captured."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    originals: Mapping[str, Tensor]
    """The user's own parameters under the same names: `parameters` may be copies in another precision."""
    batches: tuple[ModelWithInputs, ...]
    request: Request
    audits: Audits
    weight_kind: int
    """States of the model with equal numbers share audits and plans: a layer may have become wider."""
    gathered_bytes: int | None
    """Largest number of bytes of weights gathered at a time, where they are sharded; else None."""
    copied_bytes: int
    """Bytes that weights and buffers take a second time."""
    facts: OutputFacts = None  # type: ignore[assignment]
    """What the model gives. Set once a few samples of every batch were run."""
    reuse: bool = False
    """Keep the last chunk of every batch, for several quantities of the same samples."""
    deferred: DeferredChecks | None = None
    """Where checks go that wait for a device; None evaluates them at once, and acts on what fails."""
    has_gradient: bool = False
    """Whether any chunk's outputs carried a gradient."""
    _recorded: set[object] = field(default_factory=set)
    """Kinds of inputs whose pass was recorded in this measurement."""
    _examples: dict[int, Chunk] = field(default_factory=dict)
    _last: dict[int, tuple[int, int, Chunk]] = field(default_factory=dict)
    """Batch -> begin, end and chunk of the samples that were captured last."""
    _generator: torch.Generator = field(default_factory=fixed_generator)

    @property
    def classes(self) -> int:
        """C, the number of outputs."""
        return self.facts.classes

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which kernels are accumulated."""
        return self.facts.dtype

    @property
    def device(self) -> torch.device:
        """Where the outputs, and so the kernels, live."""
        return self.facts.device

    def example(self, number: int = 0) -> Chunk:
        """A few samples of a batch, captured and read: what they show of uses and sizes holds for all."""
        if number not in self._examples:
            self._examples[number] = self._example(self.batches[number])
        return self._examples[number]

    @property
    def examples(self) -> list[Chunk]:
        """One for every batch."""
        return [self.example(number) for number in range(len(self.batches))]

    def _example(self, batch: ModelWithInputs, *, anew: bool = False) -> Chunk:
        """A few samples, audited if their graph is not known yet, or `anew`."""
        chunk = self._few(batch, proving=not self.known(batch).is_recorded)
        if chunk.graph is None:
            return chunk
        known = self.audits.graphs.get(chunk.graph.structure.names)
        if known is not None and not anew and known.axes_in(chunk.graph, len(chunk.outputs)) is not None:
            self._read(chunk)
            return chunk
        audit = audited(chunk, fixed_generator())
        if known is None or anew or known.unseen or not audit.unseen:
            self.audits.graphs[audit.nodes] = audit
        return chunk

    def _few(self, batch: ModelWithInputs, *, proving: bool) -> Chunk:
        """A few samples; `proving`: other batches will be compared with their pass."""
        indices = torch.arange(batch.samples, device="cpu")[spread(batch.samples)]
        if not proving:
            return Chunk(batch, indices, self.parameters)
        proof = SeparationProof(batch.held, max(len(indices), 2))
        try:
            chunk = Chunk(batch, indices, self.parameters, proof=proof)
        except CompilerNotLoadedError:
            load_compiler()
            return self._few(batch, proving=proving)
        except UnsupportedModelError:  # some code does not bear that its ops are noted
            chunk = Chunk(batch, indices, self.parameters)
        if proof.calls_higher_order:
            from featlearn.audit.refusals import refuse_closures  # late: few models need it

            refuse_closures(chunk)
        if not self.request.use_proofs:
            chunk.proved = None
        known = self.known(batch)
        known.proof, known.is_recorded = chunk.proved, True
        self._recorded.add(self.kind(batch))
        return chunk

    def defer(self, checks: DeferredChecks | None) -> None:
        """Collect checks instead of waiting for their answers; None: evaluate them at once again."""
        self.deferred = checks
        for batch in self.batches:
            batch.waiting = checks is None
        self._last.clear()

    def audit_again(self) -> None:
        """Audit a few samples of every batch anew; raises what only an audit can tell."""
        for batch in self.batches:
            chunk = self._example(batch, anew=True)
            if chunk.graph is not None:
                refuse_underflow(self.audits.graphs[chunk.graph.structure.names].largest, chunk.accumulate)

    def kind(self, batch: ModelWithInputs) -> object:
        """Cache key: batches with equal keys share facts, proofs and plans."""
        return (batch.kind, self.weight_kind)

    def known(self, batch: ModelWithInputs) -> KnownInputs:
        """What earlier measurements have shown for such inputs."""
        return self.audits.inputs[self.kind(batch)]

    def of_batches(self, *batches: ModelWithInputs) -> "Measurement":
        """The same model on some of its batches, or on others of the same kind. Chunks that are kept are shared.

        >>> with audited.measuring([probe, test], reuse=True) as measurement:
        ...     on_probe = measurement.of_batches(measurement.batches[0])  # quantities of the probe capture it once
        ...     crossed = measurement.of_batches(*measurement.batches[::-1])
        """
        places = {batch.name: number for number, batch in enumerate(self.batches)}
        examples = {number: self.example(places.get(batch.name, 0)) for number, batch in enumerate(batches)}
        return replace(self, batches=batches, _examples=examples)

    def chunk(self, batch: ModelWithInputs, begin: int, end: int) -> Chunk:
        """Samples [begin, end) of a batch: captured, checked for influence on each other, and read."""
        if (last := self._last.pop(id(batch), None)) is not None and last[:2] == (begin, end):
            self._last[id(batch)] = last
            return last[2]
        if self.has_gradient and not gc.isenabled():
            gc.collect(1)  # what earlier chunks have left
        whole = end - begin == batch.samples
        indices = slice(begin, end) if whole else torch.arange(begin, end, device="cpu")
        chunk, parts = self._run(batch, indices, begin, end)
        found, expected = chunk.outputs, (self.classes, self.dtype, self.device)
        if (found.shape[1], chunk.accumulate, found.device) != expected:
            raise ChangedOutputsError(
                f"the model gives {found.shape[1]} outputs ({found.dtype}, {found.device}) for samples from {begin} on "
                f"and {self.classes} ({self.dtype}, {self.device}) for others, expected the same for all; pass a "
                "readout= that makes them equal"
            )
        if self.deferred is not None:
            expect_independent(self.deferred, chunk, parts)
        elif parts:  # that outputs are finite is seen where they are made
            refuse_coupled(chunk, parts)
        if chunk.graph is not None:
            self.has_gradient = True
            self._read(chunk)
        if self.reuse:
            self._last[id(batch)] = begin, end, chunk
            if whole and self.batches and batch is self.batches[0]:
                self._examples.setdefault(0, chunk)  # it shows what a few samples would
        return chunk

    def without_captures(self) -> "Measurement":
        """Return the same measurement before anything was captured."""
        return replace(self, _examples={}, _last={})

    def _run(self, batch: ModelWithInputs, indices: Tensor | slice, begin: int, end: int) -> tuple[Chunk, list[Part]]:
        """Run samples, and again in parts where it is not proved that they do not influence each other."""
        known, samples = self.known(batch), end - begin
        reading = known.readings.get(samples)
        # A batch of the proof's size cannot reveal that the number of samples matters.
        while (proof := known.proof) is not None and max(samples, 2) != proof.samples:
            # Another proof is of other calls, whose graph may have the same nodes and other shapes.
            structure = None if reading is None or reading.proof is not proof else reading.reading.structure
            chunk = Chunk(batch, indices, self.parameters, like=proof, structure=structure)
            if chunk.proved is not None:
                return chunk, []
            del chunk  # before the next one is made
            if self.kind(batch) in self._recorded:  # the number of samples makes a difference
                known.proof = None
            else:  # a flag of the model has changed, say
                self._few(batch, proving=True)
        # Parts first: rewinding state for another pass invalidates what a graph has saved of it.
        parts = run_parts(batch, begin, end, piece_count(samples, self.facts.launch_bytes), self._generator)
        return Chunk(batch, indices, self.parameters), parts

    def _read(self, chunk: Chunk) -> None:
        """Read the uses of all parameters, with the sample axes of an audit, or of one made now."""
        graph = chunk.graph
        assert graph is not None
        readings = self.known(chunk.batch).readings
        known = readings.get(chunk.count) if chunk.structured else None
        audit = self.audits.graphs.get(graph.structure.names)
        if known is not None and audit is not None and known.audit is audit and known.proof is chunk.proved:
            chunk.read_like(known.reading)
        else:
            axes = None if audit is None else audit.axes_in(graph, len(chunk.outputs))
            if audit is None or axes is None:
                audit = audited(chunk, fixed_generator())
                self.audits.graphs.setdefault(audit.nodes, audit)
                return
            read_by(chunk, audit, *axes)
            repeatable = chunk.proved is not None and not chunk.structured and not chunk.hooked
            if repeatable and (reading := chunk.reading()) is not None:
                readings[chunk.count] = KnownReading(reading, chunk.proved, audit)
        chunk.send_to_fallback(audit.to_fallback)
        if names := chunk.unchecked(audit.unseen):
            self.audits.graphs[audit.nodes] = check_readings(chunk, audit, names, fixed_generator)

    def each_gradient(
        self,
        chunk: Chunk,
        names: Collection[str],
        directions: Tensor,
        *,
        dense: Collection[str] = (),
        proportional: ProportionalOutputs | None = None,
        apart: bool = False,
        last: bool = False,
    ) -> Iterator[tuple[str, Gradients]]:
        """Per-sample gradients of direction . f for every row of `directions` (K, C), parameter by parameter.

        What is made of one parameter can be dropped before the next. `dense`, `proportional`, `apart`: see
        `formed_gradients` and `backpropagate`. `last`: nothing else will be asked of this chunk.
        """
        readable, lost = chunk.readable(names)
        nodes = chunk.use_layouts(readable)
        doubtful = [node for node in nodes if node in chunk.unproved]
        at_once = bool(doubtful) and self.deferred is None
        final = last and not lost and not at_once and not self.reuse and chunk.is_fetched(readable)
        found = backpropagate(
            chunk, nodes, directions, apart=apart, last=final, coded=doubtful, generator=self._generator
        )
        grads = found.grads
        if doubtful and self.deferred is not None:
            expect_confirmed(self.deferred, chunk, found)
        elif doubtful and correct_axes(chunk, found):
            readable, lost = chunk.readable(names)
            nodes = chunk.use_layouts(readable)
            grads = {value: found.grads.pop(value) for value in list(found.grads) if value[0] in nodes}
        del found
        yield from formed_gradients(chunk, readable, grads, dense, proportional)
        if lost:
            gradients = sample_gradients(chunk, lost, directions)
            refuse_unequal_sums(chunk, gradients, directions, fixed_generator())
            yield from gradients.items()

    def confirm(self, chunk: Chunk) -> None:
        """Confirm all sample axes of a chunk that are in doubt, by two backward passes; refuse what cannot be read."""
        readable, _ = chunk.readable(chunk.uses)
        doubtful = [node for node in chunk.use_layouts(readable) if node in chunk.unproved]
        if doubtful:
            direction = torch.randn(1, self.classes, generator=self._generator, dtype=torch.float64, device="cpu")
            found = backpropagate(
                chunk, chunk.use_layouts(readable), direction, coded=doubtful, generator=self._generator
            )
            correct_axes(chunk, found)
            chunk.unproved = frozenset()

    def outputs(self, batch: ModelWithInputs, chunk: int = 256) -> Tensor:
        """(P, C) outputs of all samples, without a graph."""
        return torch.cat([batch.outputs(indices).detach() for indices in _pieces(batch, chunk)])

    def pulled_back(self, batch: ModelWithInputs, cotangent: Tensor, chunk: int = 256) -> dict[str, Tensor]:
        """J^T v for v of shape (P, C): the gradient of sum_i v_i . f_i, by plain backward passes over chunks."""
        totals = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        for (found,) in self.pulled_back_pieces(batch, cotangent[None], chunk):
            for name, gradient in found.items():
                totals[name] += gradient
        return totals

    def pulled_back_pieces(
        self, batch: ModelWithInputs, cotangents: Tensor, chunk: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """J_b^T v for each v of (m, P, C), chunk by chunk, by plain backward passes over its samples alone."""
        for indices in _pieces(batch, chunk):
            outputs, several = batch.paired_outputs(indices), []
            for cotangent in cotangents if outputs.requires_grad else ():
                chosen = cotangent[indices.to(cotangent.device)].to(outputs)
                _, found = backward_to(outputs, [], self.parameters, chosen)
                several.append({name: gradient.detach() for name, gradient in found.items() if gradient is not None})
            yield several or [{} for _ in cotangents]

    def refuse_no_gradient(self, *, of_example: bool = False) -> None:
        """Raise if no output depends on the parameters: of any chunk so far, or of a few samples."""
        if not (self.example().graph is not None if of_example else self.has_gradient):
            raise InputValueError(
                "the outputs carry no gradient: they are detached, or computed under no_grad inside the model; "
                "expected outputs that depend on the trainable parameters through differentiable operations"
            )

    def close(self) -> None:
        """Drop what leads back here: its memory would wait for the garbage collector."""
        self._last.clear()
        self._examples.clear()


def spread(samples: int) -> slice:
    """A few samples from everywhere, at equal distances: data may be sorted."""
    count = min(AUDITED, samples)
    step = max(1, (samples - 1) // max(count - 1, 1))
    return slice(0, step * (count - 1) + 1, step)


def _pieces(batch: ModelWithInputs, size: int) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = torch.arange(batch.samples, device="cpu").split(size)
    return pieces
