"""Columns of a tangent kernel for a few of its samples, in time linear in the number of samples."""

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from featlearn.contraction.factors import weighted_squared_norms
from featlearn.distributed.agreement import same_tensors
from featlearn.errors import InputValueError
from featlearn.gradients.directions import Outputs, output_directions
from featlearn.kernel.execution import measured_kernels
from featlearn.kernel.stream import taken
from featlearn.kernel.sweep import Sweeps
from featlearn.linalg.nystrom import ColumnTerm
from featlearn.network.inputs import ModelWithInputs
from featlearn.planning.plan import KernelCall, ProgressLine

BLOCK = 2**24
"""Numbers in a block of columns that are held at a time."""


class KernelColumns:
    """The columns of a tangent kernel, of the mean over outputs or with all pairs of them (`outputs="full"`)."""

    def __init__(self, sweeps: Sweeps, outputs: Literal["mean", "full"], means: Tensor | None = None) -> None:
        self._sweeps, self._outputs = sweeps, outputs
        self.samples = sweeps.stream.samples
        self.group = sweeps.measurement.classes if outputs == "full" else 1
        self._means = None if means is None else means.double().cpu()
        """(P,) means of the rows of the kernel: then it is H K H with H = I - 1 1^T / P."""

    @cached_property
    def diagonal(self) -> Tensor:
        """(P,) squared norms of the gradients of every sample, summed or averaged over outputs; less the mean."""
        classes = self._sweeps.measurement.classes
        every = torch.eye(classes, dtype=torch.float64, device="cpu")
        whole = squared_gradients(self._sweeps, every, "sizes of samples").sum(1) / (classes // self.group)
        return whole if self._means is None else whole - 2 * self._means + self._means.mean()

    def sums(self, drawn: Tensor, term: ColumnTerm, wanted: Tensor | None = None) -> tuple[Tensor, ...]:
        """The sums of what `term` makes of columns, block by block; ranks divide the columns, and all have the sums."""
        ranks = self._sweeps.ranks
        with ranks.together() as block:
            # Draws follow from numbers that other hardware may round otherwise.
            block.expect(same_tensors("the choice of", {"columns": drawn}, "use equal hardware on all ranks"))
            empty = torch.zeros(len(drawn) * self.group, 0, dtype=torch.float64, device=self._sweeps.measurement.device)
            totals = term(empty, drawn[:0])
            for rows, places in self._rows(drawn, wanted):
                totals = tuple(total + part for total, part in zip(totals, term(rows, places), strict=True))
        ranks.add_up(totals)
        return totals

    def _rows(self, drawn: Tensor, wanted: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the drawn samples with those of this rank, block by block, and the places of these."""
        for rows, places in row_blocks(self._sweeps, self._outputs, drawn, wanted):
            if self._means is not None:
                own, others = (self._means[chosen].to(rows.device) for chosen in (drawn, places))
                rows = rows - own[:, None] - others + self._means.mean().to(rows.device)
            yield rows, places

    def squared_sum(self) -> float:
        """|K|_F^2 of a kernel that is small enough: all columns."""
        everything = torch.arange(self.samples, device="cpu")
        (found,) = self.sums(everything, lambda rows, _: (rows.square().sum(),))
        return float(found)


def squared_gradients(sweeps: Sweeps, directions: Tensor, title: str) -> Tensor:
    """(P, k): v^T K_ii v for every sample and every direction (k, C) among the outputs; float64 on the CPU."""
    found = torch.zeros(sweeps.stream.samples, len(directions), dtype=torch.float64, device="cpu")
    size = sweeps.chunk(3.0 + 2.0 * len(directions))
    scratch = sweeps.budget // 8
    with ProgressLine(title, -(-sweeps.stream.samples // size)) as progress, sweeps.ranks.together():
        for batch, places in sweeps.batches(size):
            chunk = sweeps.measurement.chunk(batch, 0, batch.samples)
            total: Tensor | float = 0.0
            for name, gradients in sweeps.measurement.each_gradient(chunk, sweeps.measurement.parameters, directions):
                total = total + weighted_squared_norms(gradients, sweeps.rates.get(name, 1.0), scratch).double()
            found[places] = torch.as_tensor(total, dtype=torch.float64).cpu()
            progress.advance()
    sweeps.ranks.add_up([found])
    return found


def row_blocks(
    sweeps: Sweeps, outputs: Outputs, drawn: Tensor, wanted: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the kernel for the drawn samples (s C, n C) or (s, n), float64, and the n places they are with.

    `wanted`, ascending, are the samples they are with, instead of all. Every rank has the columns of its share.
    """
    left = gathered(sweeps, drawn)
    directions = output_directions(outputs, sweeps.measurement.classes)
    call = KernelCall(directions=directions, rates=sweeps.rates, memory=sweeps.audited.request.memory)
    classes = sweeps.measurement.classes if outputs == "full" else 1
    step = max(64, min(4096, BLOCK // (len(drawn) * classes**2)))
    # The inputs of a block take up to an eighth of the memory.
    step = max(1, min(step, int(sweeps.budget // 8 / sweeps.stream.sample_bytes)))
    others = sweeps.stream.samples if wanted is None else len(wanted)
    with ProgressLine("kernel columns", -(-others // step)) as progress:
        for batch, places in sweeps.batches(-(-step // sweeps.ranks.size), wanted):
            pair = sweeps.measurement.of_batches(left, batch)
            kernel = measured_kernels(pair, sweeps.audited.plans, call)[""]
            rows = kernel.permute(0, 2, 1, 3).flatten(0, 1).flatten(1) if outputs == "full" else kernel
            yield rows.double(), places
            progress.advance()


def gathered(sweeps: Sweeps, drawn: Tensor) -> ModelWithInputs:
    """The network on the drawn samples, in the order in which they were drawn."""
    order = drawn.argsort()
    chunks = list(sweeps.stream.chunks(len(drawn), drawn[order]))
    (x, _), *others = chunks
    if others:
        raise InputValueError(
            "the samples of the loader differ in shape from batch to batch, expected one shape, for samples of several "
            "batches to stand side by side; pad all of them to one length"
        )
    return sweeps.batch(taken(x, len(drawn), order.argsort()), len(drawn))
