"""The plan of one kernel: which route each parameter takes, and what is captured together to fit into memory."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from featlearn.contraction.blocking import formed_bytes
from featlearn.contraction.gram import Extent, Mode, Route, costs, window_cost
from featlearn.contraction.hardware import elementwise_cost
from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.errors import MemoryBudgetError
from featlearn.gradients.captured import Chunk
from featlearn.gradients.directions import OutputSelection
from featlearn.measurement import Measurement
from featlearn.ops import Outer
from featlearn.planning.memory import byte_budget, readable_bytes
from featlearn.planning.plan import KernelCall, ParameterGroup, ParameterPlan, Plan


def plan_kernel(measurement: Measurement, call: KernelCall, columns: int | None = None) -> Plan:
    """Choose routes, groups of parameters and chunks for a kernel.

    `columns`: how many the kernel has, where other ranks have the samples of most of them.
    """
    directions = call.directions
    sizes = [batch.samples for batch in measurement.batches]
    samples = (sizes[0], sizes[-1])
    count = directions.count
    budget = byte_budget(call.memory, measurement.device)
    shape = directions.kernel_shape(samples[0], samples[1] if columns is None else columns)
    kernels = len(set(kernel_keys(measurement.parameters, call.by).values())) + (1 if call.verify else 0)
    needed = torch.Size(shape).numel() * measurement.dtype.itemsize * kernels
    if needed > 0.9 * budget:
        raise MemoryBudgetError(
            f"the kernel {' x '.join(map(str, shape))}{f' for {kernels} parts' if kernels > 1 else ''} takes "
            f"{readable_bytes(needed)}, expected at most {readable_bytes(0.9 * budget)} of the budget "
            f"{readable_bytes(budget)}; write it to a file with out='kernel.npy', multiply with it without forming it "
            "(fl.NTKOperator), estimate it (sketch=fl.Sketch(k)), take outputs='mean' and by='network', or pass a "
            "larger memory="
        )
    plans = parameter_plans(measurement, directions.mode, count, samples, call.formed)
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
        verified=call.verify,
        gathered_bytes=measurement.gathered_bytes,
    )


def parameter_plans(
    measurement: Measurement, mode: Mode, directions: int, samples: tuple[int, int], formed: Collection[str]
) -> tuple[ParameterPlan, ...]:
    """Plan how every parameter is read and contracted, from a few samples of every batch."""
    item, weight = measurement.dtype.itemsize, elementwise_cost(measurement.device)
    plans, captured = [], measurement.examples
    for name, parameter in measurement.parameters.items():
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        examples = [example for example in captured if name in example.uses]
        nodes = examples[0].uses[name].nodes if examples else ()
        plan = ParameterPlan(
            name=name,
            shape=tuple(parameter.shape),
            uses=nodes,
            # Others than these samples may use a parameter that is unused here, so it is captured all the same.
            route="unused",
            reason="no gradient reaches it from the few samples that were run",
            operations=0,
            kept=directions * size * item,
            passing=3 * directions * size * item,
            form_early=True,
        )
        if not examples:
            plans.append(plan)
            continue
        route, reason = _route(name, examples, name in formed)
        if route != "factors":
            operands = max(_operand_numbers(example, name) for example in examples) * directions * item
            dense = samples[0] * samples[1] * size * (directions**2 if mode == "full" else directions)
            plans.append(
                replace(plan, route=route, reason=reason, operations=dense, passing=3 * (plan.kept + operands))
            )
            continue
        extents = [
            _extent(example, name, count, directions, weight) for example, count in zip(examples, samples, strict=False)
        ]
        cost = costs(extents[0], extents[-1], mode, weight)
        best = min(cost, key=cost.__getitem__)
        factors = max(_factor_numbers(example, name, directions) for example in examples) * item
        early = best is Route.GRADIENTS and plan.kept < factors
        positions = max(sum(t for t, _, _ in extent.parts) for extent in extents)
        kept = plan.kept if early else factors
        plans.append(
            replace(
                plan,
                route=best.value,
                reason=f"{positions} position{'' if positions == 1 else 's'}",
                operations=cost[best],
                kept=kept,
                # Rows and gradients as the op has them, by sample, and once more while they are multiplied.
                passing=(4 * factors + kept) if early else 3 * factors,
                form_early=early,
                factors=factors // item,
                positions=positions,
            )
        )
    return tuple(plans)


def _route(name: str, examples: Sequence[Chunk], elementwise: bool) -> tuple[str, str]:
    for example in examples:
        uses = example.uses[name]
        if uses.fallback_reason is not None:
            return "fallback", uses.fallback_reason
    for example in examples:
        uses = example.uses[name]
        if uses.matrix_view is None:
            whole = all(reading.value[0] is example.graph.leaves[name] for reading in uses.readings)  # type: ignore[union-attr]
            return ("direct", "small operand") if whole else ("pulled back", "made by other ops")
    return ("direct", "a rate for every entry") if elementwise else ("factors", "")


def _operand_numbers(example: Chunk, name: str) -> int:
    """Numbers per sample while the gradients of a parameter's operands are formed, to be pulled back to it."""
    readings = example.uses[name].readings
    factors = [
        r.form.positions * r.form.blocks * (r.form.row_size + r.form.grad_size)
        for r in readings
        if isinstance(r.form, Outer) and not r.form.indexed
    ]
    # Every direction's gradient at every use is held until the operands' gradients are formed.
    held = sum(reading.use.output.numel() // reading.use.layout.samples for reading in readings)
    return sum(reading.use.shape.numel() for reading in readings) + sum(factors) + held


def _extent(example: Chunk, name: str, samples: int, directions: int, elementwise: float) -> Extent:
    uses = example.uses[name]
    where = uses.matrix_view
    assert where is not None
    sides: dict[tuple[bool, bool], tuple[int, int, int]] = {}
    for reading in uses.readings:
        form = reading.form
        assert isinstance(form, Outer)
        key = (form.rows_first != where.flipped[reading.value], form.indexed)
        before = sides.get(key, (0, 0, 0))[0]
        sides[key] = (before + form.positions, _row_cost(form, elementwise), form.grad_size)
    return Extent(samples, directions, where.blocks, where.first, where.second, tuple(sides.values()))


def _row_cost(form: Outer, elementwise: float) -> int:
    """Multiply-adds for the inner product of two rows."""
    if form.pixels:
        return window_cost(form.window, form.row_size, form.pixels, form.positions, elementwise)
    return 1 if form.indexed else form.row_size


def _factor_numbers(example: Chunk, name: str, directions: int) -> int:
    """Numbers kept per sample as factors: images, where the rows are their windows."""
    kept = written = 0
    for reading in example.uses[name].readings:
        form = reading.form
        assert isinstance(form, Outer)
        rows = form.positions if form.indexed else form.blocks * form.positions * form.row_size
        image = form.pixels * form.blocks * form.row_size // form.window
        grads = form.blocks * form.positions * directions * form.grad_size
        kept, written = kept + (image or rows) + grads, written + rows + grads
    # Several uses on one side are written out and joined.
    single = len(example.uses[name].readings) == 1
    return kept if single else written


def grouped(
    plans: Sequence[ParameterPlan],
    *,
    graph_bytes: int,
    available: int,
    samples: tuple[int, int],
    symmetric: bool,
    directions: OutputSelection,
    largest_chunk: int,
    one_by_one: bool,
    proved: bool = True,
    avoided: frozenset[int] = frozenset(),
) -> tuple[ParameterGroup, ...]:
    """Pack parameters so that what is kept of all samples fits; a parameter too large alone is split further.

    `one_by_one`: where one chunk holds all samples, directions are captured and multiplied one after the other.
    `proved`: chunks are not run again in parts, unless they have as many samples as one of `avoided`.
    """
    held = samples[0] if symmetric else sum(samples)
    keep, pass_through = int(0.45 * available), int(0.3 * available)
    mode, count = directions.mode, directions.count
    # Directions are written out for a block of them at a time, C numbers each.
    together = count if mode == "full" else min(count, max(1, 2**24 // directions.classes))

    at_once = symmetric and plans and samples[0] <= largest_chunk
    if at_once and samples[0] * _at_once(plans, graph_bytes) < 0.75 * available:
        few = 1 if one_by_one else together
        return (ParameterGroup(tuple(plan.name for plan in plans), samples[0], few, samples[0]),)

    def chunk(passing_bytes: int, block: int) -> int:
        each = max(graph_bytes + passing_bytes, 1)
        # One sample alone is run beside its copy, and parts of fewer than four beside copies of theirs.
        least = 2 if proved else 4
        fitting = least if least * each <= 0.5 * available else 1
        size = min(block, largest_chunk, max(fitting, pass_through // each))
        if size not in avoided or size <= 2:
            return size
        # Running every chunk again in parts takes longer than a few more chunks, and less time than twice as many.
        return size - 1 if 4 * -(-block // (size - 1)) <= 5 * -(-block // size) else size

    packs: list[list[ParameterPlan]] = []
    kept = 0
    for plan in plans:
        one = max((graph_bytes + plan.passing // count) / 0.3, 2 * plan.kept / count / 0.45)
        if one > available:
            raise MemoryBudgetError(
                f"{plan.name} needs about {readable_bytes(one)} for a single sample, expected at most "
                f"{readable_bytes(max(available, 0))}, which is what the kernel and copies of weights leave of the "
                "budget; raise memory=, or leave the parameter out with parameters="
            )
        if not packs or (kept + plan.kept) * held > keep:
            packs.append([])
            kept = 0
        packs[-1].append(plan)
        kept += plan.kept
    groups = []
    for pack in packs:
        kept, passing = sum(plan.kept for plan in pack), sum(plan.passing for plan in pack)
        block, few = max(samples), together
        if kept * held > keep:  # fewer directions at a time (another sweep each), then blocks of samples
            if mode != "full":
                few = max(1, min(together, keep * count // (kept * held)))
            kept, passing = max(1, kept * few // count), passing * few // count
            block = max(1, min(block, keep // (2 * kept))) if kept * held > keep else block
        groups.append(ParameterGroup(tuple(plan.name for plan in pack), block, few, chunk(passing, block)))
    return tuple(groups)


def largest_chunk(measurement: Measurement, samples: int, directions: int) -> int:
    """Samples in one pass. A CPU with many passes to make is faster when their activations stay small: the C library
    keeps memory below about 50 MiB for the next pass, and gets more of it anew from the system each time."""
    bytes_each = max((_graph_bytes(example, 1)[0] for example in measurement.examples if example.graph), default=0)
    few = SMALL // max(bytes_each, 1)
    slow = measurement.device.type == "cpu" and directions >= MANY and few >= LEAST_CHUNK
    return -(-samples // -(-samples // few)) if slow and few < samples else samples


def samples_within(measurement: Measurement, room: float, directions: int = 1, *, dense: bool = False) -> int:
    """Return how many samples may be captured at once in so many bytes: see `bytes_per_sample`."""
    return int(max(1, min(1024, room // bytes_per_sample(measurement, directions, dense=dense))))


def bytes_per_sample(measurement: Measurement, directions: int = 1, *, dense: bool = False) -> int:
    """Return the bytes of one captured sample, with the gradients of all directions at all ops.

    `dense`: the per-sample gradients of every parameter will be formed, one parameter after the other. Without it,
    those count that cannot be computed otherwise.
    """
    item = measurement.dtype.itemsize
    # Activations, their gradients and what an op needs while it runs.
    sizes = [_graph_bytes(example, item) for example in measurement.examples if example.graph]
    each = max((3 * activations + 2 * directions * use_gradients for activations, use_gradients in sizes), default=0)
    formed = max((_formed_numbers(example, dense) for example in measurement.examples), default=0)
    return each + directions * formed * item + 1


def captured_bytes(measurement: Measurement, directions: int) -> int:
    """Bytes of one sample while it is captured: activations, and the gradients of all directions at all uses."""
    item = measurement.dtype.itemsize
    sizes = [_graph_bytes(example, item) for example in measurement.examples if example.graph]
    return max((activations + directions * use_gradients for activations, use_gradients in sizes), default=0)


def _formed_numbers(example: Chunk, dense: bool) -> int:
    """Numbers per sample and direction of gradients that are formed: of the largest parameter, twice while that
    happens, and of all that go to the fallback together."""
    largest = together = 0
    for name, uses in example.uses.items():
        size = example.parameters[name].numel() * (2 if example.parameters[name].is_complex() else 1)
        if uses.fallback_reason is not None:
            together += 2 * size
        elif dense or uses.matrix_view is None:
            largest = max(largest, 2 * size)
    return largest + together


def shares_rows(measurement: Measurement, samples: int, directions: int) -> bool:
    """Whether directions are better captured one by one, inner products of rows being kept between them.

    Worth it where the gradients of all directions are many numbers, and more than the inner products of rows. A GPU
    captures all directions at once; with several positions other routes may be better.
    """
    every = [uses for uses in measurement.example().uses.values() if uses.matrix_view is not None]
    forms = [reading.form for uses in every for reading in uses.readings]
    single = [form for form in forms if isinstance(form, Outer) and form.positions == 1]
    if measurement.device.type != "cpu" or directions == 1 or not forms or len(single) < len(forms):
        return False
    gradients = directions * sum(form.blocks * form.grad_size for form in single)
    return samples * len(single) < gradients and samples * gradients > MANY_NUMBERS


# That many gradients take longer to be put side by side than directions to be captured one by one.
MANY_NUMBERS = 2**21
# Bytes of activations in a pass, how many passes are many, and the least samples in one that are worth its overhead.
SMALL, MANY, LEAST_CHUNK = 32 * 2**20, 4, 32


def held_bytes(
    measurement: Measurement,
    plans: Sequence[ParameterPlan],
    groups: Sequence[ParameterGroup],
    samples: tuple[int, int],
    symmetric: bool,
    directions: int,
) -> int:
    """About how many bytes a kernel is made from at a time: activations, gradients at uses, what is formed of them."""
    item = measurement.dtype.itemsize
    graphs = [_graph_bytes(example, item) for example in measurement.examples if example.graph]
    activations, use_gradients = (max(sizes) for sizes in zip(*graphs, strict=True)) if graphs else (0, 0)
    named = {plan.name: plan for plan in plans}
    most = 0
    for group in groups:
        chosen = [named[name] for name in group.names]
        passing = activations + group.directions * use_gradients
        if symmetric and group.chunk >= samples[0]:
            formed = max(_formed_bytes(plan, samples[0], directions, item) for plan in chosen)
            most = max(most, samples[0] * passing + formed * group.directions // directions)
        else:
            sides = 1 if symmetric and group.block >= samples[0] else 2
            kept = sum(plan.kept for plan in chosen) * group.directions // directions
            most = max(most, sides * group.block * kept + group.chunk * passing)
    return most


def _formed_bytes(plan: ParameterPlan, samples: int, directions: int, item: int) -> int:
    """Bytes of one parameter while it is contracted: factors, or as much of the gradients as is formed at a time."""
    if plan.route != Route.GRADIENTS.value:
        return samples * plan.kept
    return min(samples * directions * math.prod(plan.shape) * item, max(formed_bytes(), samples * plan.kept))


def _graph_bytes(example: Chunk, item: int) -> tuple[int, int]:
    """Bytes per sample of all activations, and of the gradients of one direction at all ops that use parameters."""
    assert example.graph is not None
    outputs = {r.use.node: r.use.output.numel() for uses in example.uses.values() for r in uses.readings}
    return example.graph.structure.output_bytes // len(example.indices), sum(outputs.values()) * item // len(
        example.indices
    )


def _at_once(plans: Sequence[ParameterPlan], graph_bytes: int) -> float:
    """Bytes per sample if all are captured in one chunk: the graph, gradients at all uses, and one parameter's.

    Activations are dropped on the way of the only backward pass: half of what a chunk among others is granted.
    """
    use_gradients = sum(plan.passing if plan.route in ("fallback", "unused") else plan.passing / 3 for plan in plans)
    return graph_bytes / 2 + use_gradients + max(plan.passing for plan in plans)
