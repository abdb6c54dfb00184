"""Rows that are windows of images, stored as images, because patches of a convolution repeat pixels many times."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from featlearn.contraction.hardware import cache_bytes

# Bytes of windows unfolded at a time on a GPU, enough to keep it busy.
BATCHED = 2**28


def cached_bytes() -> int:
    """Return the bytes of windows unfolded at a time on a CPU, which fit in its cache."""
    return 2 * cache_bytes(2)


@dataclass(frozen=True)
class Windows:
    """Windows of a convolution at every position of every image: (samples, positions, blocks, row size) if unfolded."""

    image: Tensor
    """(samples, channels, *space), without padding; channels are (blocks, channels of a block)."""
    blocks: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros before every axis (and after it, as needed for `count`)."""
    count: tuple[int, ...]
    """Number of positions along every axis."""

    @property
    def samples(self) -> int:
        """Number of images."""
        return self.image.shape[0]

    @property
    def positions(self) -> int:
        """Number of windows per image."""
        return prod(self.count)

    @property
    def row_size(self) -> int:
        """Size of a window of a block."""
        return self.image.shape[1] // self.blocks * prod(self.kernel)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Key: windows with equal geometry have inner products from pixels."""
        return (self.blocks, self.kernel, self.stride, self.dilation, self.padding, self.count, self.image.shape[1:])

    def take(self, samples: slice | Tensor) -> "Windows":
        """Select images."""
        return replace(self, image=self.image[samples])

    def channels(self, entries: slice) -> tuple["Windows", slice]:
        """Keep only the channels that these row entries use; also return where the entries now lie."""
        taps = prod(self.kernel)
        begin, end, _ = entries.indices(self.row_size)
        first, last = begin // taps, -(-end // taps)
        if self.row_size == (last - first) * taps:
            return self, slice(begin, end)
        image = self.image.unflatten(1, (self.blocks, -1))[:, :, first:last].flatten(1, 2)
        return replace(self, image=image), slice(begin - first * taps, end - first * taps)

    def columns(self) -> Tensor:
        """Unfold, with windows last: (samples, blocks, row size, positions)."""
        seen = _view(self._padded(self.image), self.kernel, self.stride, self.dilation, self.count)
        return seen.reshape(self.samples, self.blocks, self.row_size, self.positions)

    def rows(self) -> Tensor:
        """Unfold: (samples, positions, blocks, row size)."""
        return self.columns().permute(0, 3, 1, 2)

    def lengths(self) -> Tensor:
        """Compute Euclidean norms of windows: (samples, positions, blocks), float64."""
        squares = self.image.double().square().unflatten(1, (self.blocks, -1)).sum(2)
        seen = _view(self._padded(squares), self.kernel, self.stride, self.dilation, self.count)
        taps = tuple(range(2, 2 + len(self.kernel)))
        return seen.sum(taps).flatten(2).sqrt().transpose(1, 2)

    def pieces(self, item: int, room: int) -> Iterator[slice]:
        """Yield ranges of samples to unfold together, in at most `room` bytes if a sample fits."""
        sample_bytes = self.blocks * self.row_size * self.positions * item
        step = max(1, min(room, BATCHED if self.image.is_cuda else cached_bytes()) // max(sample_bytes, 1))
        for begin in range(0, self.samples, step):
            yield slice(begin, min(begin + step, self.samples))

    def inner(self, other: "Windows") -> Tensor:
        """Compute inner products of all pairs of windows from those of pixels: (blocks, P T, P2 T2).

        The result is the sum over taps d of <x[t + d], y[s + d]>: a product of depth `channels`, then a sum of shifted
        copies.
        """
        left, right = (windows.image.unflatten(1, (windows.blocks, -1)).transpose(0, 1) for windows in (self, other))
        space = self.image.shape[2:]
        pixels = torch.einsum("bpci,bqcj->bpiqj", left.flatten(3), right.flatten(3))
        total = pixels.reshape(self.blocks, self.samples, *space, other.samples, *space)
        for axis in range(len(space)):  # axis by axis, so that costs of taps add instead of multiply
            total = self._shifted(total, axis)
        return total.reshape(self.blocks, self.samples * self.positions, other.samples * self.positions)

    def _shifted(self, products: Tensor, axis: int) -> Tensor:
        """Sum products of pixels, (blocks, P, *space, P2, *space), over the taps of an axis."""
        first, second = 2 + axis, 3 + len(self.kernel) + axis
        shape = list(products.shape)
        shape[first] = shape[second] = self.count[axis]
        total = products.new_zeros(shape)
        for tap in range(self.kernel[axis]):
            positions, pixels = self._reach(axis, tap)
            if positions.stop > positions.start:
                target, source = (
                    tuple(indices if i in (first, second) else slice(None) for i in range(len(shape)))
                    for indices in (positions, pixels)
                )
                total[target] += products[source]
        return total

    def _reach(self, axis: int, tap: int) -> tuple[slice, slice]:
        """Return the positions along an axis at which a tap is inside the image, and the pixels there."""
        size, count = self.image.shape[2 + axis], self.count[axis]
        stride, shift = self.stride[axis], tap * self.dilation[axis] - self.padding[axis]
        begin = max(0, -(shift // stride)) if shift < 0 else 0
        end = min(count, (size - 1 - shift) // stride + 1)
        pixels = slice(begin * stride + shift, max((end - 1) * stride + shift + 1, 0), stride)
        return slice(begin, max(end, begin)), pixels

    def _padded(self, image: Tensor) -> Tensor:
        sizes: list[int] = []
        for axis in reversed(range(len(self.kernel))):
            reach = (self.count[axis] - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1
            sizes += [self.padding[axis], reach - image.shape[2 + axis] - self.padding[axis]]
        return functional.pad(image, sizes) if any(sizes) else image


def _view(
    image: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], count: tuple[int, ...]
) -> Tensor:
    """View all windows of a padded image (N, channels, *space) as (N, channels, *kernel, *count), without a copy."""
    image = image.contiguous()
    space = image.stride()[2:]
    steps = [s * j for s, j in zip(space, stride, strict=True)]
    holes = [s * j for s, j in zip(space, dilation, strict=True)]
    return image.as_strided((*image.shape[:2], *kernel, *count), (*image.stride()[:2], *holes, *steps))
