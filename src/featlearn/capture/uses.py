"""Every use of every parameter, found once.

From a parameter upwards, values without a sample axis form a region that parameters alone (or several samples
together) made: transposes, normalised weights, generated weights. Each edge that leaves the region into a node whose
output has a sample axis is a use. Every path from a parameter to the outputs leaves the region for the first time
through exactly one edge, so the sum over uses, each pulled back through the region, is the whole per-sample gradient.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from featlearn.capture.graph import Edge, Graph, Node, Value, gradients_at
from featlearn.capture.reordering import may_reorder
from featlearn.capture.sample_axis import is_certain, sample_codes, sample_layout, splits
from featlearn.ops import Direct, Layout, Outer, Use, rule_for
from featlearn.ops.form import Form

# They only rearrange their one input, so no sample can have touched their output if none touched their input,
# and sums of products over their output are those over their input.
REARRANGEMENTS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Alias", "Clone", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy", "Transpose", "Unsqueeze",
        "UnsafeView", "View", "Swapaxes",
    )
    for number in range(4)
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One use, as its rule reads it."""

    value: Value
    """The operand: an output of a node in the region, or the parameter's own leaf."""
    use: Use
    form: Form


@dataclass(frozen=True)
class ParameterUses:
    """All uses of one parameter, or the reason why they cannot be read."""

    readings: tuple[Reading, ...] = ()
    refusal: str | None = None
    nodes: tuple[str, ...] = ()
    """Names of the nodes that use the parameter, for the plan."""


@dataclass(frozen=True)
class Pattern:
    """The sample axes of one graph, to be expected of another that the same code has built for other samples."""

    names: tuple[str, ...]
    """All nodes in order."""
    layouts: Mapping[int, Layout | None]
    """Number of a node -> its sample axis."""
    single_output: Mapping[int, bool]


class SampleAxes:
    """Sample axes of the nodes of one graph, found on demand by pairs of backward passes.

    `exemplary`: they will be expected of other graphs, so whether they are certain is found out as well.
    """

    def __init__(
        self, outputs: Tensor, graph: Graph, generator: torch.Generator, expected: Pattern | None = None,
        exemplary: bool = False,
    ) -> None:  # fmt: skip
        self.graph = graph
        self._outputs, self._generator = outputs, generator
        # The gradient of the root is the cotangent: samples first.
        self.layouts: dict[Node, Layout | None] = {graph.root[0]: Layout(1, len(outputs), outputs.shape[1])}
        self.single_output: dict[Node, bool] = {graph.root[0]: graph.root[1] == 0}
        self._exemplary = exemplary
        self._doubtful: set[Node] = set()
        self.assumed = expected is not None and self._assume(expected)

    @cached_property
    def _sent(self) -> tuple[Tensor, list[Tensor]]:
        """A cotangent, and codes that tell its samples from one another."""
        codes = sample_codes(len(self._outputs), self.graph.dtypes, self._generator)
        return _gaussian(self._outputs, self._generator), codes

    def pattern(self) -> Pattern:
        """What has been found so far, without what few samples leave open."""
        places = {node: number for number, node in enumerate(self.graph.order) if node not in self._doubtful}
        return Pattern(
            tuple(node.name() for node in self.graph.order),
            {places[node]: layout for node, layout in self.layouts.items() if node in places},
            {places[node]: single for node, single in self.single_output.items() if node in places},
        )

    def _assume(self, expected: Pattern) -> bool:
        """Take over the sample axes of a graph with the same nodes, if all shapes are as they should then be."""
        order, samples = self.graph.order, len(self._outputs)
        if tuple(node.name() for node in order) != expected.names:
            return False
        found: dict[Node, Layout | None] = {}
        for number, layout in expected.layouts.items():
            node = order[number]
            if layout is not None:
                layout = Layout(layout.before, samples, layout.after)
                if layout not in splits(self.graph.output_shape((node, 0)), samples):
                    return False
            found[node] = layout
        if may_reorder(self.graph, found, samples):
            return False
        self.layouts |= found
        self.single_output |= {order[number]: single for number, single in expected.single_output.items()}
        return True

    def find(self, nodes: list[Node]) -> None:
        """Find the sample axis of each node's output."""
        values = [(node, number) for node in nodes for number in range(len(self.graph.described[node]))]
        cotangent, codes = self._sent
        plain = gradients_at(self._outputs, values, cotangent)
        coded = [gradients_at(self._outputs, values, cotangent * code.to(self._outputs)[:, None]) for code in codes]
        for node in nodes:
            numbers = [n for n in range(len(self.graph.described[node])) if plain[node, n] is not None] or [0]
            layouts = []
            for n in numbers:
                shape, value = self.graph.output_shape((node, n)), (node, n)
                shown = plain[value], [found[value] for found in coded], codes, shape
                layout = sample_layout(*shown)
                layouts.append(layout)
                if self._exemplary and layout is not None and not is_certain(*shown, layout):
                    self._doubtful.add(node)
            self.layouts[node] = layouts[0] if None not in layouts else None
            self.single_output[node] = numbers == [0]


