"""The empirical tangent kernel of any network, exactly."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.capture.admission import trainable_parameters, unwrapped
from featlearn.capture.isolation import collector_paused
from featlearn.capture.measurement import Measurement, measuring
from featlearn.capture.precision import checked_dtype
from featlearn.capture.probe import Inputs, Probe, Readout
from featlearn.capture.sightings import mixed
from featlearn.errors import InputValueError, MemoryBudgetError
from featlearn.linalg.collapse import Collapse, UnequalChunksError
from featlearn.linalg.factors import Dense, Gathered, Gradients
from featlearn.linalg.gram import in_memory_order
from featlearn.quantities.blocks import Captured, Kernels, add_kernels, empty_kernels, kernel_keys
from featlearn.quantities.budget import byte_budget, keep_released_memory, readable_bytes
from featlearn.quantities.directions import Directions, Outputs, Probes, output_directions
from featlearn.quantities.optimizer_kernel import Rate, step_rates
from featlearn.quantities.plan import Group, Plan, grouped, held_bytes, largest_chunk, parameter_plans
from featlearn.quantities.progress import Progress
from featlearn.quantities.repetition import Call
from featlearn.quantities.verification import Checks


@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["network"] = "network",
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: Literal["layer", "parameter"],
    parameters: str | Sequence[str] | None = None, optimizer: Optimizer | None = None,
    dtype: torch.dtype | None = None, memory: str | int | None = None, verify: bool = False,
) -> Kernels: ...  # fmt: skip
def ntk(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False,
) -> Tensor | Kernels:  # fmt: skip
    """The empirical neural tangent kernel K = J J^T of a network, exact for every trainable parameter.

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
        optimizer: the kernel of the update it is about to make, sum_j eta_j d_j f d_j f' (Atanasov et al., Eq. 91), for
            SGD, Adam, AdamW, RMSprop and Adagrad: learning rates and second moments are inside; momentum and weight
            decay are not. Adaptive ones must have made a step.
        dtype: `torch.float64` measures a copy of the network in double. Without it the network is measured in its own
            precision, and kernels of half-precision networks are accumulated in float32.
        memory: a byte budget such as `"2GiB"`; by default half of what is free. Chunks follow from it. What torch's own
            ops take while they run (tens of MiB on a CPU) comes on top.
        verify: compare v^T K v with |J^T v|^2 from independent backward passes, parameter by parameter, and raise if
            they differ.

    Returns:
        A tensor on the outputs' device, or a dict of them; parameters of the root module itself are the layer `""`.

    Raises:
        FeatlearnError: for anything that cannot be measured exactly, with what to do about it.
    """

    plain = x2 is None and optimizer is None and dtype is None and not verify

    def measured() -> Kernels:
        call = Call(model, x, outputs, readout, by, parameters, memory) if plain else None
        kernels = call.again() if call else None
        if kernels is not None:
            return kernels
        prepared = _prepared(model, x, x2, outputs, readout, by, parameters, optimizer, dtype, verify)
        with prepared as (measurement, rates):
            kernels = measured_kernels(measurement, outputs, by, rates=rates, memory=memory, verify=verify, call=call)
        if call:
            call.remember()
        return kernels

    with collector_paused():  # until all that was measured with is gone: the collector would take it for lasting
        kernels = measured()
    return kernels[""] if by == "network" else kernels


def measured_kernels(
    measurement: Measurement, outputs: Outputs, by: str, *, rates: Mapping[str, Rate] | None = None,
    memory: str | int | None = None, verify: bool = False, call: Call | None = None,
) -> Kernels:  # fmt: skip
    """The kernels of a measurement that is under way: key (layer, parameter, or "" for the network) -> kernel.

    `call` is told what a call like this one can take over.
    """
    rates = {} if rates is None else rates
    if memory is None:
        keep_released_memory()
    directions = output_directions(outputs, measurement.classes)
    plan = _plan(measurement, directions, rates, by, memory, verify)
    keys = kernel_keys(measurement.parameters, by)
    kernels = empty_kernels(keys, plan.kernel_shape, directions.mode, measurement.dtype, measurement.device)
    for kernel in kernels.values():
        kernel.zero_()
    checks = Checks(measurement, directions, rates, plan) if verify else None
    progress = Progress("tangent kernel", plan.passes)
    try:
        for group in plan.groups:
            for chosen in _direction_blocks(directions, group):

                def capture(probe: Probe, block: slice, group: Group = group, chosen: slice = chosen) -> Captured:
                    return _captured(measurement, probe, block, directions, chosen, rates, plan, group, progress, call)

                add_kernels(kernels, keys, measurement.probes, group.block, chosen, directions.mode, plan.scratch,
                            capture, checks.add if checks else None)  # fmt: skip
    finally:
        progress.close()
    _refuse_no_gradient(any(measurement.graphs))
    if checks is not None:
        checks.conclude()
    for key, kernel in kernels.items():
        if directions.divisor != 1:
            kernel /= directions.divisor
        low, high = _range(kernel)
        if max(-low, high) < torch.finfo(kernel.dtype).tiny and measurement.audit_anew is not None:
            measurement.audit_anew()  # gradients may have become too small since
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InputValueError(
                f"the kernel{f' of {key}' if by != 'network' else ''} is not finite: gradients overflow or the "
                "weights are not finite; measure with dtype=torch.float64, or lower the learning rate of the run"
            )
    return kernels


def _refuse_no_gradient(seen: bool) -> None:
    if not seen:
        raise InputValueError(
            "the outputs carry no gradient: they are detached, or computed under no_grad inside the model; expected "
            "outputs that depend on the trainable parameters through differentiable operations"
        )


def _range(kernel: Tensor) -> tuple[float, float]:
    """Both ends: one pass, and no second tensor of the kernel's size."""
    low, high = torch.stack(in_memory_order(kernel).aminmax()).tolist()
    return low, high


