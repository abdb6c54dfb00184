"""Convolutions of one to three dimensions (grouped, strided, dilated, transposed), and pooling."""

from torch import Tensor

from featlearn.contraction.windows import Windows
from featlearn.graph.graph import Layout, Use
from featlearn.ops.registry import (
    Direct,
    FlowRule,
    Form,
    LinearMap,
    Outer,
    Step,
    first_axis,
    register_flow,
    register_rule,
)

_CONVOLUTIONS = ("Convolution", "ConvolutionOverrideable", "CudnnConvolution")
register_flow(*_CONVOLUTIONS)(first_axis)


def _pixels(image: Tensor, groups: int) -> Tensor:
    """(N, channels, *space) -> (N, positions, groups, channels per group)."""
    return image.flatten(2).transpose(1, 2).reshape(image.shape[0], -1, groups, image.shape[1] // groups)


def _samples_first(use: Use, tensor: Tensor) -> Tensor:
    """(N, positions, groups, d), N laid out as the output's first axis, -> (samples, positions, groups, d)."""
    return use.layout.samples_first(tensor, *tensor.shape[1:]).flatten(1, 2)


@register_rule(*(f"{name}Backward0" for name in _CONVOLUTIONS))
def convolution(use: Use) -> Form | None:
    """Weight and bias of a convolution; the samples lie in the output's first axis."""
    # bias.grad[p] = sum_t grads[p, t]
    if len(use.output) < 3 or not use.layout.outside(*use.output[1:]):
        return None
    if use.operand == 2:
        return Direct(lambda grad: use.layout.samples_first(grad.flatten(2), *grad.flatten(2).shape[1:]).sum((1, 3)))
    image = use.saved("input")
    if use.operand != 1 or image is None:
        return None
    return _transposed(use, image) if use.saved("transposed") else _plain(use, image)


def _plain(use: Use, image: Tensor) -> Outer:
    # W.grad[p] = sum_t grads[p, t] (x) window[p, t], over pixels t of the output, for each group of channels
    groups, kernel, weight = use.saved("groups"), use.shape[2:], use.saved("weight")
    # Padding "valid" is kept as one number for all axes.
    padding, stride, dilation = (
        tuple(numbers) * (len(kernel) if len(numbers) == 1 else 1)
        for numbers in (use.saved("padding"), use.saved("stride"), use.saved("dilation"))
    )
    as_image = use.layout.before == 1 and image.shape[0] == use.layout.samples

    def rows() -> Tensor | Windows:
        windows = Windows(image, groups, tuple(kernel), stride, dilation, padding, tuple(use.output[2:]))
        return windows if as_image else _samples_first(use, windows.rows())

    return Outer(
        rows,
        lambda grad: _samples_first(use, _pixels(grad, groups)),
        rows_first=False,
        positions=use.layout.positions(use.output[1]),
        row_size=use.shape[1:].numel(),
        grad_size=use.shape[0] // groups,
        blocks=groups,
        window=kernel.numel(),
        pixels=image.shape[2:].numel() if as_image else 0,
        linear_map=LinearMap(weight, row_taps=kernel.numel(), channels_second=True),
    )


def _transposed(use: Use, image: Tensor) -> Outer:
    """The weight is (channels in, channels out / groups, *kernel): each input pixel meets a window of the output."""
    # W.grad[p] = sum_t pixel[p, t] (x) window of grads[p, t], over pixels t of the input, for each group of channels
    groups, kernel, weight = use.saved("groups"), use.shape[2:], use.saved("weight")
    padding, stride, dilation = (tuple(use.saved(name)) for name in ("padding", "stride", "dilation"))

    def grads(grad: Tensor) -> Tensor:
        windows = Windows(grad, groups, tuple(kernel), stride, dilation, padding, tuple(image.shape[2:]))
        return _samples_first(use, windows.rows())

    return Outer(
        lambda: _samples_first(use, _pixels(image, groups)),
        grads,
        rows_first=True,
        positions=image.shape[0] // use.layout.samples * image.shape[2:].numel(),
        row_size=use.shape[0] // groups,
        grad_size=use.shape[1:].numel(),
        blocks=groups,
        linear_map=LinearMap(weight, grad_taps=kernel.numel(), channels_second=True),
    )


def _pooling(pooled_axes: int) -> FlowRule:
    """The axes in front of the pooled ones stay as they are: samples and channels, or channels of one image."""

    def rule(step: Step) -> Layout | None:
        is_in_front = step.operand == 0 and step.at.axis < len(step.output) - pooled_axes
        return step.in_axis(step.at.axis) if is_in_front else None

    return rule


register_flow("AdaptiveAvgPool2D", "AvgPool2D", "MaxPool2DWithIndices")(_pooling(2))
register_flow("AvgPool3D", "MaxPool3DWithIndices")(_pooling(3))
