"""The network at one step, measured on its probe. What several quantities need is computed once."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.audited_model import AuditedModel
from featlearn.contraction.kernel_sum import Kernels
from featlearn.errors import MemoryBudgetError
from featlearn.gradients.captured import Chunk
from featlearn.gradients.directions import Directions, Outputs, output_directions
from featlearn.graph.graph import backward
from featlearn.kernel.execution import measured_kernels
from featlearn.kernel.step_rates import step_rates
from featlearn.linear_maps.consecutive import Pair, consecutive
from featlearn.linearization.two_states import LEAST, Gap, GapMemory, TwoStates
from featlearn.measurement import Measurement
from featlearn.monitoring.probe_data import Sizes, WatchedNetwork, as_targets, pull_on_outputs
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, ModelWithInputs
from featlearn.planning.kernel_plan import bytes_per_sample
from featlearn.planning.memory import byte_budget
from featlearn.planning.plan import KernelCall, Rate
from featlearn.quantities.feature_change import (
    LAST,
    LOW_PRECISION,
    FeatureChange,
    RepresentationReader,
    Representations,
    current_state,
    entering,
    feature_changes,
)
from featlearn.quantities.layer_features import NeuralFeatures
from featlearn.quantities.layer_pairs import Rates, pair_balance
from featlearn.quantities.neural_features import InitialGradients, measured_features, refuse_shared

if TYPE_CHECKING:
    from featlearn.monitoring.shared_measurement import SharedMeasurement

MANY_OUTPUTS = 16
"""Number of outputs up to which each has its own kernel; above, fixed random directions estimate the mean."""
LARGEST_CAPTURE = 1024
"""Number of samples that are captured at once, at most."""
DIRECTIONS, FEATURE_DIRECTIONS = 8, 4
"""Number of random directions of kernels and of neural features."""
LARGEST_FULL = 2048
"""Samples times outputs up to which a kernel between all outputs is measured: 16 MiB in float32."""
SHRUNK = 0.95
"""Share of a layer's first weights below which they count as shrunk."""
LARGEST_FIRST = 2**24
"""Numbers of the first representations, or gradients, up to which they are stored: 64 MiB in float32."""
LARGEST_SUM = 2**28
"""Numbers in such kernels of all layers together, up to which each output's kernel is taken from them: 1 GiB."""


@dataclass
class Baseline:
    """Values of the first measurement, with which later ones are compared."""

    kernel: Tensor | None = None
    """(P, P), the mean over outputs."""
    outputs: Tensor | None = None
    """(P, C)"""
    balances: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    """Pair of layers -> what gradient flow conserves between them."""
    weights: dict[tuple[str, str], float] = field(default_factory=dict)
    """Pair of layers -> |W|^2 / rate of the first of them."""


@dataclass
class RunMemory:
    """What the measurements of a run share, as long as the same parameters are trained."""

    names: tuple[str, ...]
    """The parameters that are trained."""
    rates: Rates
    """Their learning rates when their training began; 1 if no optimizer is known, or if it begins at 0."""
    gap: GapMemory = field(default_factory=GapMemory)
    reader: RepresentationReader | None = None
    first: Representations | None = None
    """What enters each layer at the start of the run, unless it is large."""
    gradients: InitialGradients = field(default_factory=lambda: InitialGradients(LARGEST_FIRST))
    """Gradients at each layer at the start of the run, unless they are large."""
    sample_bytes: int = 0
    """Bytes of one captured sample; 0 if unknown."""
    pairs_from: Literal["few", "all", "math"] = "few"
    """What shows which layers follow each other: a few samples, all that are captured, or few with the math backend."""

    @classmethod
    def of(cls, watched: WatchedNetwork) -> "RunMemory":
        """Return an empty memory for the parameters that are trained now."""
        parameters, optimizer = trainable_parameters(watched.model), watched.optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        known = all(id(p) in trained for p in parameters.values()) and all(float(group["lr"]) > 0 for group in groups)
        return cls(tuple(parameters), Rates(optimizer if known else None, parameters, []))


