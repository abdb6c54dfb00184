"""Matrix products: linear layers, einsum, weights on either side, bilinear forms."""

from torch import Tensor

from featlearn.graph.graph import Layout, Use
from featlearn.ops.registry import (
    FlowRule,
    Form,
    LinearMap,
    Outer,
    Step,
    broadcast,
    broadcast_gradient,
    register_flow,
    register_rule,
    scaled,
)


def _product(use: Use, rows: Tensor | None, weight_right: bool, weight: str, scale: float = 1.0) -> Form | None:
    """scale * rows @ Z for a weight on the right, scale * Z @ rows on the left; Z may have a leading axis of blocks."""
    # Z.grad[p, b] = scale * sum_t rows[p, t, b] (x) grads[p, t, b]; with Z on the left both are columns
    if rows is None:
        return None
    blocks = use.shape[0] if len(use.shape) == 3 else 1
    split = _row_split(use, weight_right, blocks)
    if split is None:
        return None
    outer, inner = split
    row_size, grad_size = use.shape[-2:] if weight_right else use.shape[-2:][::-1]

    def by_sample(matrix: Tensor, size: int) -> Tensor:
        # With the weight on the left the op is read transposed: its columns are rows here.
        matrix = matrix if weight_right else matrix.mT
        if blocks == outer == 1:
            return matrix.reshape(use.layout.samples, inner, 1, size)
        parts = matrix.reshape(blocks, outer, use.layout.samples, inner, size)
        return parts.permute(2, 1, 3, 0, 4).reshape(use.layout.samples, outer * inner, blocks, size)

    def grads(grad: Tensor) -> Tensor:
        return by_sample(grad, grad_size) if scale == 1.0 else by_sample(grad, grad_size) * scale

    return Outer(
        lambda: by_sample(rows, row_size),
        grads,
        rows_first=weight_right,
        positions=outer * inner,
        row_size=row_size,
        grad_size=grad_size,
        blocks=blocks,
        linear_map=LinearMap(use.saved(weight)),
    )


def _row_split(use: Use, weight_right: bool, blocks: int) -> tuple[int, int] | None:
    """Return how the samples lie among the rows of the product, (outer, inner): columns for a weight on the left."""
    layout, (count, width) = use.layout, use.output[-2:]
    if weight_right:
        outer, rest = divmod(layout.before, blocks)
        inner, uneven = divmod(layout.after, width)
        rows = count
    else:
        outer, rest = divmod(layout.before, blocks * count)
        inner, uneven = layout.after, 0
        rows = width
    return None if rest or uneven or outer * layout.samples * inner != rows else (outer, inner)


@register_rule("MmBackward0", "BmmBackward0")
def product(use: Use) -> Form | None:
    """self @ mat2, one matrix or a batch of them."""
    if use.operand == 1:
        return _product(use, use.saved("self"), True, "mat2")
    return _product(use, use.saved("mat2"), False, "self")


@register_rule("AddmmBackward0")
def biased_product(use: Use) -> Form | None:
    """beta * self + alpha * mat1 @ mat2."""
    return _biased(use, "mat1", "mat2")


@register_rule("BaddbmmBackward0")
def biased_batch_product(use: Use) -> Form | None:
    """beta * self + alpha * batch1 @ batch2."""
    return _biased(use, "batch1", "batch2")


def _biased(use: Use, left: str, right: str) -> Form | None:
    alpha, beta = use.saved("alpha"), use.saved("beta")
    if isinstance(alpha, complex) or isinstance(beta, complex):
        return None
    if use.operand == 0:
        return scaled(broadcast_gradient(use), 1.0 if beta is None else float(beta))  # sum_t beta * grads[p, t]
    scale = 1.0 if alpha is None else float(alpha)
    if use.operand == 2:
        return _product(use, use.saved(left), True, right, scale)
    return _product(use, use.saved(right), False, left, scale)


@register_rule("MvBackward0")
def matrix_vector(use: Use) -> Form | None:
    """self @ vec with the vector as the weight; a weight matrix on the left has no sample axis to meet."""
    # vec.grad[p] = sum_t rows[p, t] * grads[p, t]
    rows, weight = use.saved("self"), use.saved("vec")
    if use.operand != 1 or rows is None:
        return None
    return Outer(
        lambda: use.layout.samples_first(rows, 1, rows.shape[1]),
        lambda grad: use.layout.samples_first(grad, 1, 1),
        rows_first=True,
        positions=use.layout.positions(1),
        row_size=rows.shape[1],
        grad_size=1,
        linear_map=LinearMap(weight),
    )


@register_rule("LinearBackward0")
def linear(use: Use) -> Form | None:
    """input @ weight^T + bias, where a backend keeps `linear` whole."""
    # weight.grad[p] = sum_t grads[p, t] (x) rows[p, t]
    if use.operand == 2:
        return broadcast_gradient(use)
    rows = use.saved("input") if use.saved("input") is not None else use.saved("self")
    if use.operand != 1 or rows is None or len(use.shape) != 2 or not use.layout.outside(use.shape[0]):
        return None
    grad_size, row_size = use.shape
    weight = use.saved("weight")
    return Outer(
        lambda: use.layout.samples_first(rows, 1, row_size),
        lambda grad: use.layout.samples_first(grad, 1, grad_size),
        rows_first=False,
        positions=use.layout.positions(grad_size),
        row_size=row_size,
        grad_size=grad_size,
        linear_map=LinearMap(weight),
    )


def _matrices(first: int) -> FlowRule:
    """Operands `first` and `first + 1` are multiplied: matrices, or a batch of them. One before them is added."""

    def rule(step: Step) -> Layout | None:
        if step.operand < first:
            return broadcast(step)
        rows = len(step.output) - 2
        is_batch, own_axis = step.at.axis < rows, rows if step.operand == first else rows + 1
        return step.in_axis(step.at.axis) if is_batch or step.at.axis == own_axis else None

    return rule


register_flow("Mm", "Bmm")(_matrices(0))
register_flow("Addmm", "Baddbmm")(_matrices(1))


@register_flow("Mv")
def rows_of_the_matrix(step: Step) -> Layout | None:
    """Rows of the matrix meet one vector."""
    return step.in_axis(0) if step.operand == 0 else None
