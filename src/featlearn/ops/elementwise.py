"""Operands that are broadcast against the samples: sums, products, scales, expanded tokens."""

from torch import Tensor

from featlearn.graph.layout import sample_dimension
from featlearn.graph.uses import Use
from featlearn.ops.form import Direct, Form, broadcast_gradient
from featlearn.ops.registry import register_rule


@register_rule("AddBackward0", "SubBackward0")
def addition(use: Use) -> Form | None:
    """self + alpha * other, self - alpha * other."""
    plain = broadcast_gradient(use)
    alpha = use.saved("alpha")
    if plain is None or use.operand == 0 or isinstance(alpha, complex):
        return plain if use.operand == 0 else None
    scale = float(alpha) * (-1.0 if use.node.name() == "SubBackward0" else 1.0)
    return plain if scale == 1.0 else Direct(lambda grad: plain.gradient(grad) * scale)


@register_rule("MulBackward0")
def multiplication(use: Use) -> Form | None:
    """self * other."""
    other = use.saved("other") if use.operand == 0 else use.saved("self")
    return None if other is None else broadcast_gradient(use, lambda: other)


@register_rule("DivBackward0")
def division(use: Use) -> Form | None:
    """self / other."""
    numerator, denominator = use.saved("self"), use.saved("other")
    if denominator is None:
        return None
    if use.operand == 0:
        return broadcast_gradient(use, lambda: 1.0 / denominator)
    return None if numerator is None else broadcast_gradient(use, lambda: -numerator / denominator**2)


@register_rule("PreluKernelBackward0")
def prelu(use: Use) -> Form | None:
    """Slope of the negative side."""
    source = use.saved("self")
    if use.operand != 1 or source is None:
        return None
    return broadcast_gradient(use, lambda: source.clamp(max=0.0))


@register_rule("ExpandBackward0")
def expansion(use: Use) -> Form | None:
    """A token or table repeated for every sample."""
    return broadcast_gradient(use)


@register_rule("RepeatBackward0")
def repetition(use: Use) -> Form | None:
    """operand.repeat(...): tiles along each axis, the samples among the tiles of one of them."""
    found = sample_dimension(use.output, use.layout)
    repeats = tuple(use.saved("repeats"))
    if found is None:
        return None
    axis, outer = found
    padded = (1,) * (len(repeats) - len(use.shape)) + tuple(use.shape)
    tiles, rest = divmod(repeats[axis], outer * use.layout.samples)
    if rest:
        return None

    def gradient(grad: Tensor) -> Tensor:
        shape: list[int] = []
        summed: list[int] = []
        where = 0
        for i, (times, size) in enumerate(zip(repeats, padded, strict=True)):
            split = (outer, use.layout.samples, tiles, size) if i == axis else (times, size)
            copies = range(len(shape), len(shape) + len(split) - 1)
            where = len(shape) + 1 if i == axis else where
            summed += [j for j in copies if not (i == axis and j == len(shape) + 1)]
            shape += split
        total = grad.reshape(shape).movedim(where, 0)
        moved = [j + 1 if j < where else j for j in summed]
        return total.sum(moved).reshape(use.layout.samples, *use.shape)

    return Direct(gradient)


@register_rule("AddcmulBackward0")
def scaled_product(use: Use) -> Form | None:
    """self + value * tensor1 * tensor2."""
    if use.operand == 0:
        return broadcast_gradient(use)
    value, other = use.saved("value"), use.saved("tensor2" if use.operand == 1 else "tensor1")
    if other is None or isinstance(value, complex):
        return None
    return broadcast_gradient(use, lambda: value * other)
