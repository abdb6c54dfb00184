"""The plan of one kernel: which route each parameter takes, and what is captured together."""

from collections.abc import Collection

import torch

from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.errors import MemoryBudgetError
from featlearn.gradients.directions import OutputSelection
from featlearn.measurement import Measurement
from featlearn.planning.chunks import grouped, held_bytes, largest_chunk, shares_rows
from featlearn.planning.cost import parameter_plans
from featlearn.planning.memory import byte_budget, readable_bytes
from featlearn.planning.plan import Plan


def plan_kernel(
    measurement: Measurement,
    directions: OutputSelection,
    elementwise: Collection[str],
    by: str,
    memory: str | int | None,
    verify: bool,
    columns: int | None = None,
) -> Plan:
    """Choose routes, groups of parameters and chunks for a kernel.

    `elementwise`: parameters whose entries have rates of their own, so that their gradients must be formed. `columns`:
    how many the kernel has, where other ranks have the samples of most of them.
    """
    sizes = [batch.samples for batch in measurement.batches]
    samples = (sizes[0], sizes[-1])
    count = directions.count
    budget = byte_budget(memory, measurement.device)
    shape = directions.kernel_shape(samples[0], samples[1] if columns is None else columns)
    kernels = len(set(kernel_keys(measurement.parameters, by).values())) + (1 if verify else 0)
    needed = torch.Size(shape).numel() * measurement.dtype.itemsize * kernels
    if needed > 0.9 * budget:
        raise MemoryBudgetError(
            f"the kernel {' x '.join(map(str, shape))}{f' for {kernels} parts' if kernels > 1 else ''} takes "
            f"{readable_bytes(needed)}, expected at most {readable_bytes(0.9 * budget)} of the budget "
            f"{readable_bytes(budget)}; two ways out: fewer samples or outputs='mean' with by='network', "
            "or a larger memory= if the machine has it"
        )
    plans = parameter_plans(measurement, directions.mode, count, samples, elementwise)
    # Activations, their gradients and what an op needs while it runs.
    graph_bytes = 3 * max(
        (example.graph.structure.output_bytes // len(example.indices) if example.graph else 0)
        for example in measurement.examples
    )
    available, symmetric = budget - needed - measurement.copied_bytes, len(sizes) == 1
    one_by_one = directions.mode == "each" and symmetric and shares_rows(measurement, samples[0], count)
    proofs = [measurement.known(batch).proof for batch in measurement.batches]
    proved_by = frozenset(proof.samples for proof in proofs if proof is not None)
    groups = grouped(
        plans,
        graph_bytes=graph_bytes,
        available=available,
        samples=samples,
        symmetric=symmetric,
        directions=directions,
        largest_chunk=largest_chunk(measurement, max(samples), count),
        one_by_one=one_by_one,
        proved=None not in proofs,
        avoided=proved_by,
    )
    peak = needed + measurement.copied_bytes + held_bytes(measurement, plans, groups, samples, symmetric, count)
    confirmed = any(example.unproved for example in measurement.examples)
    return Plan(
        parameters=plans,
        groups=groups,
        samples=samples,
        symmetric=symmetric,
        directions=count,
        kernel_shape=shape,
        kernel_bytes=needed,
        memory=budget,
        scratch=int(0.2 * available),
        peak=peak,
        launch_bytes=measurement.facts.launch_bytes,
        proved_by=frozenset() if None in proofs else proved_by,
        confirmed=confirmed,
        verified=verify,
        gathered_bytes=measurement.gathered_bytes,
    )
