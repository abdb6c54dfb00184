"""One tangent kernel, measured by its plan: gradients of blocks of samples, captured, gathered and multiplied."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel
from featlearn.contraction.blocking import RowGrams
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Dense, Gathered, Gradients
from featlearn.contraction.gram import in_memory_order
from featlearn.contraction.kernel_sum import Kernels, KernelSum, kernel_keys
from featlearn.contraction.proportional_outputs import ProportionalOutputs, UnequalChunksError
from featlearn.errors import InputTypeError, InputValueError, NotFiniteError
from featlearn.gradients.directions import Directions, Outputs, output_directions
from featlearn.kernel.step_rates import step_rates, with_rates
from featlearn.measurement import Measurement
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.inputs import ModelWithInputs
from featlearn.planning.kernel_plan import plan_kernel
from featlearn.planning.memory import keep_released_memory
from featlearn.planning.plan import (
    KernelCall,
    ParameterGroup,
    Plan,
    PlannedKernel,
    ProgressLine,
    Rate,
    plan_key,
    sample_blocks,
    still_fits,
)

if TYPE_CHECKING:
    from featlearn.kernel.verification import KernelVerification


class KernelExecution:
    """One kernel, measured by its plan."""

    def __init__(
        self,
        measurement: Measurement,
        plan: Plan,
        call: KernelCall,
        proportional: frozenset[str] | None = None,
    ) -> None:
        self._measurement, self._plan, self._directions, self._rates = measurement, plan, call.directions, call.rates
        self._formed = call.formed if call.rates else frozenset()
        self._keys = kernel_keys(measurement.parameters, call.by)
        self._known = proportional
        self.found_proportional: frozenset[str] | None = None
        """Parameters for which one output direction was found to stand for all."""

    def run(self, checks: "KernelVerification | None" = None) -> Kernels:
        """The kernels of all groups of parameters."""
        measurement, plan = self._measurement, self._plan
        total = KernelSum(
            self._keys,
            plan.kernel_shape,
            self._directions.mode,
            measurement.dtype,
            measurement.device,
            symmetric=plan.symmetric,
            scratch=plan.scratch,
            deferred=measurement.deferred,
        )
        total.callback = checks.add if checks else None
        with ProgressLine("tangent kernel", plan.passes) as progress:
            for group in plan.groups:
                if plan.symmetric and group.chunk >= plan.samples[0]:
                    self._add_at_once(total, group)
                    progress.advance()
                else:
                    self._add_in_blocks(total, group, progress)
        total.mirror(slice(0, self._directions.count))
        total.divide(self._directions.divisor)
        return total.kernels

    def direction_blocks(self, group: ParameterGroup) -> list[slice]:
        """The output directions that are captured at a time."""
        return sample_blocks(self._directions.count, group.directions)

    def _add_at_once(self, total: KernelSum, group: ParameterGroup) -> None:
        """All samples in one chunk: each parameter's gradients are formed when they are multiplied, and dropped."""
        measurement, (batch,), mode = self._measurement, self._measurement.batches, self._directions.mode
        chunk, blocks = measurement.chunk(batch, 0, batch.samples), self.direction_blocks(group)
        every = slice(0, batch.samples)
        kept: dict[str, RowGrams] | None = {} if len(blocks) > 1 and mode == "each" else None
        for chosen in blocks:
            proportional = self._proportional(len(blocks) == 1)
            captured = measurement.each_gradient(
                chunk,
                group.names,
                self._directions.rows(chosen),
                dense=self._formed,
                proportional=proportional,
                apart=mode == "each",
                last=chosen is blocks[-1],
            )
            total.add_diagonal(with_rates(captured, self._rates) if self._rates else captured, every, chosen, kept)
            if proportional is not None:
                self.found_proportional = frozenset(proportional.shares)

    def _proportional(self, all_directions: bool) -> ProportionalOutputs | None:
        """Whether one output direction may stand for all; on a GPU only those that were found to, without a wait."""
        if self._directions.mode != "sum" or not all_directions:
            return None
        deferred = self._measurement.deferred
        if deferred is None:
            return ProportionalOutputs()
        return ProportionalOutputs(self._known, deferred) if self._known else None

    def _add_in_blocks(self, total: KernelSum, group: ParameterGroup, progress: ProgressLine) -> None:
        """Pairs of blocks of samples; what was captured of a block is gathered chunk by chunk."""
        batches, symmetric = self._measurement.batches, total.symmetric
        for chosen in self.direction_blocks(group):
            for i, others in self._plan.blocks(group):
                # The shares of outputs are those of the rows: they must serve all columns.
                shared = self._directions.mode == "sum" and chosen == slice(0, self._directions.count)
                proportional = ProportionalOutputs() if shared else None
                captured = self.gathered(batches[0], i, chosen, group, progress, proportional)
                if symmetric and not others:
                    total.add_diagonal(captured, i, chosen)
                    continue
                left = dict(captured)
                del captured
                for j in [*others, i] if symmetric else others:
                    same = symmetric and i == j
                    right = left if same else dict(self.gathered(batches[-1], j, chosen, group, progress, proportional))
                    names = [name for name in left if name in right]
                    if any(left[name].directions != right[name].directions for name in names):
                        proportional = None  # from here on, every output by itself
                        left = dict(self.gathered(batches[0], i, chosen, group, progress))
                        right = dict(self.gathered(batches[-1], j, chosen, group, progress))
                    for name in names:
                        total.add(name, left[name], right[name], i, j, chosen)

    def gathered(
        self,
        batch: ModelWithInputs,
        block: slice,
        chosen: slice,
        group: ParameterGroup,
        progress: ProgressLine,
        proportional: ProportionalOutputs | None = None,
    ) -> Iterator[tuple[str, Gradients]]:
        """Gradients of a block of samples, in the form that takes less memory.

        `proportional`: chunks of the block agree on outputs for which one direction stands.
        """
        measurement, directions = self._measurement, self._directions.rows(chosen)
        early = {p.name for p in self._plan.parameters if p.form_early}
        gathered: dict[str, Gathered] = {}
        begin = block.start
        while begin < block.stop:
            end = min(begin + group.chunk, block.stop)
            chunk = measurement.chunk(batch, begin, end)
            seen = set()
            try:
                captured = measurement.each_gradient(
                    chunk,
                    group.names,
                    directions,
                    dense=early,
                    proportional=proportional,
                    apart=self._directions.mode == "each",
                    last=True,
                )
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


