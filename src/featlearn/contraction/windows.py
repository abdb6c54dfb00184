"""Rows that are windows of images, kept as the images: a convolution's patches repeat every pixel many times."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from featlearn.contraction.hardware import cache_bytes

# Bytes of windows written out at a time on a GPU: there must be enough of them to keep it busy.
BATCHED = 2**28


def cached_bytes() -> int:
    """The same on a CPU: they are multiplied while they are still in its cache."""
    return 2 * cache_bytes(2)


@dataclass(frozen=True)
class Windows:
    """What a kernel sees at every position of every image: (samples, positions, blocks, row size) when written out."""

    image: Tensor
    """(samples, channels, *space), without its padding; channels are (blocks, channels of a block)."""
    blocks: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    """Zeros in front of every axis (and behind it as far as `count` needs them)."""
    count: tuple[int, ...]
    """Positions along every axis."""

    @property
    def samples(self) -> int:
        """How many images."""
        return self.image.shape[0]

    @property
    def positions(self) -> int:
        """How many windows an image has."""
        return prod(self.count)

    @property
    def row_size(self) -> int:
        """Numbers in one window of one block."""
        return self.image.shape[1] // self.blocks * prod(self.kernel)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Windows can be compared pixel by pixel where this is equal."""
        return (self.blocks, self.kernel, self.stride, self.dilation, self.padding, self.count, self.image.shape[1:])

    def take(self, samples: slice | Tensor) -> "Windows":
        """Some of the images."""
        return replace(self, image=self.image[samples])

    def channels(self, entries: slice) -> tuple["Windows", slice]:
        """The channels that hold these entries of the rows, and where the entries then stand."""
        taps = prod(self.kernel)
        begin, end, _ = entries.indices(self.row_size)
        first, last = begin // taps, -(-end // taps)
        if self.row_size == (last - first) * taps:
            return self, slice(begin, end)
        image = self.image.unflatten(1, (self.blocks, -1))[:, :, first:last].flatten(1, 2)
        return replace(self, image=image), slice(begin - first * taps, end - first * taps)

    def columns(self) -> Tensor:
        """Written out, windows last: (samples, blocks, row size, positions)."""
        seen = _view(self._padded(self.image), self.kernel, self.stride, self.dilation, self.count)
        return seen.reshape(self.samples, self.blocks, self.row_size, self.positions)

    def rows(self) -> Tensor:
        """Written out: (samples, positions, blocks, row size)."""
        return self.columns().permute(0, 3, 1, 2)

    def lengths(self) -> Tensor:
        """Euclidean lengths of the windows: (samples, positions, blocks), float64."""
        squares = self.image.double().square().unflatten(1, (self.blocks, -1)).sum(2)
        seen = _view(self._padded(squares), self.kernel, self.stride, self.dilation, self.count)
        taps = tuple(range(2, 2 + len(self.kernel)))
        return seen.sum(taps).flatten(2).sqrt().transpose(1, 2)

    def pieces(self, item: int, room: int) -> Iterator[slice]:
        """Ranges of samples whose windows are written out together, in at most so many bytes if one fits."""
        each = self.blocks * self.row_size * self.positions * item
        step = max(1, min(room, BATCHED if self.image.is_cuda else cached_bytes()) // max(each, 1))
        for begin in range(0, self.samples, step):
            yield slice(begin, min(begin + step, self.samples))

    def inner(self, other: "Windows") -> Tensor:
        """Inner products of all pairs of windows, block by block, from those of the pixels: (blocks, P T, P2 T2).

        sum over taps d of <x[t + d], y[s + d]>: one product of depth `channels`, then a sum of shifted copies of it.
        """
        left, right = (one.image.unflatten(1, (one.blocks, -1)).transpose(0, 1) for one in (self, other))
        space = self.image.shape[2:]
        pixels = torch.einsum("bpci,bqcj->bpiqj", left.flatten(3), right.flatten(3))
        total = pixels.reshape(self.blocks, self.samples, *space, other.samples, *space)
        for axis in range(len(space)):  # one after the other: taps add up, they do not multiply
            total = self._shifted(total, axis)
        return total.reshape(self.blocks, self.samples * self.positions, other.samples * self.positions)

    def _shifted(self, products: Tensor, axis: int) -> Tensor:
        """Products of pixels, (blocks, P, *space, P2, *space), summed over the taps of one axis."""
        first, second = 2 + axis, 3 + len(self.kernel) + axis
        shape = list(products.shape)
        shape[first] = shape[second] = self.count[axis]
        total = products.new_zeros(shape)
        for tap in range(self.kernel[axis]):
            inside, seen = self._reach(axis, tap)
            if inside.stop > inside.start:
                target, source = (
                    tuple(chosen if i in (first, second) else slice(None) for i in range(len(shape)))
                    for chosen in (inside, seen)
                )
                total[target] += products[source]
        return total

    def _reach(self, axis: int, tap: int) -> tuple[slice, slice]:
        """Positions along an axis at which a tap lies inside the image, and the pixels it meets there."""
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
    """Every window in a padded image (N, channels, *space): (N, channels, *kernel, *count), nothing copied."""
    image = image.contiguous()
    space = image.stride()[2:]
    steps = [s * j for s, j in zip(space, stride, strict=True)]
    holes = [s * j for s, j in zip(space, dilation, strict=True)]
    return image.as_strided((*image.shape[:2], *kernel, *count), (*image.stride()[:2], *holes, *steps))
