"""Kernels block by block: pairs of sample blocks, each captured when it is needed."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from featlearn.capture.probe import Probe
from featlearn.linalg.factors import Gradients
from featlearn.linalg.gram import Mode, add_gram, mirror

Kernels = dict[str, Tensor]
Captured = dict[str, Gradients]


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
    for i in _blocks(probes[0], size):
        left = capture(probes[0], i)
        for j in _blocks(probes[-1], size):
            if symmetric and j.start > i.start:
                continue
            diagonal = symmetric and i == j
            right = left if diagonal else capture(probes[-1], j)
            for name in (name for name in left if name in right):
                block = _block(kernels[keys[name]], i, j, chosen, mode)
                # A part of its own where it is needed twice.
                part = torch.zeros_like(block) if witness else block
                add_gram(part, left[name], right[name], mode, symmetric=diagonal, scratch=scratch)
                if witness is not None:
                    block += part
                    if diagonal:
                        mirror(part, mode)
                    witness(name, part, i, j, chosen, mirrored=symmetric and not diagonal)
    for kernel in kernels.values() if symmetric else ():
        mirror(kernel, mode)


def _blocks(probe: Probe, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, probe.samples)) for begin in range(0, probe.samples, size)]


def _block(kernel: Tensor, rows: slice, columns: slice, directions: slice, mode: Mode) -> Tensor:
    return kernel[directions, rows, columns] if mode == "each" else kernel[rows, columns]
