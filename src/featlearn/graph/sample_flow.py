"""Where the samples must lie, by what is known of each op.

The samples are in the first axis of the outputs. Many ops (elementwise ones, products, convolutions, norms, views) say
where the samples then lie in their inputs. Followed from the outputs down, they prove the sample axis of a node for
this very batch, without a backward pass. Nothing is assumed of an op that is not listed here: below it nothing is
proved, and a backward pass has to tell (`featlearn.audit.attribution`).
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.graph.graph import Graph, Node, Value
from featlearn.graph.layout import Layout, sample_dimension
from featlearn.torch_internals import saved


class SampleAxis(NamedTuple):
    """The axis that holds the samples: its entries are (outer, samples, inner)."""

    axis: int
    outer: int


class Step(NamedTuple):
    """One op, where the samples lie in its output, and one of its inputs."""

    node: Node
    output: torch.Size
    at: SampleAxis
    layout: Layout
    operand: int
    input: torch.Size

    def saved(self, name: str) -> Any:
        """What the node kept of its arguments, None if nothing."""
        return saved(self.node, name)

    def dims(self, name: str = "dim") -> list[int]:
        """Axes of the input that the op was called with; negative ones are kept as unsigned numbers."""
        kept = self.saved(name)
        listed = [] if kept is None else list(kept) if isinstance(kept, tuple | list) else [kept]
        return [(dim - 2**64 if dim >= 2**63 else dim) % max(len(self.input), 1) for dim in listed]

    def in_axis(self, axis: int) -> Layout | None:
        """The layout of the input if its samples lie in this axis as they do in the output's."""
        if not 0 <= axis < len(self.input) or self.input[axis] != self.output[self.at.axis] or not self.input.numel():
            return None
        before = self.input[:axis].numel() * self.at.outer
        return Layout(before, self.layout.samples, self.input.numel() // (before * self.layout.samples))


Rule = Callable[[Step], Layout | None]


def broadcast(step: Step) -> Layout | None:
    """Entry by entry, axes aligned at the end."""
    return step.in_axis(step.at.axis - len(step.output) + len(step.input))


def same_elements(step: Step) -> Layout | None:
    """Elements keep their order."""
    return step.layout if step.input.numel() == step.output.numel() else None


def _permuted(step: Step) -> Layout | None:
    return step.in_axis(step.dims("dims")[step.at.axis])


def _transposed(step: Step) -> Layout | None:
    first, second = (step.dims(name)[0] for name in ("dim0", "dim1"))
    return step.in_axis({first: second, second: first}.get(step.at.axis, step.at.axis))


def _matrix_transposed(step: Step) -> Layout | None:
    return step.in_axis(len(step.input) - 1 - step.at.axis)


def _product(first: int) -> Rule:
    """Of matrices or batches of them; operands `first` and `first + 1` are multiplied, one before them is added."""

    def rule(step: Step) -> Layout | None:
        if step.operand < first:
            return broadcast(step)
        left, axis, last = step.operand == first, step.at.axis, len(step.output) - 1
        shared = axis < last - 1  # the batch of matrices
        return step.in_axis(axis) if shared or axis == (last - 1 if left else last) else None

    return rule


def _matrix_vector(step: Step) -> Layout | None:
    return step.in_axis(0) if step.operand == 0 else None


def _bilinear(step: Step) -> Layout | None:
    """Rows of two inputs, with the weight between them, as `torch.bilinear` calls it."""
    arguments = tuple(tuple(step.saved(name) or ()) for name in ("expand1", "expand2", "expand3", "sumdim"))
    if arguments != ((1, 3), (0,), (1, 2), (2, 3)):
        return None
    return step.in_axis(0) if step.operand != 1 and step.at.axis == 0 else None


def _distances(step: Step) -> Layout | None:
    """Rows of operand 0 to those of operand 1; axes in front of the rows are a batch of both."""
    rows = len(step.output) - 2
    if len(step.input) != len(step.output) or step.at.axis > rows - step.operand:
        return None
    return step.in_axis(step.at.axis)


def images(step: Step) -> Layout | None:
    """Samples first, channels second; operand 0 are the images."""
    return step.in_axis(0) if step.operand == 0 and step.at.axis == 0 else None


def _pooled(pooled_axes: int) -> Rule:
    """Images, or channels of one: the axes in front of those that are pooled, at the end, are left alone."""

    def rule(step: Step) -> Layout | None:
        kept = step.operand == 0 and step.at.axis < len(step.output) - pooled_axes
        return step.in_axis(step.at.axis) if kept else None

    return rule


def _group_norm(step: Step) -> Layout | None:
    """The number of images that it is told may be another than there are."""
    return images(step) if step.saved("N") == step.output[0] else None


def _layer_norm(step: Step) -> Layout | None:
    normalized = step.saved("normalized_shape")
    if step.operand != 0 or normalized is None:
        return None
    return step.layout if step.layout.outside(*normalized) else None


def _batch_norm(step: Step) -> Layout | None:
    return None if step.saved("training") else images(step)


def _reduced(step: Step) -> Layout | None:
    """Some axes are reduced, and dropped or kept with one entry."""
    gone, keep = set(step.dims()), step.saved("keepdim")
    if not gone or keep is None:
        return None
    left = [axis for axis in range(len(step.input)) if keep or axis not in gone]
    axis = left[step.at.axis] if step.at.axis < len(left) else -1
    return step.in_axis(axis) if axis not in gone else None


def along_another_axis(step: Step) -> Layout | None:
    """The op works along some axes; the others keep their entries in place."""
    along = step.dims() or step.dims("dims")
    return step.in_axis(step.at.axis) if along and step.at.axis not in along else None


def _joined(step: Step) -> Layout | None:
    """Concatenated along another axis; the saved axis counts those of the output."""
    return along_another_axis(step) if len(step.input) == len(step.output) else None


def _stacked(step: Step) -> Layout | None:
    dim = step.saved("dim")
    count = len(step.output)
    new = (dim - 2**64 if dim >= 2**63 else dim) % count
    return None if new == step.at.axis else step.in_axis(step.at.axis - (step.at.axis > new))


def _picked(step: Step) -> Layout | None:
    """One entry along an axis, which is dropped."""
    (dim,) = step.dims()
    return step.in_axis(step.at.axis + (step.at.axis >= dim))


def _indexed(step: Step) -> Layout | None:
    """input[:, ..., index]: axes in front of the only index stay. input[range(P), index]: each sample from itself."""
    indices = step.saved("indices")
    places = [] if indices is None else [k for k, index in enumerate(indices) if index is not None]
    if len(places) == 1 and step.at.axis < places[0]:
        return step.in_axis(step.at.axis)
    if places == [0, 1] and step.at == SampleAxis(0, 1) and _counts(indices[0], step.input[0]):
        # An index of another shape would be broadcast against the first.
        return step.in_axis(0) if indices[1].shape in (indices[0].shape, ()) and _is_list(indices[1]) else None
    return None


def _is_list(index: Tensor) -> bool:
    return index.dtype in (torch.int64, torch.int32)


def _counts(index: Tensor, size: int) -> bool:
    """Whether an index is 0, 1, ... size - 1; not asked of a GPU, which would have to be waited for."""
    if index.device.type != "cpu" or index.shape != (size,) or not _is_list(index):
        return False
    return torch.equal(index.long(), torch.arange(size, device="cpu"))


def _padded(step: Step) -> Layout | None:
    pad = step.saved("pad")
    return None if pad is None or step.at.axis >= len(step.output) - len(pad) // 2 else step.in_axis(step.at.axis)


def attention(step: Step) -> Layout | None:
    """Queries, keys and values (..., tokens, width), batch and heads one by one; the bias is added."""
    if step.operand > 2:  # (..., queries, keys): its last axis is not that of the output
        return broadcast(step) if step.at.axis < len(step.output) - 1 else None
    return step.in_axis(step.at.axis) if step.at.axis < len(step.output) - 2 else None


# `featlearn.graph.separation` follows them too, also for values without gradients. A rule says None of an operand that
# is the same for all samples or mixes them. Ops that take an index, or choose by value, are excluded there.
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "Abs",
            "Add",
            "Addcdiv",
            "Addcmul",
            "Atan2",
            "Celu",
            "Clamp",
            "ClampMax",
            "ClampMin",
            "Clone",
            "Cos",
            "Div",
            "Elu",
            "Erf",
            "Exp",
            "Expand",
            "Expm1",
            "Gelu",
            "Hardsigmoid",
            "Hardswish",
            "Hardtanh",
            "LeakyRelu",
            "Lerp",
            "Log",
            "Log1P",
            "LogSigmoid",
            "MaskedFill",
            "Maximum",
            "Minimum",
            "Mish",
            "Mul",
            "NativeDropout",
            "Neg",
            "Pow",
            "PreluKernel",
            "Reciprocal",
            "Relu",
            "Rsqrt",
            "Rsub",
            "Selu",
            "Sigmoid",
            "Silu",
            "Sin",
            "Softplus",
            "Sqrt",
            "Sub",
            "Tanh",
            "Threshold",
            "ToCopy",
            "Where",
        ),
        broadcast,
    ),
    **dict.fromkeys(("Alias", "ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View"), same_elements),
    **dict.fromkeys(("Mm", "Bmm"), _product(0)),
    **dict.fromkeys(("Addmm", "Baddbmm"), _product(1)),
    "Mv": _matrix_vector,
    "Trilinear": _bilinear,
    **dict.fromkeys(("Cdist", "EuclideanDist"), _distances),
    "Permute": _permuted,
    **dict.fromkeys(("Transpose", "Swapaxes"), _transposed),
    "T": _matrix_transposed,
    **dict.fromkeys(("Convolution", "ConvolutionOverrideable", "CudnnConvolution"), images),
    "NativeGroupNorm": _group_norm,
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), _batch_norm),
    **dict.fromkeys(("AdaptiveAvgPool2D", "AvgPool2D", "MaxPool2DWithIndices"), _pooled(2)),
    **dict.fromkeys(("AvgPool3D", "MaxPool3DWithIndices"), _pooled(3)),
    **dict.fromkeys(("NativeLayerNorm", "FusedRmsNorm"), _layer_norm),
    **dict.fromkeys(
        ("Amax", "Amin", "LinalgVectorNorm", "Logsumexp", "Max", "Mean", "Min", "Norm", "Std", "Sum", "Var"), _reduced
    ),
    **dict.fromkeys(
        (
            "Cumsum",
            "Flip",
            "Gather",
            "IndexSelect",
            "LogSoftmax",
            "Roll",
            "SafeSoftmax",
            "Slice",
            "Softmax",
            "Sort",
            "Split",
            "SplitWithSizes",
            "Topk",
            "UnsafeSplit",
        ),
        along_another_axis,
    ),
    "Cat": _joined,
    "Stack": _stacked,
    **dict.fromkeys(("Select", "Unbind"), _picked),
    "Index": _indexed,
    "ConstantPadNd": _padded,
    **dict.fromkeys(
        (
            "ScaledDotProductFlashAttention",
            "ScaledDotProductFlashAttentionForCpu",
            "ScaledDotProductCudnnAttention",
            "ScaledDotProductEfficientAttention",
            "ScaledDotProductFusedAttentionOverrideable",
        ),
        attention,
    ),
}


