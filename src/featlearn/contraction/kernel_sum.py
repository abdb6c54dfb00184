"""Accumulate kernels from products of per-sample gradients, block by block."""

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
"""Pairs of parameter name and gradients."""

SMALL = 2**23
"""Bytes of small gradients that are concatenated for a product."""


class BlockCallback(Protocol):
    """Called with every block of every parameter's kernel as it is added."""

    def __call__(  # noqa: D102
        self, name: str, part: Tensor, rows: slice, columns: slice, chosen: slice, *, mirrored: bool
    ) -> None: ...


def kernel_keys(names: Iterable[str], by: str) -> dict[str, str]:
    """Return parameter name -> key of its kernel."""
    return {name: {"network": "", "layer": name.rpartition(".")[0], "parameter": name}[by] for name in names}


class KernelSum:
    """Kernels of the same shape by key.

    With `symmetric`, both sides are the same samples, only one triangle is accumulated, and `mirror` completes it.
    `first_row` is the sample index of the first row, if other ranks hold earlier rows.
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
        if mode == "full":  # stored as (P, C, P2, C), the order in which blocks are computed
            stored = [shape[i] for i in (0, 2, 1, 3)]
        zeros = {key: torch.zeros(stored, dtype=dtype, device=device) for key in dict.fromkeys(keys.values())}
        self.kernels: Kernels = zeros if mode != "full" else {key: zero.transpose(1, 2) for key, zero in zeros.items()}
        self.callback: BlockCallback | None = None

    def add(
        self,
        name: str,
        left: Gradients,
        right: Gradients,
        rows: slice,
        columns: slice,
        directions: slice,
        grams: RowGrams | None = None,
    ) -> None:
        """Add the block of these samples and output directions.

        `grams` caches inner products of rows for other directions of the same samples.
        """
        diagonal = self.symmetric and rows == columns
        block = self.block(self.keys[name], directions, rows, columns)
        # The callback needs the term separately.
        term = torch.zeros_like(block) if self.callback else block
        add_gram(
            term, left, right, self.mode, symmetric=diagonal, scratch=self.scratch, deferred=self._deferred, grams=grams
        )
        if self.callback is not None:
            block += term
            if diagonal:
                mirror(term, self.mode)
            self.callback(name, term, rows, columns, directions, mirrored=self.symmetric and not diagonal)

    def add_diagonal(
        self, captured: Captured, rows: slice, directions: slice, grams: dict[str, RowGrams] | None = None
    ) -> None:
        """Add the diagonal block of some samples, parameter by parameter; free gradients after each."""
        for name, gradients in captured if self.callback else _concatenate_small(captured, self.keys):
            row_grams = None if grams is None else grams.setdefault(name, {})
            self.add(name, gradients, gradients, rows, rows, directions, row_grams)
            del gradients

    def mirror(self, directions: slice) -> None:
        """Complete symmetric kernels, once all blocks of these directions are added."""
        for key in self.kernels if self.symmetric else ():
            mirror(self.block(key, directions), self.mode)

    def divide(self, divisor: int) -> None:
        """Divide all kernels."""
        for kernel in self.kernels.values() if divisor != 1 else ():
            kernel /= divisor

    def block(self, key: str, directions: slice, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return the block of a kernel for some directions and samples."""
        kernel = self.kernels[key]
        if self._first_row and rows != slice(None):
            rows = slice(rows.start - self._first_row, rows.stop - self._first_row)
        if self.mode == "each":
            return kernel[directions, rows, columns]
        return some_of(some_of(kernel, 0, rows), 1, columns)


def _concatenate_small(captured: Captured, keys: Mapping[str, str]) -> Iterator[tuple[str, Gradients]]:
    """Concatenate small gradients of the same kernel, such as biases and scales, to save products."""
    pending: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
    sizes: dict[tuple[str, int], int] = defaultdict(int)
    for name, gradients in captured:
        if isinstance(gradients, Dense) and gradients.gradient.nbytes < SMALL:
            group = (keys[name], gradients.directions)
            pending.setdefault(group, []).append((name, gradients.gradient))
            sizes[group] += gradients.gradient.nbytes
            if sizes[group] >= SMALL:
                del sizes[group]
                yield _side_by_side(pending.pop(group))
        else:
            yield name, gradients
        del gradients
    for entries in pending.values():
        yield _side_by_side(entries)


def _side_by_side(entries: Sequence[tuple[str, Tensor]]) -> tuple[str, Dense]:
    return entries[0][0], Dense(torch.cat([gradient for _, gradient in entries], 2))
