"""`fl.plan`: what a kernel will do and cost, before anything is paid."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import nn
from torch.optim import Optimizer

from featlearn.audited_model import AuditedModel
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.gradients.directions import Outputs, Probes, output_directions
from featlearn.network.inputs import Inputs, Readout
from featlearn.planning.kernel_plan import plan_kernel
from featlearn.planning.plan import Plan
from featlearn.planning.sketch_plan import SketchPlan, plan_sketch
from featlearn.quantities.ntk import checked_by, checked_rates
from featlearn.quantities.optimizer_kernel import elementwise
from featlearn.quantities.sketched_kernel import checked_sketch


@overload
def plan(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False, sketch: None = None,
) -> Plan: ...  # fmt: skip
@overload
def plan(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False, sketch: Sketch,
) -> SketchPlan: ...  # fmt: skip
def plan(
    model: nn.Module, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean",
    readout: Readout | None = None, by: str = "network", parameters: str | Sequence[str] | None = None,
    optimizer: Optimizer | None = None, dtype: torch.dtype | None = None, memory: str | int | None = None,
    verify: bool = False, sketch: Sketch | None = None,
) -> Plan | SketchPlan:  # fmt: skip
    """What `fl.ntk` with the same arguments will do and cost; runs the model on a few samples only.

    Per parameter: its uses, the route or the fallback and why, multiply-adds, bytes. `print(fl.plan(...))` is a table.
    """
    checked_by(by)
    audited = AuditedModel(model, readout=readout, parameters=parameters, dtype=dtype, memory=memory)
    return kernel_plan(audited, x, x2, outputs=outputs, by=by, optimizer=optimizer, verify=verify, sketch=sketch)


def kernel_plan(
    audited: AuditedModel, x: Inputs, x2: Inputs | None = None, *, outputs: Outputs = "mean", by: str = "network",
    optimizer: Optimizer | None = None, verify: bool = False, sketch: Sketch | None = None,
) -> Plan | SketchPlan:  # fmt: skip
    """What `tangent_kernel`, or `sketched_kernel`, will do and cost."""
    if sketch is not None:
        checked_sketch(sketch, outputs, verify)
    if isinstance(outputs, Probes):
        outputs = Probes(outputs.k)  # the directions of the call that follows are not drawn here
    rates = checked_rates(audited, outputs, by, optimizer)
    with audited.measuring([x] if x2 is None else [x, x2]) as measurement:
        directions = output_directions(outputs, measurement.classes)
        measurement.has_gradient = any(example.graph is not None for example in measurement.examples)
        measurement.refuse_no_gradient()
        if sketch is not None:
            return plan_sketch(measurement, directions, sketch, elementwise(rates), by, audited.memory)
        return plan_kernel(measurement, directions, elementwise(rates), by, audited.memory, verify)
