"""What is known of each op: the rule that reads a use of a parameter, and the rule of how samples flow through it.

A *use* is one operand Z of one autograd node: a parameter, or something made from parameters alone (a transpose, a
normalized weight). The node's output has a sample axis, described by `Layout`. A rule returns one of two forms:

- `Outer`: Z.grad[p] = sum_t rows[p, t] (x) grads[p, t] over positions t, never formed unless that is cheaper;
- `Direct`: Z.grad[p] itself, for small operands (biases, norm weights, scales, tables).

Rules of uses are registered by autograd node (`MulBackward0`), because users have nodes of their own. Flow rules are
registered by op (`Mul`), because they also hold for ops of a forward pass, which make no node.

The samples lie in the first axis of the outputs. Flow rules say where they lie in the operands of each op. Followed
from the outputs down, they prove the sample axis of a node for this batch, without a backward pass. Below an op without
a rule nothing is proved, and a backward pass decides (`featlearn.audit.audit`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from featlearn.contraction.windows import Windows
from featlearn.errors import InputTypeError, InputValueError
from featlearn.graph.graph import Edge, Graph, Layout, Node, Use, Value
from featlearn.torch_internals import saved


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
    place = sample_axis(use.output, use.layout)
    if place is None or len(padded) != axes or padded[place.axis] != 1:
        return None
    axis, outer = place
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


Rule = Callable[[Use], Form | None]
"""Return how the per-sample gradient of a use is made, None if the rule does not cover the case."""


class SampleAxis(NamedTuple):
    """The axis of a tensor that holds the samples: its entries are (outer, samples, inner)."""

    axis: int
    outer: int


def sample_axis(shape: torch.Size, layout: Layout) -> SampleAxis | None:
    """Return the axis of `shape` that holds the samples, None if they do not lie inside one axis."""
    prefix = 1
    for axis, size in enumerate(shape if shape.numel() else ()):
        outer, rest = divmod(layout.before, prefix)
        if rest == 0 and size % (outer * layout.samples) == 0:
            return SampleAxis(axis, outer)
        prefix *= size
    return None


class Step(NamedTuple):
    """One operand of one op, and where the samples lie in the op's output."""

    argument: Callable[[str], Any]
    """Return what the op was called with under this name, None if that is not known."""
    output: torch.Size
    """The shape of the output."""
    at: SampleAxis
    """The sample axis of the output."""
    layout: Layout
    """The layout of the output."""
    operand: int
    """The number of the operand among the op's tensors."""
    input: torch.Size
    """The shape of the operand."""

    def dims(self, name: str = "dim") -> list[int]:
        """Return the axes of the operand that an argument names, counted from the front."""
        argument = self.argument(name)
        dims = [] if argument is None else list(argument) if isinstance(argument, tuple | list) else [argument]
        return [signed(dim) % max(len(self.input), 1) for dim in dims]

    def in_axis(self, axis: int) -> Layout | None:
        """Return the operand's layout if its samples lie in this axis as they do in the output's."""
        if not 0 <= axis < len(self.input) or self.input[axis] != self.output[self.at.axis] or not self.input.numel():
            return None
        before = self.input[:axis].numel() * self.at.outer
        return Layout(before, self.layout.samples, self.input.numel() // (before * self.layout.samples))


def signed(dim: int) -> int:
    """Return an axis as it was passed: autograd nodes save negative ones as unsigned numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


FlowRule = Callable[[Step], Layout | None]
"""Return the layout of an operand, None if it has no sample axis or if the op may mix samples."""


class Flow(NamedTuple):
    """A flow rule and what else a proof needs to know of the op."""

    rule: FlowRule
    writes_entries: bool
    """Whether an in-place version of the op changes entries of its first operand, and not its shape."""
    gives_pieces: bool
    """Whether the outputs are pieces of the operand, each with the same sample axis."""
    shares_operands: bool
    """Whether an operand without a sample axis acts on all samples in the same way, as a weight does."""


def broadcast(step: Step) -> Layout | None:
    """Entries meet one by one, with axes aligned at the end."""
    return step.in_axis(step.at.axis - len(step.output) + len(step.input))


def first_axis(step: Step) -> Layout | None:
    """Operand 0 holds the samples in its first axis, as the output does. Other operands are weights."""
    return step.in_axis(0) if step.operand == 0 and step.at.axis == 0 else None


_RULES: dict[str, Rule] = {}
_BUILT_IN: dict[str, Rule] = {}
_FLOWS: dict[tuple[str, str], Flow] = {}


def register_rule(*node_names: str, replace: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule that reads uses of a parameter by an op of your own.

    `node_names` are names of autograd nodes as `output.grad_fn.name()` gives them: for a
    `torch.autograd.Function` called `Scale` that is `"ScaleBackward"`. The rule takes a `featlearn.ops.Use` and returns
    a `featlearn.ops.Direct` or `featlearn.ops.Outer`, or None when it does not apply (the use then goes to the exact
    fallback). Your rules are compared with autograd on every batch, and a rule that disagrees is not used. Fetch saved
    tensors when the rule runs, not inside the functions it returns.

    >>> @fl.ops.register_rule("ScaleBackward")
    ... def scale(use):
    ...     x, weight = use.node.saved_tensors  # x (P, T, F), weight (F,)
    ...     return fl.ops.Direct(lambda grad: use.layout.samples_first(grad * x, x.shape[-1]).sum(1))
    """
    if not node_names or not all(isinstance(name, str) and name for name in node_names):
        raise InputTypeError(
            f"register_rule got {node_names!r}, expected names of autograd nodes; "
            'write @register_rule("MyFunctionBackward")'
        )
    for name in node_names:
        if name in _RULES and not replace:
            raise InputValueError(f"a rule for {name!r} is registered already; pass replace=True to replace it")

    def add(rule: Rule) -> Rule:
        if not callable(rule):
            raise InputTypeError(f"register_rule got {rule!r}, expected a function of a featlearn.ops.Use")
        _RULES.update(dict.fromkeys(node_names, rule))
        return rule

    return add


def register_flow(
    *op_names: str,
    writes_entries: bool = False,
    pieces: bool = False,
    shares_operands: bool = True,
    only: Literal["forward", "backward"] | None = None,
) -> Callable[[FlowRule], FlowRule]:
    """Register how samples flow through built-in ops. See `Flow` for the flags.

    `op_names` are names of autograd nodes without the ending `Backward0`. An op without a backward pass has the name
    that torch would give it: `logical_and` is `LogicalAnd`. `only`: the rule holds in one of the two passes.
    """

    def add(rule: FlowRule) -> FlowRule:
        flow = Flow(rule, writes_entries=writes_entries, gives_pieces=pieces, shares_operands=shares_operands)
        for kind in ("forward", "backward") if only is None else (only,):
            _FLOWS.update(dict.fromkeys([(kind, name) for name in op_names], flow))
        return rule

    return add


def close_built_in() -> None:
    """Count every rule that is registered from now on as the user's."""
    _BUILT_IN.update(_RULES)


def is_built_in(node_name: str) -> bool:
    """Return whether nodes of this name are read by the library's own rule."""
    return _RULES.get(node_name) is _BUILT_IN.get(node_name)


def rule_for(node_name: str) -> Rule | None:
    """Return the rule for nodes of this name, None if there is none."""
    return _RULES.get(node_name)


def forward_flow(op_name: str) -> Flow | None:
    """Return how samples flow through an op of a forward pass, None if that is not known."""
    return _FLOWS.get(("forward", op_name))


def backward_flow(node_name: str) -> Flow | None:
    """Return how samples flow through the op of an autograd node, None if that is not known."""
    op_name, _, number = node_name.partition("Backward")
    # The node of a user's function has a name without a number.
    return _FLOWS.get(("backward", op_name)) if number.isdigit() else None


class Reading(NamedTuple):
    """One use, as its rule reads it."""

    value: Value
    """The operand: an output of a node without samples, or the parameter's own leaf."""
    use: Use
    form: Form


def read_use(graph: Graph, edge: Edge, layout: Layout | None, several_outputs: bool) -> Reading | str:
    """Read one use, or return why it cannot be read."""
    node, name = edge.consumer, graph.names[edge.consumer]
    rule = rule_for(name)
    if rule is None:
        return f"no rule for {name}"
    if several_outputs or layout is None:
        return f"{name} has several outputs" if several_outputs else f"{name} has no sample axis"
    (output, dtype), (shape, operand_dtype) = graph.described[node][0], graph.described[edge.value[0]][edge.value[1]]
    if dtype.is_complex or operand_dtype.is_complex:
        return f"{name} is complex"
    use = Use(node, edge.operand, shape, output, layout)
    try:
        form: Form | None = rule(use)
    except Exception as error:  # a rule may be the user's
        return f"the rule for {name} fails: {type(error).__name__}: {error}"
    if form is None:
        return f"the rule for {name} does not cover this case"
    if isinstance(form, Outer | Direct):
        return Reading(edge.value, use, form)
    return f"the rule for {name} gives {type(form).__name__}, expected Outer, Direct or None"  # type: ignore[unreachable]


Placed = tuple[torch.Size, Layout | None]
"""The shape of an output, and where the samples lie in it if that is known."""


def proved_layouts(graph: Graph, samples: int, wanted: Collection[Node]) -> dict[Node, Layout]:
    """Return the sample axes of some nodes, as far as the ops above them determine them."""
    described, outputs = graph.described, graph.output_shape(graph.root)
    layouts: dict[Value, Layout | None] = {graph.root: Layout(1, samples, outputs.numel() // samples)}
    proved: dict[Node, Layout] = {}
    leaves = set(graph.leaves.values())
    for node in reversed(graph.order):  # every op after all that consume it
        if node not in graph.names_below:
            continue
        used = [number for number in range(len(described[node])) if (node, number) in layouts]
        if not used:
            continue  # only reached as a weight
        layout = layouts[node, used[0]]
        if node in wanted and layout is not None and used == [0]:
            proved[node] = layout
        flow = backward_flow(graph.names[node])
        if used != [0] and flow is not None and not flow.gives_pieces:
            flow = None
        placed = [(described[node][number][0], layouts[node, number]) for number in used]
        argument = partial(saved, node)
        for operand, child in enumerate(graph.inputs[node]):
            if child[0] in graph.names_below and child[0] not in leaves:
                shape = described[child[0]][child[1]][0]
                below = operand_layout(flow, argument, placed, operand, shape) if flow else None
                # All consumers of a value must agree on it.
                layouts[child] = below if layouts.get(child, below) == below else None
    return proved


def operand_layout(
    flow: Flow, argument: Callable[[str], Any], outputs: Sequence[Placed], operand: int, shape: torch.Size
) -> Layout | None:
    """Return where the samples lie in an operand, given where they lie in the outputs that are used.

    None if the rule does not say it, or says something else for each output.
    """
    layouts = set()
    for output, layout in outputs:
        place = None if layout is None else sample_axis(output, layout)
        if layout is None or place is None:
            return None
        layouts.add(flow.rule(Step(argument, output, place, layout, operand, shape)))
    return layouts.pop() if len(layouts) == 1 else None
