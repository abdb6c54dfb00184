"""Weights that follow each other in the executed forward pass, as matrices over the channels they share.

A convolution has one channel for all places of its kernel: followed by another, U is (outputs * taps, channels) and W
is (channels, inputs * taps). Where ops between the two may rearrange channels (flattening, concatenation, shuffling,
heads that share keys), the channel that each input comes from is found by moving the outputs of the first weight.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.gradients.captured import Chunk
from featlearn.graph.attention_paths import FeaturePaths, attentions
from featlearn.graph.graph import Graph, Node, Value
from featlearn.graph.uses import REARRANGEMENTS
from featlearn.linear_maps.weight_matrices import WeightMatrices, WeightMatrix, weight_matrices
from featlearn.ops import Outer
from featlearn.ops.form import Form
from featlearn.ops.reading import Reading


@dataclass(frozen=True)
class Pair:
    """Two weights, the output of the first being the input of the second."""

    first: WeightMatrix
    second: WeightMatrix
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


@dataclass(frozen=True)
class Link:
    """One place where the output of one use becomes the input of another."""

    first: Reading
    second: Reading
    value: Value
    """What the second multiplies."""
    between: frozenset[Node]


def consecutive(chunk: Chunk) -> tuple[dict[tuple[str, str], Pair], WeightMatrices]:
    """Every pair of weights with nothing but other ops between them."""
    graph, known = chunk.graph, weight_matrices(chunk)
    assert graph is not None
    at: dict[Node, list[str]] = {}
    for name, one in known.found.items():
        for reading in one.readings:
            at.setdefault(reading.use.node, []).append(name)
    others = set(_other_uses(chunk, known.found)) - at.keys()
    paths = FeaturePaths(graph, at.keys() | others, attentions(graph, at.keys() | others))
    links, fed = _links(known.found, at, paths)
    ends = paths.sources([graph.root])
    crowded = {node for other in others for node in paths.sources(other.next_functions)}
    pairs: dict[tuple[str, str], Pair] = {}
    for names, link in links.items():
        one, other = (known.found[name] for name in names)
        alone = fed[names[0]] == 1 and sum(second == names[1] for _, second in links) == 1
        alone = alone and link.first.use.node not in ends and link.first.use.node not in crowded
        alone = alone and len(paths.sources([link.value])) == len(one.readings) == len(other.readings) == 1
        after, reason = _matched(chunk, one, other, link, paths)
        alone = alone and one.units is None and other.units is None
        pairs[names] = Pair(one, other, _rows(one), after, reason, link.between, alone)
    return pairs, known


def _links(
    found: Mapping[str, WeightMatrix], at: Mapping[Node, list[str]], paths: FeaturePaths
) -> tuple[dict[tuple[str, str], Link], dict[str, int]]:
    """(first, second) -> one of their links, and how many uses each weight feeds."""
    links: dict[tuple[str, str], Link] = {}
    fed = dict.fromkeys(found, 0)
    for name, other in found.items():
        for reading in other.readings:
            for operand, value in enumerate(reading.use.node.next_functions):
                if operand == reading.use.operand or value[0] is None:
                    continue
                for source in paths.sources([value]):
                    for before in at.get(source, []):
                        if found[before].role in ("q", "k") and found[before].units is not None:
                            continue  # of a fused projection only the values go on as features
                        fed[before] += 1
                        if (before, name) not in links:
                            first = next(r for r in found[before].readings if r.use.node is source)
                            between = frozenset(paths.between([value], source))
                            links[before, name] = Link(first, reading, value, between)
    return links, fed


def _other_uses(chunk: Chunk, found: Mapping[str, WeightMatrix]) -> Iterator[Node]:
    """Ops that multiply by a weight which is no linear map: nothing behind them follows directly."""
    graph = chunk.graph
    assert graph is not None
    known = {name for one in found.values() for name in one.parameters}
    for name, uses in chunk.uses.items():
        if name in known:
            continue
        yield from (reading.use.node for reading in uses.readings if isinstance(reading.form, Outer))
        if uses.fallback_reason is not None and chunk.parameters[name].dim() > 1:
            stack = [edge.consumer for edge in graph.consumers.get(graph.leaves[name], ())]
            while stack:
                node = stack.pop()
                if node.name() in REARRANGEMENTS:
                    stack += [edge.consumer for edge in graph.consumers.get(node, ())]
                else:
                    yield node


def _rows(one: WeightMatrix) -> Tensor:
    """W with one row for each channel."""
    return one.weight.reshape(len(one.weight) // one.grad_taps, -1)


def _columns(one: WeightMatrix) -> Tensor:
    """U with one column for each channel: (outputs * taps, channels)."""
    parts = one.weight.reshape(len(one.weight), -1, one.row_taps)
    return parts.transpose(1, 2).reshape(-1, parts.shape[1])


def _matched(
    chunk: Chunk, one: WeightMatrix, other: WeightMatrix, link: Link, paths: FeaturePaths
) -> tuple[Tensor | None, str]:
    channels, columns = len(_rows(one)), _columns(other)
    graph = chunk.graph
    assert graph is not None
    if columns.shape[1] == channels and all(_keeps_channels(graph, node, channels) for node in link.between):
        return columns, ""
    try:
        origin = _origins(graph, one, columns.shape[1], link, paths)
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


_ENTRY_BY_ENTRY = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Abs",
        "Add",
        "Alias",
        "AvgPool1D",
        "AvgPool2D",
        "Clamp",
        "ClampMin",
        "Clone",
        "CudnnBatchNorm",
        "Div",
        "Elu",
        "Erf",
        "Exp",
        "FusedRmsNorm",
        "Gelu",
        "Hardsigmoid",
        "Hardswish",
        "Hardtanh",
        "LeakyRelu",
        "LogSigmoid",
        "MaxPool2DWithIndices",
        "Mul",
        "NativeBatchNorm",
        "NativeDropout",
        "NativeGroupNorm",
        "NativeLayerNorm",
        "Neg",
        "Pow",
        "Prelu",
        "Relu",
        "Rsqrt",
        "Sigmoid",
        "Silu",
        "Softplus",
        "Sqrt",
        "Sub",
        "Tanh",
        "Threshold",
        "ToCopy",
    )
    for number in range(3)
)


_NORMS = frozenset(["NativeLayerNormBackward0", "NativeGroupNormBackward0", "FusedRmsNormBackward0"])


def _keeps_channels(graph: Graph, node: Node, channels: int) -> bool:
    """Whether an op surely leaves every channel where it is; norms take away means, and leave it there too."""
    if node.name() in _ENTRY_BY_ENTRY:
        return True
    if node.name().startswith(("View", "UnsafeView", "ReshapeAlias")):
        child, number = node.next_functions[0]
        return graph.output_shape((node, 0))[-1] == graph.output_shape((child, number))[-1] == channels
    return False


def _origins(graph: Graph, one: WeightMatrix, inputs: int, link: Link, paths: FeaturePaths) -> Tensor | None:
    """For every input channel of the second weight the output channel of the first it depends on; negative for none.

    None if one depends on several. The channels whose number has a certain binary digit are moved together.
    """
    count = len(_rows(one))
    units = torch.arange(count, device=one.weight.device) if one.units is None else one.units
    axis = _channel_axis(link.second, graph.output_shape(link.value), inputs)
    tracer = ChannelTracer(graph, link, axis, paths)
    numbers = torch.arange(count, device=units.device)
    codes = torch.zeros(inputs, dtype=torch.long, device=units.device)
    sizes = []
    for digit in range(max(1, (count - 1).bit_length())):
        ones = ((numbers >> digit) & 1).bool()
        by_ones, by_zeros = tracer.of(units[ones]), tracer.of(units[~ones])
        sizes.append(by_ones + by_zeros)
        # A norm moves all channels a little with each of them; what moves one channel alone moves it far more.
        if bool(((by_ones <= 2 * by_zeros) & (by_zeros <= 2 * by_ones) & (sizes[-1] > 0)).any()):
            return None
        codes += (by_ones > by_zeros).long() << digit
    alive = torch.stack(sizes).amax(0) > 0
    return _completed(torch.where(alive, codes, -1), tracer.foreign() & ~alive, count)


def _is_image(form: Form) -> bool:
    return isinstance(form, Outer) and form.linear_map is not None and form.linear_map.channels_second


def _channel_axis(reading: Reading, shape: torch.Size, channels: int) -> int:
    """Where the channels of an op's input or output lie: second in images, last in rows of matrix products."""
    form = reading.form
    axis = 1 if _is_image(form) else len(shape) - 1
    if shape[axis] != channels:
        raise ValueError(f"no axis of {tuple(shape)} holds {channels} channels")
    return axis


