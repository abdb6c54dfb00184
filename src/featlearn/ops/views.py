"""Views and joins: ops that rearrange, cut, join, shift or pad tensors.

out[p, i] = x[p, place(i)]. Between a parameter and its use they are looked through, so no use needs a rule.
"""

from featlearn.graph.graph import Layout
from featlearn.ops.reductions import along_another_axis
from featlearn.ops.registry import Step, register_flow, signed


@register_flow("Alias", "Squeeze", "UnsafeView", "Unsqueeze", "View")
def same_elements(step: Step) -> Layout | None:
    """Elements keep their order."""
    return step.layout if step.input.numel() == step.output.numel() else None


register_flow("Detach", only="forward")(same_elements)
# In a forward pass the op takes strides, which may reorder elements.
register_flow("ReshapeAlias", only="backward")(same_elements)


@register_flow("Permute")
def permutation(step: Step) -> Layout | None:
    """output.shape[k] = input.shape[dims[k]]"""
    return step.in_axis(step.dims("dims")[step.at.axis])


@register_flow("Transpose", "Swapaxes")
def transposition(step: Step) -> Layout | None:
    """Axes `dim0` and `dim1` change places."""
    first, second = (step.dims(name)[0] for name in ("dim0", "dim1"))
    return step.in_axis({first: second, second: first}.get(step.at.axis, step.at.axis))


@register_flow("T")
def matrix_transposition(step: Step) -> Layout | None:
    """The axes of a matrix change places."""
    return step.in_axis(len(step.input) - 1 - step.at.axis)


register_flow("Flip", "Roll", "Slice", shares_operands=False)(along_another_axis)
register_flow("Split", "SplitWithSizes", "UnsafeSplit", pieces=True, shares_operands=False)(along_another_axis)


@register_flow("Cat")
def concatenation(step: Step) -> Layout | None:
    """Joined along axis `dim`, which counts the axes of the output."""
    return along_another_axis(step) if len(step.input) == len(step.output) else None


@register_flow("Stack")
def stacking(step: Step) -> Layout | None:
    """Joined along a new axis `dim`."""
    new = signed(step.argument("dim")) % len(step.output)
    return None if new == step.at.axis else step.in_axis(step.at.axis - (step.at.axis > new))


@register_flow("Select")
def selection(step: Step) -> Layout | None:
    """One entry of axis `dim`, which is dropped."""
    (dim,) = step.dims()
    return step.in_axis(step.at.axis + (step.at.axis >= dim))


register_flow("Unbind", pieces=True)(selection)


@register_flow("ConstantPadNd")
def padding(step: Step) -> Layout | None:
    """The last len(pad) / 2 axes are padded or cut."""
    pad = step.argument("pad")
    return None if pad is None or step.at.axis >= len(step.output) - len(pad) // 2 else step.in_axis(step.at.axis)
