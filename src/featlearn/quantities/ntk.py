"""The empirical tangent kernel of any network, exactly."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel, Settings
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.gram import in_memory_order
from featlearn.contraction.kernel_sum import Kernels
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.errors import ChangedOutputsError, InputTypeError, InputValueError
from featlearn.gradients.directions import Directions, Outputs, OutputSelection, output_directions
from featlearn.kernel.execution import KernelExecution, refuse_not_finite
from featlearn.kernel.step_rates import Rate, elementwise, step_rates
from featlearn.linalg.estimate import Estimate
from featlearn.measurement import Measurement
from featlearn.network.checks import trainable_parameters, unwrapped
from featlearn.network.inputs import Inputs
from featlearn.network.isolation import collector_paused
from featlearn.planning.kernel_plan import plan_kernel
from featlearn.planning.memory import keep_released_memory
from featlearn.planning.plan import PlannedKernel, plan_key, still_fits
from featlearn.signatures import name_keywords


@overload
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["network"] = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: None = None,
    **settings: Unpack[Settings],
) -> Tensor: ...
@overload
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["layer", "parameter"],
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: None = None,
    **settings: Unpack[Settings],
) -> Kernels: ...
@overload
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["network"] = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch,
    **settings: Unpack[Settings],
) -> Estimate: ...
@overload
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["layer", "parameter"],
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch,
    **settings: Unpack[Settings],
) -> dict[str, Estimate]: ...
@name_keywords("The kernel does not depend on targets, so drop `y`.")
def ntk(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: str = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch | None = None,
    **settings: Unpack[Settings],
) -> Tensor | Kernels | Estimate | dict[str, Estimate]:
    """The empirical neural tangent kernel K = J J^T of a network, exact for every trainable parameter.

    See Shan & Bordelon 2021a, Eq. 2, 15; 2021b, Eq. 2, 8; Atanasov et al. 2022, Eq. 91 (with `optimizer`).

    A `fl.Session` used once. Loops that measure a network again and again hold a Session, which audits it once.

    Args:
        model: any `nn.Module`, measured in eval mode and left as it was, bit for bit.
        x: a tensor, a tuple (called as `model(*x)`) or a mapping (`model(**x)`), batch first, P samples.
        x2: a second probe with P2 samples for a cross kernel; None for the kernel of `x` with itself.
        outputs: `"mean"` (1/C sum_c K^cc) and `"sum"`: (P, P2); `"each"`: (C, P, P2); `"full"`: (P, P2, C, C) with axes
            K_{mu nu c c'}; one backward pass for each of the C outputs. An int c: K^cc. `fl.Directions(k)`: an unbiased
            estimate of `"sum"` from k random directions, for large C.
        readout: Map from the model's output to (P,) or (P, C): `readout(output)` or `readout(output, x)`. By default
            the output or its logits. For logits (P, T, V) of a language model it is `fl.readouts.next_token()`, the
            mean log-probability of a sequence's targets: `labels` or `targets` in x, or the ids shifted by one. This
            is printed.
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
        group: `"world"` or a process group of `torch.distributed` whose ranks divide the samples. Every rank makes the
            same call with all samples, and gets a DTensor, `Shard(0)`, that holds the rows of its own ones (of `"each"`
            the kernels of some outputs): `.to_local()` has them, `.full_tensor()` gathers all. None divides nothing.

    Returns:
        A tensor on the outputs' device, or a dict of them; parameters of the root module itself are the layer `""`.
        With `sketch` an `fl.Estimate` whose value and stderr are (P, P2), or a dict of them.

    Raises:
        FeatlearnError: for anything that cannot be measured exactly, with what to do about it.
    """
    return ntk_of(  # type: ignore[call-overload,no-any-return]
        AuditedModel(model, **settings),
        x2,
        x=x,
        outputs=outputs,
        by=by,
        optimizer=optimizer,
        verify=verify,
        sketch=sketch,
    )


@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["network"] = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: None = None,
) -> Tensor: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["layer", "parameter"],
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: None = None,
) -> Kernels: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["network"] = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch,
) -> Estimate: ...
@overload
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: Literal["layer", "parameter"],
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch,
) -> dict[str, Estimate]: ...
def ntk_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: str = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch | None = None,
) -> Tensor | Kernels | Estimate | dict[str, Estimate]:
    """Compute the tangent kernel: see `fl.ntk`. `x` replaces the inputs of the Session in this call."""
    x, ranks = audited.inputs(x), audited.request.group
    if sketch is not None:
        from featlearn.kernel.sketched_kernel import checked_sketch, sketched_kernels

        with ranks.together():  # one rank alone may ask for it
            checked_sketch(sketch, outputs, verify)
            if ranks.given:
                raise InputValueError(
                    "sketch= with group=, expected one of them: sketched kernels are not divided among ranks"
                )
    if ranks.given:
        from featlearn.kernel.divided_kernel import divided_kernels

        divided = divided_kernels(
            audited, x, x2, outputs, by, verify, lambda: checked_rates(audited, outputs, by, optimizer, verify)
        )
        return divided[""] if by == "network" else divided
    if rates := checked_rates(audited, outputs, by, optimizer, verify):
        rates = whole_tensors(rates)

    def measure(measurement: Measurement) -> Kernels | dict[str, Estimate]:
        if sketch is None:
            return measured_kernels(measurement, audited, outputs, by, rates=rates, verify=verify)
        return sketched_kernels(measurement, audited, sketch, outputs, by, rates)

    inputs = [x] if x2 is None else [x, x2]
    try:
        kernels = _measure(audited, inputs, measure)
    except ChangedOutputsError:  # a flag of the model, say, since an earlier call
        audited.forget()
        kernels = _measure(audited, inputs, measure)
    return kernels[""] if by == "network" else kernels


def _measure(
    audited: AuditedModel, inputs: Sequence[Inputs], measure: Callable[[Measurement], Kernels | dict[str, Estimate]]
) -> Kernels | dict[str, Estimate]:
    # Paused until all that was measured with is gone: the collector would take it for lasting.
    with collector_paused(), audited.measuring(inputs, by_layer=True) as measurement:
        return measure(measurement)


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


def measured_kernels(
    measurement: Measurement,
    audited: AuditedModel,
    outputs: Outputs,
    by: str,
    *,
    rates: Mapping[str, Rate] | None = None,
    verify: bool = False,
) -> Kernels:
    """The kernels of a measurement that is under way: key (layer, parameter, or "" for the network) -> kernel."""
    rates, memory = {} if rates is None else rates, audited.request.memory
    if memory is None:
        keep_released_memory()
    directions = output_directions(outputs, measurement.classes)
    formed = elementwise(rates) if rates else frozenset()
    key = plan_key(measurement, directions, formed, by, memory, verify)
    known = audited.plans.get(key)
    if known is None or not still_fits(known.plan, memory, measurement.device):
        known = PlannedKernel(plan_kernel(measurement, directions, formed, by, memory, verify), None)
    elif measurement.device.type == "cuda" and not verify and not measurement.reuse:
        # All checks in one wait at the end. Should one fail, everything is measured again, and each acted on.
        kernels = _deferring(measurement, known, directions, rates, by)
        if kernels is not None:
            return kernels
    execution = KernelExecution(measurement, known.plan, directions, rates=rates, by=by, proportional=None)
    checks = None
    if verify:
        from featlearn.kernel.verification import KernelVerification  # late: few kernels need it

        checks = KernelVerification(measurement, directions, rates, known.plan)
    kernels = execution.run(checks)
    measurement.refuse_no_gradient()
    if checks is not None:
        checks.conclude()
    refuse_not_finite(measurement, kernels, by)
    audited.plans[key] = PlannedKernel(known.plan, execution.found_proportional)
    return kernels


def _deferring(
    measurement: Measurement, known: PlannedKernel, directions: OutputSelection, rates: Mapping[str, Rate], by: str
) -> Kernels | None:
    """The kernels with every check deferred to the end; None if one of them fails."""
    deferred = DeferredChecks()
    measurement.defer(deferred)
    try:
        execution = KernelExecution(
            measurement, known.plan, directions, rates=rates, by=by, proportional=known.proportional
        )
        kernels = execution.run()
        tiny = torch.finfo(measurement.dtype).tiny
        deferred.expect_sizes(
            lambda size: math.isfinite(size) and size >= tiny, [in_memory_order(kernel) for kernel in kernels.values()]
        )
        return kernels if deferred.hold() else None
    finally:
        measurement.defer(None)
