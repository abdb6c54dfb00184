"""The autograd graph between a network's outputs and its parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.errors import UnsupportedModelError

Node = Any  # torch.autograd.graph.Node: C++ nodes are only registered as virtual subclasses of it
Value = tuple[Node, int]
"""One output of one node."""
Description = tuple[torch.Size, torch.dtype]
"""Of one output of a node."""


class Edge(NamedTuple):
    """`consumer` takes `value` as its input number `operand`."""

    value: Value
    consumer: Node
    operand: int


@dataclass(frozen=True)
class Graph:
    """The part of the graph that lies between the outputs and the given parameters."""

    root: Value
    leaves: dict[str, Node]
    """Parameter name -> its AccumulateGrad node; parameters the outputs do not depend on are absent."""
    names_below: dict[Node, frozenset[str]]
    """Node -> the parameters it depends on."""
    variables: frozenset[int] = frozenset()
    """Identities of all leaf tensors walked to, whether or not they were asked for."""
    precision: float = 0.0
    """Machine epsilon of the coarsest floating type that any node's output has."""
    order: tuple[Node, ...] = ()
    """All nodes walked, in an order that two passes of the same code share."""
    described: Mapping[Node, tuple[Description, ...]] = field(default_factory=dict)
    """Shape and type of every output of every node; asking a node makes them anew each time."""
    inputs: Mapping[Node, tuple[tuple[Node | None, int], ...]] = field(default_factory=dict)
    """What every node takes: `next_functions`, which a node makes anew each time."""
    names: Mapping[Node, str] = field(default_factory=dict)
    """The name of every node."""

    @cached_property
    def consumers(self) -> dict[Node, list[Edge]]:
        """Node -> the edges through which others take what it gives."""
        found: dict[Node, list[Edge]] = defaultdict(list)
        for node, children in self.inputs.items():
            for operand, value in enumerate(children):
                if value[0] in self.names_below:
                    found[value[0]].append(Edge(value, node, operand))
        return dict(found)

    @cached_property
    def precisions(self) -> Mapping[str, float]:
        """The same for each parameter, of the nodes between it and the outputs alone."""
        return _precisions_above(self)

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all node outputs together that are no views of others: about what the forward pass makes."""
        return sum(
            shape.numel() * dtype.itemsize
            for node, described in self.described.items()
            if self.names[node].partition("Backward")[0] not in _VIEWS
            and (self.inputs[node] or getattr(node, "variable", None) is None)
            for shape, dtype in described
        )

    @cached_property
    def ordered_names(self) -> tuple[str, ...]:
        """Names of all nodes in order: two passes of the same code have the same."""
        return tuple(self.names.values())

    def output_shape(self, value: Value) -> torch.Size:
        """The shape of a node's output."""
        node, number = value
        return self.described[node][number][0]

    def output_dtype(self, value: Value) -> torch.dtype:
        """The dtype of a node's output."""
        node, number = value
        return self.described[node][number][1]


def _described(node: Node) -> tuple[Description, ...]:
    # Ragged ones (nested tensors) count as empty, so that no axis of them is ever read.
    return tuple([(torch.Size((0,) if m.is_nested_tensor else m.shape), m.dtype) for m in node._input_metadata or ()])


def build_graph(outputs: Tensor, parameters: Mapping[str, Tensor]) -> Graph:
    """Walk from `outputs` to every parameter."""
    inputs = _children_first(outputs.grad_fn)
    named = {id(parameter): name for name, parameter in parameters.items()}
    below: dict[Node, frozenset[str]] = {}
    leaves: dict[str, Node] = {}
    variables: set[int] = set()
    described: dict[Node, tuple[Description, ...]] = {}
    names: dict[Node, str] = {}
    for node, children in inputs.items():
        names[node] = node.name()
        described[node] = _described(node)
        found = frozenset[str]()
        variable = None if children else getattr(node, "variable", None)
        if variable is not None:
            variables.add(id(variable))
            if id(variable) in named:
                leaves[named[id(variable)]] = node
                found = frozenset([named[id(variable)]])
        for child, _ in children:
            if child is not None and (carried := below[child]):
                # Reused where it is equal: deep networks would otherwise hold depth x parameters names.
                found = carried if found <= carried else found if carried <= found else found | carried
        below[node] = found
    dtypes = {dtype for several in described.values() for _, dtype in several}
    return Graph(
        root=(outputs.grad_fn, outputs.output_nr),
        leaves=leaves,
        names_below={node: found for node, found in below.items() if found},
        variables=frozenset(variables),
        precision=max((torch.finfo(t).eps for t in dtypes if t.is_floating_point or t.is_complex), default=0.0),
        order=tuple(inputs),
        described=described,
        inputs=inputs,
        names=names,
    )


