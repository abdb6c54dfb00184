"""What a kernel will cost, and how every parameter will be read, before anything is paid."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from featlearn.capture.measurement import Measurement
from featlearn.capture.snapshot import Snapshot
from featlearn.errors import MemoryBudgetError
from featlearn.linalg.cuts import formed_bytes
from featlearn.linalg.gram import Extent, Mode, Route, costs, window_cost
from featlearn.linalg.rates import elementwise_cost
from featlearn.ops import Outer
from featlearn.quantities.budget import readable_bytes, readable_count


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter will be read and contracted."""

    name: str
    shape: tuple[int, ...]
    uses: tuple[str, ...]
    """Autograd nodes that use it, one entry per use."""
    route: str
    """`pairs`, `gradients` (formed slice by slice), `direct`, `pulled back`, `fallback` or `unused`."""
    reason: str
    """Why this route; for a fallback, what could not be read."""
    operations: float
    """Multiply-adds of the contraction."""
    kept: int
    """Bytes kept per sample."""
    passing: int
    """Bytes per sample while a chunk is captured."""
    form_early: bool
    """Whether per-sample gradients are formed as soon as they are captured, because they are smaller that way."""


@dataclass(frozen=True)
class Group:
    """Parameters captured together: `block` samples are held at a time, `directions` output directions."""

    names: tuple[str, ...]
    block: int
    directions: int
    chunk: int
    """Samples in one forward pass."""


