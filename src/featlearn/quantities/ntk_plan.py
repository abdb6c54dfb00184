"""`fl.plan`: what a kernel will do and cost, before anything is paid."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from featlearn.audited_model import AuditedModel, Settings
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.errors import InputValueError
from featlearn.gradients.directions import Directions, Outputs, output_directions
from featlearn.kernel.execution import checked_rates
from featlearn.kernel.sketched_kernel import checked_sketch
from featlearn.kernel.stored_tiles import KernelTiles, StoredPlan, checked_storage, plan_stored
from featlearn.kernel.stream import taken
from featlearn.network.inputs import Inputs
from featlearn.planning.exchange import shared_kernel, shared_parameters
from featlearn.planning.kernel_plan import plan_kernel
from featlearn.planning.plan import KernelCall, Plan
from featlearn.planning.rank_costs import Device, RankCosts, checked_device, checked_ranks, rank_costs
from featlearn.planning.sketch_plan import SketchPlan, plan_sketch
from featlearn.quantities.ntk import KernelOptions
from featlearn.signatures import name_keywords


class PlanOptions(KernelOptions, total=False):
    """Keyword arguments of `fl.plan` that do not change the type of the result."""

    by: str
    ranks: int | None
    device: str | Device


@overload
def plan(model: nn.Module, x: Inputs, **options: Unpack[PlanOptions]) -> Plan: ...
@overload
def plan(model: nn.Module, x: Inputs, *, sketch: Sketch, **options: Unpack[PlanOptions]) -> SketchPlan: ...
@overload
def plan(
    model: nn.Module,
    x: Inputs,
    *,
    out: str | Path,
    out_dtype: torch.dtype | None = None,
    **options: Unpack[PlanOptions],
) -> StoredPlan: ...
@name_keywords("The kernel does not depend on targets, so drop `y`.")
def plan(
    model: nn.Module,
    x: Inputs,
    *,
    x2: Inputs | None = None,
    outputs: Outputs = "mean",
    by: str = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch | None = None,
    ranks: int | None = None,
    device: str | Device = "H100",
    out: str | Path | None = None,
    out_dtype: torch.dtype | None = None,
    **settings: Unpack[Settings],
) -> Plan | SketchPlan | StoredPlan:
    """What `fl.ntk` with the same arguments will do and cost; runs the model on a few samples only.

    Per parameter: its uses, the route or the fallback and why, multiply-adds, bytes. `print(fl.plan(...))` is a table.
    With `sketch` it is the plan of the sketched kernel. `ranks=64, device="H100"` adds a model of the same kernel on
    several devices (`.rank_costs`): compute, bytes moved and memory of each, and where the time goes; it was not run on
    several GPUs. Devices are V100, A100, H100, H200, B200, or a `featlearn.planning.rank_costs.Device`.

    With `out` it is the plan of a kernel in a file: tiles, bytes, and the time on this machine, from trials of a few
    samples, or on `ranks` devices.
    """
    return plan_of(
        AuditedModel(model, **settings),
        x2,
        x=x,
        outputs=outputs,
        by=by,
        optimizer=optimizer,
        verify=verify,
        sketch=sketch,
        ranks=ranks,
        device=device,
        out=out,
        out_dtype=out_dtype,
    )


def plan_of(
    audited: AuditedModel,
    x2: Inputs | None = None,
    *,
    x: Inputs | None = None,
    outputs: Outputs = "mean",
    by: str = "network",
    optimizer: Optimizer | None = None,
    verify: bool = False,
    sketch: Sketch | None = None,
    ranks: int | None = None,
    device: str | Device = "H100",
    out: str | Path | None = None,
    out_dtype: torch.dtype | None = None,
) -> Plan | SketchPlan | StoredPlan:
    """Estimate the cost of `ntk` with the same arguments: see `fl.plan`."""
    x = audited.inputs(x)
    if audited.request.group.given:
        raise InputValueError("group=..., expected none: fl.plan divides no samples; ranks= models several devices")
    path = None
    if out is not None or out_dtype is not None:
        path = checked_storage(outputs, sketch, out, out_dtype)
    elif ranks is not None and (sketch is not None or x2 is not None):
        raise InputValueError("ranks= with sketch= or x2, expected an exact kernel of one batch: no other is modeled")
    checked_device(device)
    if sketch is not None:
        checked_sketch(sketch, outputs, verify)
    if isinstance(outputs, Directions):
        outputs = Directions(outputs.k)  # the directions of the call that follows are not drawn here
    rates = whole_tensors(checked_rates(audited, outputs, by, optimizer, verify))
    with audited.measuring([x] if x2 is None else [x, x2], by_layer=True) as measurement:
        directions, memory = output_directions(outputs, measurement.classes), audited.request.memory
        call = KernelCall(directions=directions, by=by, rates=rates, memory=memory, verify=verify)
        measurement.has_gradient = any(example.graph is not None for example in measurement.examples)
        measurement.refuse_no_gradient()
        if path is not None:
            return plan_stored(KernelTiles(measurement, call, out_dtype), path, ranks, device)
        if sketch is not None:
            return plan_sketch(measurement, call, sketch)
        found = plan_kernel(measurement, call)
    if ranks is None:
        return found
    return replace(found, rank_costs=_rank_costs(audited, x, found, call, ranks, device))


def _rank_costs(
    audited: AuditedModel,
    x: Inputs,
    found: Plan,
    call: KernelCall,
    ranks: int,
    device: str | Device,
) -> RankCosts:
    """The costs on several devices, from the plan that rank 0 would make; passes are counted on a few samples."""
    device, samples = checked_device(device), found.samples[0]
    own = -(-samples // checked_ranks(ranks))
    with audited.measuring([taken(x, samples, torch.arange(own, device="cpu"))], by_layer=True) as measurement:
        (batch,) = measurement.batches
        with FlopCounterMode(display=False) as counted:
            outputs = batch.outputs(torch.arange(min(2, own), device="cpu"))
        memory = int(device.memory / 2) if audited.request.memory is None else found.memory
        pair = measurement.of_batches(batch, batch)
        kernel = shared_kernel(ranks, (samples, samples), True, call.directions, measurement, call.by, memory)
        plan = plan_kernel(pair, replace(call, memory=memory - kernel.reserved), samples)
        return rank_costs(
            shared_parameters(plan, measurement.dtype.itemsize),
            kernel,
            device,
            # As many operations again for each direction: gradients of activations, never of weights.
            sample_operations=counted.get_total_flops() / min(2, own) * (1 + found.directions),
            weight_bytes=measurement.copied_bytes
            + sum(p.numel() * p.element_size() for p in measurement.model.parameters()),
            dtype=measurement.dtype,
            network_dtype=outputs.dtype,
            groups=plan.groups,
        )
