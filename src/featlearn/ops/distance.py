"""Distances between samples and learned centers."""

from torch import Tensor

from featlearn.graph.graph import Layout, Use
from featlearn.ops.registry import Direct, Form, Step, register_flow, register_rule
from featlearn.torch_internals import distance_gradient


@register_rule("CdistBackward0", "EuclideanDistBackward0")
def distance(use: Use) -> Form | None:
    """`torch.cdist(points, centers)` of any order, with the same centers (K, d) for all samples."""
    # centers.grad[p, k] = sum_t grads[p, t, k] * d|x[p, t] - centers[k]| / d centers[k]
    points, centers, result = use.saved("x1"), use.saved("x2"), use.saved("result")
    if use.operand != 1 or len(use.shape) != 2 or points is None or not use.layout.outside(use.shape[0]):
        return None
    (count, width), samples = use.shape, use.layout.samples
    order = 2.0 if use.saved("p") is None else float(use.saved("p"))  # EuclideanDist is of order two

    def by_sample(tensor: Tensor) -> Tensor:
        """(samples, centers, positions)"""
        return use.layout.samples_first(tensor, count).mT.contiguous()

    def gradient(grad: Tensor) -> Tensor:
        rows = use.layout.samples_first(points, width)
        copies = centers.expand(samples, count, width)
        # Autograd calls this once for the whole batch. Here every sample has a copy of the centers.
        return distance_gradient(by_sample(grad), copies, rows, order, by_sample(result))

    return Direct(gradient)


@register_flow("Cdist", "EuclideanDist")
def rows_of_both_sets(step: Step) -> Layout | None:
    """Rows of operand 0 meet rows of operand 1. Axes in front of the rows are a batch of both."""
    rows = len(step.output) - 2
    if len(step.input) != len(step.output) or step.at.axis > rows - step.operand:
        return None
    return step.in_axis(step.at.axis)
