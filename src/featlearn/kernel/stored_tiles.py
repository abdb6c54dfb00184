"""Tangent kernels that are written to a file, tile by tile."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from featlearn.audited_model import AuditedModel
from featlearn.contraction.kernel_sum import Kernels, kernel_keys
from featlearn.contraction.tensor_sketch import Sketch
from featlearn.distributed.agreement import fingerprints, smallest_budget
from featlearn.distributed.sharded_model import whole_tensors
from featlearn.errors import InputTypeError, InputValueError
from featlearn.gradients.directions import Outputs, output_directions
from featlearn.kernel.execution import checked_rates, measured_kernels
from featlearn.linalg.stored_kernel import KernelFile, StoredKernel, checked_path, free_disk, tile_places
from featlearn.measurement import Measurement, spread
from featlearn.network.inputs import Inputs, ModelWithInputs, tensors_in
from featlearn.planning.kernel_plan import parameter_plans
from featlearn.planning.memory import byte_budget, readable_bytes, readable_seconds
from featlearn.planning.plan import KernelCall, ProgressLine, plural, times
from featlearn.planning.rank_costs import Device, checked_device, checked_ranks

LEAST_TILE, LARGEST_TILE = 64, 8192
"""Samples on a side of a tile: at least, if the gradients of more do not fit, and at most, for little to be lost."""
SHARE = 3
"""Part of the memory budget for the entries of a tile, and for the gradients of its samples."""
DTYPES = (torch.float16, torch.float32, torch.float64)


def stored_kernels(
    audited: AuditedModel,
    x: Inputs,
    x2: Inputs | None,
    *,
    outputs: Outputs,
    by: str,
    optimizer: Optimizer | None,
    verify: bool,
    sketch: Sketch | None,
    out: str | Path | None,
    out_dtype: torch.dtype | None,
) -> StoredKernel | dict[str, StoredKernel]:
    """Write the kernels of an audited model to a file; each rank of a group writes some of the tiles."""
    ranks = audited.request.group
    with ranks.together():
        path = checked_storage(outputs, sketch, out, out_dtype)
        rates = checked_rates(audited, outputs, by, optimizer, verify)
    rates = whole_tensors(rates)
    audited.forget()  # the same plans in every process
    with audited.measuring([x] if x2 is None else [x, x2], by_layer=True) as measurement:
        directions, memory = output_directions(outputs, measurement.classes), audited.request.memory
        call = KernelCall(directions=directions, by=by, rates=rates, memory=memory, verify=verify)
        tiles = KernelTiles(measurement, call, out_dtype)
        budget = byte_budget(memory, measurement.device)
        budget = smallest_budget(ranks, budget, measurement.device, measured=memory is None)
        for leads in (True, False):  # rank 0 makes the file
            with ranks.together():
                if leads == (ranks.rank == 0):
                    file = KernelFile(path, tiles.header(budget), leads=leads)
        try:
            with ranks.together():
                tiles.write(file, path.name, ranks.rank, ranks.size)
        finally:
            file.close()
    return {part: StoredKernel(path, part) for part in tiles.parts} if by != "network" else StoredKernel(path)


def checked_storage(outputs: Outputs, sketch: Sketch | None, out: object, out_dtype: torch.dtype | None) -> Path:
    """Return the path, after a check of what can be stored."""
    if out is None:
        raise InputValueError("out_dtype=... without out=, expected both: it is the precision in the file")
    if sketch is not None:
        raise InputValueError("sketch= with out=, expected one of them: sketched kernels are held in memory")
    if outputs in ("each", "full"):
        raise InputValueError(
            f"outputs={outputs!r} with out=, expected 'mean', 'sum', the number of an output or fl.Directions(k)"
        )
    if out_dtype not in (None, *DTYPES):
        raise InputTypeError(f"out_dtype={out_dtype!r}, expected torch.float16, torch.float32 or torch.float64")
    return checked_path(out)


@dataclass
class KernelTiles:
    """Kernels of a measurement under way, tile by tile."""

    measurement: Measurement
    call: KernelCall
    out_dtype: torch.dtype | None

    @property
    def parts(self) -> list[str]:
        """Names of all kernels."""
        return list(dict.fromkeys(kernel_keys(self.measurement.parameters, self.call.by).values()))

    def header(self, budget: int) -> dict[str, Any]:
        """Return how the kernel is divided, and what must be the same in a call that goes on with it."""
        measurement, batches = self.measurement, self.measurement.batches
        dtype = self.out_dtype or measurement.dtype
        weights = {**dict(measurement.model.named_parameters()), **dict(measurement.model.named_buffers())}
        drawn = self.call.directions.drawn
        chosen = replace(self.call.directions, drawn=None)
        few = batches[0].outputs(slice(0, min(2, batches[0].samples))).detach()[:, :8]
        samples = (batches[0].samples, batches[-1].samples)
        return {
            "shape": samples,
            "symmetric": len(batches) == 1,
            "parts": self.parts,
            "dtype": str(dtype).removeprefix("torch."),
            "scale": self._scale(budget) if dtype == torch.float16 else 1.0,
            "tile": self.tile(budget),
            "memory": budget,
            "outputs": few.double().tolist(),
            "call": {
                **{batch.name: fingerprints(_named(tensors_in(batch.x))) for batch in batches},
                "the weight or buffer": fingerprints(weights),
                "the rate of": fingerprints({name: torch.as_tensor(rate) for name, rate in self.call.rates.items()}),
                "outputs": [str(chosen), None if drawn is None else fingerprints({"drawn": drawn})],
                "by": self.call.by,
                "parameters": list(measurement.parameters),
                "dtype": str(measurement.dtype),
                "out_dtype": str(dtype),
                "verify": self.call.verify,
                "memory": str(self.call.memory),
            },
        }

    def tile(self, budget: int) -> int:
        """Return how many samples a side of a tile has: its entries, and gradients on both sides, fit into memory."""
        measurement, (rows, columns) = self.measurement, self.samples
        count, mode = self.call.directions.count, self.call.directions.mode
        plans = parameter_plans(measurement, mode, count, (rows, columns), self.call.formed)
        entry = measurement.dtype.itemsize * (len(self.parts) + self.call.verify)
        available = max(budget - measurement.copied_bytes, 1) / SHARE
        gradients = max(LEAST_TILE, int(available / 2 / sum(plan.kept for plan in plans)))
        longest = max(rows, columns)
        most = max(1, min(longest, LARGEST_TILE, math.isqrt(int(available / entry)), gradients))
        return -(-longest // -(-longest // most))  # tiles of nearly one size

    @property
    def samples(self) -> tuple[int, int]:
        """Samples on both sides."""
        return self.measurement.batches[0].samples, self.measurement.batches[-1].samples

    def kernels(self, rows: slice, columns: slice, memory: int) -> Kernels:
        """Compute a tile of every kernel; the same numbers in every process."""
        batches = self.measurement.batches
        sides = [_some(batches[0], rows)]
        if len(batches) == 2 or rows != columns:
            sides.append(_some(batches[-1], columns))
        pair = self.measurement.of_batches(*sides)
        return measured_kernels(pair, {}, replace(self.call, memory=memory))

    def write(self, file: KernelFile, name: str, rank: int, ranks: int) -> None:
        """Write the missing tiles of one rank."""
        tiles = [tile for tile in file.missing if tile[0] % ranks == rank]
        with ProgressLine(name, sum(map(_work, tiles)), logged=True) as progress:
            for number, rows, columns in tiles:
                file.write(number, self.kernels(rows, columns, file.header["memory"]))
                progress.advance(_work((number, rows, columns)))

    def _scale(self, budget: int) -> float:
        """Return a power of two that brings the largest of a few samples to 256 in float16."""
        batch = self.measurement.batches[0]
        few = _some(batch, torch.arange(batch.samples, device="cpu")[spread(batch.samples)])
        pair = self.measurement.of_batches(few)
        kernels = measured_kernels(pair, {}, replace(self.call, memory=budget))
        largest = max(float(kernel.diagonal().max()) for kernel in kernels.values())
        return 2.0 ** (math.floor(math.log2(largest)) - 8) if largest > 0 else 1.0


@dataclass(frozen=True, repr=False, kw_only=True)
class StoredPlan:
    """What `fl.ntk(..., out=path)` would do with the same arguments; `str()` says it."""

    path: Path
    shape: tuple[int, int]
    parts: int
    tile: int
    """Samples on a side of a tile."""
    tiles: int
    captured: int
    """Samples that are captured, those of both sides of every tile."""
    file_bytes: int
    free_bytes: int
    """Free bytes on the disk of the file."""
    memory: int
    """The byte budget."""
    seconds: float
    basis: str
    """What the time is computed from."""

    def __str__(self) -> str:
        rows, columns = self.shape
        captures = self.captured / (rows if rows == columns else rows + columns)
        room = "" if self.file_bytes <= self.free_bytes else ": too few"
        return "\n".join(
            [
                f"{rows} x {columns} samples -> {self.path} ({readable_bytes(self.file_bytes)} for "
                f"{plural(self.parts, 'kernel', 's')}, {readable_bytes(self.free_bytes)} free on that disk{room})",
                f"{plural(self.tiles, 'tile', 's')} of up to {self.tile} x {self.tile} samples, budget "
                f"{readable_bytes(self.memory)}; each sample is captured {times(captures)}",
                f"about {readable_seconds(self.seconds)}, {self.basis}",
            ]
        )

    __repr__ = __str__


def plan_stored(tiles: KernelTiles, path: Path, ranks: int | None, device: str | Device) -> StoredPlan:
    """Plan a stored kernel, with the time on this machine, or on `ranks` devices."""
    measurement, shape = tiles.measurement, tiles.samples
    budget = byte_budget(tiles.call.memory, measurement.device)
    tile = tiles.tile(budget)
    places = tile_places({"shape": shape, "tile": tile, "symmetric": len(measurement.batches) == 1})
    captured = sum(
        (rows.stop - rows.start) * (rows != columns) + columns.stop - columns.start for rows, columns in places
    )
    entries = sum(_work((0, *place)) for place in places)
    if ranks is None:
        seconds, basis = _timed(tiles, captured, entries, tile, budget)
    else:
        speed, share = checked_device(device), slice(0, min(2, shape[0]))
        with FlopCounterMode(display=False) as counted:
            measurement.batches[0].outputs(share)
        passes = counted.get_total_flops() / share.stop * (1 + tiles.call.directions.count) * captured
        plans = parameter_plans(measurement, "sum", tiles.call.directions.count, (tile, tile), tiles.call.formed)
        operations = passes + 2 * sum(plan.operations for plan in plans) / tile**2 * entries
        seconds = operations / speed.rate(measurement.dtype) / checked_ranks(ranks)
        basis = f"a model of {ranks} {speed.name} that was not run on several GPUs"
    itemsize = (tiles.out_dtype or measurement.dtype).itemsize
    return StoredPlan(
        path=path,
        shape=shape,
        parts=len(tiles.parts),
        tile=tile,
        tiles=len(places),
        captured=captured,
        file_bytes=math.prod(shape) * len(tiles.parts) * itemsize,
        free_bytes=free_disk(path),
        memory=budget,
        seconds=seconds,
        basis=basis,
    )


def _timed(tiles: KernelTiles, captured: int, entries: int, tile: int, budget: int) -> tuple[float, str]:
    """Return seconds for all tiles from tiles that double in size, the last of which takes a second or is a whole one.

    A tile of n samples takes a n + b n^2.
    """

    def timed(size: int) -> float:
        begun = time.perf_counter()
        tiles.kernels(slice(0, size), slice(tiles.samples[1] - size, tiles.samples[1]), budget)
        return time.perf_counter() - begun

    size = min(32, tile)
    timed(size)  # the first tile audits the model
    trials = {size: timed(size)}
    while trials[size] < 1.0 and size < tile:
        size = min(2 * size, tile)
        trials[size] = timed(size)
    few = max((n for n in trials if 2 * n <= size), default=size)
    quadratic = 0.0
    if few < size:
        quadratic = max(0.0, (trials[size] / size - trials[few] / few) / (size - few))
    linear = max(0.0, trials[size] / size - quadratic * size)
    return linear * captured / 2 + quadratic * entries, f"from trials of {few} and {size} samples on this machine"


def _named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"" if len(tensors) == 1 else f"(tensor {place})": tensor for place, tensor in enumerate(tensors)}


def _some(batch: ModelWithInputs, samples: slice | Tensor) -> ModelWithInputs:
    count = samples.stop - samples.start if isinstance(samples, slice) else len(samples)
    return replace(batch, x=batch.take(samples), samples=count)


def _work(tile: tuple[int, slice, slice]) -> int:
    """Entries that are computed: half of a tile on the diagonal."""
    _, rows, columns = tile
    height, width = int(rows.stop - rows.start), int(columns.stop - columns.start)
    return height * width // (1 + (rows == columns))
