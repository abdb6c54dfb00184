"""Fused scaled dot-product attention: out[p, h, t] = sum_s softmax_s(q[p, h, t] k[p, h, s] / sqrt(d)) v[p, h, s].

It takes no parameter as it is, so that a flow of samples is all it needs.
"""

from featlearn.graph.graph import Layout
from featlearn.ops.registry import Step, broadcast, register_flow

_KINDS = ("Flash", "Cudnn", "Efficient")
_NAMES = [f"ScaledDotProduct{kind}Attention" for kind in _KINDS]
_NAMES += ["ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFusedAttentionOverrideable"]


@register_flow(*_NAMES, only="backward")
def attention(step: Step) -> Layout | None:
    """Queries, keys and values are (..., tokens, width); the bias is (..., queries, keys)."""
    if step.operand > 2:  # the last axis of the bias is not that of the output
        return broadcast(step) if step.at.axis < len(step.output) - 1 else None
    return step.in_axis(step.at.axis) if step.at.axis < len(step.output) - 2 else None


@register_flow(*_NAMES, only="forward")
def attention_of_a_batch(step: Step) -> Layout | None:
    """Constant keys may have fewer heads than queries, so samples that lie among the heads are not followed."""
    return attention(step) if step.at.axis == 0 else None
