"""Lookups: embeddings and parameters indexed along their first axis. Rows are kept as integers."""

from torch import Tensor

from featlearn.graph.uses import Use
from featlearn.ops.form import Form, Outer
from featlearn.ops.registry import register_rule


def _lookup(use: Use, index: Tensor | None, width: int, padding: int = -1) -> Form | None:
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
    """`padding_idx` receives no gradient, as in training."""
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
    if use.saved("dim") not in (0, 2**64 - len(use.shape)):
        return None
    return _lookup(use, use.saved("index"), use.shape[1:].numel())
