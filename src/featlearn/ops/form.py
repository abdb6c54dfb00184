"""The forms in which a rule gives the per-sample gradient of an operand.

A *use* is one operand Z of one autograd node: a parameter, or something made from parameters alone (a transpose, a
normalized weight). The node's output has a sample axis, described by `Layout`. A rule returns one of two forms:

- `Outer`: Z.grad[p] = sum_t rows[p, t] (x) grads[p, t] over positions t, never formed unless that is cheaper;
- `Direct`: Z.grad[p] itself, for small operands (biases, norm weights, scales, tables).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from featlearn.contraction.windows import Windows
from featlearn.graph.layout import sample_dimension
from featlearn.graph.uses import Use


@dataclass(frozen=True)
class LinearMap:
    """State that the op applies the operand as a matrix: h = W x for the rows x of every sample and position.

    Neural features and layer alignment are defined for linear maps alone.
    """

    weight: Tensor | None = None
    """W where the op saved it; ops save it only if their other input needs a gradient."""
    row_taps: int = 1
    """Number of neighboring entries of a row that belong to one channel: the area of a convolution's kernel."""
    grad_taps: int = 1
    """The same for the entries of a gradient: the kernel's area of a transposed convolution."""
    channels_second: bool = False
    """Whether channels lie in the second axis of the op's input and output, otherwise in the last."""


@dataclass(frozen=True)
class Outer:
    """The per-sample gradient as sum_t rows[p, t] (x) grads(G)[p, t], in independent blocks."""

    rows: Callable[[], Tensor | Windows]
    """Return (samples, positions, blocks, n); or integers (samples, positions), for rows of an identity matrix of size
    n; or the images whose windows the rows are.
    A function, because rows can be many times larger than what the op saved (the patches of a convolution)."""
    grads: Callable[[Tensor], Tensor]
    """Turn the gradient of the op's output into (samples, positions, blocks, m)."""
    rows_first: bool
    """Whether the operand, flattened, is (blocks, n, m); otherwise it is (blocks, m, n)."""
    positions: int
    row_size: int
    grad_size: int
    blocks: int = 1
    indexed: bool = False
    """Whether the rows are integers."""
    window: int = 1
    """Entries of a row that lie in one channel, where rows are windows of images: the area of the kernel."""
    pixels: int = 0
    """Number of pixels of a sample's images whose windows the rows are, 0 where the rows are written out."""
    linear_map: LinearMap | None = None
    """Set where the op computes h = W x with this operand as W, None for everything else (bilinear forms, tables)."""


@dataclass(frozen=True)
class Direct:
    """The per-sample gradient itself."""

    gradient: Callable[[Tensor], Tensor]
    """Turn the gradient of the op's output into (samples, *operand shape)."""


Form = Outer | Direct


def scaled(form: Direct | None, factor: float) -> Direct | None:
    """Multiply a per-sample gradient by a number."""
    if form is None or factor == 1.0:
        return form
    return Direct(lambda grad: form.gradient(grad) * factor)


def broadcast_gradient(use: Use, factor: Callable[[], Tensor] | None = None) -> Direct | None:
    """Sum `factor * grad` over the axes along which the operand was broadcast against the output, sample by sample.

    Return None if the operand itself varies along the sample axis.
    """
    axes, samples = len(use.output), use.layout.samples
    padded = (1,) * (axes - len(use.shape)) + tuple(use.shape)
    sample_axis = sample_dimension(use.output, use.layout)
    if sample_axis is None or len(padded) != axes or padded[sample_axis[0]] != 1:
        return None
    axis, outer = sample_axis
    trailing = tuple(use.shape[next((i for i, size in enumerate(use.shape) if size != 1), len(use.shape)) :])
    is_bias = trailing == tuple(use.output[axes - len(trailing) :]) and use.layout.outside(*trailing)
    summed = [i + 1 for i, size in enumerate(padded) if size == 1]  # after the sample axis has moved to the front

    def gradient(grad: Tensor) -> Tensor:
        if factor is not None:
            grad = grad * factor()
        if is_bias:
            split = grad.reshape(use.layout.before, samples, -1, *trailing)
            copies = [k for k in (0, 2) if split.shape[k] != 1]
            return (split.sum(copies) if copies else split).reshape(samples, *use.shape)
        split = grad.reshape(*grad.shape[:axis], outer, samples, -1, *grad.shape[axis + 1 :])
        by_sample = split.movedim(axis + 1, 0).flatten(axis + 1, axis + 2)
        return by_sample.sum(summed).reshape(samples, *use.shape) if summed else by_sample.reshape(samples, *use.shape)

    return Direct(gradient)
