"""Consecutive weights of the executed forward pass, as matrices over their shared channels.

For two consecutive convolutions, U is (outputs * taps, channels) and W is (channels, inputs * taps). If ops between the
two may rearrange channels (flattening, concatenation, shuffling, heads that share keys), the source channel of each
input is determined by perturbing the outputs of the first weight.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.gradients.captured import Chunk
from featlearn.graph.attention_paths import FeaturePaths, attentions
from featlearn.graph.graph import REARRANGEMENTS, Graph, Node, Value
from featlearn.linear_maps.weight_matrices import WeightMatrices, WeightMatrix, weight_matrices
from featlearn.ops import Outer
from featlearn.ops.registry import Form, Reading


@dataclass(frozen=True)
class Pair:
    """Two weights: the output of the first is the input of the second."""

    first: WeightMatrix
    second: WeightMatrix
    before: Tensor
    """W, (k, n); rows are shared channels."""
    after: Tensor | None
    """U, (m, k); columns are shared channels; None if channels cannot be matched."""
    reason: str
    """Reason why channels cannot be matched."""
    between: frozenset[Node]
    """Ops between the two weights."""
    alone: bool
    """Whether the first feeds only the second, and the second is fed only by the first, once each."""
    traced: bool
    """Whether channels were matched by perturbing the outputs of the first."""


@dataclass(frozen=True)
class Link:
    """A use whose output is the input of another use."""

    first: Reading
    second: Reading
    value: Value
    """Input of the second use."""
    between: frozenset[Node]


def consecutive(chunk: Chunk) -> tuple[dict[tuple[str, str], Pair], WeightMatrices]:
    """Return all pairs of weights without other weights in between."""
    graph, matrices = chunk.graph, weight_matrices(chunk)
    assert graph is not None
    names_by_node: dict[Node, list[str]] = {}
    for name, matrix in matrices.by_name.items():
        for reading in matrix.readings:
            names_by_node.setdefault(reading.use.node, []).append(name)
    other_nodes = set(_other_uses(chunk, matrices.by_name)) - names_by_node.keys()
    paths = FeaturePaths(
        graph, names_by_node.keys() | other_nodes, attentions(graph, names_by_node.keys() | other_nodes)
    )
    links, use_counts = _links(matrices.by_name, names_by_node, paths)
    output_sources = paths.sources([graph.root])
    mixed_sources = {node for second_matrix in other_nodes for node in paths.sources(second_matrix.next_functions)}
    pairs: dict[tuple[str, str], Pair] = {}
    for names, link in links.items():
        matrix, second_matrix = (matrices.by_name[name] for name in names)
        exclusive = use_counts[names[0]] == 1 and sum(second == names[1] for _, second in links) == 1
        exclusive = exclusive and link.first.use.node not in output_sources and link.first.use.node not in mixed_sources
        exclusive = (
            exclusive and len(paths.sources([link.value])) == len(matrix.readings) == len(second_matrix.readings) == 1
        )
        traced = not _channels_match(graph, matrix, second_matrix, link)
        after, reason = (
            _traced_channels(graph, matrix, second_matrix, link, paths) if traced else (_columns(second_matrix), "")
        )
        exclusive = exclusive and matrix.units is None and second_matrix.units is None
        pairs[names] = Pair(
            first=matrix,
            second=second_matrix,
            before=_rows(matrix),
            after=after,
            reason=reason,
            between=link.between,
            alone=exclusive,
            traced=traced,
        )
    return pairs, matrices


def _links(
    matrices: Mapping[str, WeightMatrix], names_by_node: Mapping[Node, list[str]], paths: FeaturePaths
) -> tuple[dict[tuple[str, str], Link], dict[str, int]]:
    """Return (first, second) -> a link between them, and the number of uses each weight feeds."""
    links: dict[tuple[str, str], Link] = {}
    use_counts = dict.fromkeys(matrices, 0)
    for name, second_matrix in matrices.items():
        for reading in second_matrix.readings:
            for operand, value in enumerate(reading.use.node.next_functions):
                if operand == reading.use.operand or value[0] is None:
                    continue
                for source in paths.sources([value]):
                    for first_name in names_by_node.get(source, []):
                        if matrices[first_name].role in ("q", "k") and matrices[first_name].units is not None:
                            continue  # only the values of a fused projection continue as features
                        use_counts[first_name] += 1
                        if (first_name, name) not in links:
                            first = next(r for r in matrices[first_name].readings if r.use.node is source)
                            between = frozenset(paths.between([value], source))
                            links[first_name, name] = Link(first, reading, value, between)
    return links, use_counts


def _other_uses(chunk: Chunk, matrices: Mapping[str, WeightMatrix]) -> Iterator[Node]:
    """Yield ops that multiply by a weight that is not a linear map, which interrupt a sequence."""
    graph = chunk.graph
    assert graph is not None
    names = {name for matrix in matrices.values() for name in matrix.parameters}
    for name, uses in chunk.uses.items():
        if name in names:
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


def _rows(matrix: WeightMatrix) -> Tensor:
    """Return W with a row per channel."""
    return matrix.weight.reshape(len(matrix.weight) // matrix.grad_taps, -1)


def _columns(matrix: WeightMatrix) -> Tensor:
    """Return U with a column per channel: (outputs * taps, channels)."""
    parts = matrix.weight.reshape(len(matrix.weight), -1, matrix.row_taps)
    return parts.transpose(1, 2).reshape(-1, parts.shape[1])


def _channels_match(graph: Graph, first: WeightMatrix, second: WeightMatrix, link: Link) -> bool:
    """Return whether each column of the second is known to belong to the row of the first at the same place."""
    channels = len(_rows(first))
    same = _columns(second).shape[1] == channels
    return same and all(_keeps_channels(graph, node, channels) for node in link.between)


def _traced_channels(
    graph: Graph, first: WeightMatrix, second: WeightMatrix, link: Link, paths: FeaturePaths
) -> tuple[Tensor | None, str]:
    """Match channels by perturbing the outputs of the first; return U, or None and the reason."""
    channels, columns = len(_rows(first)), _columns(second)
    try:
        origin = _origins(graph, first, columns.shape[1], link, paths)
    except Exception as error:  # ops without a second derivative, shapes without a channel axis
        return None, f"the channels between them cannot be traced: {type(error).__name__}: {error}"
    if origin is None:
        return None, "an input of the second mixes several outputs of the first"
    if int(origin.max()) < 0:
        return None, "no input of the second depends on the first"
    # Stack the columns of each channel, and pad channels with fewer columns by zeros.
    slots = [(origin == channel).nonzero().flatten() for channel in range(channels)]
    depth = max(len(slot) for slot in slots)
    stacked = columns.new_zeros(depth, len(columns), channels)
    for channel, slot in enumerate(slots):
        stacked[: len(slot), :, channel] = columns[:, slot].mT
    return stacked.flatten(0, 1), ""


_ENTRY_BY_ENTRY_OPS = """
    Abs Add Alias AvgPool1D AvgPool2D Clamp ClampMin Clone CudnnBatchNorm Div Elu Erf Exp FusedRmsNorm Gelu
    Hardsigmoid Hardswish Hardtanh LeakyRelu LogSigmoid MaxPool2DWithIndices Mul NativeBatchNorm NativeDropout
    NativeGroupNorm NativeLayerNorm Neg Pow Prelu Relu Rsqrt Sigmoid Silu Softplus Sqrt Sub Tanh Threshold
    ToCopy