class ChannelTracer:
    """How far the channels of a value move when units of ops before it do: J v, by two backward passes."""

    def __init__(self, graph: Graph, link: Link, axis: int, paths: FeaturePaths) -> None:
        self._graph, self._link, self._axis, self._paths = graph, link, axis, paths
        shape, dtype = graph.output_shape(link.value), graph.output_dtype(link.value)
        self._device = next(iter(graph.leaves.values())).variable.device
        self._cotangent = torch.zeros(shape, dtype=dtype, device=self._device, requires_grad=True)
        self._pulled = self._pull([link.first.use.node])[0]

    def of(self, units: Tensor) -> Tensor:
        """When these units of the first op move: (channels,)."""
        assert self._pulled is not None
        step = _random(self._pulled)
        first = self._link.first
        axis = 1 if _is_image(first.form) else step.dim() - 1
        chosen = torch.zeros(step.shape[axis], dtype=torch.bool, device=step.device)
        chosen[units] = True
        return self._pushed([self._pulled], [(step.movedim(axis, -1) * chosen).movedim(-1, axis)])

    def foreign(self) -> Tensor:
        """Which channels move when all other ops do that feed the second."""
        first = self._link.first.use.node
        others = [node for node in self._paths.sources([self._link.value]) if node is not first]
        pulled = [g for g in self._pull(others) if g is not None] if others else []
        if not pulled:
            return torch.zeros(self._cotangent.shape[self._axis], dtype=torch.bool, device=self._device)
        return self._pushed(pulled, [_random(g) for g in pulled]) > 0

    def _pull(self, nodes: Collection[Node]) -> tuple[Tensor | None, ...]:
        with _cut(self._paths.stops, nodes, self._link.between):
            return torch.autograd.grad(
                [GradientEdge(*self._link.value)],
                [GradientEdge(node, 0) for node in nodes],
                [self._cotangent],
                create_graph=True,
                allow_unused=True,
            )

    def _pushed(self, pulled: list[Tensor], steps: list[Tensor]) -> Tensor:
        (moved,) = torch.autograd.grad(pulled, self._cotangent, steps, retain_graph=True)
        return moved.detach().double().square().movedim(self._axis, -1).flatten(0, -2).sum(0).sqrt()


