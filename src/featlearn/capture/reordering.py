"""Ops that can put samples into another order, one that follows from data.

A model may sort its samples by length and put them back at the end. Where they lie in between is then another matter in
every batch, so sample axes of one graph say nothing about the next.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.capture.graph import Graph, Node
from featlearn.ops import Layout

_BY_DATA = (
    "Embedding", "Flip", "Gather", "Index", "MaskedScatter", "MaskedSelect", "Put", "Roll", "Scatter", "Sort", "Take",
    "Topk", "UnsafeIndex", "UnsafeMaskedIndex",
)  # fmt: skip
_PICKS = ("Select", "Slice", "Split", "Narrow", "Unbind")
"""They take pieces, which may then be joined in another order."""
_JOINS = ("Cat", "Stack")
_PRODUCTS = ("Mm", "Bmm")
"""By a matrix on the left that has no gradient, which may be a permutation."""


def may_reorder(graph: Graph, axes: Mapping[Node, Any], samples: int) -> bool:
    """Whether anything made from samples goes through an op that orders them by data.

    `axes`: nodes with their sample axes, None for those that have none.
    """
    return not all(_keeps_order(graph, node, samples) for node in _suspects(graph, axes))


def ordered_by_data(graph: Graph, axes: Mapping[Node, Layout]) -> bool:
    """Whether more than the nodes and shapes of a graph decides about the order of samples in it."""
    samples = next((layout.samples for layout in axes.values()), 1)
    return not all(
        node.name().startswith(_PICKS) and _keeps_order(graph, node, samples) for node in _suspects(graph, axes)
    )


def _suspects(graph: Graph, axes: Mapping[Node, Any]) -> Iterator[Node]:
    """Nodes that may put something made from samples into another order."""
    leaves = set(graph.leaves.values())
    joins = any(name.startswith(_JOINS) for name in graph.node_names)

    def suspicious(name: str) -> bool:
        return _by_data(name) or (joins and name.startswith(_PICKS))

    doubtful = {
        node
        for node in (graph.order if any(map(suspicious, graph.node_names)) else ())
        if suspicious(node.name())
        and any(child is not None and child not in leaves for child, _ in node.next_functions)
        and not (node.name().startswith(_PRODUCTS) and node.next_functions[0][0] is not None)
    }
    carrying: set[Node] = set()
    for node in graph.order if doubtful else ():  # inputs first
        if any(child in carrying for child, _ in node.next_functions):
            if node in doubtful:
                yield node
            carrying.add(node)
        elif axes.get(node) is not None:
            carrying.add(node)


def _by_data(name: str) -> bool:
    # Functions of the user's own, which have no number at the end, may do anything.
    own = name.endswith("Backward") and "::" not in name
    return own or name.startswith((*_BY_DATA, *_PRODUCTS))


def _keeps_order(graph: Graph, node: Node, samples: int) -> bool:
    """Whether no axis that is looked up in can hold the samples, or each looks up in itself: h[range(P), n]."""
    if node.name().startswith(_PRODUCTS):
        return bool(graph.output_shape(node.next_functions[1])[-2] % samples)
    if node.next_functions[0][0] is None:
        return False
    shapes = [graph.output_shape(source) for source in node.next_functions if source[0] is not None]
    indices = getattr(node, "_saved_indices", None)
    if node.name().startswith("IndexBackward") and indices is not None:
        masks = [index for index in indices if index is not None and not _is_list(index)]
        return not masks and all(
            index is None or size % samples or _counts(index, samples)
            for index, size in zip(indices, shapes[0], strict=False)
        )
    dims = getattr(node, "_saved_dims", None) or [getattr(node, "_saved_dim", None)]
    if None in dims or not all(map(len, shapes)):
        return False
    # Negative ones are read as unsigned.
    return all(shape[dim - 2**64 if dim >= 2**63 else dim] % samples for shape in shapes for dim in dims)


def _is_list(index: Tensor) -> bool:
    return index.dtype in (torch.int64, torch.int32)


def _counts(index: Tensor, samples: int) -> bool:
    return index.numel() == samples and torch.equal(index.flatten(), torch.arange(samples).to(index))