def _gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def explore(axes: SampleAxes) -> list[Edge]:
    """The edges through which parameters meet the samples; `axes` learns every node on the way."""
    graph = axes.graph
    region: set[Node] = set(graph.leaves.values())
    crossing: list[Edge] = []
    pending = [edge for leaf in region for edge in graph.consumers.get(leaf, ())]
    reach = 1
    while pending:
        unknown: list[Node] = []
        later: list[Edge] = []
        for edge in _following(graph, pending, region, axes, crossing):
            unknown.append(edge.consumer)
            later.append(edge)
        if unknown:
            axes.find(_with_followers(graph, unknown, axes, reach))
            reach *= 4  # long regions (generated weights) are asked for in growing steps, not one pass pair per op
        pending = later
    return crossing


def _following(graph: Graph, pending: list[Edge], region: set[Node], axes: SampleAxes, crossing: list[Edge]
               ) -> list[Edge]:  # fmt: skip
    """Follow known edges as far as they go; what is left ends in nodes whose sample axis is unknown."""
    stack, unknown = list(pending), []
    while stack:
        edge = stack.pop()
        node = edge.consumer
        if node in region:
            continue
        # The root carries the samples whatever it is: its gradient is the cotangent.
        rearranged = node.name() in REARRANGEMENTS and node is not graph.root[0]
        if not rearranged and node not in axes.layouts:
            unknown.append(edge)
        elif not rearranged and axes.layouts[node] is not None:
            crossing.append(edge)
        else:
            region.add(node)
            axes.layouts[node] = None
            stack += graph.consumers.get(node, ())
    return unknown


def _with_followers(graph: Graph, nodes: list[Node], axes: SampleAxes, reach: int) -> list[Node]:
    found: dict[Node, None] = {}
    level = nodes
    for _ in range(reach):
        level = [node for node in level if node not in found and node not in axes.layouts]
        found.update(dict.fromkeys(level))
        level = [edge.consumer for node in level for edge in graph.consumers.get(node, ())]
    return list(found)


def parameter_uses(axes: SampleAxes) -> dict[str, ParameterUses]:
    """Every parameter of the graph with all of its uses, read by their rules."""
    graph = axes.graph
    readings: dict[str, list[Reading]] = defaultdict(list)
    refusals: dict[str, str] = {}
    nodes: dict[str, list[str]] = defaultdict(list)
    regions: dict[Node, tuple[frozenset[str], frozenset[str]]] = {}
    for edge in explore(axes):
        reachable, tainted = _through_region(graph, axes, edge.value[0], regions)
        reading = _read(axes, edge)
        for name in reachable:
            nodes[name].append(edge.consumer.name())
            if name in tainted:
                refusals[name] = f"part of it meets the samples before {edge.consumer.name()}"
            elif isinstance(reading, str):
                refusals[name] = reading
            else:
                readings[name].append(reading)
    return {name: ParameterUses(tuple(readings[name]), refusals.get(name), tuple(nodes[name])) for name in graph.leaves}


def _through_region(
    graph: Graph, axes: SampleAxes, node: Node, known: dict[Node, tuple[frozenset[str], frozenset[str]]]
) -> tuple[frozenset[str], frozenset[str]]:
    """Parameters that reach `node` through the region alone, and those that reach it by way of samples."""
    stack = [node]
    while stack:
        top = stack[-1]
        if top in known:
            stack.pop()
            continue
        if axes.layouts.get(top) is not None:
            known[top] = (frozenset(), graph.names_below[top])
            continue
        children = [child for child, _ in top.next_functions if child is not None and child in graph.names_below]
        waiting = [child for child in children if child not in known]
        if waiting:
            stack += waiting
        elif children:
            known[top] = (
                frozenset().union(*(known[child][0] for child in children)),
                frozenset().union(*(known[child][1] for child in children)),
            )
        else:
            known[top] = (graph.names_below[top], frozenset())
    return known[node]


def _read(axes: SampleAxes, edge: Edge) -> Reading | str:
    """Read one use, or say why it cannot be read."""
    node, name, layout = edge.consumer, edge.consumer.name(), axes.layouts[edge.consumer]
    rule = rule_for(name)
    if rule is None:
        return f"no rule for {name}"
    if not axes.single_output[node] or layout is None:
        return f"{name} has several outputs"
    graph = axes.graph
    if graph.output_dtype((node, 0)).is_complex or graph.output_dtype(edge.value).is_complex:
        return f"{name} is complex"
    use = Use(node, edge.operand, graph.output_shape(edge.value), graph.output_shape((node, 0)), layout)
    try:
        form: Form | None = rule(use)
    except Exception as error:  # a rule may be the user's
        return f"the rule for {name} fails: {type(error).__name__}: {error}"
    if form is None:
        return f"the rule for {name} does not cover this case"
    if isinstance(form, Outer | Direct):
        return Reading(edge.value, use, form)
    return f"the rule for {name} gives {type(form).__name__}, expected Outer, Direct or None"  # type: ignore[unreachable]
