"""Find where the samples lie in the values of a graph, by two backward passes.

A backward pass is linear in its cotangent. Scale the cotangent of each sample p by a factor of its own. An element of a
gradient that belongs to sample p alone is scaled by that factor, and an element that several samples share is not. The
split (before, samples, after) under which each slice shows its own factor is the sample axis. Where no split does, the
value does not belong to samples one by one (a weight, a table, rows picked by routing).
"""

from collections.abc import Mapping
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
        values = {node: (node, _used_output(graph, node, plain)) for node in pending}
        options = {
            node: list(splits(graph.described[node][value[1]][0], samples)) if not _is_nested(plain.get(value)) else []
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