NOT_FINITE = (
    "gradients overflow, the weights are not finite, or an op has no derivative at its input (the root of zero, a "
    "softmax over masked entries alone). Measure with dtype=torch.float64, lower the learning rate of the run, or find "
    "the op with torch.autograd.detect_anomaly()"
)
"""Causes of gradients that are not finite, and what to do."""


def refuse_not_finite(measurement: Measurement, kernels: Kernels, by: str) -> None:
    """Raise where a kernel is not finite, or where it may have lost all of its digits."""
    for key, kernel in kernels.items():
        if not kernel.numel():  # a rank without samples
            continue
        low, high = torch.stack(in_memory_order(kernel).aminmax()).tolist()  # one pass, no second tensor of its size
        if max(-low, high) < torch.finfo(kernel.dtype).tiny:
            measurement.audit_again()  # gradients may be too small for their squares
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NotFiniteError(f"the kernel{f' of {key}' if by != 'network' else ''} is not finite: {NOT_FINITE}")


def checked_rates(
    audited: AuditedModel, outputs: Outputs, by: str, optimizer: Optimizer | None, verify: bool
) -> dict[str, Rate]:
    """Complain before anything runs; rates are read before the measurement, which puts .grad aside."""
    checked_by(by)
    if not isinstance(verify, bool):
        raise InputTypeError(f"verify={verify!r}, expected True or False")
    if not isinstance(outputs, int | Directions):
        output_directions(outputs, 1)  # directions would be drawn
    if optimizer is None:
        return {}
    unwrapped(audited.model)
    return step_rates(optimizer, trainable_parameters(audited.model, audited.request.parameters))


def checked_by(by: str) -> None:
    """Refuse other ways to divide a kernel."""
    if by not in ("network", "layer", "parameter"):
        raise InputValueError(f"by={by!r}, expected 'network', 'layer' or 'parameter'")


def measured_kernels(measurement: Measurement, plans: dict[object, PlannedKernel], call: KernelCall) -> Kernels:
    """Compute the kernels of a measurement under way: key (layer, parameter, or "" for the network) -> kernel.

    `plans` are those of earlier calls.
    """
    if call.memory is None:
        keep_released_memory()
    key = plan_key(measurement, call)
    known = plans.get(key)
    if known is None or not still_fits(known.plan, call.memory, measurement.device):
        known = PlannedKernel(plan_kernel(measurement, call), None)
    elif measurement.device.type == "cuda" and not call.verify and not measurement.reuse:
        # All checks in one wait at the end. Should one fail, everything is measured again, and each acted on.
        kernels = _deferring(measurement, known, call)
        if kernels is not None:
            return kernels
    execution = KernelExecution(measurement, known.plan, call)
    checks = None
    if call.verify:
        from featlearn.kernel.verification import KernelVerification  # late: few kernels need it

        checks = KernelVerification(measurement, call, known.plan)
    kernels = execution.run(checks)
    measurement.refuse_no_gradient()
    refuse_not_finite(measurement, kernels, call.by)  # before the checks, whose message would blame the rules
    if checks is not None:
        checks.conclude()
    plans[key] = PlannedKernel(known.plan, execution.found_proportional)
    return kernels


def _deferring(measurement: Measurement, known: PlannedKernel, call: KernelCall) -> Kernels | None:
    """The kernels with every check deferred to the end; None if one of them fails."""
    deferred = DeferredChecks()
    measurement.defer(deferred)
    try:
        kernels = KernelExecution(measurement, known.plan, call, known.proportional).run()
        tiny = torch.finfo(measurement.dtype).tiny
        deferred.expect_sizes(
            lambda size: math.isfinite(size) and size >= tiny, [in_memory_order(kernel) for kernel in kernels.values()]
        )
        return kernels if deferred.hold() else None
    finally:
        measurement.defer(None)