def plan(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False,
) -> Plan:  # fmt: skip
    """What `fl.ntk` with the same arguments will do and cost; runs the model on a few samples only.

    Per parameter: its uses, the route or the fallback and why, multiply-adds, bytes. `print(fl.plan(...))` is a table.
    """
    if isinstance(outputs, Probes):
        outputs = Probes(outputs.k)  # the directions of the call that follows are not drawn here
    with _prepared(model, x, x2, outputs, readout, by, parameters, optimizer, dtype, verify) as (measurement, rates):
        found = _plan(measurement, output_directions(outputs, measurement.classes), rates, by, memory, verify)
        _refuse_no_gradient(any(pilot.graph is not None for pilot in measurement.pilots))
        return found


@contextmanager
def _prepared(
    model: nn.Module, x: Inputs, x2: Inputs | None, outputs: Outputs, readout: Readout | None, by: str,
    parameters: str | Sequence[str] | None, optimizer: Optimizer | None, dtype: torch.dtype | None, verify: bool,
) -> Iterator[tuple[Measurement, dict[str, Rate]]]:  # fmt: skip
    if by not in ("network", "layer", "parameter"):
        raise InputValueError(f"by={by!r}, expected 'network', 'layer' or 'parameter'")
    checked_dtype(dtype)
    unwrapped(model)
    if not isinstance(outputs, int | Probes):
        output_directions(outputs, 1)  # complain before anything runs; probes would be drawn
    # Before the measurement, which puts .grad aside.
    rates = {} if optimizer is None else step_rates(optimizer, trainable_parameters(model, parameters))
    inputs = [x] if x2 is None else [x, x2]
    with measuring(
        model, inputs, readout=readout, parameters=parameters, dtype=dtype, recalling=not verify
    ) as measurement:
        yield measurement, rates


