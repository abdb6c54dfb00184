"""Where the samples lie in a tensor."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where the samples lie in an op's output: its elements in order are (before, samples, after)."""

    before: int
    samples: int
    after: int

    def split(self, tensor: Tensor) -> Tensor:
        """Reshape a tensor to (before, samples, after)."""
        return tensor.reshape(self.before, self.samples, self.after)

    def samples_first(self, tensor: Tensor, *trailing: int) -> Tensor:
        """Bring a tensor whose leading axes are laid out like the output to (samples, positions, *trailing)."""
        if self.before == 1:
            return tensor.reshape(self.samples, -1, *trailing)
        split = tensor.reshape(self.before, self.samples, -1, *trailing)
        return split.movedim(1, 0).reshape(self.samples, -1, *trailing)

    def outside(self, *trailing: int) -> bool:
        """Return whether the last axes of the output, of these sizes, hold no samples."""
        size = math.prod(trailing)
        return size > 0 and self.after % size == 0

    def positions(self, *trailing: int) -> int:
        """Return the number of positions of each sample, each with values of this shape."""
        return self.before * self.after // math.prod(trailing)


def splits(shape: torch.Size, samples: int) -> Iterator[Layout]:
    """Yield every way in which the samples can lie inside one axis; nothing if the value is empty."""
    total, before = shape.numel(), 1
    if total == 0:
        return
    for size in shape:
        if size % samples == 0:
            inside = size // samples
            for outer in range(1, inside + 1):
                if inside % outer == 0:
                    yield Layout(before * outer, samples, total // (before * outer * samples))
        before *= size


def sample_dimension(shape: torch.Size, layout: Layout) -> tuple[int, int] | None:
    """Return the axis of `shape` that holds the samples, and the number of entries in front of them in that axis."""
    prefix = 1
    for axis, size in enumerate(shape if shape.numel() else ()):
        outer, rest = divmod(layout.before, prefix)
        if rest == 0 and size % (outer * layout.samples) == 0:
            return axis, outer
        prefix *= size
    return None
