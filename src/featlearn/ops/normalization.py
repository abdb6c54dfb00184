"""Scale and shift of normalization layers."""

import torch
from torch import Tensor

from featlearn.graph.graph import Layout, Use
from featlearn.ops.registry import Direct, Form, Step, broadcast_gradient, first_axis, register_flow, register_rule

# In every rule, with n the normalized input: y = weight * n + bias
# weight.grad[p] = sum_t grads[p, t] * n[p, t],  bias.grad[p] = sum_t grads[p, t]


@register_rule("NativeLayerNormBackward0")
def layer_norm(use: Use) -> Form | None:
    """Weight and bias over the trailing axes."""
    if use.operand == 2:
        return broadcast_gradient(use)
    x, mean, inverse_deviation = use.saved("input"), use.saved("result1"), use.saved("result2")
    if use.operand != 1 or x is None:
        return None
    return broadcast_gradient(use, lambda: (x - mean) * inverse_deviation)


@register_rule("FusedRmsNormBackward0")
def rms_norm(use: Use) -> Form | None:
    """Weight over the trailing axes."""
    x, inverse_deviation = use.saved("input"), use.saved("result1")
    if use.operand != 1 or x is None or inverse_deviation is None:
        return None
    return broadcast_gradient(use, lambda: x * inverse_deviation)


def _by_channel(use: Use, normalized: Tensor | None) -> Form | None:
    """Weight or bias per channel: samples in axis 0 of the output, channels in axis 1."""
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
        return _by_channel(use, None)
    x = use.saved("input")
    if use.operand != 1 or x is None:
        return None
    batch, groups = use.saved("N"), use.saved("group")
    grouped = x.reshape(batch, groups, -1)
    mean, inverse_deviation = (use.saved(name).reshape(batch, groups, 1) for name in ("result1", "result2"))
    return _by_channel(use, (grouped - mean) * inverse_deviation)


_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")


@register_rule(*(f"{name}Backward0" for name in _BATCH_NORMS))
def batch_norm(use: Use) -> Form | None:
    """Weight and bias per channel, with the running statistics of eval mode."""
    if use.operand == 2:
        return _by_channel(use, None)
    x, mean, variance = use.saved("input"), use.saved("running_mean"), use.saved("running_var")
    if use.operand != 1 or x is None or mean is None or variance is None or use.saved("training"):
        return None
    eps = use.saved("eps") if use.saved("eps") is not None else use.saved("epsilon")
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return _by_channel(use, (x - mean.reshape(shape)) * torch.rsqrt(variance + eps).reshape(shape))


@register_flow("NativeLayerNorm", "FusedRmsNorm")
def outside_the_normalized_axes(step: Step) -> Layout | None:
    """The trailing axes `normalized_shape` are mixed."""
    normalized = step.argument("normalized_shape")
    if step.operand != 0 or normalized is None:
        return None
    return step.layout if step.layout.outside(*normalized) else None


@register_flow("NativeGroupNorm")
def images_of_group_norm(step: Step) -> Layout | None:
    """Images are normalized one by one, if the op was called with as many as there are."""
    return first_axis(step) if step.argument("N") == step.output[0] else None


@register_flow(*_BATCH_NORMS)
def images_of_batch_norm(step: Step) -> Layout | None:
    """Images are normalized one by one in eval mode."""
    return None if step.argument("training") else first_axis(step)


register_flow("NativeBatchNormLegitNoTraining", only="forward")(first_axis)
