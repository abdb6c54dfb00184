"""Bilinear layers: one weight between two inputs."""

from torch import Tensor

from featlearn.graph.graph import Layout, Use
from featlearn.ops.registry import Form, Outer, Step, register_flow, register_rule


@register_rule("TrilinearBackward0")
def bilinear(use: Use) -> Form | None:
    """y_o = sum_ij x_i W_oij z_j, as `torch.bilinear` calls the op."""
    # W.grad[p] = sum_t grads[p, t] (x) (x[p, t] (x) z[p, t])
    first, second = use.saved("i1"), use.saved("i3")
    if use.operand != 1 or first is None or second is None or not use.layout.outside(use.shape[0]):
        return None
    outputs, left, right = use.shape

    def rows() -> Tensor:
        products = first[:, :, None] * second[:, None, :]
        return use.layout.samples_first(products.flatten(1), 1, left * right)

    # No linear map: the weight is not applied to one input, so there is no x with h = W x.
    return Outer(
        rows,
        lambda grad: use.layout.samples_first(grad, 1, outputs),
        rows_first=False,
        positions=use.layout.positions(outputs),
        row_size=left * right,
        grad_size=outputs,
    )


@register_flow("Trilinear")
def rows_of_both_inputs(step: Step) -> Layout | None:
    """Rows of operands 0 and 2 meet, with the weight between them, as `torch.bilinear` calls the op."""
    arguments = tuple(tuple(step.argument(name) or ()) for name in ("expand1", "expand2", "expand3", "sumdim"))
    if arguments != ((1, 3), (0,), (1, 2), (2, 3)):
        return None
    return step.in_axis(0) if step.operand != 1 and step.at.axis == 0 else None
