"""What follows the last op with a parameter: an output function such as softmax, or a layer without weights."""

from collections.abc import Collection, Iterator, Set

from featlearn.graph.graph import Graph, Node


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


LINEAR = _names(
    "Add Alias AsStrided Cat Clone ConstantPadNd Copy Diagonal Expand Flip Gather Index IndexSelect MaskedFill "
    "MaskedSelect Mul Div Narrow NativeBatchNorm CudnnBatchNorm Neg Permute Repeat ReshapeAlias Roll Rsub Select Slice "
    "Split SplitWithSizes Squeeze Stack Sub Swapaxes T ToCopy Transpose Unbind UnsafeSplit UnsafeView Unsqueeze View "
    "Where"
)
"""Linear in their input, entry by entry; products and quotients of two inputs that depend on parameters are not."""
MIXING = _names(
    "Addmm Addmv AdaptiveAvgPool2D AvgPool2D AvgPool3D Baddbmm Bmm Convolution Cumsum Dot Linear Mean Mm MkldnnAvgPool "
    "Mv Sum Trace UpsampleBilinear2D"
)
"""Linear ops that add up entries."""
ADDING = _names("Add Rsub Sub")
PICKING = _names("Gather Index IndexSelect MaskedSelect Narrow Select Slice Split SplitWithSizes Unbind UnsafeSplit")
"""Ops that take some of the entries."""
GATING = PICKING | _names("MaskedFill Mul Where")
"""Ops that are linear unless their mask or index depends on the parameters."""
LIKELIHOODS = _names(
    "BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss KlDiv LogSigmoid LogSoftmax Logsumexp MseLoss NllLoss "
    "NllLoss2D SmoothL1Loss SoftMarginLoss"
)
"""Log-probabilities and losses. Their sums over outputs or positions belong to the output function."""
CURVED = _names(
    "Abs Acos Asin Atan Clamp ClampMax ClampMin Cos Cosh Elu Erf Exp Expm1 Gelu Hardsigmoid Hardswish Hardtanh "
    "LeakyRelu LinalgVectorNorm Log Log10 Log1P Log2 Mish NativeLayerNorm Norm Pow Prelu Reciprocal Relu Rsqrt Sigmoid "
    "Silu Sin Sinh Softmax Softplus Softshrink Sqrt Tan Tanh Threshold"
)
"""Nonlinear, entry by entry or within a sample. Units that are curved and then added up are hidden units."""
REDUCING = _names("Amax LinalgVectorNorm Max Mean Norm Sum")


def common_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that lie on every path from a parameter to the outputs, those next to the parameters first.

    An edge that passes over a node is part of a path around it: nodes are ordered with their inputs first.
    """
    number = graph.number
    farthest = max((number[leaf] for leaf in graph.leaves.values()), default=0)
    for place, node in enumerate(graph.order):
        if node not in graph.names_below:
            continue
        if place >= farthest:
            yield node
        for edge in graph.consumers.get(node, ()):
            farthest = max(farthest, number[edge.consumer])


def nodes_after(graph: Graph, node: Node) -> set[Node]:
    """Return the nodes between a common node and the outputs."""
    return set(graph.order[graph.number[node] + 1 :]) & graph.names_below.keys()


def nonlinear_ops(graph: Graph, nodes: Collection[Node], gated: Set[Node] = frozenset()) -> list[str]:
    """Return the names of the nonlinear ops among `nodes`, in the order of the forward pass."""
    ordered = [node for node in graph.order if node in nodes]
    return [op_name(graph.names[node]) for node in ordered if is_nonlinear(graph, node, gated, likelihoods=True)]


def has_hidden_units(graph: Graph, nodes: Collection[Node], gated: Set[Node] = frozenset()) -> bool:
    """Return whether these ops are a layer without weights, and not an output function.

    Such a layer adds up units behind a nonlinear op, or has an op that is not known as part of an output function.

    `gated`: nodes that take a value which depends on the parameters without a gradient, such as a mask.
    """
    curved: set[Node] = set()
    picked: set[Node] = set()
    for node in graph.order:
        if node not in nodes:
            continue
        name = op_name(graph.names[node])
        children = {child for child, _ in graph.inputs[node]}
        below = not children.isdisjoint(curved)
        if name in REDUCING and _normalizes(graph, node):
            curved.add(node)
            continue
        if name not in LINEAR | MIXING | LIKELIHOODS | CURVED:
            return True
        if below and name in MIXING and _adds_up(graph, node):
            return True
        if below and name in ADDING and len(children & picked) > 1:
            return True
        if below or is_nonlinear(graph, node, gated):
            curved.add(node)
        if name in PICKING or not children.isdisjoint(picked):
            picked.add(node)
    return False


def _normalizes(graph: Graph, node: Node) -> bool:
    """Return whether a reduction is only subtracted from its input, divides it, or is the log of a sum of exponentials.

    So it is in a softmax that is written out.
    """
    reduced = graph.inputs[node][0]
    exponentials = op_name(graph.names[reduced[0]]) == "Exp"
    for edge in graph.consumers.get(node, ()):
        name = op_name(graph.names[edge.consumer])
        shifts = name in ("Sub", "Div") and graph.inputs[edge.consumer][0] == reduced
        if not shifts and not (name == "Log" and exponentials):
            return False
    return node in graph.consumers


FORMING = LINEAR | _names(
    "Addmm Addmv Bmm Dot Exp LinalgMatrixExp LinalgVectorNorm Mean Mm Mv Norm Pow Reciprocal Rsqrt Sqrt Sum "
    "WeightNormInterface"
)
"""Ops by which weights are formed from parameters: products, norms, rearrangements. Activations are none of them."""


def forms_weight(graph: Graph) -> bool:
    """Whether a value is a nonlinear function of parameters, made of products and norms."""
    ops = [node for node in graph.order if graph.inputs[node] and node in graph.names_below]
    names = {op_name(graph.names[node]) for node in ops}
    several = any(
        op_name(graph.names[node]) in MIXING | {"Mul", "Div"}
        and sum(child in graph.names_below for child, _ in graph.inputs[node][-2:]) > 1
        for node in ops
    )
    return names <= FORMING and (several or not names.isdisjoint(CURVED | {"WeightNormInterface", "LinalgMatrixExp"}))


def is_nonlinear(graph: Graph, node: Node, gated: Set[Node], *, likelihoods: bool = False) -> bool:
    """Return whether an op is nonlinear in what depends on parameters; `likelihoods`: count those as well."""
    name = op_name(graph.names[node])
    if node in gated:
        return True
    if name in ("Mul", "Div"):
        return sum(child in graph.names_below for child, _ in graph.inputs[node]) > 1
    return name in CURVED or (likelihoods and name in LIKELIHOODS)


def _adds_up(graph: Graph, node: Node) -> bool:
    """Whether an op has fewer entries than what it takes; products with matrices always mix."""
    if op_name(graph.names[node]) not in ("Sum", "Mean"):
        return True
    (child, output), *_ = graph.inputs[node]
    return graph.output_shape((child, output)).numel() > graph.output_shape((node, 0)).numel()


def op_name(node_name: str) -> str:
    """Return the name of an op without what autograd adds to it."""
    return node_name.partition("Backward")[0]
