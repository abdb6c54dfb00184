"""What a Session keeps between calls: a model, the settings of its measurements, and what is known of its graphs."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from featlearn.audit.audit import refuse_foreign_weights, refuse_rewriting
from featlearn.distributed.agreement import same_arguments, same_outputs, same_tensors, smallest_budget
from featlearn.distributed.group import Expectation, RankGroup
from featlearn.distributed.sharded_model import ShardedWeights, idle_parts, sharded_weights, whole_weights
from featlearn.errors import FeatlearnError, InputValueError, UnsupportedModelError
from featlearn.graph.graph import build_graph
from featlearn.measurement import Audits, Measurement, OutputFacts
from featlearn.network.checks import admitted, trainable_parameters, unwrapped
from featlearn.network.inputs import (
    Inputs,
    ModelWithInputs,
    Readout,
    batch_size,
    cast_inputs,
    checked_dtype,
    map_tensors,
    tensors_in,
)
from featlearn.network.isolation import Isolation, undisturbed
from featlearn.network.state import Inventory
from featlearn.planning.memory import byte_budget, free_bytes, readable_bytes
from featlearn.readouts import TARGET_TYPES, LastPositionError, LogProbability
from featlearn.request import Request

if TYPE_CHECKING:
    from featlearn.distributed.layered_weights import LayeredWeights
    from featlearn.network.copies import StoredResult
    from featlearn.planning.plan import PlannedKernel


class Settings(TypedDict, total=False):
    """Keyword arguments that every function measuring a model accepts."""

    readout: Readout | None
    """Map from the model's output to (P,) or (P, C): `readout(output)` or `readout(output, x)`."""
    parameters: str | Sequence[str] | None
    """Glob or list of globs, such as `"layers.*.weight"`. Only matching parameters count; None for all."""
    dtype: torch.dtype | None
    """`torch.float64` to measure a copy of the model in double precision; None for the model's own precision."""
    memory: str | int | None
    """Byte budget, such as `"2GiB"`; None for half of the free memory."""
    group: object
    """`"world"` or a process group whose ranks divide the samples; None to divide nothing."""


