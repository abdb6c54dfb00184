"""Scale and shift of normalization layers."""

import torch
from torch import Tensor

from featlearn.graph.uses import Use
from featlearn.ops.form import Direct, Form, broadcast_gradient
from featlearn.ops.registry import register_rule


@register_rule("NativeLayerNormBackward0")
def layer_norm(use: Use) -> Form | None:
    """Weight and bias over the trailing axes."""
    if use.operand == 2:
        return broadcast_gradient(use)
    source, mean, deviation = use.saved("input"), use.saved("result1"), use.saved("result2")
    if use.operand != 1 or source is None:
        return None
    return broadcast_gradient(use, lambda: (source - mean) * deviation)


@register_rule("FusedRmsNormBackward0")
def rms_norm(use: Use) -> Form | None:
    """Weight over the trailing axes."""
    source, deviation = use.saved("input"), use.saved("result1")
    if use.operand != 1 or source is None or deviation is None:
        return None
    return broadcast_gradient(use, lambda: source * deviation)


def _channel(use: Use, normalized: Tensor | None) -> Form | None:
    """A weight per channel, channels being axis 1, samples in axis 0 of the output."""
    if not use.layout.outside(*use.output[1:]):
        return None
    channels, rest = use.output[1], use.output[2:].numel()

    def gradient(grad: Tensor) -> Tensor:
        product = grad if normalized is None else grad * normalized.reshape(grad.shape)
        return use.layout.samples_first(product, channels, rest).sum((1, 3))

    return Direct(gradient)


@register_rule("NativeGroupNormBackward0")
def group_norm(use: Use) -> Form | None:
    """Weight and bias per channel; statistics per sample and group."""
    if use.operand == 2:
        return _channel(use, None)
    source = use.saved("input")
    if use.operand != 1 or source is None:
        return None
    batch, groups = use.saved("N"), use.saved("group")
    grouped = source.reshape(batch, groups, -1)
    mean, deviation = use.saved("result1").reshape(batch, groups, 1), use.saved("result2").reshape(batch, groups, 1)
    return _channel(use, (grouped - mean) * deviation)


@register_rule("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def batch_norm(use: Use) -> Form | None:
    """Weight and bias per channel, with the running statistics of eval mode."""
    if use.operand == 2:
        return _channel(use, None)
    source, mean, variance = use.saved("input"), use.saved("running_mean"), use.saved("running_var")
    if use.operand != 1 or source is None or mean is None or variance is None or use.saved("training"):
        return None
    eps = use.saved("eps") if use.saved("eps") is not None else use.saved("epsilon")
    shape = (1, -1) + (1,) * (source.dim() - 2)
    return _channel(use, (source - mean.reshape(shape)) * torch.rsqrt(variance + eps).reshape(shape))
