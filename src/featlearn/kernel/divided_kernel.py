"""A tangent kernel measured by several ranks: what they agree on, and the tensor that holds the rows of each."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from featlearn.audited_model import AuditedModel
from featlearn.contraction.kernel_sum import Kernels, kernel_keys
from featlearn.distributed.agreement import same_call, same_tensors, smallest_budget
from featlearn.distributed.exchange import TensorKind, swap_tensors
from featlearn.distributed.group import RankGroup
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.gradients.directions import Outputs, OutputSelection, output_directions
from featlearn.kernel.divided_execution import DividedExecution
from featlearn.kernel.divided_samples import SampleShares
from featlearn.kernel.execution import KernelExecution, refuse_not_finite
from featlearn.kernel.stream import taken
from featlearn.kernel.verification import KernelVerification
from featlearn.measurement import Measurement
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, batch_size
from featlearn.network.isolation import collector_paused
from featlearn.planning.exchange import shared_kernel
from featlearn.planning.kernel_plan import plan_kernel
from featlearn.planning.memory import byte_budget
from featlearn.planning.plan import KernelCall, Rate
from featlearn.shapes import describe


def divided_kernels(
    audited: AuditedModel,
    x: Inputs,
    x2: Inputs | None,
    outputs: Outputs,
    by: str,
    verify: bool,
    rates_of: Callable[[], dict[str, Rate]],
) -> Kernels:
    """The kernels of an audited model, each a DTensor of which every rank has the rows of its samples.

    `rates_of` complains about arguments, and reads the optimizer's rates.
    """
    ranks, given = audited.request.group, [x] if x2 is None else [x, x2]
    with ranks.together():
        unwrapped(audited.model)
        rates = rates_of()
        sizes = [batch_size(one, name) for one, name in zip(given, ("x", "x2"), strict=False)]
    rates = whole_tensors(rates)
    arguments = {
        "x": describe(x),
        "x2": None if x2 is None else describe(x2),
        "outputs": outputs,
        "by": by,
        "verify": verify,
        "parameters": audited.request.parameters,
        "dtype": audited.request.dtype,
        "the number of rates": len(rates),
    }
    with ranks.together() as block:
        block.expect(
            *same_call(arguments, {"x": x, "x2": x2, "outputs": outputs}),
            same_tensors("the optimizer's rate of", rates, "load one state into all optimizers"),
        )
    division = SampleShares(ranks, (sizes[0], sizes[-1]), x2 is None)
    own = [_own(one, size, ranks) for one, size in zip(given, sizes, strict=True)]

    audited.audits.forget_outputs()  # a few samples are run anyway, and no rank can begin again alone
    with collector_paused(), audited.measuring(own, common=x, by_layer=True) as measurement:
        kernels, directions = _measured(measurement, audited, division, outputs, by, rates, verify)
    if directions.mode == "each":
        kernels = {key: _by_output(kernel, division) for key, kernel in kernels.items()}
    shape = directions.kernel_shape(*division.samples)
    return {key: _sharded(kernel, shape, ranks) for key, kernel in kernels.items()}


def _own(x: Inputs, samples: int, ranks: RankGroup) -> Inputs:
    """The samples of this rank; the last one, whose gradients nobody asks for, where it has none."""
    share = ranks.share(samples)
    if share.start == share.stop:
        share = slice(samples - 1, samples)
    return taken(x, samples, torch.arange(share.start, share.stop, device="cpu"))


def _measured(
    measurement: Measurement,
    audited: AuditedModel,
    division: SampleShares,
    outputs: Outputs,
    by: str,
    rates: Mapping[str, Rate],
    verify: bool,
) -> tuple[Kernels, OutputSelection]:
    """The rows of this rank, by the plan of rank 0, which has as many samples as any."""
    ranks, batches = division.ranks, measurement.batches
    pair = measurement.of_batches(batches[0], batches[0]) if division.symmetric else measurement
    with ranks.together():
        directions = output_directions(outputs, pair.classes)
        budget = byte_budget(audited.request.memory, pair.device)
    budget = smallest_budget(ranks, budget, pair.device, measured=audited.request.memory is None)
    shared = shared_kernel(ranks.size, division.samples, division.symmetric, directions, pair, by, budget)
    with ranks.together():
        left = budget - shared.reserved
        call = KernelCall(directions=directions, by=by, rates=rates, memory=left, verify=verify)
        mine = plan_kernel(pair, call, division.samples[1])
    plan = ranks.from_first(mine)
    execution = KernelExecution(pair, plan, call)
    checks = KernelVerification(pair, call, plan, division.samples, ranks) if verify else None
    keys = kernel_keys(pair.parameters, by)
    kernels = DividedExecution(execution, pair, plan, directions, division, shared, keys, checks).run()
    pair.has_gradient = ranks.any(pair.has_gradient)
    pair.refuse_no_gradient()
    if checks is not None:
        checks.conclude()
    with ranks.together():
        refuse_not_finite(measurement, kernels, by)
    return kernels, directions


def _by_output(rows: Tensor, division: SampleShares) -> Tensor:
    """(C, own samples, P2) -> (own outputs, P, P2): every rank gets the kernels of some outputs, for all samples."""
    ranks, (outputs, _, columns) = division.ranks, rows.shape
    own = ranks.share(outputs)
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    outgoing = {rank: [rows[ranks.share(outputs, rank)].contiguous()] for rank in others}
    expected = {}
    for rank in others:
        there = division.places(0, rank)
        shape = (own.stop - own.start, there.stop - there.start, columns)
        expected[rank] = [TensorKind(shape, rows.dtype, (0, 1, 2))]
    found = swap_tensors(ranks, outgoing, expected, rows.device)
    return torch.cat([found[rank][0] if rank in found else rows[own] for rank in range(ranks.size)], 1)


def _sharded(rows: Tensor, shape: tuple[int, ...], ranks: RankGroup) -> Tensor:
    """The kernel of all samples, of which this rank holds some rows, or those of some outputs."""
    from torch.distributed.device_mesh import DeviceMesh  # takes long to load
    from torch.distributed.tensor import DTensor, Shard

    if not ranks.sends_from(rows.device):  # `full_tensor` would send from there
        rows = rows.to(ranks.device)
    mesh = DeviceMesh.from_group(ranks.process_group, rows.device.type)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides
    )