def proved_layouts(graph: Graph, samples: int, wanted: Collection[Node]) -> dict[Node, Layout]:
    """The sample axes of some nodes as far as the ops above them determine them."""
    outputs = graph.output_shape(graph.root)
    layouts: dict[Value, Layout | None] = {graph.root: Layout(1, samples, outputs.numel() // samples)}
    found: dict[Node, Layout] = {}
    leaves = set(graph.leaves.values())
    for node in reversed(graph.order):  # every op after all that consume it
        if node not in graph.names_below:
            continue
        used = [number for number in range(len(graph.described[node])) if (node, number) in layouts]
        if not used:
            continue  # only reached as a weight
        layout = layouts[node, used[0]]
        if node in wanted and layout is not None and used == [0]:
            found[node] = layout
        rule = _rule(graph.names[node], used)
        for operand, child in enumerate(graph.inputs[node]):
            if child[0] in graph.names_below and child[0] not in leaves:
                below = None if rule is None else _below(graph, node, used, layouts, operand, child, rule)
                # Everything that consumes a value must agree on it.
                layouts[child] = below if layouts.get(child, below) == below else None
    return found


def _rule(name: str, used: list[int]) -> Rule | None:
    """The rule of an op, if only its first output is used or it gives pieces of its input."""
    kind, _, rest = name.partition("Backward")
    rule = RULES.get(kind) if rest.isdigit() else None
    return rule if used == [0] or kind in PIECES else None


PIECES = frozenset(["Split", "SplitWithSizes", "UnsafeSplit", "Unbind"])


def _below(
    graph: Graph,
    node: Node,
    used: list[int],
    layouts: dict[Value, Layout | None],
    operand: int,
    child: Value,
    rule: Rule,
) -> Layout | None:
    answers = set()
    for number in used:
        layout, shape = layouts[node, number], graph.output_shape((node, number))
        found = None if layout is None else sample_dimension(shape, layout)
        if layout is None or found is None:
            return None
        step = Step(node, shape, SampleAxis(*found), layout, operand, graph.output_shape(child))
        answers.add(rule(step))
    return answers.pop() if len(answers) == 1 else None
