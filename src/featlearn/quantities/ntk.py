"""The empirical tangent kernel of any network, exactly."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.gram import in_memory_order
from featlearn.contraction.kernel_sum import Kernels
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.errors import ChangedOutputsError, InputValueError
from featlearn.gradients.directions import Directions, Outputs, Probes, output_directions
from featlearn.measurement import Measurement
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.inputs import Inputs, Readout
from featlearn.network.isolation import collector_paused
from featlearn.planning.kernel_plan import plan_kernel, plan_key, still_fits
from featlearn.planning.memory import keep_released_memory
from featlearn.planning.plan import Plan, PlannedKernel
from featlearn.quantities.divided_kernel import divided_kernels
from featlearn.quantities.kernel_execution import KernelExecution, elementwise_rates, refuse_not_finite
from featlearn.quantities.optimizer_kernel import Rate, step_rates
from featlearn.quantities.verification import KernelVerification


@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["network"] = "network",
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False, group: object = None,
) -> Tensor: ...  # fmt: skip
@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["layer", "parameter"],
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False, group: object = None,
) -> Kernels: ...  # fmt: skip
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False, group: object = None,
) -> Tensor | Kernels:  # fmt: skip
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
        verify: compare v^T K v with |J^T v|^2 from independent backward passes, parameter by parameter, and raise if
            they differ.
        group: `"world"` or a process group of `torch.distributed` whose ranks divide the samples. Every rank makes the
            same call with all samples, and gets a DTensor that holds the rows of its own ones: `.to_local()` has them,
            `.full_tensor()` gathers all. None divides nothing.

    Returns:
        A tensor on the outputs' device, or a dict of them; parameters of the root module itself are the layer `""`.

    Raises:
        FeatlearnError: for anything that cannot be measured exactly, with what to do about it.
    """
    _checked_by(by)
    audited = AuditedModel(model, readout=readout, parameters=parameters, dtype=dtype, memory=memory, group=group)
    return tangent_kernel(audited, x, x2, outputs=outputs, by=by, optimizer=optimizer, verify=verify)


def plan(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False,
) -> Plan:  # fmt: skip
    """What `fl.ntk` with the same arguments will do and cost; runs the model on a few samples only.

    Per parameter: its uses, the route or the fallback and why, multiply-adds, bytes. `print(fl.plan(...))` is a table.
    """
    _checked_by(by)
    audited = AuditedModel(model, readout=readout, parameters=parameters, dtype=dtype, memory=memory)
    return kernel_plan(audited, x, x2, outputs=outputs, by=by, optimizer=optimizer, verify=verify)


def tangent_kernel(
    audited: AuditedModel, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean", by: str = "network",
    optimizer: Optimizer | None = None, verify: bool = False,
) -> Tensor | Kernels:  # fmt: skip
    """The tangent kernel of an audited model: see `fl.ntk`."""
    if audited.group.given:
        divided = divided_kernels(
            audited, x, x2, outputs, by, verify, lambda: _checked(audited, outputs, by, optimizer)
        )
        return divided[""] if by == "network" else divided
    rates = whole_tensors(_checked(audited, outputs, by, optimizer))

    def measured() -> Kernels:
        # Until all that was measured with is gone: the collector would take it for lasting.
        with collector_paused(), audited.measuring([x] if x2 is None else [x, x2]) as measurement:
            return measured_kernels(measurement, audited, outputs, by, rates=rates, verify=verify)

    try:
        kernels = measured()
    except ChangedOutputsError:  # a flag of the model, say, since an earlier call
        audited.forget()
        kernels = measured()
    return kernels[""] if by == "network" else kernels


def kernel_plan(
    audited: AuditedModel, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean", by: str = "network",
    optimizer: Optimizer | None = None, verify: bool = False,
) -> Plan:  # fmt: skip
    """What `tangent_kernel` will do and cost."""
    if isinstance(outputs, Probes):
        outputs = Probes(outputs.k)  # the directions of the call that follows are not drawn here
    rates = whole_tensors(_checked(audited, outputs, by, optimizer))
    with audited.measuring([x] if x2 is None else [x, x2]) as measurement:
        directions = output_directions(outputs, measurement.classes)
        found = plan_kernel(measurement, directions, elementwise_rates(rates), by, audited.memory, verify)
        measurement.has_gradient = any(example.graph is not None for example in measurement.examples)
        measurement.refuse_no_gradient()
        return found


def _checked(audited: AuditedModel, outputs: Outputs, by: str, optimizer: Optimizer | None) -> dict[str, Rate]:
    """Complain before anything runs; rates are read before the measurement, which puts .grad aside."""
    _checked_by(by)
    unwrapped(audited.model)
    if not isinstance(outputs, int | Probes):
        output_directions(outputs, 1)  # probes would be drawn
    return {} if optimizer is None else step_rates(optimizer, trainable_parameters(audited.model, audited.globs))


def _checked_by(by: str) -> None:
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
    elementwise = elementwise_rates(rates)
    key = plan_key(measurement, directions, elementwise, by, memory, verify)
    known = audited.plans.get(key)
    if known is None or not still_fits(known.plan, memory, measurement.device):
        known = PlannedKernel(plan_kernel(measurement, directions, elementwise, by, memory, verify), None)
    elif measurement.device.type == "cuda" and not verify and not measurement.reuse:
        # All checks in one wait at the end. Should one fail, everything is measured again, and each acted on.
        kernels = _deferring(measurement, known, directions, rates, by)
        if kernels is not None:
            return kernels
    execution = KernelExecution(measurement, known.plan, directions, rates, by, None)
    checks = KernelVerification(measurement, directions, rates, known.plan) if verify else None
    kernels = execution.run(checks)
    measurement.refuse_no_gradient()
    if checks is not None:
        checks.conclude()
    refuse_not_finite(measurement, kernels, by)
    audited.plans[key] = PlannedKernel(known.plan, execution.found_proportional)
    return kernels


def _deferring(
    measurement: Measurement, known: PlannedKernel, directions: Directions, rates: Mapping[str, Rate], by: str
) -> Kernels | None:
    """The kernels with every check deferred to the end; None if one of them fails."""
    deferred = DeferredChecks()
    measurement.defer(deferred)
    try:
        kernels = KernelExecution(measurement, known.plan, directions, rates, by, known.proportional).run()
        tiny = torch.finfo(measurement.dtype).tiny
        deferred.expect_sizes(
            lambda size: math.isfinite(size) and size >= tiny, [in_memory_order(kernel) for kernel in kernels.values()]
        )
        return kernels if deferred.hold() else None
    finally:
        measurement.defer(None)
