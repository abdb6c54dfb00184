"""Weights that follow each other in the executed forward pass, as matrices over the channels they share.

A convolution has one channel for all places of its kernel: followed by another, U is (outputs * taps, channels) and W
is (channels, inputs * taps). Where an op between the two rearranges channels (flattening, concatenation, heads that
share keys), the channel that each input comes from is found by moving the outputs of the first weight.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.capture.graph import Graph, Node, Value
from featlearn.capture.projections import Projection, projections
from featlearn.capture.snapshot import Snapshot
from featlearn.capture.succession import between, sources
from featlearn.capture.uses import REARRANGEMENTS
from featlearn.ops import Outer


@dataclass(frozen=True)
class Pair:
    """Two weights, the output of the first being the input of the second."""

    first: Projection
    second: Projection
    before: Tensor
    """W, (k, n): rows are the shared channels."""
    after: Tensor | None
    """U, (m, k): columns are the shared channels; None where they cannot be matched."""
    reason: str
    """Why they cannot be matched."""
    between: frozenset[Node]
    """The ops on the way."""
    alone: bool
    """Whether the first feeds nothing but the second, and the second is fed by nothing else, once each."""


def consecutive(snapshot: Snapshot) -> dict[tuple[str, str], Pair]:
    """Every pair of projections with nothing but other ops between them."""
    graph, found = snapshot.graph, projections(snapshot).found
    assert graph is not None
    at: dict[Node, list[str]] = {}
    for name, one in found.items():
        for reading in one.readings:
            at.setdefault(reading.use.node, []).append(name)
    stops = at.keys() | set(_other_uses(snapshot, found))
    feeding = {name: _feeding(one, stops) for name, one in found.items()}
    fed: dict[str, list[str]] = {name: [] for name in found}
    pairs: dict[tuple[str, str], tuple[Node, Node]] = {}
    for name, ways in feeding.items():
        for second, first in ways:
            for before in at.get(first, []):
                if found[before].role in (None, "v"):
                    fed[before].append(name)
                    pairs.setdefault((before, name), (first, second))
    ends = sources([graph.root], stops)
    result = {}
    for (before, name), (first, second) in pairs.items():
        alone = len(fed[before]) == 1 and len(feeding[name]) == 1 and first not in ends
        one, other = found[before], found[name]
        alone = alone and len(one.readings) == len(other.readings) == 1 and one.units is None and other.units is None
        after, reason = _matched(snapshot, one, other, first, second)
        way = frozenset(between(graph, second, first))
        result[before, name] = Pair(one, other, _rows(one), after, reason, way, alone)
    return result


def _feeding(one: Projection, stops: set[Node]) -> list[tuple[Node, Node]]:
    """(use of this weight, op that its input comes from)."""
    found = []
    for reading in one.readings:
        node, operand = reading.use.node, reading.use.operand
        starts = [value for number, value in enumerate(node.next_functions) if number != operand]
        found += [(node, source) for source in sources(starts, stops, features=True)]
    return found


def _other_uses(snapshot: Snapshot, found: Mapping[str, Projection]) -> Iterator[Node]:
    """Ops that meet a weight which is no projection: nothing behind them follows directly."""
    graph = snapshot.graph
    assert graph is not None
    known = {name for one in found.values() for name in one.parameters}
    for name, leaf in graph.leaves.items():
        if name not in known and snapshot.parameters[name].dim() > 1:
            stack = [edge.consumer for edge in graph.consumers.get(leaf, ())]
            while stack:
                node = stack.pop()
                if node.name() in REARRANGEMENTS:
                    stack += [edge.consumer for edge in graph.consumers.get(node, ())]
                else:
                    yield node


def _rows(one: Projection) -> Tensor:
    """W with one row for each channel."""
    return one.weight.reshape(len(one.weight) // one.grad_taps, -1)


def _columns(one: Projection) -> Tensor:
    """U with one column for each channel: (outputs * taps, channels)."""
    parts = one.weight.reshape(len(one.weight), -1, one.row_taps)
    return parts.transpose(1, 2).reshape(-1, parts.shape[1])


def _matched(
    snapshot: Snapshot, one: Projection, other: Projection, first: Node, second: Node
) -> tuple[Tensor | None, str]:
    channels, columns = len(_rows(one)), _columns(other)
    if columns.shape[1] == channels:
        return columns, ""
    if one.units is not None:
        return None, "one part of a fused weight gives another number of channels than the next takes"
    try:
        origin = _origins(snapshot, one, other, first, second)
    except Exception as error:  # ops without a second derivative, shapes that are no channels
        return None, f"the channels between them cannot be followed: {type(error).__name__}: {error}"
    if origin is None:
        return None, "an input of the second mixes several outputs of the first"
    if int(origin.max()) < 0:
        return None, "no input of the second is seen to come from the first"
    # Columns of one channel are set below one another; channels with fewer of them are filled up with zeros.
    slots = [(origin == channel).nonzero().flatten() for channel in range(channels)]
    depth = max(len(slot) for slot in slots)
    stacked = columns.new_zeros(depth, len(columns), channels)
    for channel, slot in enumerate(slots):
        stacked[: len(slot), :, channel] = columns[:, slot].mT
    return stacked.flatten(0, 1), ""


def _origins(snapshot: Snapshot, one: Projection, other: Projection, first: Node, second: Node) -> Tensor | None:
    """For every input channel of the second weight the output channel of the first it depends on; -1 for none.

    None if one depends on several. The channels whose number has a certain binary digit are moved together.
    """
    graph = snapshot.graph
    assert graph is not None
    reading = next(r for r in one.readings if r.use.node is first)
    axis_of_first = _channel_axis(graph.output_shape((first, 0)), len(_rows(one)), reading.form)
    use = next(r.use for r in other.readings if r.use.node is second)
    operand = next(n for n, (child, _) in enumerate(second.next_functions) if child is not None and n != use.operand
                   and sources([second.next_functions[n]], {first}, features=True))  # fmt: skip
    value: Value = second.next_functions[operand]
    inputs = _columns(other).shape[1]
    axis_of_second = _channel_axis(graph.output_shape(value), inputs, other.readings[0].form)
    channels = torch.arange(len(_rows(one)), device=snapshot.outputs.device)
    codes = torch.zeros(inputs, dtype=torch.long, device=channels.device)
    seen = torch.zeros(inputs, dtype=torch.bool, device=channels.device)
    for digit in range(max(1, int(channels[-1]).bit_length())):
        ones = (channels >> digit) & 1
        by_ones, by_zeros = (
            _moved(graph, value, first, chosen, axis_of_first, axis_of_second) for chosen in (ones == 1, ones == 0)
        )
        if bool((by_ones & by_zeros).any()):
            return None
        codes += by_ones.long() << digit
        seen |= by_ones | by_zeros
    return _completed(torch.where(seen, codes, -1), len(channels))


def _channel_axis(shape: torch.Size, channels: int, form: object) -> int:
    """Where the channels lie: last in rows of matrix products, second in images."""
    convolved = isinstance(form, Outer) and (form.row_taps > 1 or form.grad_taps > 1 or len(shape) > 3)
    axis = 1 if convolved or shape[-1] != channels else len(shape) - 1
    if shape[axis] != channels:
        raise ValueError(f"no axis of {tuple(shape)} holds {channels} channels")
    return axis


def _moved(graph: Graph, value: Value, first: Node, chosen: Tensor, axis: int, axis_of_value: int) -> Tensor:
    """Which channels of a value move when the chosen ones of an op's output do: J v, by two backward passes."""
    generator = torch.Generator("cpu").manual_seed(0)
    device, dtype = chosen.device, graph.output_dtype(value)
    cotangent = torch.zeros(graph.output_shape(value), dtype=dtype, device=device, requires_grad=True)
    edge = GradientEdge(first, 0)
    (pulled,) = torch.autograd.grad([GradientEdge(*value)], [edge], [cotangent], create_graph=True)
    step = torch.randn(pulled.shape, generator=generator).to(device, dtype).movedim(axis, -1) * chosen
    (pushed,) = torch.autograd.grad(pulled, cotangent, step.movedim(-1, axis), retain_graph=True)
    return (pushed != 0).movedim(axis_of_value, -1).flatten(0, -2).any(0)


def _completed(origin: Tensor, channels: int) -> Tensor:
    """Inputs that did not move (dead units) get the channel they have in the regular order that fits all others."""
    inputs = len(origin)
    if inputs % channels or not bool((origin < 0).any()):
        return origin
    place, repeats = torch.arange(inputs, device=origin.device), inputs // channels
    for group in (d for d in range(1, channels + 1) if channels % d == 0):
        # (groups, repeats, group): 1 is flattened channels, `channels` is channels last, between them shared heads
        regular = place // (group * repeats) * group + place % group
        if bool(((origin < 0) | (origin == regular)).all()):
            return regular
    return origin
