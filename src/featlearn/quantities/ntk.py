"""The empirical tangent kernel of any network, exactly."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Dense, Gathered, Gradients
from featlearn.contraction.gram import in_memory_order
from featlearn.contraction.kernel_sum import Kernels, KernelSum, kernel_keys
from featlearn.contraction.matrices import RowGrams
from featlearn.contraction.proportional_outputs import ProportionalOutputs, UnequalChunksError
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.errors import ChangedOutputsError, InputValueError
from featlearn.gradients.directions import Directions, Outputs, Probes, output_directions
from featlearn.linalg.estimate import Estimate
from featlearn.measurement import Measurement
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.inputs import Inputs, ModelWithInputs, Readout
from featlearn.network.isolation import collector_paused
from featlearn.planning.chunks import ParameterGroup
from featlearn.planning.kernel_plan import plan_kernel, plan_key, still_fits
from featlearn.planning.memory import keep_released_memory
from featlearn.planning.plan import Plan, PlannedKernel
from featlearn.planning.progress_line import ProgressLine
from featlearn.quantities.optimizer_kernel import Rate, elementwise, step_rates, with_rates
from featlearn.quantities.sketched_kernel import checked_sketch, sketched_kernels
from featlearn.quantities.verification import KernelVerification

Found = TypeVar("Found")


@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["network"] = "network",
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False, sketch: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["layer", "parameter"],
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False, sketch: None = None,
) -> Kernels: ...  # fmt: skip
@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["network"] = "network",
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False, sketch: Sketch,
) -> Estimate: ...  # fmt: skip
@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["layer", "parameter"],
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False, sketch: Sketch,
) -> dict[str, Estimate]: ...  # fmt: skip
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False, sketch: Sketch | None = None,
) -> Tensor | Kernels | Estimate | dict[str, Estimate]:  # fmt: skip
    """The empirical neural tangent kernel K = J J^T of a network, exact for every trainable parameter.

    A `fl.Session` used once. Loops that measure a network again and again hold a Session, which audits it once.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was, bit for bit.
        x: a tensor, a tuple (called as `model(*x)`) or a mapping (`model(**x)`), batch first, P samples.
        x2: a second probe with P2 samples for a cross kernel; None for the kernel of `x` with itself.
        outputs: `"mean"` (1/C sum_c K^cc) and `"sum"`: (P, P2); `"each"`: (C, P, P2); `"full"`: (P, P2, C, C) with axes
            K_{mu nu c c'}; one backward pass for each of the C outputs. An int c: K^cc. `fl.Probes(k)`: an unbiased
            estimate of `"sum"` from k random directions, for large C.
        readout: turns the model's output into (P,) or (P, C): `readout(output)` or `readout(output, x)`.
        by: `"network"`: one tensor; `"layer"`: a dict by `named_modules()` name; `"parameter"`: a dict by
            `named_parameters()` name. The parts add up to the network.
        parameters: a glob such as `"layers.*.weight"`, or a list of them; only matching parameters count.
        optimizer: the kernel of the update it is about to make, sum_j eta_j d_j f d_j f' (Atanasov et al. 2022, Eq.
            91), for SGD, Adam, AdamW, RMSprop and Adagrad: learning rates and second moments are inside; momentum and
            weight decay are not. Adaptive ones must have made a step.
        dtype: `torch.float64` measures a copy of the network in double. Without it the network is measured in its own
            precision, and kernels of half-precision networks are accumulated in float32.
        memory: a byte budget such as `"2GiB"`; by default half of what is free. Chunks follow from it. What torch's own
            ops take while they run (tens of MiB on a CPU) comes on top.
        verify: compare v^T K w with (J^T v) . (J^T w) from independent backward passes, parameter by parameter and for
            every 64 samples, and raise if they differ. Two forward and three backward passes for each output.
        sketch: `fl.Sketch(k=4096, repeats=4)` estimates the kernel from k random sums of each gradient's entries, for
            networks and numbers of samples where the exact kernel takes too long: `outputs` `"mean"`, `"sum"` or an
            int. Two standard errors hold an entry in about 95 of 100 draws.

    Returns:
        A tensor on the outputs' device, or a dict of them; parameters of the root module itself are the layer `""`.
        With `sketch` an `fl.Estimate` whose value and stderr are (P, P2), or a dict of them.

    Raises:
        FeatlearnError: for anything that cannot be measured exactly, with what to do about it.
    """
    checked_by(by)
    audited = AuditedModel(model, readout=readout, parameters=parameters, dtype=dtype, memory=memory)
    if sketch is not None:
        return sketched_kernel(audited, x, x2, sketch, outputs=outputs, by=by, optimizer=optimizer, verify=verify)
    return tangent_kernel(audited, x, x2, outputs=outputs, by=by, optimizer=optimizer, verify=verify)


def tangent_kernel(
    audited: AuditedModel, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean", by: str = "network",
    optimizer: Optimizer | None = None, verify: bool = False,
) -> Tensor | Kernels:  # fmt: skip
    """The tangent kernel of an audited model: see `fl.ntk`."""
    rates = checked_rates(audited, outputs, by, optimizer)

    def measured(measurement: Measurement) -> Kernels:
        return measured_kernels(measurement, audited, outputs, by, rates=rates, verify=verify)

    kernels = _measured_once_more(audited, x, x2, measured)
    return kernels[""] if by == "network" else kernels


def sketched_kernel(
    audited: AuditedModel, x: Inputs, x2: Inputs | None, sketch: Sketch, *, outputs: Outputs = "mean",
    by: str = "network", optimizer: Optimizer | None = None, verify: bool = False,
) -> Estimate | dict[str, Estimate]:  # fmt: skip
    """The sketched kernel of an audited model: see `fl.ntk`."""
    checked_sketch(sketch, outputs, verify)
    rates = checked_rates(audited, outputs, by, optimizer)

    def measured(measurement: Measurement) -> dict[str, Estimate]:
        return sketched_kernels(measurement, audited, sketch, outputs, by, rates)

    found = _measured_once_more(audited, x, x2, measured)
    return found[""] if by == "network" else found


def _measured_once_more(
    audited: AuditedModel, x: Inputs, x2: Inputs | None, measured: Callable[[Measurement], Found]
) -> Found:
    """What is measured, once more where the model gives other outputs than in an earlier call."""

    def attempt() -> Found:
        # Until all that was measured with is gone: the collector would take it for lasting.
        with collector_paused(), audited.measuring([x] if x2 is None else [x, x2]) as measurement:
            return measured(measurement)

    try:
        return attempt()
    except ChangedOutputsError:  # a flag of the model, say, since an earlier call
        audited.forget()
        return attempt()


def checked_rates(audited: AuditedModel, outputs: Outputs, by: str, optimizer: Optimizer | None) -> dict[str, Rate]:
    """Complain before anything runs; rates are read before the measurement, which puts .grad aside."""
    checked_by(by)
    unwrapped(audited.model)
    if not isinstance(outputs, int | Probes):
        output_directions(outputs, 1)  # probes would be drawn
    return {} if optimizer is None else step_rates(optimizer, trainable_parameters(audited.model, audited.globs))


def checked_by(by: str) -> None:
    """Refuse other ways to divide a kernel."""
    if by not in ("network", "layer", "parameter"):
        raise InputValueError(f"by={by!r}, expected 'network', 'layer' or 'parameter'")


def measured_kernels(
    measurement: Measurement, audited: AuditedModel, outputs: Outputs, by: str, *,
    rates: Mapping[str, Rate] | None = None, verify: bool = False,
) -> Kernels:  # fmt: skip
    """The kernels of a measurement that is under way: key (layer, parameter, or "" for the network) -> kernel."""
    rates, memory = {} if rates is None else rates, audited.memory
    if memory is None:
        keep_released_memory()
    directions = output_directions(outputs, measurement.classes)
    formed = elementwise(rates)
    key = plan_key(measurement, directions, formed, by, memory, verify)
    known = audited.plans.get(key)
    if known is None or not still_fits(known.plan, memory, measurement.device):
        known = PlannedKernel(plan_kernel(measurement, directions, formed, by, memory, verify), None)
    elif measurement.device.type == "cuda" and not verify and not measurement.reuse:
        # All checks in one wait at the end. Should one fail, everything is measured again, and each acted on.
        kernels = _deferring(measurement, known, directions, rates, by)
        if kernels is not None:
            return kernels
    execution = _Execution(measurement, known.plan, directions, rates, by, None)
    checks = KernelVerification(measurement, directions, rates, known.plan) if verify else None
    kernels = execution.run(checks)
    measurement.refuse_no_gradient()
    if checks is not None:
        checks.conclude()
    _refuse_not_finite(measurement, kernels, by)
    audited.plans[key] = PlannedKernel(known.plan, execution.found_proportional)
    return kernels


def _deferring(
    measurement: Measurement, known: PlannedKernel, directions: Directions, rates: Mapping[str, Rate], by: str
) -> Kernels | None:
    """The kernels with every check deferred to the end; None if one of them fails."""
    deferred = DeferredChecks()
    measurement.defer(deferred)
    try:
        kernels = _Execution(measurement, known.plan, directions, rates, by, known.proportional).run()
        tiny = torch.finfo(measurement.dtype).tiny
        deferred.expect_sizes(
            lambda size: math.isfinite(size) and size >= tiny, [in_memory_order(kernel) for kernel in kernels.values()]
        )
        return kernels if deferred.hold() else None
    finally:
        measurement.defer(None)


def _refuse_not_finite(measurement: Measurement, kernels: Kernels, by: str) -> None:
    for key, kernel in kernels.items():
        low, high = torch.stack(in_memory_order(kernel).aminmax()).tolist()  # one pass, no second tensor of its size
        if max(-low, high) < torch.finfo(kernel.dtype).tiny:
            measurement.audit_again()  # gradients may be too small for their squares
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InputValueError(
                f"the kernel{f' of {key}' if by != 'network' else ''} is not finite: gradients overflow or the "
                "weights are not finite; measure with dtype=torch.float64, or lower the learning rate of the run"
            )


class _Execution:
    """One kernel, measured by its plan."""

    def __init__(
        self, measurement: Measurement, plan: Plan, directions: Directions, rates: Mapping[str, Rate], by: str,
        proportional: frozenset[str] | None,
    ) -> None:  # fmt: skip
        self._measurement, self._plan, self._directions, self._rates = measurement, plan, directions, rates
        self._keys = kernel_keys(measurement.parameters, by)
        self._known = proportional
        self.found_proportional: frozenset[str] | None = None
        """Parameters for which one output direction was found to stand for all."""

    def run(self, checks: KernelVerification | None = None) -> Kernels:
        """The kernels of all groups of parameters."""
        measurement, plan = self._measurement, self._plan
        total = KernelSum(
            self._keys, plan.kernel_shape, self._directions.mode, measurement.dtype, measurement.device,
            symmetric=plan.symmetric, scratch=plan.scratch, deferred=measurement.deferred,
        )  # fmt: skip
        total.callback = checks.add if checks else None
        progress = ProgressLine("tangent kernel", plan.passes)
        try:
            for group in plan.groups:
                if plan.symmetric and group.chunk >= plan.samples[0]:
                    self._add_at_once(total, group)
                    progress.advance()
                else:
                    self._add_in_blocks(total, group, progress)
        finally:
            progress.close()
        total.mirror(slice(0, self._directions.count))
        total.divide(self._directions.divisor)
        return total.kernels

    def _direction_blocks(self, group: ParameterGroup) -> list[slice]:
        count = self._directions.count
        return [slice(k, min(k + group.directions, count)) for k in range(0, count, group.directions)]

    def _add_at_once(self, total: KernelSum, group: ParameterGroup) -> None:
        """All samples in one chunk: each parameter's gradients are formed when they are multiplied, and dropped."""
        measurement, (batch,), mode = self._measurement, self._measurement.batches, self._directions.mode
        chunk, blocks = measurement.chunk(batch, 0, batch.samples), self._direction_blocks(group)
        every = slice(0, batch.samples)
        kept: dict[str, RowGrams] | None = {} if len(blocks) > 1 and mode == "each" else None
        for chosen in blocks:
            proportional = self._proportional(len(blocks) == 1)
            captured = measurement.each_gradient(
                chunk, group.names, self._directions.rows(chosen), dense=elementwise(self._rates),
                proportional=proportional, apart=mode == "each", last=chosen is blocks[-1],
            )  # fmt: skip
            total.add_diagonal(with_rates(captured, self._rates) if self._rates else captured, every, chosen, kept)
            if proportional is not None:
                self.found_proportional = frozenset(proportional.found)

    def _proportional(self, all_directions: bool) -> ProportionalOutputs | None:
        """Whether one output direction may stand for all; on a GPU only those that were found to, without a wait."""
        if self._directions.mode != "sum" or not all_directions:
            return None
        deferred = self._measurement.deferred
        if deferred is None:
            return ProportionalOutputs()
        return None if self._known is None else ProportionalOutputs(self._known, deferred)

    def _add_in_blocks(self, total: KernelSum, group: ParameterGroup, progress: ProgressLine) -> None:
        """Pairs of blocks of samples; what was captured of a block is gathered chunk by chunk."""
        batches = self._measurement.batches
        rows, columns = (_blocks(batch, group.block) for batch in (batches[0], batches[-1]))
        for chosen in self._direction_blocks(group):
            for i in rows:
                if total.symmetric and len(rows) == 1:
                    total.add_diagonal(self._gathered(batches[0], i, chosen, group, progress), i, chosen)
                    continue
                left = dict(self._gathered(batches[0], i, chosen, group, progress))
                for j in columns:
                    if total.symmetric and j.start > i.start:
                        break
                    same = total.symmetric and i == j
                    right = left if same else dict(self._gathered(batches[-1], j, chosen, group, progress))
                    for name in (name for name in left if name in right):
                        total.add(name, left[name], right[name], i, j, chosen)

    def _gathered(
        self, batch: ModelWithInputs, block: slice, chosen: slice, group: ParameterGroup, progress: ProgressLine
    ) -> Iterator[tuple[str, Gradients]]:
        """Gradients of a block of samples, in the form that takes less memory."""
        measurement, directions = self._measurement, self._directions.rows(chosen)
        early = {p.name for p in self._plan.parameters if p.form_early}
        whole = self._plan.symmetric and block == slice(0, batch.samples)
        # Chunks of one block agree on it; between blocks nothing could be taken back.
        proportional = ProportionalOutputs() if whole and self._directions.mode == "sum" else None
        gathered: dict[str, Gathered] = {}
        begin = block.start
        while begin < block.stop:
            end = min(begin + group.chunk, block.stop)
            chunk = measurement.chunk(batch, begin, end)
            seen = set()
            try:
                captured = measurement.each_gradient(
                    chunk, group.names, directions, dense=early, proportional=proportional,
                    apart=self._directions.mode == "each", last=True,
                )  # fmt: skip
                for name, gradients in with_rates(captured, self._rates):
                    if name not in gathered:
                        gathered[name] = Gathered(block.stop - block.start, gradients.directions)
                        if begin > block.start:
                            gathered[name].add(self._nothing(name, begin - block.start, gradients.directions))
                    if gathered[name].directions != gradients.directions:
                        raise UnequalChunksError
                    gathered[name].add(gradients)
                    seen.add(name)
            except UnequalChunksError:  # once more, with all directions
                gathered.clear()
                begin, proportional = block.start, None
                continue
            for name in gathered.keys() - seen:
                gathered[name].add(self._nothing(name, end - begin, gathered[name].directions))
            del chunk  # before the next one is made
            progress.advance()
            begin = end
        while gathered:
            name = next(iter(gathered))
            yield name, gathered.pop(name).whole()

    def _nothing(self, name: str, samples: int, directions: int) -> Dense:
        """The gradient of samples that do not use a parameter others use."""
        parameter = self._measurement.parameters[name]
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        return Dense(torch.zeros(samples, directions, size, dtype=self._measurement.dtype, device=parameter.device))


def _blocks(batch: ModelWithInputs, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, batch.samples)) for begin in range(0, batch.samples, size)]