def _random(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator("cpu").manual_seed(0)).to(like)


@contextmanager
def _cut(stops: Collection[Node], asked: Collection[Node], between: Collection[Node]) -> Iterator[None]:
    """Nothing passes other weights, since what lies behind them comes by another way; norms pass everything as it is,
    though they take a mean away that mixes all channels."""

    def nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    def unchanged(
        gradients: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        return (arrived[0], *(None if g is None else torch.zeros_like(g) for g in gradients[1:]))

    handles = [node.register_prehook(nothing) for node in stops if node not in asked]
    handles += [node.register_hook(unchanged) for node in between if node.name() in _NORMS]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _completed(origin: Tensor, foreign: Tensor, channels: int) -> Tensor:
    """Inputs that did not move (dead units) get the channel they have in the regular order that fits all others."""
    inputs, unknown = len(origin), origin < 0
    if not bool(unknown.any()) or bool(unknown.all()):
        return origin
    place = torch.arange(inputs, device=origin.device)
    if inputs % channels == 0 and not bool(foreign.any()):
        repeats = inputs // channels
        for group in (d for d in range(1, channels + 1) if channels % d == 0):
            # (groups, repeats, group): 1 is flattened channels, `channels` is channels last, between them shared heads
            regular = place // (group * repeats) * group + place % group
            if bool((unknown | (origin == regular)).all()):
                return regular
    shift = (place - origin)[~unknown]
    if bool((shift == shift[0]).all()):  # one piece of a concatenation
        inside = (place >= shift[0]) & (place < shift[0] + channels) & unknown & ~foreign
        return torch.where(inside, place - shift[0], origin)
    return origin
