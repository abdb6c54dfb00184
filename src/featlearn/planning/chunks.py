"""Which samples and parameters are captured together, so that everything fits into memory."""

import math
from collections.abc import Sequence

from featlearn.contraction.blocking import formed_bytes
from featlearn.contraction.gram import Route
from featlearn.errors import MemoryBudgetError
from featlearn.gradients.captured import Chunk
from featlearn.gradients.directions import OutputSelection
from featlearn.measurement import Measurement
from featlearn.ops import Outer
from featlearn.planning.memory import readable_bytes
from featlearn.planning.plan import ParameterGroup, ParameterPlan


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
    groups: list[ParameterGroup] = []
    names: list[str] = []
    kept = passing = 0

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

    def close() -> None:
        if names:
            block = max(samples)
            groups.append(ParameterGroup(tuple(names), block, together, chunk(passing, block)))
            names.clear()

    for plan in plans:
        one = max((graph_bytes + plan.passing // count) / 0.3, 2 * plan.kept / count / 0.45)
        if one > available:
            raise MemoryBudgetError(
                f"{plan.name} needs about {readable_bytes(one)} for a single sample, expected at most "
                f"{readable_bytes(max(available, 0))}, which is what the kernel and copies of weights leave of the "
                "budget; raise memory=, or leave the parameter out with parameters="
            )
        if plan.kept * held > keep:
            close()
            kept = passing = 0
            groups.append(_split(plan, keep, held, samples, mode, count, together, chunk))
            continue
        if names and (kept + plan.kept) * held > keep:
            close()
            kept = passing = 0
        names.append(plan.name)
        kept, passing = kept + plan.kept, passing + plan.passing
    close()
    return tuple(groups)


def largest_chunk(measurement: Measurement, samples: int, directions: int) -> int:
    """Samples in one pass. A CPU with many passes to make is faster when their activations stay small: the C library
    keeps memory below about 50 MiB for the next pass, and gets more of it anew from the system each time."""
    bytes_each = max((_graph_bytes(example, 1)[0] for example in measurement.examples if example.graph), default=0)
    few = SMALL // max(bytes_each, 1)
    slow = measurement.device.type == "cpu" and directions >= MANY and few >= LEAST_CHUNK
    return -(-samples // -(-samples // few)) if slow and few < samples else samples


def samples_within(measurement: Measurement, room: float, directions: int = 1, *, dense: bool = False) -> int:
    """How many samples may be captured at once in so many bytes, with the gradients of all directions at all ops.

    `dense`: the per-sample gradients of every parameter will be formed, one parameter after the other; without it only
    those that cannot be had otherwise count.
    """
    item = measurement.dtype.itemsize
    # Activations, their gradients and what an op needs while it runs.
    sizes = [_graph_bytes(example, item) for example in measurement.examples if example.graph]
    each = max((3 * activations + 2 * directions * use_gradients for activations, use_gradients in sizes), default=0)
    formed = max((_formed_numbers(example, dense) for example in measurement.examples), default=0)
    return int(max(1, min(1024, room // (each + directions * formed * item + 1))))


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


def _split(plan, keep, held, samples, mode, directions, together, chunk) -> ParameterGroup:  # type: ignore[no-untyped-def]
    """First fewer directions at a time (another sweep each), then blocks of samples (another sweep for each pair)."""
    few = directions
    if mode != "full":
        few = max(1, min(together, keep * directions // max(plan.kept * held, 1)))
    kept = max(1, plan.kept * few // directions)
    block = max(1, min(max(samples), keep // (2 * kept))) if kept * held > keep else max(samples)
    return ParameterGroup((plan.name,), block, few, chunk(plan.passing * few // directions, block))