@dataclass(kw_only=True, eq=False)
class StepMeasurement:
    """The network at one step of a run. Each attribute is measured on first access. Tensors are on the CPU."""

    watched: WatchedNetwork
    step: int
    audited: AuditedModel
    now: Measurement
    stack: ExitStack
    memory: RunMemory
    baseline: Baseline | None = None
    """Values of the first measurement; None if this is the first."""
    end: bool = False
    """Whether it is the first or the last measurement, with kernels of test points and between outputs."""
    shared: "SharedMeasurement | None" = None
    """The ranks that measure together; None for this one alone."""

    @property
    def model(self) -> nn.Module:
        """The network as it is now; do not modify it."""
        return self.watched.model

    @property
    def x(self) -> Inputs:
        """Inputs of the probe."""
        return self.watched.probe.x

    @property
    def probe_batch(self) -> ModelWithInputs:
        """The network with its probe."""
        return self.now.batches[0]

    @cached_property
    def outputs(self) -> Tensor:
        """(P, C) outputs on the probe."""
        return self._forward[0]

    @cached_property
    def _forward(self) -> tuple[Tensor, Tensor | None]:
        if self._capture is not None and LAST in self._entering:
            return self._capture.outputs[: self._capture.count].detach().cpu(), self._entering[LAST]
        from featlearn.quantities.representation import outputs_with_features  # late: few networks need it

        outputs, features = outputs_with_features(self.now.batches[0])
        return outputs.cpu(), features

    @cached_property
    def _capture(self) -> Chunk | None:
        """The probe, captured once for all quantities; None where its graph takes too much memory."""
        now, samples, memory = self.now, self.watched.probe.samples, self.memory
        memory.sample_bytes = memory.sample_bytes or bytes_per_sample(now)
        room = 0.2 * byte_budget(self.audited.request.memory, now.device)
        fits = samples <= LARGEST_CAPTURE and samples * memory.sample_bytes <= room
        return now.chunk(now.batches[0], 0, samples) if fits else None

    @cached_property
    def _entering(self) -> Representations:
        return {} if self._capture is None else entering(self._capture)

    @property
    def _reads_graph(self) -> bool:
        """Whether the capture shows what enters every layer, in full precision."""
        parameters = self.watched.model.parameters()
        return self._capture is not None and all(p.requires_grad and p.dtype not in LOW_PRECISION for p in parameters)

    @cached_property
    def targets(self) -> Tensor | None:
        """(P, C) targets in double; class labels become one-hot rows less 1 / C."""
        return None if self.watched.probe.y is None else as_targets(self.watched.probe.y, self.outputs)

    @property
    def gap(self) -> Gap:
        """The linearization gap since the start of the run, on the probe."""
        return self._gaps[0]

    @property
    def test_gap(self) -> Gap | None:
        """The same on the test points; None where they are too few to show its error."""
        return self._gaps[1]

    @cached_property
    def _gaps(self) -> tuple[Gap, Gap | None]:
        """The gaps on the probe and on the test points: in one pass where they form one batch."""
        test, outputs, states = self.watched.test, self.outputs, self._two_states()
        if test is None or test.samples < LEAST or self.test_outputs is None:
            return states.gap(self.x, outputs=outputs), None
        if self.watched.both is None:
            return states.gap(self.x, outputs=outputs), states.gap(test.x, outputs=self.test_outputs)
        probe, tests = states.gaps(self.watched.both, [outputs, self.test_outputs])
        return probe, tests

    @cached_property
    def unshrunk_gap(self) -> Gap | None:
        """The gap from the first weights, shrunk layer by layer to what is left of them; None where they have not."""
        states = self._two_states(unshrunk=True)
        return None if min(states.shrinking.values()) > SHRUNK else states.gap(self.x, outputs=self.outputs)

    def _two_states(self, *, unshrunk: bool = False) -> TwoStates:
        initial, memory = self.watched.initial, self.memory.gap
        return TwoStates(self.audited, initial, unshrunk=unshrunk, memory=memory, inside=self.now)

    @cached_property
    def feature_changes(self) -> dict[str, FeatureChange]:
        """Layer -> change of what enters it since the start of the run; `LAST` -> of what enters the last layer."""
        return feature_changes(self._representations, self._first_representations)

    @property
    def constant_inputs(self) -> list[str]:
        """Layers whose input is the same for all samples now, and was not at the start of the run."""
        now, first = self._representations, self._first_representations
        names = [name for name in first if name in now and name != LAST]
        return [name for name in names if _is_constant(now[name]) and not _is_constant(first[name])]

    @cached_property
    def statistics_change(self) -> tuple[FeatureChange, FeatureChange] | None:
        """Changes of what enters the last layer, by buffers alone and by weights alone; None if no buffer changed.

        Buffers change first, at the first weights, and weights then.
        """
        model, initial = self.watched.model, self.watched.initial
        now = dict(unwrapped(model).named_buffers())
        if all(torch.equal(buffer, initial[name].to(buffer)) for name, buffer in now.items() if name in initial):
            return None
        between = self._reader.at(initial, self.x, buffers=now)
        first, last = self._first_representations, self._representations
        return feature_changes(between, first)[LAST], feature_changes(last, between)[LAST]

    @cached_property
    def _representations(self) -> Representations:
        return self._entering if self._reads_graph else self._reader.at(current_state(self.watched.model), self.x)

    @cached_property
    def _first_representations(self) -> Representations:
        if not self._reads_graph:
            return self._reader.at(self.watched.initial, self.x)
        if self.memory.first is None:
            (batch,) = self._start.batches
            first = entering(self._start.chunk(batch, 0, batch.samples))
            self._store_first(first)
            return first
        return self.memory.first

    def _store_first(self, first: Representations) -> None:
        if sum(features.numel() for features in first.values()) <= LARGEST_FIRST:
            self.memory.first = {name: features.clone() for name, features in first.items()}

    @property
    def _reader(self) -> RepresentationReader:
        if self.memory.reader is None:
            self.memory.reader = RepresentationReader(self.audited)
        return self.memory.reader

    @cached_property
    def last_features(self) -> Tensor | None:
        """(P, N) what enters the last layer, on its device; None where its rows are not the samples."""
        return self._forward[1]

    @cached_property
    def layer_kernels(self) -> dict[str, Tensor]:
        """Layer -> (C, P, P), one kernel per output; (1, P, P), their mean, where outputs are many."""
        probe = slice(self.watched.probe.samples)
        return {name: kernel[:, probe, probe].contiguous() for name, kernel in self._each_by_layer.items()}

    @cached_property
    def _each_by_layer(self) -> dict[str, Tensor]:
        """Layer -> (C, N, N) or (1, N, N) for N samples: the probe, and the test probe at an end of the run."""
        if self._full_by_layer is not None:
            return {name: torch.einsum("pqcc->cpq", kernel) for name, kernel in self._full_by_layer.items()}
        return {name: kernel.cpu() for name, kernel in self._kernels(self._measured_samples, "layer").items()}

    @cached_property
    def _full_by_layer(self) -> dict[str, Tensor] | None:
        """Layer -> (N, N, C, C), where both kernels are asked for: each output's is then part of it."""
        measurement = self._measured_samples
        classes, samples = measurement.classes, measurement.batches[0].samples
        layers = len({name.rpartition(".")[0] for name in measurement.parameters})
        size = (samples * classes) ** 2
        if not self.end or classes > MANY_OUTPUTS or not self._wants_full(measurement) or layers * size > LARGEST_SUM:
            return None
        try:
            found = self._measured(measurement, "full", "layer")
        except MemoryBudgetError:
            return None
        return {name: kernel.cpu() for name, kernel in found.items()}

    @cached_property
    def _measured_samples(self) -> Measurement:
        """The probe; at the first and the last measurement with the test probe in the same batch, where it fits."""
        if not self.end or self.watched.both is None:
            return self.now
        return self.stack.enter_context(self.audited.measuring([self.watched.both], reuse=True))

    @cached_property
    def _full_of_all(self) -> Tensor | None:
        """(N, N, C, C) between all outputs; None if it is too large, or for a single output."""
        if self._full_by_layer is not None:
            whole: Tensor = sum(self._full_by_layer.values(), torch.zeros(()))
            return whole
        return self._full(self._measured_samples, {})

    @cached_property
    def kernel_each(self) -> Tensor:
        """(C, P, P), or (1, P, P) where outputs are many."""
        total: Tensor = sum(self.layer_kernels.values(), torch.zeros(()))
        return total

    @cached_property
    def kernel(self) -> Tensor:
        """(P, P), the mean over outputs."""
        return self.kernel_each.mean(0)

    @cached_property
    def kernel_full(self) -> Tensor | None:
        """(P, P, C, C) between all outputs; None if it is too large, or for a single output."""
        probe = slice(self.watched.probe.samples)
        return None if self._full_of_all is None else self._full_of_all[probe, probe].contiguous()

    @cached_property
    def features(self) -> NeuralFeatures:
        """Neural features of every layer, compared with the start of the run where it is known."""
        outputs = Directions(FEATURE_DIRECTIONS) if self.now.classes > MANY_OUTPUTS else None
        compared = self.baseline is not None and bool(self.watched.initial)

        def alone() -> NeuralFeatures:
            gradients = self.memory.gradients
            if not compared:
                is_start = self.baseline is None and not gradients
                return measured_features(self.now, None, None, outputs, store=gradients if is_start else None)
            if gradients:
                return measured_features(self.now, gradients, None, outputs)
            refuse_shared(self._start, self.watched.model)
            return measured_features(self.now, self._start, None, outputs)

        return (
            alone() if self.shared is None else self.shared.measured(self.watched, alone, "features", compared, outputs)
        )

    @cached_property
    def loss_gradients(self) -> dict[str, Tensor] | None:
        """Parameter -> derivative of the training loss on the probe, up to a factor; None if the loss is not known."""
        y = self.watched.probe.y
        pull = None if y is None else pull_on_outputs(y, self.outputs, self.watched.loss)
        if pull is None:
            return None
        now, chunk = self.now, self._capture
        if chunk is None or chunk.count != len(chunk.outputs):
            return now.pulled_back(now.batches[0], pull.to(now.device))
        gradients = backward([chunk.outputs], [*now.parameters.values()], [pull.to(chunk.outputs)])
        return {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(now.parameters.items(), gradients, strict=True)
        }

    @cached_property
    def pairs(self) -> dict[tuple[str, str], Pair]:
        """Pairs of consecutive weight layers."""
        return self._followed[0]

    @cached_property
    def balances(self) -> dict[tuple[str, str], Tensor]:
        """Pair of layers -> what gradient flow conserves between them; its diagonal where not all of it."""
        pairs, measurement = self._followed
        return {names: pair_balance(pair, names, self.memory.rates, measurement).value for names, pair in pairs.items()}

    @cached_property
    def optimizer_kernel(self) -> Tensor | None:
        """(P, P) kernel of the update that the optimizer makes, None before its first step or without one."""
        rates = self._step_rates
        return None if rates is None else self._mean(self.now, rates)

    @cached_property
    def optimizer_kernel_full(self) -> Tensor | None:
        """(P, P, C, C) kernel of the optimizer's update between all outputs."""
        rates = self._step_rates
        return None if rates is None else self._full(self.now, rates)

    @cached_property
    def optimizer_cross_kernels(self) -> tuple[Tensor, Tensor | None] | None:
        """(P', P) kernel of the optimizer's update between the test probe and the probe, and (P', P, C, C)."""
        rates = self._step_rates
        return None if rates is None or self.watched.test is None else self._cross(rates)

    @cached_property
    def test_outputs(self) -> Tensor | None:
        """(P', C) outputs on the test probe."""
        test = self.watched.test
        if test is None:
            return None
        x = self.audited.paired(test.x)
        return self.now.outputs(replace(self.now.batches[0], x=x, samples=test.samples)).cpu()

    @cached_property
    def test_targets(self) -> Tensor | None:
        """(P', C) targets of the test probe."""
        test, outputs = self.watched.test, self.test_outputs
        return None if test is None or test.y is None or outputs is None else as_targets(test.y, outputs)

    @cached_property
    def test_kernel(self) -> Tensor | None:
        """(P', P') kernel of the test probe, the mean over outputs."""
        if self._measured_samples is not self.now:
            return self._mean_of_all[self.watched.probe.samples :, self.watched.probe.samples :].contiguous()
        if self.watched.test is None:
            return None
        with self.audited.measuring([self.watched.test.x], reuse=True) as measurement:
            return self._mean(measurement, {})

    @cached_property
    def cross_kernels(self) -> tuple[Tensor, Tensor | None] | None:
        """Kernels of the test probe with the probe: (P', P), the mean over outputs, and (P', P, C, C) between all."""
        if self._measured_samples is not self.now:
            probe, test = slice(self.watched.probe.samples), slice(self.watched.probe.samples, None)
            full = self._full_of_all
            return self._mean_of_all[test, probe].contiguous(), None if full is None else full[test, probe].contiguous()
        return None if self.watched.test is None else self._cross({})

    @cached_property
    def _mean_of_all(self) -> Tensor:
        """(N, N), the mean over outputs."""
        total: Tensor = sum(self._each_by_layer.values(), torch.zeros(()))
        return total.mean(0)

    def as_baseline(self, *, kernel: bool, layers: bool) -> Baseline:
        """The values with which later steps are compared."""
        baseline = Baseline(self.kernel if kernel else None, self.outputs)
        if self.memory.first is None and self._reads_graph:
            self._store_first(self._entering)
        if layers:
            baseline.balances = self.balances
            for names, pair in self.pairs.items():
                rate = self.memory.rates.of(names[0], pair.first.parameters[0])
                baseline.weights[names] = float(pair.before.square().sum()) / rate
        return baseline

    @cached_property
    def _start(self) -> Measurement:
        audited = self.audited.of_copy(network_at(self.watched.model, self.watched.initial))
        return self.stack.enter_context(audited.measuring([self.watched.probe.x], reuse=True, keep_weights=True))

    @cached_property
    def _followed(self) -> tuple[dict[tuple[str, str], Pair], Measurement]:
        memory, now = self.memory, self.now
        if memory.pairs_from == "all" and self._capture is not None:
            return consecutive(now.example())[0], now
        now = now.without_captures()
        if memory.pairs_from == "few":
            pairs = consecutive(now.example())[0]
            if all(pair.after is not None for pair in pairs.values()):
                # To trace channels takes backward passes, which few samples make cheap.
                memory.pairs_from = "few" if any(pair.traced for pair in pairs.values()) else "all"
                return pairs, now
            now = now.without_captures()
        # Fused attention has no second derivative, which tracing channels needs. The math backend has.
        with sdpa_kernel(SDPBackend.MATH):
            pairs = consecutive(now.example())[0]
        memory.pairs_from = "math"
        return pairs, now

    @property
    def _step_rates(self) -> dict[str, Rate] | None:
        """Rates after the last optimizer step; gradients are set aside during a measurement."""
        optimizer = self.watched.optimizer
        if optimizer is None or (not optimizer.state and not isinstance(optimizer, torch.optim.SGD)):
            return None
        return step_rates(optimizer, trainable_parameters(self.watched.model))

    def _cross(self, rates: Mapping[str, Rate]) -> tuple[Tensor, Tensor | None]:
        assert self.watched.test is not None
        inputs = [self.watched.test.x, self.watched.probe.x]
        with self.audited.measuring(inputs) as measurement:
            full = self._full(measurement, rates)
            mean = self._mean(measurement, rates) if full is None else full.diagonal(dim1=2, dim2=3).mean(2)
            return mean, full

    def _full(self, measurement: Measurement, rates: Mapping[str, Rate]) -> Tensor | None:
        """(P, P2, C, C) between all outputs; None for one output, or if it does not fit into memory."""
        if not self._wants_full(measurement):
            return None
        try:
            return self._measured(measurement, "full", "network", rates)[""].cpu()
        except MemoryBudgetError:
            return None

    def _wants_full(self, measurement: Measurement) -> bool:
        return sizes_of(self.watched, measurement.classes).full

    def _kernels(self, measurement: Measurement, by: str, rates: Mapping[str, Rate] | None = None) -> dict[str, Tensor]:
        """Key -> (C, P, P2), each output's kernel; (1, P, P2), their mean estimated, where they are many."""
        many = measurement.classes > MANY_OUTPUTS
        outputs: Outputs = sizes_of(self.watched, measurement.classes).kernel if by == "layer" or many else "mean"
        kernels = self._measured(measurement, outputs, by, rates)
        divisor = measurement.classes if many else 1
        return {key: kernel if kernel.dim() == 3 else kernel[None] / divisor for key, kernel in kernels.items()}

    def _measured(
        self, measurement: Measurement, outputs: Outputs, by: str, rates: Mapping[str, Rate] | None = None
    ) -> Kernels:
        """Kernels, by all ranks where they measure together; those of an optimizer's step by this one."""

        def alone() -> Kernels:
            directions = output_directions(outputs, measurement.classes)
            memory = self.audited.request.memory
            call = KernelCall(directions=directions, by=by, rates=rates or {}, memory=memory)
            return measured_kernels(measurement, self.audited.plans, call)

        if self.shared is None or rates:
            return alone()
        test = ("test", "probe") if len(measurement.batches) > 1 else ("test",)
        of = ("probe",) if measurement is self.now else ("both",) if measurement is self._measured_samples else test
        return self.shared.measured(self.watched, alone, "kernels", of, outputs, by)

    def _mean(self, measurement: Measurement, rates: Mapping[str, Rate]) -> Tensor:
        """(P, P2), the mean over outputs."""
        return self._kernels(measurement, "network", rates)[""].mean(0).cpu()


def _is_constant(features: Tensor) -> bool:
    return bool((features == features[:1]).all())


def sizes_of(watched: WatchedNetwork, classes: int) -> Sizes:
    """Return the samples and output directions that are measured."""
    samples, tests = watched.probe.samples, 0 if watched.test is None else watched.test.samples
    many = classes > MANY_OUTPUTS
    return Sizes(
        samples=samples,
        tests=tests,
        kernel=Directions(DIRECTIONS) if many else "each",
        features=FEATURE_DIRECTIONS if many else classes,
        full=classes > 1 and max(samples, tests) * classes <= LARGEST_FULL,
    )


@contextmanager
def measured_step(
    watched: WatchedNetwork, audited: AuditedModel, *, baseline: Baseline | None, **arguments: Any
) -> Iterator[StepMeasurement]:
    """Isolate the network and yield its measurement at one step; the other arguments are those of `StepMeasurement`."""
    with ExitStack() as stack:
        now = stack.enter_context(audited.measuring([watched.probe.x], reuse=True, keep_weights=True))
        if baseline is None:
            now.refuse_no_gradient(of_example=True)
        yield StepMeasurement(watched=watched, audited=audited, baseline=baseline, now=now, stack=stack, **arguments)
