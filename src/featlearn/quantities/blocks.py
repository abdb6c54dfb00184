"""Kernels block by block: pairs of sample blocks, each captured when it is needed."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from featlearn.capture.probe import Probe
from featlearn.linalg.factors import Dense, Gradients
from featlearn.linalg.gram import Mode, Route, add_gram, mirror
from featlearn.linalg.later import Later
from featlearn.linalg.matrices import RowGrams

Kernels = dict[str, Tensor]
Captured = Iterator[tuple[str, Gradients]]
"""Parameters with their gradients, one after the other."""


class Witness(Protocol):
    """Sees every block of every part as it is added."""

    def __call__(  # noqa: D102
        self, name: str, part: Tensor, rows: slice, columns: slice, chosen: slice, *, mirrored: bool
    ) -> None: ...


def kernel_keys(names: Iterable[str], by: str) -> dict[str, str]:
    """The kernel that each parameter belongs to."""
    return {name: {"network": "", "layer": name.rpartition(".")[0], "parameter": name}[by] for name in names}


def empty_kernels(
    keys: Mapping[str, str], shape: tuple[int, ...], mode: Mode, dtype: torch.dtype, device: torch.device
) -> Kernels:
    """Kernels to be zeroed and added to; a full one lies in memory as (P, C, P2, C), as its blocks are computed."""
    order = (0, 2, 1, 3) if mode == "full" else tuple(range(len(shape)))
    stored = [shape[i] for i in order]
    return {key: torch.empty(stored, dtype=dtype, device=device).permute(order) for key in dict.fromkeys(keys.values())}


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
    later: Later | None = None,
    routes: Mapping[str, Route] | None = None,
    kept: defaultdict[str, RowGrams] | None = None,
    tiled: Mapping[str, Tensor] | None = None,
) -> None:
    """Add the kernels of what `capture` gives, in blocks of `size` samples, to the kernels under their keys.

    One probe: the kernel is symmetric, and one triangle of it is computed and then mirrored. `chosen` are the output
    directions that the captured gradients have. `later`: what has to be waited for is asked for.
    `routes` are taken where they are known. `kept`: what calls for other directions share. `tiled`: inner products of
    rows that are known.
    """
    symmetric = len(probes) == 1

    def add(name: str, left: Gradients, right: Gradients, i: slice, j: slice) -> None:
        diagonal = symmetric and i == j
        block = kernel_block(kernels[keys[name]], mode, chosen, i, j)
        # A part of its own where it is needed twice.
        part = torch.zeros_like(block) if witness else block
        add_gram(part, left, right, mode, symmetric=diagonal, scratch=scratch, later=later,
                 route=None if routes is None else routes.get(name),
                 kept=None if kept is None else kept[name], tiled=tiled.get(name) if tiled else None)  # fmt: skip
        if witness is not None:
            block += part
            if diagonal:
                mirror(part, mode)
            witness(name, part, i, j, chosen, mirrored=symmetric and not diagonal)

    blocks = _blocks(probes[0], size)
    for i in blocks:
        if symmetric and len(blocks) == 1:
            captured = capture(probes[0], i)
            for name, gradients in captured if witness else _joined(captured, keys):
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
        mirror(kernel_block(kernel, mode, chosen), mode)


def _joined(captured: Captured, keys: Mapping[str, str]) -> Captured:
    """Small gradients of one kernel side by side: biases and scales are many, and each product has its price."""
    waiting: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
    for name, gradients in captured:
        if isinstance(gradients, Dense) and gradients.gradient.nbytes < SMALL:
            alike = (keys[name], gradients.directions)
            waiting.setdefault(alike, []).append((name, gradients.gradient))
            if sum(gradient.nbytes for _, gradient in waiting[alike]) >= SMALL:
                yield _side_by_side(waiting.pop(alike))
        else:
            yield name, gradients
        del gradients
    for several in waiting.values():
        yield _side_by_side(several)


def _side_by_side(several: Sequence[tuple[str, Tensor]]) -> tuple[str, Dense]:
    return several[0][0], Dense(torch.cat([gradient for _, gradient in several], 2))


# Bytes of gradients that are multiplied together.
SMALL = 2**23


def _blocks(probe: Probe, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, probe.samples)) for begin in range(0, probe.samples, size)]


def kernel_block(
    kernel: Tensor, mode: Mode, directions: slice, rows: slice = slice(None), columns: slice = slice(None)
) -> Tensor:
    """The part of a kernel that these directions and samples are added to."""
    return kernel[directions, rows, columns] if mode == "each" else kernel[rows, columns]