@dataclass(frozen=True)
class GraphStructure:
    """What two graphs of the same code and shapes share, by the numbers of their nodes."""

    names: tuple[str, ...]
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    """Numbers of the nodes that each takes, -1 for none, and of their outputs."""
    root: int
    leaves: Mapping[int, str | None]
    """Numbers of the nodes of leaf tensors, with the names of parameters."""
    described: tuple[tuple[Description, ...], ...]
    below: tuple[frozenset[str], ...]
    precision: float

    @classmethod
    def of(cls, graph: Graph) -> "GraphStructure":
        """The structure of a graph."""
        number: dict[Node | None, int] = {node: k for k, node in enumerate(graph.order)}
        number[None] = -1
        named = {node: name for name, node in graph.leaves.items()}
        return cls(
            names=graph.ordered_names,
            inputs=tuple(tuple((number[child], n) for child, n in children) for children in graph.inputs.values()),
            root=graph.root[1],
            leaves={number[node]: named.get(node) for node, children in graph.inputs.items()
                    if not children and hasattr(node, "variable")},
            described=tuple(graph.described.values()),
            below=tuple(graph.names_below.get(node, frozenset()) for node in graph.order),
            precision=graph.precision,
        )  # fmt: skip

    def graph(self, outputs: Tensor, parameters: Mapping[str, Tensor]) -> Graph | None:
        """The graph of outputs if it has this structure, walked once; shapes and types are taken for granted."""
        if outputs.output_nr != self.root:
            return None
        nodes: list[Node] = [None] * len(self.names)
        children: list[tuple[tuple[Node | None, int], ...]] = [()] * len(nodes)
        nodes[-1] = outputs.grad_fn
        for k in range(len(nodes) - 1, -1, -1):  # every node after all that take it
            node, expected = nodes[k], self.inputs[k]
            children[k] = found = node.next_functions
            if node.name() != self.names[k] or len(found) != len(expected):
                return None
            for (child, n), (place, number) in zip(found, expected):  # noqa: B905 (equally long)
                if n != number or (place < 0) != (child is None):
                    return None
                if child is not None:
                    if nodes[place] is None:
                        nodes[place] = child
                    elif nodes[place] is not child:
                        return None
        if len(set(nodes)) < len(nodes):
            return None
        variables = {k: nodes[k].variable for k in self.leaves}
        named = {id(parameter): name for name, parameter in parameters.items()}
        if any(named.get(id(variable)) != self.leaves[k] for k, variable in variables.items()):
            return None
        return Graph(
            root=(nodes[-1], self.root),
            leaves={name: nodes[k] for k, name in self.leaves.items() if name is not None},
            names_below={node: names for node, names in zip(nodes, self.below, strict=True) if names},
            variables=frozenset(map(id, variables.values())),
            precision=self.precision,
            order=tuple(nodes),
            described=dict(zip(nodes, self.described, strict=True)),
            inputs=dict(zip(nodes, children, strict=True)),
            names=dict(zip(nodes, self.names, strict=True)),
        )


# Their outputs lie in the memory of their inputs.
_VIEWS = frozenset(
    ("Alias", "AsStrided", "Diagonal", "Expand", "Narrow", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
     "SplitWithSizes", "Squeeze", "Swapaxes", "T", "Transpose", "Unbind", "Unfold", "UnsafeSplit", "UnsafeView",
     "Unsqueeze", "View")
)  # fmt: skip


def _precisions_above(graph: Graph) -> dict[str, float]:
    """The coarsest precision on any path from each leaf to the root."""
    coarsest: dict[Node, float] = defaultdict(float)
    for node in reversed(graph.order):
        kinds = [dtype for _, dtype in graph.described[node] if dtype.is_floating_point or dtype.is_complex]
        coarsest[node] = max([coarsest[node], *(torch.finfo(kind).eps for kind in kinds)])
        for child, _ in graph.inputs[node]:
            if child is not None:
                coarsest[child] = max(coarsest[child], coarsest[node])
    return {name: coarsest[leaf] for name, leaf in graph.leaves.items()}


def _children_first(root: Node) -> dict[Node, tuple[tuple[Node | None, int], ...]]:
    """Every node under `root` with its inputs, each after all of its inputs; no recursion, graphs are deep."""
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
    outputs: Sequence[Any], inputs: Sequence[Any], cotangents: Sequence[Tensor], *, batched: bool = False,
    last: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """One backward pass between tensors or graph edges (`batched`: one for each row of the cotangents).

    The `last` one lets go of what the forward pass has kept for it on the way.
    """
    try:
        found = torch.autograd.grad(
            outputs, inputs, cotangents, retain_graph=not last, allow_unused=True, is_grads_batched=batched
        )
        return tuple(_strided(g) for g in found)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"a backward pass through the model failed: {type(error).__name__}: {error}"
        ) from error


def _strided(gradient: Tensor | None) -> Tensor | None:
    sparse = gradient is not None and gradient.layout != torch.strided and not gradient.is_nested
    return gradient.to_dense() if sparse and gradient is not None else gradient


def backward_to(
    outputs: Tensor, values: Sequence[Value], parameters: Mapping[str, Tensor], cotangent: Tensor, *, last: bool = False
) -> tuple[dict[Value, Tensor | None], dict[str, Tensor | None]]:
    """Gradients at node outputs and at parameters, by one backward pass."""
    edges = [GradientEdge(node, number) for node, number in values]
    if not edges and not parameters:
        return {}, {}
    found = backward([outputs], [*edges, *parameters.values()], [cotangent], last=last)
    at_values, at_parameters = found[: len(edges)], found[len(edges) :]
    return dict(zip(values, at_values, strict=True)), dict(zip(parameters, at_parameters, strict=True))


def numbers(found: Sequence[Tensor]) -> list[float]:
    """Scalars, fetched together: on a GPU each would be waited for."""
    if not found:
        return []
    values: list[float] = torch.stack([one.detach().double().to(found[0].device) for one in found]).tolist()
    return values
