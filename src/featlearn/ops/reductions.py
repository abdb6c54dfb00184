"""Ops that work along some axes: reductions, softmax, sums up to a position, sorting.

out[p, ...] = op over axes `dim` of x[p, ...]. None takes a parameter together with samples, so no use needs a rule.
"""

from featlearn.graph.graph import Layout
from featlearn.ops.registry import Step, register_flow


@register_flow("Amax", "Amin", "LinalgVectorNorm", "Logsumexp", "Max", "Mean", "Min", "Norm", "Std", "Sum", "Var")
def reduction(step: Step) -> Layout | None:
    """Axes `dim` are reduced, and dropped or kept with one entry."""
    reduced, keepdim = set(step.dims()), step.argument("keepdim")
    if not reduced or keepdim is None:
        return None
    remaining = [axis for axis in range(len(step.input)) if keepdim or axis not in reduced]
    axis = remaining[step.at.axis] if step.at.axis < len(remaining) else -1
    return step.in_axis(axis) if axis not in reduced else None


@register_flow("Cumsum", "LogSoftmax", "SafeSoftmax", "Softmax", shares_operands=False)
def along_another_axis(step: Step) -> Layout | None:
    """The op mixes entries along axes `dim` or `dims`. Entries of all other axes keep their places."""
    mixed = step.dims() or step.dims("dims")
    return step.in_axis(step.at.axis) if mixed and step.at.axis not in mixed else None


# In a forward pass they choose by value.
register_flow("Sort", "Topk", only="backward", shares_operands=False)(along_another_axis)
