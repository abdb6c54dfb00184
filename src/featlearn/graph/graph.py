"""The autograd graph between a network's outputs and its parameters, and where the parameters meet the samples.

One walk finds every use of every parameter (`find_uses`). From a parameter upwards, values without a sample axis form a
region that parameters alone (or several samples together) made: transposes, normalized weights, generated weights. Each
edge that leaves the region into a node whose output has a sample axis is a use. Every path from a parameter to the
outputs leaves the region for the first time through exactly one edge, so the sum over uses, each pulled back through
the region, is the whole per-sample gradient.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.errors import UnsupportedModelError
from featlearn.torch_internals import SAVED, batched_gradients, engine_gradients, output_forms

Node = Any  # torch.autograd.graph.Node: C++ nodes are only registered as virtual subclasses of it
Value = tuple[Node, int]
"""One output of one node."""
Description = tuple[torch.Size, torch.dtype]
"""Of one output of a node."""


class Edge(NamedTuple):
    """One input of a node: `consumer` takes `value` as its input number `operand`."""

    value: Value
    consumer: Node
    operand: int


_OF_TORCH = re.compile(r"[A-Z][A-Za-z0-9]*Backward\d+|torch::autograd::AccumulateGrad")


@dataclass(frozen=True)
class GraphStructure:
    """What graphs of the same code and shapes share. Nodes are numbered, each after its inputs."""

    names: tuple[str, ...]
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    """The inputs of each node: the number of the node that makes it, -1 for none, and of that node's output."""
    described: tuple[tuple[Description, ...], ...]
    """Shape and type of each output of each node."""
    below: tuple[frozenset[str], ...]
    """The parameters that each node depends on."""
    leaves: Mapping[int, str | None]
    """Number of the node of each leaf tensor, with its name if it is a parameter."""
    root: int
    """The number of the last node's output that is the model's output."""

    @cached_property
    def precision(self) -> float:
        """Machine epsilon of the coarsest floating type of any node's output."""
        return max(map(_coarsest, set(self.described)), default=0.0)

    @cached_property
    def precisions(self) -> Mapping[str, float]:
        """Machine epsilon of the coarsest floating type between each parameter and the outputs."""
        coarsest = [0.0] * len(self.names)
        for k in range(len(self.names) - 1, -1, -1):
            coarsest[k] = max(coarsest[k], _coarsest(self.described[k]))
            for child, _ in self.inputs[k]:
                if child >= 0:
                    coarsest[child] = max(coarsest[child], coarsest[k])
        return {name: coarsest[k] for k, name in self.leaves.items() if name is not None}

    @cached_property
    def of_torch(self) -> bool:
        """Whether all nodes are torch's own: the names of those that users define end otherwise."""
        return all(map(_OF_TORCH.fullmatch, self.names))

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all node outputs that are not views of others: about what the forward pass allocates."""
        return sum(
            shape.numel() * dtype.itemsize
            for k, described in enumerate(self.described)
            if k not in self.leaves and self.names[k].partition("Backward")[0] not in _VIEWS
            for shape, dtype in described
        )

    def graph(self, outputs: Tensor, parameters: Mapping[str, Tensor]) -> "Graph | None":
        """Return the graph of outputs if it has this structure. Shapes are not compared."""
        if outputs.output_nr != self.root:
            return None
        nodes: list[Node] = [None] * len(self.names)
        nodes[-1] = outputs.grad_fn
        for k in range(len(nodes) - 1, -1, -1):  # every node after all that take it
            node, expected = nodes[k], self.inputs[k]
            children = node.next_functions
            if node.name() != self.names[k] or len(children) != len(expected):
                return None
            for (child, n), (place, number) in zip(children, expected):  # noqa: B905 (equally long)
                if n != number or (place < 0) != (child is None):
                    return None
                if child is not None:
                    if nodes[place] is None:
                        nodes[place] = child
                    elif nodes[place] is not child:
                        return None
        if len(set(nodes)) < len(nodes):
            return None
        named = {id(parameter): name for name, parameter in parameters.items()}
        variables = [id(nodes[k].variable) for k in self.leaves]
        if [named.get(variable) for variable in variables] != [*self.leaves.values()]:
            return None
        return Graph(self, tuple(nodes), frozenset(variables))


def _coarsest(described: tuple[Description, ...]) -> float:
    kinds = [dtype for _, dtype in described if dtype.is_floating_point or dtype.is_complex]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


@dataclass(frozen=True)
class Graph:
    """The graph between the outputs and the given parameters."""

    structure: GraphStructure
    order: tuple[Node, ...]
    """All nodes by their numbers, an order that two passes of the same code share."""
    variables: frozenset[int]
    """Identities of all leaf tensors that were reached, parameters or not."""

    @cached_property
    def root(self) -> Value:
        """The outputs."""
        return (self.order[-1], self.structure.root)

    @cached_property
    def leaves(self) -> Mapping[str, Node]:
        """Map each parameter to its AccumulateGrad node. Parameters that the outputs do not depend on are absent."""
        return {name: self.order[k] for k, name in self.structure.leaves.items() if name is not None}

    @cached_property
    def number(self) -> Mapping[Node, int]:
        """The number of every node."""
        return {node: k for k, node in enumerate(self.order)}

    @cached_property
    def names(self) -> Mapping[Node, str]:
        """The name of every node."""
        return dict(zip(self.order, self.structure.names, strict=True))

    @cached_property
    def names_below(self) -> Mapping[Node, frozenset[str]]:
        """Map each node to the parameters it depends on. Nodes that depend on none are absent."""
        return {node: names for node, names in zip(self.order, self.structure.below, strict=True) if names}

    @cached_property
    def inputs(self) -> Mapping[Node, tuple[tuple[Node | None, int], ...]]:
        """Map each node to its inputs, as `next_functions`, which a node makes anew each time."""
        order = (*self.order, None)
        taken = (tuple([(order[k], n) for k, n in several]) for several in self.structure.inputs)
        return dict(zip(self.order, taken, strict=True))

    @cached_property
    def described(self) -> Mapping[Node, tuple[Description, ...]]:
        """Map each node to the shape and type of its outputs; cached, as autograd describes them anew at every
        access.
        """
        return dict(zip(self.order, self.structure.described, strict=True))

    @cached_property
    def consumers(self) -> dict[Node, list[Edge]]:
        """Map each node to the edges through which others take its outputs."""
        edges: dict[Node, list[Edge]] = defaultdict(list)
        for node, children in self.inputs.items():
            for operand, value in enumerate(children):
                if value[0] in self.names_below:
                    edges[value[0]].append(Edge(value, node, operand))
        return dict(edges)

    def output_shape(self, value: Value) -> torch.Size:
        """The shape of a node's output."""
        node, number = value
        return self.described[node][number][0]

    def output_dtype(self, value: Value) -> torch.dtype:
        """The dtype of a node's output."""
        node, number = value
        return self.described[node][number][1]