@dataclass(frozen=True, repr=False)
class Plan:
    """What `fl.ntk` would do with the same arguments; `str()` is a table."""

    parameters: tuple[ParameterPlan, ...]
    groups: tuple[Group, ...]
    samples: tuple[int, int]
    symmetric: bool
    """Whether it is the kernel of one probe with itself."""
    directions: int
    """Output directions, each a backward pass per chunk."""
    kernel_shape: tuple[int, ...]
    kernel_bytes: int
    """Bytes of the result, all of its parts together."""
    memory: int
    """The byte budget."""
    scratch: int
    """Bytes for temporaries of a contraction."""
    peak: int
    """About how many bytes will be held at most: the kernel, the weights once more, and what it is made from."""

    @property
    def fallbacks(self) -> dict[str, str]:
        """Parameters that go through the exact fallback, with the reason."""
        return {p.name: p.reason for p in self.parameters if p.route == "fallback"}

    @property
    def operations(self) -> float:
        """Multiply-adds of all contractions."""
        return sum(p.operations for p in self.parameters)

    @property
    def passes(self) -> int:
        """Forward passes over chunks of samples; a block of samples is captured anew for every pair of blocks."""
        return sum(chunks * -(-self.directions // group.directions) for chunks, group in self._swept())

    @property
    def backward_passes(self) -> int:
        """Backward passes over chunks of samples, one for each output direction, without the checks."""
        return sum(chunks * self.directions for chunks, _ in self._swept())

    def _swept(self) -> list[tuple[int, Group]]:
        """How many chunks each group captures for one block of directions."""
        found = []
        for group in self.groups:
            chunks = [_chunks(samples, group) for samples in self.samples]
            if self.symmetric:  # block i, then every block before it
                count = sum(size * (len(chunks[0]) - i) for i, size in enumerate(chunks[0]))
            else:
                count = sum(chunks[0]) + len(chunks[0]) * sum(chunks[1])
            found.append((count, group))
        return found

    def __str__(self) -> str:
        head = ("parameter", "shape", "uses", "route", "multiply-adds", "bytes/sample", "why")
        lines = [
            (
                _common_name([p.name for p in same]),
                " x ".join(map(str, same[0].shape)) or "scalar",
                _counted(same[0].uses),
                same[0].route,
                readable_count(sum(p.operations for p in same)),
                readable_bytes(sum(p.kept for p in same)),
                same[0].reason,
            )
            for same in _alike(self.parameters)
        ]
        widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in (head, *lines)]  # fmt: skip
        rows.insert(1, "  ".join("-" * width for width in widths))
        chunks = sorted({group.chunk for group in self.groups})
        shape = " x ".join(map(str, self.kernel_shape))
        held = f"{chunks[0]}" if len(chunks) == 1 else f"{chunks[0]} to {chunks[-1]}" if chunks else "no"
        summary = [
            f"{self.samples[0]} x {self.samples[1]} samples -> kernel {shape} ({readable_bytes(self.kernel_bytes)}), "
            f"about {readable_bytes(self.peak)} at most, budget {readable_bytes(self.memory)}",
            f"{_plural(self.passes, 'forward pass', 'es')} of {held} sample{'' if held == '1' else 's'} and "
            f"{_plural(self.backward_passes, 'backward pass', 'es')}, then {readable_count(self.operations)} "
            "multiply-adds of contractions",
            f"{_plural(len(self.fallbacks), 'parameter', 's')} through the fallback",
        ]
        if self.directions >= 100:
            summary.append(
                f"{self.directions} outputs: outputs=fl.Probes(16) estimates their sum at a fraction of this"
            )
        return "\n".join([*rows, "", *summary])

    __repr__ = __str__


def _alike(parameters: Sequence[ParameterPlan]) -> list[list[ParameterPlan]]:
    """Parameters that differ in the numbers of their names alone: the layers of a stack."""
    groups: dict[tuple[object, ...], list[ParameterPlan]] = {}
    for p in parameters:
        key = (re.sub(r"\d+", "#", p.name), p.shape, p.uses, p.route, p.reason)
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    """h.{0..11}.weight for h.0.weight to h.11.weight."""
    if len(names) == 1:
        return names[0]
    numbers = zip(*(re.findall(r"\d+", name) for name in names), strict=True)
    spans = iter(same[0] if len(set(same)) == 1 else f"{{{same[0]}..{same[-1]}}}" for same in numbers)
    return re.sub(r"\d+", lambda _: next(spans), names[0]) + f" ({len(names)})"


def _plural(count: int, thing: str, ending: str) -> str:
    return f"{count or 'no'} {thing}{'' if count == 1 else ending}"


def _chunks(samples: int, group: Group) -> list[int]:
    """How many chunks each block of samples has."""
    starts = range(0, samples, group.block)
    return [-(-(min(start + group.block, samples) - start) // group.chunk) for start in starts]


def _counted(uses: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for use in uses:
        short = use.removesuffix("0").removesuffix("Backward")
        counts[short] = counts.get(short, 0) + 1
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counts.items()) or "-"


def parameter_plans(
    measurement: Measurement, mode: Mode, directions: int, samples: tuple[int, int], elementwise: Collection[str]
) -> tuple[ParameterPlan, ...]:
    """A plan for every parameter, from the pilots."""
    item, weight = measurement.dtype.itemsize, elementwise_cost(measurement.device)
    plans = []
    for name, parameter in measurement.parameters.items():
        shape, size = tuple(parameter.shape), parameter.numel() * (2 if parameter.is_complex() else 1)
        pilots = [pilot for pilot in measurement.pilots if name in pilot.access]
        if not pilots:
            # Others than the pilot's samples may use it, so it is captured all the same.
            kept, reason = directions * size * item, "no gradient reaches it from the pilot's samples"
            plans.append(ParameterPlan(name, shape, (), "unused", reason, 0, kept, 3 * kept, True))
            continue
        uses = pilots[0].access[name].uses.nodes
        route, reason = _kind(name, pilots, name in elementwise)
        dense = samples[0] * samples[1] * size * (directions**2 if mode == "full" else directions)
        if route != "factors":
            kept = directions * size * item
            operands = max(_operand_numbers(pilot, name) for pilot in pilots) * directions * item
            plans.append(ParameterPlan(name, shape, uses, route, reason, dense, kept, 3 * (kept + operands), True))
            continue
        extents = [
            _extent(pilot, name, count, directions, weight) for pilot, count in zip(pilots, samples, strict=False)
        ]
        cost = costs(extents[0], extents[-1], mode, weight)
        best = min(cost, key=cost.__getitem__)
        factors = max(_factor_numbers(pilot, name, directions) for pilot in pilots) * item
        early = best is Route.GRADIENTS and directions * size * item < factors
        positions = max(sum(t for t, _, _ in extent.parts) for extent in extents)
        reason = f"{positions} position{'' if positions == 1 else 's'}"
        kept = directions * size * item if early else factors
        # Rows and gradients as the op has them, by sample, and once more while they are multiplied.
        passing = (4 * factors + kept) if early else 3 * factors
        plans.append(ParameterPlan(name, shape, uses, best.value, reason, cost[best], kept, passing, early))
    return tuple(plans)


def _kind(name: str, pilots: Sequence[Snapshot], elementwise: bool) -> tuple[str, str]:
    for pilot in pilots:
        access = pilot.access[name]
        if access.refusal is not None:
            return "fallback", access.refusal
    for pilot in pilots:
        access = pilot.access[name]
        if access.coordinates is None:
            whole = all(reading.value[0] is pilot.graph.leaves[name] for reading in access.uses.readings)  # type: ignore[union-attr]
            return ("direct", "small operand") if whole else ("pulled back", "made by other ops")
    return ("direct", "a rate for every entry") if elementwise else ("factors", "")


def _operand_numbers(pilot: Snapshot, name: str) -> int:
    """Numbers per sample while the gradients of a parameter's operands are formed, to be pulled back to it."""
    readings = pilot.access[name].uses.readings
    factors = [r.form.positions * r.form.blocks * (r.form.row_size + r.form.grad_size)
               for r in readings if isinstance(r.form, Outer) and not r.form.indexed]  # fmt: skip
    # Every direction's gradient at every use is held until the operands' gradients are formed.
    held = sum(reading.use.output.numel() // reading.use.layout.samples for reading in readings)
    return sum(reading.use.shape.numel() for reading in readings) + sum(factors) + held


def _extent(pilot: Snapshot, name: str, samples: int, directions: int, elementwise: float) -> Extent:
    access = pilot.access[name]
    where = access.coordinates
    assert where is not None
    sides: dict[tuple[bool, bool], tuple[int, int, int]] = {}
    for reading in access.uses.readings:
        form = reading.form
        assert isinstance(form, Outer)
        key = (form.rows_first != where.flipped[reading.value], form.indexed)
        before = sides.get(key, (0, 0, 0))[0]
        sides[key] = (before + form.positions, _row_cost(form, elementwise), form.grad_size)
    return Extent(samples, directions, where.blocks, where.first, where.second, tuple(sides.values()))


def _row_cost(form: Outer, elementwise: float) -> int:
    """Multiply-adds for the inner product of two rows."""
    if form.pixels:
        return window_cost(form.row_taps, form.row_size, form.pixels, form.positions, elementwise)
    return 1 if form.indexed else form.row_size


def _factor_numbers(pilot: Snapshot, name: str, directions: int) -> int:
    """Numbers kept per sample as factors: images, where the rows are their windows."""
    kept = written = 0
    for reading in pilot.access[name].uses.readings:
        form = reading.form
        assert isinstance(form, Outer)
        rows = form.positions if form.indexed else form.blocks * form.positions * form.row_size
        image = form.pixels * form.blocks * form.row_size // form.row_taps
        grads = form.blocks * form.positions * directions * form.grad_size
        kept, written = kept + (image or rows) + grads, written + rows + grads
    # Several uses on one side are written out and joined.
    single = len(pilot.access[name].uses.readings) == 1
    return kept if single else written


def grouped(
    plans: Sequence[ParameterPlan], graph_bytes: int, available: int, samples: tuple[int, int], symmetric: bool,
    mode: Mode, directions: int, classes: int, largest_chunk: int,
) -> tuple[Group, ...]:  # fmt: skip
    """Pack parameters so that what is kept of all samples fits; a parameter too large alone is split further."""
    held = samples[0] if symmetric else sum(samples)
    keep, pass_through = int(0.45 * available), int(0.3 * available)
    groups: list[Group] = []
    names: list[str] = []
    kept = passing = 0

    # Directions are written out for a block of them at a time, C numbers each.
    together = directions if mode == "full" else min(directions, max(1, 2**24 // classes))

    at_once = symmetric and plans and samples[0] <= largest_chunk
    if at_once and samples[0] * _at_once(plans, graph_bytes) < 0.75 * available:
        return (Group(tuple(plan.name for plan in plans), samples[0], together, samples[0]),)

    def chunk(passing_bytes: int, block: int) -> int:
        return max(1, min(block, largest_chunk, pass_through // max(graph_bytes + passing_bytes, 1)))

    def close() -> None:
        if names:
            block = max(samples)
            groups.append(Group(tuple(names), block, together, chunk(passing, block)))
            names.clear()

    for plan in plans:
        one = max((graph_bytes + plan.passing // directions) / 0.3, 2 * plan.kept / directions / 0.45)
        if one > available:
            raise MemoryBudgetError(
                f"{plan.name} needs about {readable_bytes(one)} for a single sample, expected at most "
                f"{readable_bytes(max(available, 0))}, which is what the kernel and a copy of the weights leave of the "
                "budget; raise memory=, or leave the parameter out with parameters="
            )
        if plan.kept * held > keep:
            close()
            kept = passing = 0
            groups.append(_split(plan, keep, held, samples, mode, directions, together, chunk))
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
    bytes_each = max(_graph_bytes(p, 1)[0] for p in measurement.pilots if p.graph) if measurement.pilots[0].graph else 0
    few = SMALL // max(bytes_each, 1)
    slow = measurement.device.type == "cpu" and directions >= MANY and few >= LEAST_CHUNK
    return -(-samples // -(-samples // few)) if slow and few < samples else samples


# Bytes of activations in a pass, how many passes are many, and the least samples in one that are worth its overhead.
SMALL, MANY, LEAST_CHUNK = 32 * 2**20, 4, 32


def held_bytes(
    measurement: Measurement, plans: Sequence[ParameterPlan], groups: Sequence[Group], samples: tuple[int, int],
    symmetric: bool, directions: int,
) -> int:  # fmt: skip
    """About how many bytes a kernel is made from at a time: activations, what arrives at ops, what is formed of it."""
    item = measurement.dtype.itemsize
    graphs = [_graph_bytes(pilot, item) for pilot in measurement.pilots if pilot.graph]
    activations, arriving = (max(sizes) for sizes in zip(*graphs, strict=True)) if graphs else (0, 0)
    named = {plan.name: plan for plan in plans}
    most = 0
    for group in groups:
        chosen = [named[name] for name in group.names]
        passing = activations + group.directions * arriving
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


def _graph_bytes(pilot: Snapshot, item: int) -> tuple[int, int]:
    """Bytes per sample of all activations, and of the gradients of one direction at all ops that use parameters."""
    assert pilot.graph is not None
    outputs = {r.use.node: r.use.output.numel() for access in pilot.access.values() for r in access.uses.readings}
    return pilot.graph.output_bytes // len(pilot.indices), sum(outputs.values()) * item // len(pilot.indices)


def _at_once(plans: Sequence[ParameterPlan], graph_bytes: int) -> float:
    """Bytes per sample if all are captured in one chunk: the graph, what arrives at all ops, and one parameter's."""
    arriving = sum(plan.passing if plan.route in ("fallback", "unused") else plan.passing / 3 for plan in plans)
    return graph_bytes + arriving + max(plan.passing for plan in plans)


def _split(plan, keep, held, samples, mode, directions, together, chunk) -> Group:  # type: ignore[no-untyped-def]
    """First fewer directions at a time (another sweep each), then blocks of samples (another sweep for each pair)."""
    few = directions
    if mode != "full":
        few = max(1, min(together, keep * directions // max(plan.kept * held, 1)))
    kept = max(1, plan.kept * few // directions)
    block = max(1, min(max(samples), keep // (2 * kept))) if kept * held > keep else max(samples)
    return Group((plan.name,), block, few, chunk(plan.passing * few // directions, block))
