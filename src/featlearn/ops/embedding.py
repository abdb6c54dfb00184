"""Lookups and sums by index: embeddings, tensors indexed along an axis, messages between nodes of a graph.

Rows are kept as integers.
"""

from typing import Any

import torch
from torch import Tensor

from featlearn.graph.graph import Layout, Use
from featlearn.ops.reductions import along_another_axis
from featlearn.ops.registry import Form, Outer, SampleAxis, Step, register_flow, register_rule, signed


def _lookup(use: Use, index: Tensor | None, width: int, padding: int = -1) -> Form | None:
    # table.grad[p] = sum_t onehot(index[p, t]) (x) grads[p, t]
    if index is None or not use.layout.outside(width) or index.dtype.is_floating_point:
        return None

    def rows() -> Tensor:
        return use.layout.samples_first(index.long()) % use.shape[0]  # negative indices count from the end

    def grads(grad: Tensor) -> Tensor:
        by_sample = use.layout.samples_first(grad, 1, width)
        return by_sample if padding < 0 else by_sample.masked_fill((rows() == padding)[:, :, None, None], 0.0)

    return Outer(
        rows,
        grads,
        rows_first=True,
        positions=use.layout.positions(width),
        row_size=use.shape[0],
        grad_size=width,
        indexed=True,
    )


@register_rule("EmbeddingBackward0")
def embedding(use: Use) -> Form | None:
    """table[indices]; `padding_idx` receives no gradient, as in training."""
    if use.saved("scale_grad_by_freq"):  # gradients depend on the batch
        return None
    padding = int(use.saved("padding_idx"))
    # Saved as an unsigned number: "no padding" reads as 2^64 - 1.
    padding = padding if 0 <= padding < use.shape[0] else -1
    return _lookup(use, use.saved("indices"), use.shape[1], padding)


@register_rule("IndexBackward0")
def index(use: Use) -> Form | None:
    """parameter[integers], indexing the first axis alone."""
    indices = use.saved("indices")
    if indices is None or len(indices) != 1 or indices[0] is None or indices[0].dtype.is_floating_point:
        return None
    if indices[0].dtype.itemsize == 1:  # masks
        return None
    return _lookup(use, indices[0], use.shape[1:].numel())


@register_rule("IndexSelectBackward0")
def index_select(use: Use) -> Form | None:
    """parameter.index_select(0, integers)."""
    if signed(use.saved("dim")) not in (0, -len(use.shape)):
        return None
    return _lookup(use, use.saved("index"), use.shape[1:].numel())


@register_flow("Embedding", only="forward")
def rows_of_indices(step: Step) -> Layout | None:
    """(indices..., width) from a table, operand 0, and indices, operand 1."""
    return step.in_axis(step.at.axis) if step.operand == 1 else None


# Every sample has an index of its own, of the rank of the other operands.
register_flow("Gather", "Scatter", "ScatterAdd", writes_entries=True, shares_operands=False)(along_another_axis)
# All samples share the index, a vector.
register_flow("IndexAdd", "IndexSelect", writes_entries=True)(along_another_axis)


@register_flow("Index")
def indexing(step: Step) -> Layout | None:
    """input[:, ..., index] leaves the axes in front of it. input[range(P), index] looks up in each sample."""
    indices = step.argument("indices")
    places = [] if indices is None else [k for k, index in enumerate(indices) if index is not None]
    if step.operand:  # an index that all samples share
        return None
    if len(places) == 1 and step.at.axis < places[0]:
        return step.in_axis(step.at.axis)
    if places == [0, 1] and step.at == SampleAxis(0, 1) and _is_range(indices[0], step.input[0]):
        # An index of another shape would be broadcast against the first.
        return step.in_axis(0) if indices[1].shape in (indices[0].shape, ()) and _is_integer(indices[1]) else None
    return None


def _is_integer(index: Tensor) -> bool:
    return index.dtype in (torch.int64, torch.int32)


def _is_range(index: Any, size: int) -> bool:
    """Return whether an index is 0, 1, ... size - 1.

    A GPU would have to be waited for and is not asked. A forward pass does not keep the index.
    """
    if not isinstance(index, Tensor) or index.device.type != "cpu" or index.shape != (size,) or not _is_integer(index):
        return False
    return torch.equal(index.long(), torch.arange(size, device="cpu"))
