"""Kernels to which products of per-sample gradients are added, block by block."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from featlearn.contraction.blocking import RowGrams
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Dense, Gradients, some_of
from featlearn.contraction.gram import Mode, add_gram, mirror

Kernels = dict[str, Tensor]
Captured = Iterable[tuple[str, Gradients]]
"""Parameters with their gradients, one after the other."""

SMALL = 2**23
"""Bytes of small gradients that are multiplied together."""


class BlockCallback(Protocol):
    """Called with every block of every parameter's kernel as it is added."""

    def __call__(  # noqa: D102
        self, name: str, part: Tensor, rows: slice, columns: slice, chosen: slice, *, mirrored: bool
    ) -> None: ...


def kernel_keys(names: Iterable[str], by: str) -> dict[str, str]:
    """The kernel that each parameter belongs to."""
    return {name: {"network": "", "layer": name.rpartition(".")[0], "parameter": name}[by] for name in names}


class KernelSum:
    """Kernels of one shape under their keys.

    `symmetric`: both sides are the same samples; one triangle is added to, and `mirror` completes it. `first_row`: the
    sample that the first row belongs to, where others hold the rows before.
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        shape: Sequence[int],
        mode: Mode,
        dtype: torch.dtype,
        device: torch.device,
        *,
        symmetric: bool,
        scratch: int,
        deferred: DeferredChecks | None = None,
        first_row: int = 0,
    ) -> None:
        self._first_row = first_row
        self.keys, self.mode, self.symmetric, self.scratch = keys, mode, symmetric, scratch
        self._deferred = deferred
        stored = shape
        if mode == "full":  # it lies in memory as (P, C, P2, C), as its blocks are computed
            stored = [shape[i] for i in (0, 2, 1, 3)]
        zeros = {key: torch.zeros(stored, dtype=dtype, device=device) for key in dict.fromkeys(keys.values())}
        self.kernels: Kernels = zeros if mode != "full" else {key: one.transpose(1, 2) for key, one in zeros.items()}
        self.callback: BlockCallback | None = None

    def add(
        self,
        name: str,
        left: Gradients,
        right: Gradients,
        rows: slice,
        columns: slice,
        chosen: slice,
        kept: RowGrams | None = None,
    ) -> None:
        """Add the block of these samples and output directions.

        `kept`: inner products of rows, which calls for other directions of the same samples share.
        """
        diagonal = self.symmetric and rows == columns
        block = self.block(self.keys[name], chosen, rows, columns)
        # A part of its own where it is needed twice.
        part = torch.zeros_like(block) if self.callback else block
        add_gram(
            part, left, right, self.mode, symmetric=diagonal, scratch=self.scratch, deferred=self._deferred, kept=kept
        )
        if self.callback is not None:
            block += part
            if diagonal:
                mirror(part, self.mode)
            self.callback(name, part, rows, columns, chosen, mirrored=self.symmetric and not diagonal)

    def add_diagonal(
        self, captured: Captured, rows: slice, chosen: slice, kept: dict[str, RowGrams] | None = None
    ) -> None:
        """Add the block of some samples with themselves, parameter by parameter; each is dropped before the next."""
        for name, gradients in captured if self.callback else _joined(captured, self.keys):
            self.add(
                name, gradients, gradients, rows, rows, chosen, None if kept is None else kept.setdefault(name, {})
            )
            del gradients

    def mirror(self, chosen: slice) -> None:
        """Complete symmetric kernels, once all blocks of these directions are added."""
        for key in self.kernels if self.symmetric else ():
            mirror(self.block(key, chosen), self.mode)

    def divide(self, divisor: int) -> None:
        """Divide all kernels."""
        for kernel in self.kernels.values() if divisor != 1 else ():
            kernel /= divisor

    def block(self, key: str, directions: slice, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The kernel of some directions and samples."""
        kernel = self.kernels[key]
        if self._first_row and rows != slice(None):
            rows = slice(rows.start - self._first_row, rows.stop - self._first_row)
        if self.mode == "each":
            return kernel[directions, rows, columns]
        return some_of(some_of(kernel, 0, rows), 1, columns)


def _joined(captured: Captured, keys: Mapping[str, str]) -> Iterator[tuple[str, Gradients]]:
    """Small gradients of one kernel side by side: biases and scales are many, and each product has its price."""
    waiting: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
    sizes: dict[tuple[str, int], int] = defaultdict(int)
    for name, gradients in captured:
        if isinstance(gradients, Dense) and gradients.gradient.nbytes < SMALL:
            alike = (keys[name], gradients.directions)
            waiting.setdefault(alike, []).append((name, gradients.gradient))
            sizes[alike] += gradients.gradient.nbytes
            if sizes[alike] >= SMALL:
                del sizes[alike]
                yield _side_by_side(waiting.pop(alike))
        else:
            yield name, gradients
        del gradients
    for several in waiting.values():
        yield _side_by_side(several)


def _side_by_side(several: Sequence[tuple[str, Tensor]]) -> tuple[str, Dense]:
    return several[0][0], Dense(torch.cat([gradient for _, gradient in several], 2))