def _plan(
    measurement: Measurement, directions: Directions, rates: Mapping[str, Rate], by: str, memory: str | int | None,
    verify: bool,
) -> Plan:  # fmt: skip
    sizes = [probe.samples for probe in measurement.probes]
    samples = (sizes[0], sizes[-1])
    count = directions.count
    budget = byte_budget(memory, measurement.device)
    shape = directions.kernel_shape(*samples)
    kernels = len(set(kernel_keys(measurement.parameters, by).values())) + (1 if verify else 0)
    needed = torch.Size(shape).numel() * measurement.dtype.itemsize * kernels
    if needed > 0.9 * budget:
        raise MemoryBudgetError(
            f"the kernel {' x '.join(map(str, shape))}{f' for {kernels} parts' if kernels > 1 else ''} takes "
            f"{readable_bytes(needed)}, expected at most {readable_bytes(0.9 * budget)} of the budget "
            f"{readable_bytes(budget)}; two ways out: fewer samples or outputs='mean' with by='network', "
            "or a larger memory= if the machine has it"
        )
    elementwise = [name for name, rate in rates.items() if isinstance(rate, Tensor)]
    plans = parameter_plans(measurement, directions.mode, count, samples, elementwise)
    # Activations, their gradients and what an op needs while it runs.
    graph_bytes = 3 * max(
        (pilot.graph.output_bytes // len(pilot.indices) if pilot.graph else 0) for pilot in measurement.pilots
    )
    # The weights are held a second time, to be put back should the model change them.
    tensors = (*measurement.model.parameters(), *measurement.model.buffers())
    weights = sum(t.numel() * t.element_size() for t in tensors)
    available, symmetric = budget - needed - weights, len(sizes) == 1
    groups = grouped(
        plans, graph_bytes, available, samples, symmetric, directions.mode, count, directions.classes,
        largest_chunk(measurement, max(samples), count),
    )  # fmt: skip
    peak = needed + weights + held_bytes(measurement, plans, groups, samples, symmetric, count)
    return Plan(plans, groups, samples, symmetric, count, shape, needed, budget, int(0.2 * available), peak)


def _direction_blocks(directions: Directions, group: Group) -> list[slice]:
    count = directions.count
    return [slice(k, min(k + group.directions, count)) for k in range(0, count, group.directions)]


def _captured(
    measurement: Measurement, probe: Probe, block: slice, outputs: Directions, chosen: slice,
    rates: Mapping[str, Rate], plan: Plan, group: Group, progress: Progress, call: Call | None,
) -> Captured:  # fmt: skip
    """Per-sample gradients of a block of samples, with the optimizer's rates inside.

    Where all samples make one chunk, each parameter's are formed when they are multiplied, and dropped; otherwise they
    are gathered chunk by chunk, in the form that takes less memory.
    """
    directions = outputs.rows(chosen)
    whole = len(measurement.probes) == 1 and block == slice(0, probe.samples)
    # Chunks of one block agree on it; between blocks nothing could be taken back.
    collapse = Collapse() if whole and outputs.mode == "sum" else None
    apart, last = outputs.mode == "each", not measurement.remembering
    if whole and group.chunk >= probe.samples:
        snapshot = measurement.snapshot(probe, block.start, block.stop, mixed(directions))
        elementwise = {name for name, rate in rates.items() if isinstance(rate, Tensor)}
        for name, gradients in snapshot.each_gradient(group.names, directions, elementwise, collapse, apart, last):
            yield name, _with_rate(gradients, rates.get(name, 1.0))
            del gradients
        if call is not None:
            call.made(measurement, snapshot, plan, outputs, collapse)
        progress.advance()
        return
    early = {p.name for p in plan.parameters if p.form_early}
    gathered: dict[str, Gathered] = {}
    begin = block.start
    while begin < block.stop:
        end = min(begin + group.chunk, block.stop)
        snapshot = measurement.snapshot(probe, begin, end, mixed(directions))
        seen = set()
        try:
            for name, gradients in snapshot.each_gradient(group.names, directions, early, collapse, apart, last):
                if name not in gathered:
                    gathered[name] = Gathered(block.stop - block.start, gradients.directions)
                    if begin > block.start:
                        gathered[name].add(_nothing(measurement, name, begin - block.start, gradients.directions))
                if gathered[name].directions != gradients.directions:
                    raise UnequalChunksError
                gathered[name].add(_with_rate(gradients, rates.get(name, 1.0)))
                seen.add(name)
        except UnequalChunksError:  # once more, with all directions
            gathered.clear()
            begin, collapse = block.start, None
            continue
        for name in gathered.keys() - seen:
            gathered[name].add(_nothing(measurement, name, end - begin, gathered[name].directions))
        del snapshot  # before the next one is made
        progress.advance()
        begin = end
    while gathered:
        name = next(iter(gathered))
        yield name, gathered.pop(name).whole()


def _nothing(measurement: Measurement, name: str, samples: int, directions: int) -> Dense:
    """The gradient of samples that do not use a parameter others use."""
    parameter = measurement.parameters[name]
    size = parameter.numel() * (2 if parameter.is_complex() else 1)
    return Dense(torch.zeros(samples, directions, size, dtype=measurement.dtype, device=parameter.device))


def _with_rate(gradients: Gradients, rate: Rate) -> Gradients:
    """The square root of the rate on either side of the kernel."""
    if isinstance(gradients, Dense):
        root = rate.flatten().to(gradients.gradient).sqrt() if isinstance(rate, Tensor) else rate**0.5
        return gradients if isinstance(root, float) and root == 1.0 else Dense(gradients.gradient * root)
    assert isinstance(rate, float)
    if rate == 1.0:
        return gradients
    return replace(gradients, parts=tuple(replace(p, grads=p.grads * rate**0.5) for p in gradients.parts))
