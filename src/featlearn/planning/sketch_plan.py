"""The plan of a sketched kernel: how each parameter is sketched, samples in a pass, time and memory."""

from dataclasses import dataclass, replace

from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.contraction.tensor_sketch import Sketch, SketchRoute, View, formed_cost, route_costs, sample_bytes
from featlearn.errors import MemoryBudgetError
from featlearn.gradients.captured import Chunk
from featlearn.measurement import Measurement
from featlearn.ops import Outer
from featlearn.planning.kernel_plan import captured_bytes, samples_within
from featlearn.planning.memory import byte_budget, readable_bytes, readable_count
from featlearn.planning.plan import KernelCall, alike, common_name, plural, text_table


@dataclass(frozen=True)
class SketchedParameter:
    """How one parameter is sketched."""

    name: str
    shape: tuple[int, ...]
    uses: tuple[str, ...]
    route: str
    """`factors`, `slices`, `entries`, several of them, `formed` (gradients that come formed) or `fallback`."""
    reason: str
    operations: float
    """Multiply-adds for all samples; numbers added to bins and transformed count as many."""
    passing: int
    """Bytes of one sample while it is sketched."""


@dataclass(frozen=True, repr=False)
class SketchPlan:
    """What `fl.ntk(..., sketch=...)` would do with the same arguments; `str()` is a table."""

    parameters: tuple[SketchedParameter, ...]
    samples: tuple[int, int]
    symmetric: bool
    directions: int
    k: int
    repeats: int
    chunk: int
    """Samples in one forward pass."""
    kernels: int
    """Kernels that are formed, each with its error; 0 where only numbers are made of the sketches."""
    feature_bytes: int
    """Bytes of all sketches."""
    kernel_bytes: int
    """Bytes of the kernels and their standard errors."""
    memory: int
    """The byte budget."""
    scratch: int
    """Bytes for temporaries."""
    peak: int
    """About how many bytes will be held at most."""

    @property
    def fallbacks(self) -> dict[str, str]:
        """Parameters that go through the exact fallback, with the reason."""
        return {p.name: p.reason for p in self.parameters if p.route == "fallback"}

    @property
    def operations(self) -> float:
        """Multiply-adds of all sketches."""
        return sum(p.operations for p in self.parameters)

    @property
    def gram_operations(self) -> float:
        """Multiply-adds of the products of all pairs of sketches."""
        return float(self.kernels * self.samples[0] * self.samples[1] * self.k * self.repeats)

    @property
    def passes(self) -> int:
        """Forward passes over chunks of samples."""
        counts = [-(-n // self.chunk) for n in (self.samples[:1] if self.symmetric else self.samples)]
        return sum(counts)

    @property
    def backward_passes(self) -> int:
        """Backward passes over chunks of samples."""
        return self.passes * self.directions

    @property
    def relative_error(self) -> float:
        """About the error of an entry, as a share of sqrt(K_ii K_jj)."""
        return float((self.k * self.repeats) ** -0.5)

    def __str__(self) -> str:
        head = ("parameter", "shape", "uses", "route", "multiply-adds", "why")
        lines = [
            (
                common_name([p.name for p in same]),
                " x ".join(map(str, same[0].shape)) or "scalar",
                ", ".join(dict.fromkeys(use.removesuffix("0").removesuffix("Backward") for use in same[0].uses)) or "-",
                same[0].route,
                readable_count(sum(p.operations for p in same)),
                same[0].reason,
            )
            for same in alike(self.parameters)
        ]
        formed = f", kernel and errors {readable_bytes(self.kernel_bytes)}" if self.kernels else ""
        gram = f", then {readable_count(self.gram_operations)} of their products" if self.kernels else ""
        summary = [
            f"{self.samples[0]} x {self.samples[1]} samples -> {self.repeats} sketches of {self.k} numbers a sample "
            f"({readable_bytes(self.feature_bytes)}){formed}, about {readable_bytes(self.peak)} at most, budget "
            f"{readable_bytes(self.memory)}",
            f"{plural(self.passes, 'forward pass', 'es')} of {self.chunk} samples and "
            f"{plural(self.backward_passes, 'backward pass', 'es')}, {readable_count(self.operations)} multiply-adds "
            f"of sketches{gram}",
            f"errors of about {self.relative_error:.2g} sqrt(K_ii K_jj)",
            f"{plural(len(self.fallbacks), 'parameter', 's')} through the fallback",
        ]
        return "\n".join([*text_table(head, lines), "", *summary])

    __repr__ = __str__


def plan_sketch(
    measurement: Measurement,
    call: KernelCall,
    sketch: Sketch,
    *,
    samples: tuple[int, int] | None = None,
    forming: bool = True,
) -> SketchPlan:
    """Choose the samples in a pass, and say how parameters are sketched.

    `samples`: of a stream, in place of those of the batches. `forming`: whether kernels are made of the sketches.
    """
    directions, formed = call.directions, call.formed
    sizes = [batch.samples for batch in measurement.batches]
    symmetric = len(sizes) == 1
    samples = (sizes[0], sizes[-1]) if samples is None else samples
    held = samples[0] if symmetric else sum(samples)
    budget, item = byte_budget(call.memory, measurement.device), measurement.dtype.itemsize
    keys = len(set(kernel_keys(measurement.parameters, call.by).values()))
    features = keys * held * sketch.k * sketch.repeats * item
    kernels = 2 * keys * samples[0] * samples[1] * item if forming else 0
    if features + kernels > 0.9 * budget:
        raise MemoryBudgetError(
            f"{sketch.repeats} sketches of {sketch.k} numbers for {held} samples"
            f"{f' and {keys} parts' if keys > 1 else ''} take {readable_bytes(features)}, and the kernel with its "
            f"errors {readable_bytes(kernels)}, expected at most {readable_bytes(0.9 * budget)} of the budget "
            f"{readable_bytes(budget)}; take a smaller k, by='network', fewer samples, or a larger memory="
        )
    copied = measurement.copied_bytes
    available = max(budget - features - kernels - copied, 1)
    each = captured_bytes(measurement, directions.count)
    chunk = min(held, samples_within(measurement, 0.5 * available, directions.count))
    found = tuple(
        _planned(measurement, name, directions.count, sketch, held, name in formed) for name in measurement.parameters
    )
    scratch = available // 4
    passing = min(chunk * max(p.passing for p in found), scratch)
    return SketchPlan(
        found,
        samples,
        symmetric,
        directions.count,
        sketch.k,
        sketch.repeats,
        chunk,
        keys if forming else 0,
        features,
        kernels,
        budget,
        scratch,
        features + kernels + copied + chunk * each + passing,
    )


def sketch_view(measurement: Measurement, name: str) -> View:
    """The view of a parameter in which it is sketched: that of its factors, where a few samples have them."""
    for example in measurement.examples:
        access = example.uses.get(name)
        where = None if access is None else access.matrix_view
        if where is not None:
            return View(where.blocks, where.first, where.second, where.view, where.order)
    parameter = measurement.parameters[name]
    size = parameter.numel() * (2 if parameter.is_complex() else 1)
    first = parameter.shape[0] if parameter.dim() > 1 else 1
    return View(1, max(first, 1), size // max(first, 1))


def _planned(
    measurement: Measurement, name: str, directions: int, sketch: Sketch, samples: int, elementwise: bool
) -> SketchedParameter:
    shape, device = tuple(measurement.parameters[name].shape), measurement.device
    size = sketch_view(measurement, name).size
    cost = formed_cost(size, sketch.repeats, device)
    item = measurement.dtype.itemsize
    found = SketchedParameter(name, shape, (), "formed", "", samples * directions * cost, 3 * directions * size * item)
    example = next((one for one in measurement.examples if name in one.uses), None)
    if example is None:
        return replace(found, reason="no gradient reaches it from the few samples that were run", operations=0.0)
    access = example.uses[name]
    found = replace(found, uses=access.nodes)
    if access.fallback_reason is not None:
        return replace(found, route="fallback", reason=access.fallback_reason)
    if access.matrix_view is None or elementwise:
        return replace(found, reason="a rate for every entry" if elementwise else "small, or made by other ops")
    routes, positions, total, passing = _routes(example, name, directions, sketch, measurement)
    word = f"{positions} position{'' if positions == 1 else 's'}"
    return replace(
        found, route=" and ".join(routes), reason=word, operations=samples * directions * total, passing=passing
    )


def _routes(
    example: Chunk, name: str, directions: int, sketch: Sketch, measurement: Measurement
) -> tuple[list[str], int, float, int]:
    """Routes of all uses, their positions, what they cost for one sample and direction, and bytes of a sample."""
    routes: dict[SketchRoute, None] = {}
    positions, total, passing = 0, 0.0, 0
    for reading in example.uses[name].readings:
        form = reading.form
        assert isinstance(form, Outer)
        part = (form.positions, form.row_size, form.grad_size, form.blocks)
        costs = route_costs(*part, (sketch.k, sketch.repeats), measurement.device, indexed=form.indexed)
        best = min(costs, key=costs.__getitem__)
        routes[best] = None
        positions, total = positions + form.positions, total + costs[best]
        held = sample_bytes(best, *part, sketch.k, directions, measurement.dtype.itemsize)
        passing = max(passing, held)
    return [route.value for route in routes], positions, total, passing
