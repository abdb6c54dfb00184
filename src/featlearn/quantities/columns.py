"""Columns of a tangent kernel for a few of its samples, in time linear in the number of samples."""

from collections.abc import Iterator

import torch
from torch import Tensor

from featlearn.errors import InputValueError
from featlearn.gradients.directions import Outputs
from featlearn.linalg.sketch import Sketch
from featlearn.network.inputs import Probe
from featlearn.planning.memory import byte_budget
from featlearn.planning.progress_line import ProgressLine
from featlearn.quantities.ntk import measured_kernels
from featlearn.quantities.stream import taken
from featlearn.quantities.sweep import Sweeps

# Numbers in a block of columns, which is held on its way into sums over samples.
_BLOCK = 2**24


def column_sketch(session: Sweeps, outputs: Outputs, drawn: Tensor, targets: Tensor | None = None) -> Sketch:
    """What the columns of the drawn samples show of the whole kernel; `outputs` is "mean" or "full".

    `targets` (P, d): its products with the columns too.
    """
    group = session.measurement.classes if outputs == "full" else 1
    size = len(drawn) * group
    device = session.measurement.device
    projected, squared = (torch.zeros(size, size, dtype=torch.float64, device=device) for _ in range(2))
    task = None if targets is None else torch.zeros(size, targets.shape[1], dtype=torch.float64, device=device)
    for rows, places in row_blocks(session, outputs, drawn):
        squared += rows @ rows.T
        inside = (places[:, None] == drawn).nonzero()  # (place in the block, place among the drawn)
        for k in range(group):
            projected[:, (inside[:, 1] * group + k).to(device)] = rows[:, (inside[:, 0] * group + k).to(device)]
        if task is not None and targets is not None:
            task += rows @ targets[places.to(targets.device)].to(rows)
    own = None if targets is None else targets[drawn.to(targets.device)].to(squared)
    return Sketch((projected + projected.T) / 2, squared, group, session.stream.samples, task, own)


def squared_sum(session: Sweeps, outputs: Outputs) -> float:
    """|K|_F^2 of a kernel that is small enough: all columns."""
    everything = torch.arange(session.stream.samples, device="cpu")
    return sum(float(rows.square().sum()) for rows, _ in row_blocks(session, outputs, everything))


def row_blocks(session: Sweeps, outputs: Outputs, drawn: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the kernel for the drawn samples (s C, n C) or (s, n), float64, and the n places they are with."""
    own = gathered(session, drawn)
    classes = session.measurement.classes if outputs == "full" else 1
    step = max(64, min(4096, _BLOCK // (len(drawn) * classes**2)))
    # Inputs of a block are held too, in an eighth of the memory.
    room = byte_budget(session.prepared.memory, session.measurement.device) // 8
    step = max(1, min(step, int(room / session.stream.sample_bytes)))
    progress = ProgressLine("kernel columns", -(-session.stream.samples // step))
    try:
        for probe, places in session.probes(step):
            pair = session.measurement.of_pair(own, probe)
            kernel = measured_kernels(pair, session.prepared, outputs, "network", rates=session.rates)[""]
            if outputs == "full":
                kernel = kernel.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
            yield kernel.double(), places
            progress.advance()
    finally:
        progress.close()


def gathered(session: Sweeps, drawn: Tensor) -> Probe:
    """The network on the drawn samples, in the order in which they were drawn."""
    order = drawn.argsort()
    chunks = list(session.stream.chunks(len(drawn), drawn[order]))
    (x, _), *others = chunks
    if others:
        raise InputValueError(
            "the samples of the loader differ in shape from batch to batch, expected one shape, for samples of several "
            "batches to stand side by side; pad all of them to one length"
        )
    return session.probe(taken(x, len(drawn), order.argsort()), len(drawn))
