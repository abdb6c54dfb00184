"""Find where the samples lie in the values of a graph, by two backward passes.

A backward pass is linear in its cotangent. Scale the cotangent of each sample p by a factor of its own. An element of a
gradient that belongs to sample p alone is scaled by that factor, and an element that several samples share is not. The
split (before, samples, after) under which each slice shows its own factor is the sample axis. Where no split does, the
value does not belong to samples one by one (a weight, a table, rows picked by routing).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.graph.graph import Axes, Graph, Layout, Node, Value, backward_to, numbers, splits


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
    described, samples = graph.described, len(outputs)
    nodes = [node for node in graph.order if node in graph.names_below and node not in leaves]
    # Samples may lie in them. Most weights, whose gradients are large, have other sizes.
    nodes = [n for n in nodes if len(described[n]) > 1 or any(s.numel() % samples == 0 for s, _ in described[n])]
    values = [(node, number) for node in nodes for number in range(len(described[node]))]
    direction = torch.randn(1, outputs.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    weights = sample_factors(samples, generator).to(outputs)
    plain, _ = backward_to(outputs, values, {}, direction.expand_as(outputs))
    named = {name: parameters[name] for name in graph.leaves}
    cotangent = weights[:, None] * direction
    coded, gradients = backward_to(outputs, values, named, cotangent)
    several = frozenset(node for node, number in values if number and plain[node, number] is not None)
    axes = _axes(graph, samples, plain, coded, weights)
    # The gradient of the root is the cotangent itself: samples first.
    axes[graph.root[0]] = Layout(1, samples, outputs.shape[1])
    return ProbedGraph(axes, several, _blank(axes, plain), direction, weights, plain, gradients)


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
        for node in pending:
            value = (node, _used_output(graph, node, plain))
            shape, gradient = graph.output_shape(value), plain.get(value)
            if gradient is None:  # a guess
                axes[node] = next(splits(shape, samples), None)
            else:
                found = None if gradient.is_nested else ([gradient], weights[:, None], coded[value])
                axes[node] = found and sample_layout(shape, samples, *found, graph.structure.precision**0.5)
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


def sample_layout(
    shape: torch.Size,
    samples: int,
    plain: Sequence[Tensor | None],
    weights: Tensor,
    coded: Tensor | None,
    slack: float,
) -> Layout | None:
    """Return the layout under which weighted gradients are the plain ones times the weights of each sample."""
    errors = ((layout, attribution_error(plain, weights, coded, layout)) for layout in splits(shape, samples))
    return next((layout for layout, error in errors if float(error) < slack), None)


def attribution_error(plain: Sequence[Tensor | None], weights: Tensor, coded: Tensor | None, layout: Layout) -> Tensor:
    """Return the largest |coded - sum_k weights[p, k] plain[k]| of any sample p, relative to its largest entry."""
    expected: Tensor | None = None
    for k, gradient in enumerate(plain):
        if gradient is not None:
            term = layout.split(gradient.detach()) * weights[:, k].to(gradient)[:, None]
            expected = term if expected is None else expected.add_(term)
    if expected is None or coded is None:
        whole = coded if expected is None else expected
        return torch.zeros(()) if whole is None else whole.detach().abs().amax().double().sign()
    return sample_error(expected, layout.split(coded.detach()))


def sample_error(expected: Tensor, actual: Tensor) -> Tensor:
    """Return the largest difference of any sample relative to its largest entry; both are (before, samples, after).

    Entries that are not finite count as equal: the kernel is then not finite either, and refused for that.
    """
    size = expected.abs().amax((0, 2))
    gap = (actual - expected).abs().amax((0, 2)) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return gap.nan_to_num(nan=0.0).amax().double()
