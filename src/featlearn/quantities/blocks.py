"""Kernels block by block: pairs of sample blocks, each captured when it is needed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from featlearn.capture.probe import Probe
from featlearn.linalg.factors import Gradients
from featlearn.linalg.gram import Mode, add_gram, mirror

Kernels = dict[str, Tensor]
Captured = Iterator[tuple[str, Gradients]]
"""Parameters with their gradients, one after the other."""


class Witness(Protocol):
    """Sees every block of every part as it is added."""

    def __call__(  # noqa: D102
        self, name: str, part: Tensor, rows: slice, columns: slice, chosen: slice, *, mirrored: bool
    ) -> None: ...


def add_kernels(
    kernels: Kernels,
    keys: Mapping[str, str],
    probes: tuple[Probe, ...],
    size: int,
    chosen: slice,
    mode: Mode,
    scratch: int,
    capture: Callable[[Probe, slice], Captured],
    witness: Witness | None = None,
) -> None:
    """Add the kernels of what `capture` gives, in blocks of `size` samples, to the kernels under their keys.

    One probe: the kernel is symmetric, and one triangle of it is computed and then mirrored. `chosen` are the output
    directions that the captured gradients have.
    """
    symmetric = len(probes) == 1

    def add(name: str, left: Gradients, right: Gradients, i: slice, j: slice) -> None:
        diagonal = symmetric and i == j
        block = _block(kernels[keys[name]], i, j, chosen, mode)
        # A part of its own where it is needed twice.
        part = torch.zeros_like(block) if witness else block
        add_gram(part, left, right, mode, symmetric=diagonal, scratch=scratch)
        if witness is not None:
            block += part
            if diagonal:
                mirror(part, mode)
            witness(name, part, i, j, chosen, mirrored=symmetric and not diagonal)

    blocks = _blocks(probes[0], size)
    for i in blocks:
        if symmetric and len(blocks) == 1:
            for name, gradients in capture(probes[0], i):
                add(name, gradients, gradients, i, i)
                del gradients  # before the next are made
            continue
        left = dict(capture(probes[0], i))
        for j in _blocks(probes[-1], size):
            if symmetric and j.start > i.start:
                continue
            right = left if symmetric and i == j else dict(capture(probes[-1], j))
            for name in (name for name in left if name in right):
                add(name, left[name], right[name], i, j)
    for kernel in kernels.values() if symmetric else ():
        mirror(kernel, mode)


def _blocks(probe: Probe, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, probe.samples)) for begin in range(0, probe.samples, size)]


def _block(kernel: Tensor, rows: slice, columns: slice, directions: slice, mode: Mode) -> Tensor:
    return kernel[directions, rows, columns] if mode == "each" else kernel[rows, columns]