def build_graph(outputs: Tensor, parameters: Mapping[str, Tensor]) -> Graph:
    """Build the graph between outputs and parameters by one walk."""
    taken = _children_first(outputs.grad_fn)
    order = tuple(taken)
    number: dict[Node | None, int] = {node: k for k, node in enumerate(order)}
    number[None] = -1
    inputs = tuple([tuple([(number[child], n) for child, n in children]) for children in taken.values()])
    variables = {k: node.variable for k, node in enumerate(order) if not inputs[k] and hasattr(node, "variable")}
    named = {id(parameter): name for name, parameter in parameters.items()}
    leaves = {k: named.get(id(variable)) for k, variable in variables.items()}
    below: list[frozenset[str]] = []
    for k, children in enumerate(inputs):
        name = leaves.get(k)
        names = frozenset[str]() if name is None else frozenset([name])
        for child, _ in children:
            if child >= 0 and (carried := below[child]):
                # Reused where it is equal: deep networks would otherwise hold depth x parameters names.
                names = carried if names <= carried else names if carried <= names else names | carried
        below.append(names)
    structure = GraphStructure(
        names=tuple([node.name() for node in order]),
        inputs=inputs,
        described=tuple(output_forms(order)),
        below=tuple(below),
        leaves=leaves,
        root=outputs.output_nr,
    )
    return Graph(structure, order, frozenset(map(id, variables.values())))


# Their outputs lie in the memory of their inputs.
_VIEW_NAMES = """
    Alias AsStrided Diagonal Expand Narrow Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze Swapaxes T
    Transpose Unbind Unfold UnsafeSplit UnsafeView Unsqueeze View
"""
_VIEWS = frozenset(_VIEW_NAMES.split())


def _children_first(root: Node) -> dict[Node, tuple[tuple[Node | None, int], ...]]:
    """Return every node under `root` with its inputs, each after all of its inputs, without recursion."""
    inputs: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    waiting: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node in inputs:
            stack.pop()
        elif node in waiting:
            stack.pop()
            inputs[node] = waiting[node]
        else:
            waiting[node] = children = tuple(node.next_functions)
            stack += [child for child, _ in children if child is not None and child not in waiting]
    return inputs


def backward(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    cotangents: Sequence[Tensor],
    *,
    batched: bool = False,
    last: bool = False,
) -> tuple[Tensor | None, ...]:
    """Run one backward pass between tensors or graph edges; `batched`: one for each row of the cotangents.

    The `last` pass frees saved tensors on its way.
    """
    try:
        differentiate = batched_gradients if batched else engine_gradients
        found = differentiate(outputs, inputs, cotangents, retain_graph=not last)
        return tuple([g if g is None or g.layout is torch.strided or g.is_nested else g.to_dense() for g in found])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"a backward pass through the model failed: {type(error).__name__}: {error}"
        ) from error


def backward_to(
    outputs: Tensor, values: Sequence[Value], parameters: Mapping[str, Tensor], cotangent: Tensor, *, last: bool = False
) -> tuple[dict[Value, Tensor | None], dict[str, Tensor | None]]:
    """Compute gradients at node outputs and at parameters by one backward pass."""
    edges = [GradientEdge(node, number) for node, number in values]
    if not edges and not parameters:
        return {}, {}
    gradients = backward([outputs], [*edges, *parameters.values()], [cotangent], last=last)
    at_values, at_parameters = gradients[: len(edges)], gradients[len(edges) :]
    return dict(zip(values, at_values, strict=True)), dict(zip(parameters, at_parameters, strict=True))