"""
_ENTRY_BY_ENTRY = frozenset(f"{name}Backward{number}" for name in _ENTRY_BY_ENTRY_OPS.split() for number in range(3))
_NORMS = frozenset(["NativeLayerNormBackward0", "NativeGroupNormBackward0", "FusedRmsNormBackward0"])


def _keeps_channels(graph: Graph, node: Node, channels: int) -> bool:
    """Return whether an op is known to preserve the position of every channel, as norms do."""
    if node.name() in _ENTRY_BY_ENTRY:
        return True
    if node.name().startswith(("View", "UnsafeView", "ReshapeAlias")):
        child, number = node.next_functions[0]
        return graph.output_shape((node, 0))[-1] == graph.output_shape((child, number))[-1] == channels
    return False


def _origins(graph: Graph, first: WeightMatrix, inputs: int, link: Link, paths: FeaturePaths) -> Tensor | None:
    """Return, per input channel of the second weight, the output channel of the first it depends on; -1 for none.

    The result is None if an input depends on several outputs. Channels are perturbed together by binary digits of their
    index.
    """
    count = len(_rows(first))
    units = torch.arange(count, device=first.weight.device) if first.units is None else first.units
    axis = _channel_axis(link.second, graph.output_shape(link.value), inputs)
    tracer = ChannelTracer(graph, link, axis, paths)
    numbers = torch.arange(count, device=units.device)
    codes = torch.zeros(inputs, dtype=torch.long, device=units.device)
    sizes = []
    for digit in range(max(1, (count - 1).bit_length())):
        ones = ((numbers >> digit) & 1).bool()
        by_ones, by_zeros = tracer.of(units[ones]), tracer.of(units[~ones])
        sizes.append(by_ones + by_zeros)
        # Norms move all channels a little; a direct dependence moves a channel much more.
        if bool(((by_ones <= 2 * by_zeros) & (by_zeros <= 2 * by_ones) & (sizes[-1] > 0)).any()):
            return None
        codes += (by_ones > by_zeros).long() << digit
    alive = torch.stack(sizes).amax(0) > 0
    return _fill_dead_channels(torch.where(alive, codes, -1), tracer.foreign() & ~alive, count)


def _is_image(form: Form) -> bool:
    return isinstance(form, Outer) and form.linear_map is not None and form.linear_map.channels_second


def _channel_axis(reading: Reading, shape: torch.Size, channels: int) -> int:
    """Return the channel axis of an op's input or output: 1 in images, last in rows of matrix products."""
    form = reading.form
    axis = 1 if _is_image(form) else len(shape) - 1
    if shape[axis] != channels:
        raise ValueError(f"no axis of {tuple(shape)} holds {channels} channels")
    return axis


