"""Fused ops taken apart, for derivatives of higher order.

PyTorch's fused normalizations and attention have wrong or missing derivatives beyond the first: in torch 2.13 the third
derivative of layer norm and the second of weight norm are off by tens of percent, without a sign. Inside this mode the
same functions are computed from elementary ops, whose derivatives of every order are right.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from featlearn.torch_internals import weight_norm


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centered = input - input.mean(axes, keepdim=True)
    result = centered / (centered.square().mean(axes, keepdim=True) + eps).sqrt()
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = input.reshape(input.shape[0], num_groups, -1)
    centered = grouped - grouped.mean(-1, keepdim=True)
    result = (centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(input.shape)
    channels = (1, -1) + (1,) * (input.dim() - 2)
    result = result if weight is None else result * weight.reshape(channels)
    return result if bias is None else result + bias.reshape(channels)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    channels = (1, -1) + (1,) * (input.dim() - 2)
    result = (input - running_mean.reshape(channels)) / (running_var + eps).sqrt().reshape(channels)
    result = result if weight is None else result * weight.reshape(channels)
    return result if bias is None else result + bias.reshape(channels)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    result = input / (input.square().mean(axes, keepdim=True) + eps).sqrt()
    return result if weight is None else result * weight


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()] if dim != -1 else list(range(v.dim()))
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return functional.dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0) @ value


def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """With its weights asked for, PyTorch computes it from elementary ops; they are dropped where nobody wants them."""
    bound = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
    wanted = bound.arguments.get("need_weights", True)
    bound.arguments["need_weights"] = True
    outputs, weights = functional.multi_head_attention_forward(*bound.args, **bound.kwargs)
    return outputs, weights if wanted else None


ELEMENTARY: dict[Any, Callable[..., Any]] = {
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    functional.batch_norm: _batch_norm,
    functional.rms_norm: _rms_norm,
    torch.layer_norm: lambda input, shape, weight=None, bias=None, eps=1e-5, *_: _layer_norm(
        input, shape, weight, bias, eps
    ),
    torch.rms_norm: _rms_norm,
    weight_norm: _weight_norm,
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head_attention,
}


class ElementaryOps(TorchFunctionMode):
    """Inside, fused ops are computed from elementary ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what is in the table, call the rest."""
        return ELEMENTARY.get(func, func)(*args, **(kwargs or {}))


class NoFastPaths(TorchFunctionMode):
    """Inside, modules of torch do not replace their forward pass by one fused op: they look for modes like this."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        return func(*args, **(kwargs or {}))
