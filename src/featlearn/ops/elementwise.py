"""Elementwise ops, whose operands are broadcast against each other: sums, products, activations, expanded tokens.

The gradient of every operand is `Z.grad[p] = sum_t grads[p, t] * factor[p, t]`, over the entries t that Z was broadcast
to. The equations below state the factor.
"""

from featlearn.graph.graph import Use
from featlearn.ops.registry import (
    Direct,
    Form,
    broadcast,
    broadcast_gradient,
    register_flow,
    register_rule,
    sample_axis,
    scaled,
)

_ELEMENTWISE = """
    Abs Add Addcdiv Addcmul Atan2 Celu Clamp ClampMax ClampMin Clone Cos Div Elu Erf Exp Expand Expm1 Gelu Hardsigmoid
    Hardswish Hardtanh LeakyRelu Lerp Log Log1P LogSigmoid MaskedFill Maximum Minimum Mish Mul Neg Pow PreluKernel
    Reciprocal Relu Rsqrt Rsub Selu Sigmoid Silu Sin Softplus Sqrt Sub Tanh Threshold ToCopy Where
"""
_WITHOUT_A_NODE = """
    BitwiseAnd BitwiseNot BitwiseOr Ceil Eq Floor Ge Gt Isfinite Isinf Isnan Le LogSigmoidForward LogicalAnd LogicalNot
    LogicalOr Lt Ne OnesLike Round Sign Trunc ZerosLike
"""
register_flow(*_ELEMENTWISE.split(), writes_entries=True)(broadcast)
register_flow(*_WITHOUT_A_NODE.split(), writes_entries=True, only="forward")(broadcast)
register_flow("NewOnes", "NewZeros", only="forward")(broadcast)  # the operand gives its type alone
register_flow("NativeDropout", only="backward")(broadcast)  # a forward pass draws random numbers


@register_rule("AddBackward0", "SubBackward0")
def addition(use: Use) -> Form | None:
    """self + alpha * other, self - alpha * other."""
    # factor = 1 for self, +alpha or -alpha for other
    alpha = use.saved("alpha")
    if use.operand == 0:
        return broadcast_gradient(use)
    if isinstance(alpha, complex):
        return None
    return scaled(broadcast_gradient(use), -float(alpha) if use.node.name() == "SubBackward0" else float(alpha))


@register_rule("MulBackward0")
def multiplication(use: Use) -> Form | None:
    """self * other."""
    # factor = other for self, self for other
    other = use.saved("other") if use.operand == 0 else use.saved("self")
    return None if other is None else broadcast_gradient(use, lambda: other)


@register_rule("DivBackward0")
def division(use: Use) -> Form | None:
    """self / other."""
    # factor = 1 / other for self, -self / other^2 for other
    numerator, denominator = use.saved("self"), use.saved("other")
    if denominator is None:
        return None
    if use.operand == 0:
        return broadcast_gradient(use, lambda: 1.0 / denominator)
    return None if numerator is None else broadcast_gradient(use, lambda: -numerator / denominator**2)


@register_rule("AddcmulBackward0")
def scaled_product(use: Use) -> Form | None:
    """self + value * tensor1 * tensor2."""
    # factor = 1 for self, value * tensor2 for tensor1, value * tensor1 for tensor2
    if use.operand == 0:
        return broadcast_gradient(use)
    value, other = use.saved("value"), use.saved("tensor2" if use.operand == 1 else "tensor1")
    if other is None or isinstance(value, complex):
        return None
    return broadcast_gradient(use, lambda: value * other)


@register_rule("PreluKernelBackward0")
def prelu(use: Use) -> Form | None:
    """where(x > 0, x, weight * x)."""
    # factor = min(x, 0) for weight
    x = use.saved("self")
    return None if use.operand != 1 or x is None else broadcast_gradient(use, lambda: x.clamp(max=0.0))


@register_rule("ExpandBackward0")
def expansion(use: Use) -> Form | None:
    """operand.expand(...): a token or table for every sample."""
    # factor = 1
    return broadcast_gradient(use)


@register_rule("RepeatBackward0")
def repetition(use: Use) -> Form | None:
    """operand.repeat(...): tiles along each axis, with the samples among the tiles of one axis."""
    # factor = 1
    place = sample_axis(use.output, use.layout)
    repeats, samples = tuple(use.saved("repeats")), use.layout.samples
    if place is None:
        return None
    axis, outer = place
    tiles, rest = divmod(repeats[axis], outer * samples)
    if rest:
        return None
    shape: list[int] = []
    copies: list[int] = []
    padded = (1,) * (len(repeats) - len(use.shape)) + tuple(use.shape)
    for i, (times, size) in enumerate(zip(repeats, padded, strict=True)):
        first = len(shape)
        copies += [first, first + 2] if i == axis else [first]
        shape += [outer, samples, tiles, size] if i == axis else [times, size]
    return Direct(lambda grad: grad.reshape(shape).sum(copies).movedim(axis, 0).reshape(samples, *use.shape))