class ChannelTracer:
    """Measure how far channels of a value move with units of earlier ops: J v, by two backward passes."""

    def __init__(self, graph: Graph, link: Link, axis: int, paths: FeaturePaths) -> None:
        self._graph, self._link, self._axis, self._paths = graph, link, axis, paths
        shape, dtype = graph.output_shape(link.value), graph.output_dtype(link.value)
        self._device = next(iter(graph.leaves.values())).variable.device
        self._cotangent = torch.zeros(shape, dtype=dtype, device=self._device, requires_grad=True)
        self._pullback = self._pull([link.first.use.node])[0]

    def of(self, units: Tensor) -> Tensor:
        """Return how far channels move with these units of the first op: (channels,)."""
        assert self._pullback is not None
        step = _random(self._pullback)
        first = self._link.first
        axis = 1 if _is_image(first.form) else step.dim() - 1
        mask = torch.zeros(step.shape[axis], dtype=torch.bool, device=step.device)
        mask[units] = True
        return self._push([self._pullback], [(step.movedim(axis, -1) * mask).movedim(-1, axis)])

    def foreign(self) -> Tensor:
        """Return which channels move with the other ops that feed the second."""
        first = self._link.first.use.node
        others = [node for node in self._paths.sources([self._link.value]) if node is not first]
        pulled = [g for g in self._pull(others) if g is not None] if others else []
        if not pulled:
            return torch.zeros(self._cotangent.shape[self._axis], dtype=torch.bool, device=self._device)
        return self._push(pulled, [_random(g) for g in pulled]) > 0

    def _pull(self, nodes: Collection[Node]) -> tuple[Tensor | None, ...]:
        with _isolate_path(self._paths.stops, nodes, self._link.between):
            return torch.autograd.grad(
                [GradientEdge(*self._link.value)],
                [GradientEdge(node, 0) for node in nodes],
                [self._cotangent],
                create_graph=True,
                allow_unused=True,
            )

    def _push(self, pulled: list[Tensor], steps: list[Tensor]) -> Tensor:
        (movement,) = torch.autograd.grad(pulled, self._cotangent, steps, retain_graph=True)
        return movement.detach().double().square().movedim(self._axis, -1).flatten(0, -2).sum(0).sqrt()


def _random(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator("cpu").manual_seed(0)).to(like)


@contextmanager
def _isolate_path(stops: Collection[Node], targets: Collection[Node], between: Collection[Node]) -> Iterator[None]:
    """Block gradients at other weights, and pass them unchanged through norms, whose means mix all channels."""

    def nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else torch.zeros_like(g) for g in gradients)

    def unchanged(
        gradients: tuple[Tensor | None, ...], output_gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        return (output_gradients[0], *(None if g is None else torch.zeros_like(g) for g in gradients[1:]))

    handles = [node.register_prehook(nothing) for node in stops if node not in targets]
    handles += [node.register_hook(unchanged) for node in between if node.name() in _NORMS]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _fill_dead_channels(origin: Tensor, foreign: Tensor, channels: int) -> Tensor:
    """Assign inputs that did not move (dead units) the channel of the regular order that fits all others."""
    inputs, unknown = len(origin), origin < 0
    if not bool(unknown.any()) or bool(unknown.all()):
        return origin
    index = torch.arange(inputs, device=origin.device)
    if inputs % channels == 0 and not bool(foreign.any()):
        repeats = inputs // channels
        for group in (d for d in range(1, channels + 1) if channels % d == 0):
            # (groups, repeats, group): group 1 is flattened channels, `channels` is channels last, otherwise shared
            # heads
            regular = index // (group * repeats) * group + index % group
            if bool((unknown | (origin == regular)).all()):
                return regular
    shift = (index - origin)[~unknown]
    if bool((shift == shift[0]).all()):  # a part of a concatenation
        inside = (index >= shift[0]) & (index < shift[0] + channels) & unknown & ~foreign
        return torch.where(inside, index - shift[0], origin)
    return origin
