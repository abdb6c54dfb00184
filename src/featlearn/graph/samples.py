"""Where the samples lie in the values of a graph, and where the parameters meet them.

Two backward passes find the sample axis of every node's output (`probed_graph`). A backward pass is linear in its
cotangent. Scale the cotangent of each sample p by a factor of its own. An element of a gradient that belongs to sample
p alone is scaled by that factor, and an element that several samples share is not. The split (before, samples, after)
under which each slice shows its own factor is the sample axis. Where no split does, the value does not belong to
samples one by one (a weight, a table, rows picked by routing).

One walk then finds every use of every parameter (`find_uses`). From a parameter upwards, values without a sample axis
form a region that parameters alone (or several samples together) made: transposes, normalized weights, generated
weights. Each edge that leaves the region into a node whose output has a sample axis is a use. Every path from a
parameter to the outputs leaves the region for the first time through exactly one edge, so the sum over uses, each
pulled back through the region, is the whole per-sample gradient.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from featlearn.graph.graph import TOGETHER, Edge, Graph, Node, Value, backward_to, numbers, parameter_gradients
from featlearn.torch_internals import saved


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


def sample_dimension(shape: torch.Size, layout: Layout) -> tuple[int, int] | None:
    """Return the axis of `shape` that holds the samples, and the number of entries in front of them in that axis."""
    prefix = 1
    for axis, size in enumerate(shape if shape.numel() else ()):
        outer, rest = divmod(layout.before, prefix)
        if rest == 0 and size % (outer * layout.samples) == 0:
            return axis, outer
        prefix *= size
    return None


Axes = Mapping[Node, Layout | None]
"""Map nodes to the sample axis of their output, None for none. Nodes that consume samples alone are absent."""


@dataclass(frozen=True)
class ProbedGraph:
    """A graph with the gradients that showed its sample axes."""

    axes: Axes
    several_outputs: frozenset[Node]
    """Nodes whose second or later output is used."""
    blank: frozenset[Node]
    """Nodes without a gradient, whose axis is a guess."""
    direction: Tensor
    """The output direction of both passes, (1, C)."""
    weights: Tensor
    """The factors of the second pass, (samples,)."""
    plain: Mapping[Value, Tensor | None]
    """Gradients of the first pass at every node, without factors."""
    parameters: Mapping[str, Tensor | None]
    """Autograd's gradients of the parameters, with factors."""


