"""Tangent kernels from sketched gradients, with a standard error for every entry."""

from collections.abc import Iterable

import torch
from torch import Tensor

from featlearn.contraction.gram import mirror
from featlearn.contraction.kernel_sum import kernel_keys
from featlearn.contraction.tensor_sketch import Sketch, SketchTables, add_sketch
from featlearn.errors import InputTypeError, InputValueError, NotFiniteError
from featlearn.gradients.directions import Outputs
from featlearn.kernel.execution import NOT_FINITE
from featlearn.kernel.step_rates import with_rates
from featlearn.linalg.estimate import Estimate
from featlearn.linalg.sampling import student
from featlearn.measurement import Measurement
from featlearn.network.inputs import ModelWithInputs
from featlearn.planning.plan import KernelCall, ProgressLine
from featlearn.planning.sketch_plan import SketchPlan, plan_sketch, sketch_view

Features = dict[str, Tensor]
"""Key of a kernel (layer, parameter, or "" for the network) -> sketches (repeats, samples, k)."""
Chunks = Iterable[tuple[ModelWithInputs, int, int, slice]]
"""Samples [begin, end) of a batch, and where their sketches go."""


def checked_sketch(sketch: object, outputs: Outputs, verify: bool) -> Sketch:
    """The sketch, where it can be asked for with these arguments."""
    if not isinstance(sketch, Sketch):
        raise InputTypeError(f"sketch is {sketch!r}, expected fl.Sketch(k=4096, repeats=4) or None")
    if outputs not in ("mean", "sum") and (not isinstance(outputs, int) or isinstance(outputs, bool)):
        raise InputValueError(
            f"outputs={outputs!r} with sketch=, expected 'mean', 'sum' or the number of an output: the standard error "
            "is that of the sketches alone; of very many outputs take one by readout="
        )
    if verify:
        raise InputValueError("verify=True with sketch=, expected one of them: the estimate carries its error")
    return sketch


def sketched_kernels(measurement: Measurement, sketch: Sketch, call: KernelCall) -> dict[str, Estimate]:
    """The kernels of a measurement that is under way: key -> estimate whose value and stderr are (P, P2)."""
    plan = plan_sketch(measurement, call, sketch)
    features = SketchedFeatures(measurement, plan, call, sketch)
    with ProgressLine("sketched kernel", plan.passes) as progress:
        sides = [
            features.sketched(_chunks(batch, plan.chunk), batch.samples, progress) for batch in measurement.batches
        ]
    measurement.refuse_no_gradient()
    found = {}
    for key in list(sides[0]):
        left = sides[0].pop(key)
        right = left if plan.symmetric else sides[1].pop(key)
        found[key] = gram_estimate(left, right, call.directions.divisor, plan.scratch)
        if not bool(found[key].value.isfinite().all()):  # type: ignore[union-attr]
            raise NotFiniteError(f"the kernel is not finite: {NOT_FINITE}")
    return found


class SketchedFeatures:
    """Sketches of the gradients of samples, chunk by chunk."""

    def __init__(self, measurement: Measurement, plan: SketchPlan, call: KernelCall, sketch: Sketch) -> None:
        self._measurement, self._plan, self._call, self._sketch = measurement, plan, call, sketch
        self._keys = kernel_keys(measurement.parameters, call.by)
        self._directions = call.directions.rows(slice(0, call.directions.count))
        self._seed = sketch.seed()
        self._tables: dict[str, SketchTables] = {}

    def sketched(self, chunks: Chunks, samples: int, progress: ProgressLine) -> Features:
        """The sketches of all samples that the chunks hold."""
        measurement, plan = self._measurement, self._plan
        found = {
            key: torch.zeros(plan.repeats, samples, plan.k, dtype=measurement.dtype, device=measurement.device)
            for key in dict.fromkeys(self._keys.values())
        }
        for batch, begin, end, place in chunks:
            chunk = measurement.chunk(batch, begin, end)
            captured = measurement.each_gradient(
                chunk, measurement.parameters, self._directions, dense=self._call.formed, last=True
            )
            for name, gradients in with_rates(captured, self._call.rates):
                add_sketch(found[self._keys[name]][:, place], gradients, self._table(name), plan.scratch)
                del gradients
            del chunk, captured  # before the next one is made
            progress.advance()
        return found

    def _table(self, name: str) -> SketchTables:
        if name not in self._tables:
            measurement = self._measurement
            self._tables[name] = SketchTables.drawn(
                sketch_view(measurement, name),
                name,
                self._sketch,
                self._seed,
                len(self._directions),
                measurement.dtype,
                measurement.device,
            )
        return self._tables[name]


def gram_estimate(left: Tensor, right: Tensor, divisor: float, scratch: int) -> Estimate:
    """The mean over repeats of left right^T / divisor, block by block, and its standard error.

    The error is widened by Student's t for repeats - 1 degrees of freedom.
    """
    repeats, rows, _ = left.shape
    columns = right.shape[1]
    value, error = (left.new_empty(rows, columns) for _ in range(2))
    widening = student(repeats - 1) / (divisor * repeats**0.5)
    step = max(1, min(rows, scratch // (3 * repeats * columns * left.element_size())))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        last = end if left is right else columns  # a symmetric kernel is mirrored
        products = left[:, begin:end] @ right[:, :last].mT
        deviation, mean = torch.std_mean(products, 0)
        value[begin:end, :last], error[begin:end, :last] = mean / divisor, deviation * widening
    if left is right:
        mirror(value, "sum")
        mirror(error, "sum")
    return Estimate(value, error, repeats, repeats - 1.0)


def _chunks(batch: ModelWithInputs, size: int) -> Chunks:
    for begin in range(0, batch.samples, size):
        end = min(begin + size, batch.samples)
        yield batch, begin, end, slice(begin, end)
