"""Distances between samples and learned centers."""

from torch import Tensor

from featlearn.graph.uses import Use
from featlearn.ops.form import Direct, Form
from featlearn.ops.registry import register_rule
from featlearn.torch_internals import distance_gradient


@register_rule("CdistBackward0", "EuclideanDistBackward0")
def distance(use: Use) -> Form | None:
    """`torch.cdist(points, centers)` of any order p, with the same centers (K, d) for all samples."""
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
        own = centers.expand(samples, count, width)
        # What autograd calls once for the batch, with a copy of the centers for every sample.
        return distance_gradient(by_sample(grad), own, rows, order, by_sample(result))

    return Direct(gradient)