def probed_graph(
    outputs: Tensor, graph: Graph, parameters: Mapping[str, Tensor], generator: torch.Generator
) -> ProbedGraph:
    """Find the sample axis of every node by two backward passes; the second goes on to the parameters."""
    leaves = set(graph.leaves.values())
    nodes = [node for node in graph.order if node in graph.names_below and node not in leaves]
    values = [
        (node, number)
        for node in nodes
        for number in range(len(graph.described[node]))
        if _may_show(graph, node, len(outputs))
    ]
    direction = torch.randn(1, outputs.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    weights = sample_factors(len(outputs), generator).to(outputs)
    plain, _ = backward_to(outputs, values, {}, direction.expand_as(outputs))
    named = {name: parameters[name] for name in graph.leaves}
    cotangent = weights[:, None] * direction
    gradients: Mapping[str, Tensor | None]
    if sum(parameter.numel() * parameter.element_size() for parameter in named.values()) <= TOGETHER:
        coded, gradients = backward_to(outputs, values, named, cotangent)
    else:
        coded, gradients = (
            backward_to(outputs, values, {}, cotangent)[0],
            parameter_gradients(outputs, named, cotangent),
        )
    several = frozenset(node for node, number in values if number and plain[node, number] is not None)
    axes = _axes(graph, len(outputs), plain, coded, weights)
    # The gradient of the root is the cotangent itself: samples first.
    axes[graph.root[0]] = Layout(1, len(outputs), outputs.shape[1])
    return ProbedGraph(axes, several, _blank(axes, plain), direction, weights, plain, gradients)


def _may_show(graph: Graph, node: Node, samples: int) -> bool:
    """Return whether samples may lie in a node's output. Most weights, whose gradients are large, have other sizes."""
    described = graph.described[node]
    return len(described) > 1 or any(shape.numel() % samples == 0 for shape, _ in described)


def _axes(
    graph: Graph,
    samples: int,
    plain: Mapping[Value, Tensor | None],
    coded: Mapping[Value, Tensor | None],
    weights: Tensor,
) -> dict[Node, Layout | None]:
    """Find the sample axes of all nodes that consume something without samples, from the leaves upwards."""
    axes: dict[Node, Layout | None] = dict.fromkeys(graph.leaves.values())
    pending = _consumers(graph, list(axes), axes)
    while pending:
        values = {node: (node, _used_output(graph, node, plain)) for node in pending}
        options = {
            node: list(splits(graph.output_shape(value), samples)) if not _is_nested(plain.get(value)) else []
            for node, value in values.items()
        }
        axes |= {node: options[node][0] if options[node] else None for node in pending}
        doubtful = [node for node in pending if options[node] and plain.get(values[node]) is not None]
        for turn in range(max((len(options[node]) for node in doubtful), default=0)):  # most are right at once
            errors = numbers(
                [
                    attribution_error(plain[values[node]], weights, coded[values[node]], options[node][turn])
                    for node in doubtful
                ]
            )
            wrong = [
                node for node, error in zip(doubtful, errors, strict=True) if not error < graph.structure.precision**0.5
            ]
            doubtful = [node for node in wrong if turn + 1 < len(options[node])]
            axes |= {node: options[node][turn + 1] if node in doubtful else None for node in wrong}
        pending = _consumers(graph, [node for node in pending if axes[node] is None], axes)
    return axes


def _blank(axes: Axes, plain: Mapping[Value, Tensor | None]) -> frozenset[Node]:
    gradients = {node: g for node in axes if (g := plain.get((node, 0))) is not None and not g.is_nested}
    sizes = {node: g.detach().abs().amax() for node, g in gradients.items() if g.numel()}
    largest = dict(zip(sizes, numbers(list(sizes.values())), strict=True))
    return frozenset(node for node in axes if (node, 0) in plain and not largest.get(node, 0.0) > 0.0)


def _consumers(graph: Graph, nodes: list[Node], known: Axes) -> list[Node]:
    """Return the nodes that take one of these as an input and are not known yet."""
    consumers = dict.fromkeys(edge.consumer for node in nodes for edge in graph.consumers.get(node, ()))
    return [node for node in consumers if node not in known]


def _used_output(graph: Graph, node: Node, plain: Mapping[Value, Tensor | None]) -> int:
    """Return the first output of a node that the outputs depend on."""
    used = (n for n in range(len(graph.described[node])) if plain.get((node, n)) is not None)
    return next(used, 0)


def _is_nested(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_nested


def sample_factors(samples: int, generator: torch.Generator) -> Tensor:
    """Draw powers of two with a sign, (samples,), all different while there are few samples.

    They scale gradients without rounding, also those that consist of rounding errors.
    """
    if samples <= 8:
        powers = torch.randperm(samples, generator=generator, device="cpu") - samples // 2
    else:
        powers = torch.randint(-4, 5, (samples,), generator=generator, device="cpu")
    signs = 2.0 * torch.randint(2, (samples,), generator=generator, device="cpu").double() - 1.0
    return signs * torch.exp2(powers.double())


def attribution_error(plain: Tensor | None, weights: Tensor, coded: Tensor | None, layout: Layout) -> Tensor:
    """Return the largest |coded - weight_p plain| of any sample, relative to the largest entry of that sample."""
    if plain is None or coded is None:
        whole = coded if plain is None else plain
        assert whole is not None
        return whole.detach().abs().amax().double().sign()
    expected = layout.split(plain.detach()) * weights.to(plain)[:, None]
    return sample_error(expected, layout.split(coded.detach()))


def sample_error(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the largest difference of any sample relative to its largest entry; both are (before, samples, after).

    Entries that are not finite count as equal: the kernel is then not finite either, and refused for that.
    """
    size = expected.abs().amax((0, 2))
    gap = (actual - expected).abs().amax((0, 2)) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return gap.nan_to_num(nan=0.0).amax().double()


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
        return saved(self.node, name)


class FoundUses(NamedTuple):
    """The edges through which parameters meet the samples."""

    edges: tuple[tuple[Edge, frozenset[str]], ...]
    """Each with the parameters that reach its value without meeting a sample."""
    mixed: Mapping[str, str]
    """Parameters that reach the same operand with and without samples, with the reason."""

    @property
    def nodes(self) -> list[Node]:
        """List every node that uses a parameter, once."""
        return list(dict.fromkeys(edge.consumer for edge, _ in self.edges))


def find_uses(graph: Graph, axes: Axes) -> FoundUses:
    """Find every edge from a value without samples to a node with samples, in one walk from the leaves."""
    names = {node: name for name, node in graph.leaves.items()}
    without: set[Node] = set()
    reach: dict[Node, frozenset[str]] = defaultdict(frozenset)
    by_samples: dict[Node, frozenset[str]] = defaultdict(frozenset)
    edges: list[tuple[Edge, frozenset[str]]] = []
    mixed: dict[str, str] = {}
    for node in graph.order:
        if node not in graph.names_below:
            continue
        if node in names:
            without.add(node)
            reach[node] = frozenset([names[node]])
            continue
        children = [(k, child, n) for k, (child, n) in enumerate(graph.inputs[node]) if child in graph.names_below]
        if node is not graph.root[0] and _is_without_samples(graph, node, axes, without):
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


def _is_without_samples(graph: Graph, node: Node, axes: Axes, without: set[Node]) -> bool:
    children = graph.inputs[node]
    if graph.names[node] in REARRANGEMENTS and all(child in without for child, _ in children if child is not None):
        return True
    return node in axes and axes[node] is None