class AuditedModel:
    """A model, the settings of its measurements, and what they have shown of it.

    Audits and plans are stored by what they depend on. Everything that may change with the weights or the samples is
    checked in each measurement.
    """

    x: Inputs = None
    """Inputs of calls that pass none; only a Session has some."""

    def __init__(self, model: nn.Module, request: Request | None = None, **settings: Unpack[Settings]) -> None:
        self.model = model
        self.request = request or Request(
            readout=settings.get("readout"),
            parameters=settings.get("parameters"),
            dtype=checked_dtype(settings.get("dtype")),
            memory=settings.get("memory"),
            group=RankGroup(settings.get("group")),
        )
        self.audits = Audits()
        self.plans: dict[object, PlannedKernel] = {}

    @contextmanager
    def measuring(
        self,
        inputs: Sequence[Inputs],
        *,
        reuse: bool = False,
        keep_weights: bool = False,
        by_layer: bool = False,
        common: Inputs | None = None,
        expected: Sequence[Expectation] = (),
    ) -> Iterator[Measurement]:
        """Isolate the model. What is measured inside leaves no trace on it.

        Args:
            inputs: Batches to measure: one, or two for a cross kernel.
            reuse: Hold the last captured chunk of every batch, for several quantities of the same samples.
            keep_weights: Have ops save the weights that they multiply. Inputs then need gradients; models that reject
                such inputs are measured without.
            by_layer: Allow weights of a sharded model to be gathered layer by layer. Only passes may read weights then.
            common: Samples that all ranks of the group have. Ranks enter together, after a check that all have the same
                network, which compares the outputs of two of these samples.
            expected: Other values that must agree on all ranks.
        """
        with self._gathered_weights(by_layer) as layered, ExitStack() as stack:
            entering = self._entering(inputs, reuse=reuse, layered=layered, keep_weights=keep_weights)
            if common is not None:
                entering = self.request.group.entered(
                    entering, lambda measurement: [*expected, *self._same_network(measurement, common, layered)]
                )
            yield stack.enter_context(entering)

    @contextmanager
    def _entering(self, inputs: Sequence[Inputs], **options: Any) -> Iterator[Measurement]:
        with ExitStack() as stack:
            yield self._enter(stack, inputs, **options)

    def _refuse_dependent(self, inputs: Sequence[Inputs]) -> None:
        """Refuse inputs computed from the parameters: a measurement would cut the gradient through them."""
        for x, name in zip(inputs, ("x", "x2"), strict=False):
            batch_size(x, name)
            tensors = [tensor for tensor in tensors_in(x) if tensor.requires_grad]
            if not tensors:
                continue
            parameters = trainable_parameters(self.model, self.request.parameters)
            sources = [key for key, parameter in parameters.items() if any(t is parameter for t in tensors)]
            for tensor in tensors:
                sources += [] if tensor.grad_fn is None else build_graph(tensor, parameters).leaves
            if sources:
                raise InputValueError(
                    f"{name} was computed from the model's own {', '.join(dict.fromkeys(sources))}, and its gradient "
                    f"through {name} would be left out. Pass the inputs of the whole computation, or {name}.detach() "
                    "to treat them as constants"
                )

    def _same_network(
        self, measurement: Measurement, common: Inputs, layered: "LayeredWeights | None"
    ) -> list[Expectation]:
        """Expect equal weights, equal outputs of two samples, and the same parameters to be trained."""
        model, batch, samples = measurement.model, measurement.batches[0], batch_size(common)
        trained = {f"requires_grad of {name}": p.requires_grad for name, p in model.named_parameters()}
        # Ranks that share the shards of a weight gather the same.
        weights = {name: p for name, p in model.named_parameters() if not (layered and layered.gathers(p))}
        few = slice(0, min(2, samples))
        x = cast_inputs(replace(batch, x=self.paired(common), samples=samples).take(few), self.request.dtype)
        outputs = replace(batch, x=x, samples=few.stop).outputs(few)
        precision = max((torch.finfo(p.dtype).eps for p in measurement.parameters.values()), default=0.0)
        return [
            same_arguments(trained),
            same_tensors(
                "the weight or buffer",
                {**weights, **dict(model.named_buffers())},
                "broadcast the model from one rank first (torch.distributed.broadcast, or DistributedDataParallel)",
            ),
            same_outputs(outputs, precision),
        ]

    @contextmanager
    def _gathered_weights(self, by_layer: bool) -> "Iterator[LayeredWeights | None]":
        """Gather the weights of a sharded model: all of them, or layer by layer where they do not fit."""
        model = unwrapped(self.model)
        if "torch.distributed.fsdp" not in sys.modules or not idle_parts(model):
            yield None
            return
        shards = sharded_weights(model)
        if shards is None or self._fits(shards, by_layer=by_layer and self.request.dtype is None):
            with whole_weights(model):
                yield None
            return
        from featlearn.distributed.layered_weights import LayeredWeights

        layered = LayeredWeights(model, shards.parts, shards.ranks)
        if self.request.group.given and (shards.replicated or not self.request.group.holds(shards.ranks)):
            raise InputValueError(
                "the weights do not fit into memory at once, and are spread over other ranks than those of group=, "
                "expected a mesh with one axis, of ranks that are all in the group; leave group= out"
            )
        with layered.in_place():
            self.request.group.settle = layered.settle
            try:
                yield layered
            finally:
                self.request.group.settle = lambda: None

    def _fits(self, shards: ShardedWeights, *, by_layer: bool) -> bool:
        """Return whether to gather all weights at once, the same on all ranks; raise if they do not fit either way."""
        ranks, device, memory = shards.ranks, shards.device, self.request.memory
        budget = smallest_budget(ranks, byte_budget(memory, device), device, measured=memory is None)
        budget = smallest_budget(self.request.group, budget, device, measured=False)
        if 2 * shards.whole_bytes <= budget or by_layer:  # the other half is for what is measured
            return 2 * shards.whole_bytes <= budget
        free = smallest_budget(ranks, free_bytes(device), device, measured=True)
        if shards.whole_bytes > free:
            raise UnsupportedModelError(
                f"the weights take {readable_bytes(shards.whole_bytes)} and {readable_bytes(free)} are free on each "
                "rank, expected room for all of them; layer by layer only fl.ntk, fl.quantities.ntk_diagonal, "
                "fl.NTKOperator and fl.estimate_alignment can be measured, without dtype="
            )
        return True

    def _enter(
        self,
        stack: ExitStack,
        inputs: Sequence[Inputs],
        *,
        reuse: bool,
        layered: "LayeredWeights | None",
        keep_weights: bool,
    ) -> Measurement:
        """Enter a measurement, with inputs that need gradients if ops are to save the weights that they multiply.

        It is entered again without, if the model rejects such inputs, and with targets passed to the model, if it gives
        all its logits only then.
        """
        self._refuse_dependent(inputs)
        paired = [self.paired(x) for x in inputs]
        measuring = self._measuring([needing_gradients(x) for x in paired] if keep_weights else paired, reuse, layered)
        try:
            return stack.enter_context(measuring)
        except LastPositionError:
            from featlearn.network.targets import can_pass_targets  # late: few models need it

            if self.audits.passes_targets or not all(can_pass_targets(self.model, x) for x in paired):
                raise
            self.audits.passes_targets = True
        except FeatlearnError:
            if not keep_weights:
                raise
            keep_weights = False
        return self._enter(stack, inputs, reuse=reuse, layered=layered, keep_weights=keep_weights)

    def inputs(self, x: Inputs | None) -> Inputs:
        """Return the inputs of a call, by default those of the Session."""
        return self.x if x is None else x

    def paired(self, x: Inputs) -> Inputs:
        """Pair inputs with targets, where the readout compares outputs with them."""
        readout = self.request.readout
        may_have_targets = readout is None and any(t.dim() > 1 and t.dtype in TARGET_TYPES for t in tensors_in(x))
        if not (may_have_targets or isinstance(readout, LogProbability)):
            return x
        from featlearn.network.targets import with_targets  # late: few models need it

        return with_targets(self.model, x, readout, passing=self.audits.passes_targets)

    @contextmanager
    def _measuring(
        self, inputs: Sequence[Inputs], reuse: bool, layered: "LayeredWeights | None"
    ) -> Iterator[Measurement]:
        model = unwrapped(self.model)
        with ExitStack() as stack:
            inside = Inventory(model)
            originals, sizes = admitted(self.model, inside, inputs, self.request.readout, self.request.parameters)
            copying = inside.needs_copy(self.request.dtype)
            isolation = stack.enter_context(
                undisturbed(
                    inside,
                    only_read=not reuse,  # a quantity of the user's own may write to them
                )
            )
            twin = model
            results: Sequence[StoredResult] = ()
            if copying:
                from featlearn.network.copies import copied_with_results  # few measurements need it

                twin, results = copied_with_results(model, self.request.dtype)
            parameters: Mapping[str, Tensor] = originals
            if twin is not model:
                inside = Inventory(twin)
                isolation = stack.enter_context(undisturbed(inside, only_read=not reuse))
                names = {id(p): name for name, p in model.named_parameters()}
                copies = dict(twin.named_parameters())
                parameters = {name: copies[names[id(p)]] for name, p in originals.items()}
            batches = tuple(
                ModelWithInputs(
                    model=twin,
                    x=cast_inputs(x, self.request.dtype),
                    samples=size,
                    readout=self.request.readout,
                    rewind=isolation.rewind,
                    name=name,
                    held=isolation.state.tensors,
                    guard=isolation.state.guard,
                )
                for x, size, name in zip(inputs, sizes, ("x", "x2"), strict=False)
            )
            copied_bytes = isolation.state.copied_bytes
            if twin is not model:
                copied_bytes += sum(tensor.numel() * tensor.element_size() for tensor in inside.tensors)
            gathered_bytes = None if layered is None else layered.largest
            copied_bytes += gathered_bytes or 0
            measurement = Measurement(
                model=twin,
                parameters=parameters,
                originals=originals,
                batches=batches,
                request=self.request,
                audits=self.audits,
                weight_kind=self.audits.weight_kind((tuple(parameters), inside.kind)),
                gathered_bytes=gathered_bytes,
                copied_bytes=copied_bytes,
                reuse=reuse,
            )
            stack.callback(measurement.close)
            ran = self._establish(measurement, model, results, isolation)
            self._state_default(batches)
            is_checked = ran and isolation.random.has_drawn()
            if is_checked:
                _refuse_random(measurement, isolation)
            yield measurement
            if not is_checked and isolation.random.has_drawn(at_end=True):
                _refuse_random(measurement, isolation)

    def _state_default(self, batches: Sequence[ModelWithInputs]) -> None:
        """Print what is measured without a readout, once for each Session."""
        default = next((batch.default for batch in batches if batch.default is not None), None)
        if default is not None and self.audits.default is None:
            self.audits.default = default
            if default.sentence:
                print(f"featlearn: {default.sentence}", file=sys.stderr)

    def _establish(
        self, measurement: Measurement, original: nn.Module, results: Sequence["StoredResult"], isolation: Isolation
    ) -> bool:
        """Set number of outputs, precision and device; return whether samples had to be run."""
        all_facts, ran = [], False
        for number, batch in enumerate(measurement.batches):
            known = measurement.known(batch)
            if known.facts is None:
                known.facts, ran = _output_facts(measurement, number, original, results, isolation), True
            all_facts.append(known.facts)
        first, last = all_facts[0], all_facts[-1]
        if first.classes != last.classes:
            raise InputValueError(
                f"the model gives {first.classes} outputs on x and {last.classes} on x2, expected the same number; "
                "pass a readout= that makes them equal"
            )
        measurement.facts = replace(first, launch_bytes=max(first.launch_bytes, last.launch_bytes))
        return ran

    def forget(self) -> None:
        """Drop facts about outputs, and the plans made from them. Audits of graphs stay."""
        self.audits.forget_inputs()
        self.plans.clear()

    def of_copy(self, model: nn.Module) -> "AuditedModel":
        """Return an audited model for a copy with other weights, which shares the audits."""
        twin = AuditedModel(model, replace(self.request, parameters=None, group=RankGroup()))
        twin.audits = self.audits
        return twin