def parameter_gradients(
    outputs: Tensor, parameters: Mapping[str, Tensor], cotangent: Tensor
) -> dict[str, Tensor | None]:
    """Compute gradients at parameters by one backward pass."""
    return backward_to(outputs, [], parameters, cotangent)[1]


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Fetch scalars together: each transfer from a GPU waits for it."""
    if not scalars:
        return []
    values: list[float] = torch.stack([t.detach().double().to(scalars[0].device) for t in scalars]).tolist()
    return values


class Layout(NamedTuple):
    """Where the samples lie in an op's output: its elements in order are (before, samples, after)."""

    before: int
    samples: int
    after: int

    def split(self, tensor: Tensor) -> Tensor:
        """Reshape a tensor to (before, samples, after)."""
        return tensor.reshape(self.before, self.samples, self.after)

    def samples_first(self, tensor: Tensor, *trailing: int) -> Tensor:
        """Bring a tensor whose leading axes are laid out like the output to (samples, positions, *trailing)."""
        if self.before == 1:
            return tensor.reshape(self.samples, -1, *trailing)
        split = tensor.reshape(self.before, self.samples, -1, *trailing)
        return split.movedim(1, 0).reshape(self.samples, -1, *trailing)

    def outside(self, *trailing: int) -> bool:
        """Return whether the last axes of the output, of these sizes, hold no samples."""
        size = math.prod(trailing)
        return size > 0 and self.after % size == 0

    def positions(self, *trailing: int) -> int:
        """Return the number of positions of each sample, each with values of this shape."""
        return self.before * self.after // math.prod(trailing)


def splits(shape: torch.Size, samples: int) -> Iterator[Layout]:
    """Yield every way in which the samples can lie inside one axis; nothing if the value is empty."""
    total, before = shape.numel(), 1
    if total == 0:
        return
    for size in shape:
        if size % samples == 0:
            inside = size // samples
            for outer in range(1, inside + 1):
                if inside % outer == 0:
                    yield Layout(before * outer, samples, total // (before * outer * samples))
        before *= size


Axes = Mapping[Node, Layout | None]
"""Map nodes to the sample axis of their output, None for none. Nodes that consume samples alone are absent."""


_REARRANGING = "Alias Clone Permute ReshapeAlias Squeeze Swapaxes T ToCopy Transpose Unsqueeze UnsafeView View"
# They only rearrange their one input, so no sample can have touched their output if none touched their input,
# and sums of products over their output are those over their input.
REARRANGEMENTS = frozenset(f"{name}Backward{number}" for name in _REARRANGING.split() for number in range(4))


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
        """Return what an op of torch saved in the forward pass under this name, None if nothing.

        Call it while the rule runs, not inside the functions that the rule returns. A backward pass may have freed it
        by then.
        """
        return getattr(self.node, SAVED + name, None)


class FoundUses(NamedTuple):
    """The edges through which parameters meet the samples."""

    edges: tuple[tuple[Edge, frozenset[str]], ...]
    """Each with the parameters that reach its value without meeting a sample."""
    mixed: Mapping[str, str]
    """Parameters that reach the same operand with and without samples, with the reason."""


def find_uses(graph: Graph, axes: Axes) -> FoundUses:
    """Find every edge from a value without samples to a node with samples, in one walk from the leaves."""
    names = {node: name for name, node in graph.leaves.items()}
    without: set[Node] = set()
    reach: dict[Node, frozenset[str]] = defaultdict(frozenset)
    by_samples: dict[Node, frozenset[str]] = defaultdict(frozenset)
    edges: list[tuple[Edge, frozenset[str]]] = []
    mixed: dict[str, str] = {}
    root, _ = graph.root
    for node in graph.order:
        if node not in graph.names_below:
            continue
        if node in names:
            without.add(node)
            reach[node] = frozenset([names[node]])
            continue
        inputs = graph.inputs[node]
        children = [(k, child, n) for k, (child, n) in enumerate(inputs) if child in graph.names_below]
        # What samples have not touched stays untouched when it is rearranged.
        rearranged = graph.names[node] in REARRANGEMENTS and all(c in without for c, _ in inputs if c is not None)
        if node is not root and (rearranged or (node in axes and axes[node] is None)):
            without.add(node)
            reach[node] = frozenset().union(*(reach[child] for _, child, _ in children))
            # What met samples and has lost their axis again is counted where it met them.
            by_samples[node] = frozenset().union(
                *(by_samples[child] if child in without else graph.names_below[child] for _, child, _ in children)
            )
            continue
        for operand, child, number in children:
            if child in without and reach[child]:
                edges.append((Edge((child, number), node, operand), reach[child]))
                if both := reach[child] & by_samples[child]:
                    mixed |= dict.fromkeys(both, f"part of it meets the samples before {graph.names[node]}")
    return FoundUses(tuple(edges), mixed)
