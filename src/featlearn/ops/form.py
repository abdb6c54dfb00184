"""The common form to which every use of a parameter is brought.

A *use* is one operand of one autograd node. Its weight operand is called z: the parameter itself, or something made
from parameters alone (a transpose, a normalised weight). The node's output has a sample axis, described by `Layout`.
A rule reads the use as one of two forms of the per-sample gradient of z:

- `Outer`: sum over positions t of rows[p, t] (x) grads[p, t], never formed unless that is cheaper;
- `Direct`: the per-sample gradient itself, for small operands (biases, norm weights, scales, tables).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.linalg.windows import Windows


@dataclass(frozen=True)
class Layout:
    """Where the samples lie in an op's output: its elements in order are (before, samples, after)."""

    before: int
    samples: int
    after: int

    def samples_first(self, tensor: Tensor, *trailing: int) -> Tensor:
        """Bring `tensor`, whose leading axes are laid out like the output, to (samples, positions, *trailing)."""
        split = tensor.reshape(self.before, self.samples, -1, *trailing)
        return split.movedim(1, 0).reshape(self.samples, -1, *trailing)

    def some_first(self, tensor: Tensor, places: Tensor | slice) -> Tensor:
        """The same for some of the samples, value by value: (places, positions, 1)."""
        split = tensor.reshape(self.before, self.samples, -1, 1)
        chosen = split[:, places if isinstance(places, slice) else places.to(tensor.device)]
        return chosen.movedim(1, 0).flatten(1, 2)

    def outside(self, *trailing: int) -> bool:
        """Whether the sample axis lies outside axes of these sizes at the end of the output."""
        size = math.prod(trailing)
        return size > 0 and self.after % size == 0

    def positions(self, *trailing: int) -> int:
        """How many positions each sample has, each with values of this shape."""
        return self.before * self.after // math.prod(trailing)


@dataclass(frozen=True)
class Use:
    """One operand of one autograd node whose output has a sample axis."""

    node: Any
    """The autograd node that consumes the operand (`torch.autograd.graph.Node`)."""
    operand: int
    """Which of the node's inputs it is: an index into `node.next_functions`."""
    shape: torch.Size
    """The operand's shape."""
    output: torch.Size
    """The shape of the node's output."""
    layout: Layout
    """The sample axis of the output."""

    def saved(self, name: str) -> Any:
        """What the node kept from the forward pass under this name, None if nothing."""
        return getattr(self.node, f"_saved_{name}", None)


@dataclass(frozen=True)
class Outer:
    """Per-sample gradient sum_t rows[p, t] (x) grads(G)[p, t], in independent blocks."""

    rows: Callable[[], Tensor | Windows]
    """Gives (samples, positions, blocks, n), or integers (samples, positions): rows of an identity matrix of size n; or
    the images whose windows the rows are.
    A call, because rows can be many times larger than what the op saved (the patches of a convolution)."""
    grads: Callable[[Tensor], Tensor]
    """Turns the gradient of the op's output into (samples, positions, blocks, m)."""
    rows_first: bool
    """Whether the operand, flattened, is (blocks, n, m); otherwise it is (blocks, m, n)."""
    positions: int
    row_size: int
    grad_size: int
    blocks: int = 1
    indexed: bool = False
    """Whether the rows are integers."""
    weight: Callable[[], Tensor | None] = lambda: None
    """Gives the operand's value where the op has kept it; ops keep it only if their other input needs a gradient."""
    row_taps: int = 1
    """How many neighbouring entries of a row belong to one channel: the area of a convolution's kernel."""
    grad_taps: int = 1
    """The same for the entries of a gradient: the kernel's area of a transposed convolution."""
    pixels: int = 0
    """How many pixels the images of a sample have whose windows the rows are, 0 where they are written out."""
    image: bool = False
    """Whether channels lie in the second axis of the op's input and output; otherwise in the last."""


@dataclass(frozen=True)
class Direct:
    """Per-sample gradient given outright."""

    gradient: Callable[[Tensor], Tensor]
    """Turns the gradient of the op's output into (samples, *operand shape)."""


Form = Outer | Direct


def broadcast_gradient(use: Use, factor: Callable[[], Tensor] | None = None) -> Direct | None:
    """The operand was broadcast against the output: sum `factor * G` over the broadcast axes, sample by sample.

    None when the operand itself varies along the sample axis.
    """
    axes = len(use.output)
    padded = (1,) * (axes - len(use.shape)) + tuple(use.shape)
    found = sample_dimension(use.output, use.layout)
    if found is None or len(padded) != axes or padded[found[0]] != 1:
        return None
    axis, outer = found
    summed = [i + 1 for i, size in enumerate(padded) if size == 1]  # after the sample axis has moved to the front

    def gradient(grad: Tensor) -> Tensor:
        if factor is not None:
            grad = grad * factor()
        shape = grad.shape
        split = grad.reshape(*shape[:axis], outer, use.layout.samples, -1, *shape[axis + 1 :])
        first = split.movedim(axis + 1, 0).flatten(axis + 1, axis + 2)
        if summed:
            first = first.sum(summed)
        return first.reshape(use.layout.samples, *use.shape)

    return Direct(gradient)


def sample_dimension(shape: torch.Size, layout: Layout) -> tuple[int, int] | None:
    """The axis of `shape` that holds the samples, and how many times they repeat in front of them in that axis."""
    prefix = 1
    for axis, size in enumerate(shape):
        outer, rest = divmod(layout.before, prefix)
        if rest == 0 and size % (outer * layout.samples) == 0:
            return axis, outer
        prefix *= size
    return None