def needing_gradients(x: Inputs) -> Inputs:
    """Return copies of inputs that need gradients."""

    def change(tensor: Tensor) -> Tensor:
        # Not a leaf: a model may write to its input.
        tensor = tensor.clone() if tensor.is_inference() else tensor
        return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor

    with torch.inference_mode(False), torch.enable_grad():
        return map_tensors(x, change)


def _refuse_random(measurement: Measurement, isolation: Isolation) -> None:
    """Raise if outputs or gradients change with the random numbers that the model draws."""
    from featlearn.audit.refusals import outputs_and_gradients, refuse_random_outputs  # late: few models need it

    measure = partial(outputs_and_gradients, parameters=measurement.parameters)
    refuse_random_outputs(measurement.batches, isolation.random, measure)


def _output_facts(
    measurement: Measurement, number: int, original: nn.Module, results: Sequence["StoredResult"], isolation: Isolation
) -> OutputFacts:
    """Run a few samples, and refuse models that cannot be measured."""
    before = dict(measurement.model.named_parameters())
    try:
        example = measurement.example(number)
    finally:  # where a pass has failed, weights that it has set are the likely cause
        refuse_rewriting(measurement.model, before, isolation.state)
    if measurement.model is not original:
        refuse_foreign_weights(measurement.originals, results, example)
    measurement.has_gradient = example.graph is not None
    outputs, activations = example.outputs, 0
    if example.graph is not None and outputs.device.type != "cpu":
        activations = max(1, example.graph.structure.output_bytes // len(example.indices))
    return OutputFacts(
        classes=outputs.shape[1],
        dtype=example.accumulate,
        device=outputs.device,
        launch_bytes=activations,
    )
