"""Convolutions of one to three dimensions: grouped, strided, dilated, transposed."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from featlearn.ops.form import Direct, Form, Outer, Use
from featlearn.ops.registry import register_rule


def windows(image: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
            count: Sequence[int]) -> Tensor:  # fmt: skip
    """Every window a kernel sees in a padded image (N, channels, *space): (N, channels, *count, *kernel), a view."""
    image = image.contiguous()
    space = image.stride()[2:]
    size = (*image.shape[:2], *count, *kernel)
    steps = [s * j for s, j in zip(space, stride, strict=True)]
    holes = [s * j for s, j in zip(space, dilation, strict=True)]
    return image.as_strided(size, (*image.stride()[:2], *steps, *holes))


def padded(image: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Zeros around the spatial axes; negative sizes crop."""
    sizes = [size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair]
    return functional.pad(image, sizes) if any(sizes) else image


def _patches(seen: Tensor, spatial: int, groups: int) -> Tensor:
    """(N, channels, *count, *kernel) -> (N, positions, groups, channels per group * kernel area)."""
    order = (0, *range(2, 2 + spatial), 1, *range(2 + spatial, 2 + 2 * spatial))
    return seen.permute(order).reshape(seen.shape[0], seen.shape[2 : 2 + spatial].numel(), groups, -1)


def _pixels(image: Tensor, groups: int) -> Tensor:
    """(N, channels, *space) -> (N, positions, groups, channels per group)."""
    return image.flatten(2).transpose(1, 2).reshape(image.shape[0], -1, groups, image.shape[1] // groups)


def _samples_first(use: Use, tensor: Tensor) -> Tensor:
    """(N, positions, groups, d), N laid out as the output's first axis, -> (samples, positions, groups, d)."""
    return use.layout.samples_first(tensor, *tensor.shape[1:]).flatten(1, 2)


@register_rule("ConvolutionBackward0", "ConvolutionOverrideableBackward0", "CudnnConvolutionBackward0")
def convolution(use: Use) -> Form | None:
    """Weight and bias of a convolution; the samples lie in the output's first axis."""
    if len(use.output) < 3 or not use.layout.outside(*use.output[1:]):
        return None
    if use.operand == 2:
        return Direct(lambda grad: use.layout.samples_first(grad.flatten(2), *grad.flatten(2).shape[1:]).sum((1, 3)))
    image = use.saved("input")
    if use.operand != 1 or image is None:
        return None
    return _transposed(use, image) if use.saved("transposed") else _plain(use, image)


def _plain(use: Use, image: Tensor) -> Outer:
    groups, kernel = use.saved("groups"), use.shape[2:]
    padding, stride, dilation = use.saved("padding"), use.saved("stride"), use.saved("dilation")

    def rows() -> Tensor:
        seen = windows(padded(image, padding, padding), kernel, stride, dilation, use.output[2:])
        return _samples_first(use, _patches(seen, len(kernel), groups))

    return Outer(
        rows, lambda grad: _samples_first(use, _pixels(grad, groups)), rows_first=False,
        positions=use.layout.positions(use.output[1]), row_size=use.shape[1:].numel(),
        grad_size=use.shape[0] // groups, blocks=groups, weight=lambda: use.saved("weight"), row_taps=kernel.numel(),
        image=True,
    )  # fmt: skip


def _transposed(use: Use, image: Tensor) -> Outer:
    """The weight is (channels in, channels out / groups, *kernel): each input pixel meets a window of the output."""
    groups, kernel = use.saved("groups"), use.shape[2:]
    padding, stride, dilation = use.saved("padding"), use.saved("stride"), use.saved("dilation")
    after = [p - extra for p, extra in zip(padding, use.saved("output_padding"), strict=True)]

    def grads(grad: Tensor) -> Tensor:
        seen = windows(padded(grad, padding, after), kernel, stride, dilation, image.shape[2:])
        return _samples_first(use, _patches(seen, len(kernel), groups))

    return Outer(
        lambda: _samples_first(use, _pixels(image, groups)), grads, rows_first=True,
        positions=image.shape[0] // use.layout.samples * image.shape[2:].numel(),
        row_size=use.shape[0] // groups, grad_size=use.shape[1:].numel(), blocks=groups,
        weight=lambda: use.saved("weight"), grad_taps=kernel.numel(), image=True,
    )  # fmt: skip
