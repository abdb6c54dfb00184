"""How much the representations inside a network changed between two of its states."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from featlearn.audited_model import AuditedModel, Settings
from featlearn.contraction.windows import Windows
from featlearn.distributed.sharded_model import whole_weights
from featlearn.errors import InputValueError
from featlearn.gradients.captured import Chunk
from featlearn.graph.graph import Graph, Node, build_graph
from featlearn.linalg.estimate import Estimate
from featlearn.linearization.function_calls import RecordedCalls
from featlearn.linearization.link import GATING, LINEAR, has_hidden_units, op_name
from featlearn.network.checks import unwrapped
from featlearn.network.copies import network_at
from featlearn.network.inputs import Inputs, batch_size
from featlearn.ops import Outer
from featlearn.ops.registry import Reading
from featlearn.planning.memory import refuse_over_budget, weight_bytes
from featlearn.signatures import name_keywords

FOLDS = 16
"""Groups of samples that are left out in turn for a standard error."""
FEW = 5
"""Samples that show which masks depend on the parameters."""
SAMPLES_AT_ONCE = 64
"""Samples whose graph is held at a time."""
ROUNDING = 4.0
"""Rounding error of a feature, in units of machine epsilon."""
LOW_PRECISION = (torch.float16, torch.bfloat16)
LAST = "<last>"
"""Name of what enters the last layer, beside the names of layers."""


@dataclass(frozen=True, eq=False)
class FeatureChange:
    """Change of a representation between two states, centered over the samples."""

    relative: Estimate
    """|h - h0| / |h0|. The error holds that of other samples of the same kind and that of rounding."""
    cka: float
    """Linear CKA of h and h0: 1 for representations that are equal up to rotation and scale."""
    rounding: float
    """Size of a relative change that is rounding."""
    reason: str = ""
    """Why the numbers are nan."""

    def __float__(self) -> float:
        return float(self.relative)


Representations = Mapping[str, Tensor]
"""Layer -> (P, N), what enters it, positions flattened; `LAST` -> what enters the last one."""


State = Mapping[str, Tensor]
"""A state dict."""


@overload
def features_moved(
    model: nn.Module, x: Inputs, initial: State, *, by: Literal["network"] = "network", **settings: Unpack[Settings]
) -> FeatureChange: ...
@overload
def features_moved(
    model: nn.Module, x: Inputs, initial: State, *, by: Literal["layer"], **settings: Unpack[Settings]
) -> dict[str, FeatureChange]: ...
@name_keywords()
def features_moved(
    model: nn.Module, x: Inputs, initial: State, *, by: str = "network", **settings: Unpack[Settings]
) -> FeatureChange | dict[str, FeatureChange]:
    """Measure how much the features of a network changed since an earlier state.

    The features are what the last weight matrix multiplies, trained or frozen. A linear model, and a network of which
    only the head was trained, have features that did not change. A network that learned features has features that did.
    Both states are run forward once, each with its own buffers.

    >>> change = fl.quantities.features_moved(model, x, initial)
    >>> float(change), change.cka  # 0.83, 0.41
    >>> fl.quantities.features_moved(model, x, initial, by="layer")["2"].cka  # what enters layer "2"

    Args:
        model: Module to measure, in eval mode.
        x: Batch with the sample axis first, at least 2 samples.
        initial: The `state_dict()` of an earlier state, cloned when it was taken.
        by: `"network"` for what enters the last layer, `"layer"` for what enters each layer with a weight matrix.
        **settings: As for `fl.ntk`, without `parameters` and `group`.

    Returns:
        Relative change and CKA. They are nan, with a reason, where no weight matrix comes last: where units are added
        up behind it without weights, and where the graph does not show what it multiplies.
    """
    return features_moved_of(AuditedModel(model, **settings), initial, x=x, by=by)  # type: ignore[call-overload,no-any-return]


@overload
def features_moved_of(
    audited: AuditedModel, initial: State, *, x: Inputs | None = None, by: Literal["network"] = "network"
) -> FeatureChange: ...
@overload
def features_moved_of(
    audited: AuditedModel, initial: State, *, x: Inputs | None = None, by: Literal["layer"]
) -> dict[str, FeatureChange]: ...
def features_moved_of(
    audited: AuditedModel, initial: State, *, x: Inputs | None = None, by: str = "network"
) -> FeatureChange | dict[str, FeatureChange]:
    """Measure how much the features changed since an earlier state: see `fl.quantities.features_moved`."""
    x = audited.inputs(x)
    if by not in ("network", "layer"):
        raise InputValueError(f"by={by!r}, expected 'network' or 'layer'")
    if batch_size(x) < 2:
        raise InputValueError("x has 1 sample, expected at least 2: features are centered over the samples")
    request, model = audited.request, unwrapped(audited.model)
    request.refuse("features_moved", "parameters", "group")
    refuse_over_budget(request.memory, weight_bytes(model), "a copy of the weights")
    with whole_weights(unwrapped(audited.model)):
        features = RepresentationReader(audited)
        changes = feature_changes(features.at(current_state(audited.model), x), features.at(initial, x))
    last = changes.pop(LAST)
    return last if by == "network" else changes


def current_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the model's state."""
    state = unwrapped(model).state_dict()
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def feature_changes(now: Representations, before: Representations) -> dict[str, FeatureChange]:
    """Compare the representations of two states, name by name."""
    names = [name for name in before if name in now and name != LAST]
    return {name: _change(now.get(name), before.get(name)) for name in (*names, LAST)}


class RepresentationReader:
    """Representations of one model in several states. The graph is audited once."""

    def __init__(self, audited: AuditedModel) -> None:
        self._model = audited.model
        self._trained = {name for name, p in unwrapped(audited.model).named_parameters() if p.requires_grad}
        low = any(p.dtype in LOW_PRECISION for p in audited.model.parameters())
        request = audited.request
        dtype = torch.float32 if request.dtype is None and low else request.dtype
        self._audited = AuditedModel(audited.model, replace(request, dtype=dtype))

    def at(self, state: Mapping[str, Any], x: Inputs, *, buffers: Mapping[str, Any] | None = None) -> Representations:
        """Return what enters the weight matrices in a state; `buffers` of another state may take the place of its own.

        It runs a copy in which frozen weights are trainable, for the graph to show them.
        """
        network = network_at(self._model, state)
        for parameter in network.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                if buffers is not None and name in buffers:
                    buffer.copy_(buffers[name])
        return _representations(self._audited.of_copy(network), x, self._trained)


def _representations(audited: AuditedModel, x: Inputs, trained: Set[str]) -> Representations:
    pieces: dict[str, list[Tensor]] = defaultdict(list)
    with audited.measuring([x]) as measurement:
        (batch,) = measurement.batches
        for begin in range(0, batch.samples, SAMPLES_AT_ONCE):
            chunk = measurement.chunk(batch, begin, min(begin + SAMPLES_AT_ONCE, batch.samples))
            for name, features in entering(chunk, trained).items():
                pieces[name].append(features)
    held = {name: parts for name, parts in pieces.items() if len({part.shape[1] for part in parts}) == 1}
    whole = {name: torch.cat(parts) for name, parts in held.items()}
    return {name: features for name, features in whole.items() if len(features) == batch.samples}


def entering(chunk: Chunk, trained: Set[str] = frozenset()) -> Representations:
    """Return layer -> (samples, N), the rows that its weight multiplied.

    `trained`: names of the trained parameters, if others are in the graph, too. A frozen copy of the network, as of
    `steer.scale_output`, has no last layer: its features cannot move.
    """
    layers: dict[str, list[Tensor]] = defaultdict(list)
    at: dict[Node, Tensor] = {}
    for name, uses in chunk.uses.items():
        for reading in uses.readings if uses.fallback_reason is None else ():
            if reading.use.node not in at and (rows := _rows(reading)) is not None:
                at[reading.use.node] = rows[: chunk.count]
                layers[_layer(name)].append(at[reading.use.node])
    last = _last_maps(chunk, at)
    if trained and chunk.graph is not None:
        below = chunk.graph.names_below
        last = [node for node in last if below[node] & trained] or last
    ordered = {layer: layers[layer] for name in chunk.parameters if (layer := _layer(name)) in layers}
    features = {layer: torch.cat(parts, 1) for layer, parts in ordered.items()}
    return features | ({LAST: torch.cat([at[node] for node in last], 1)} if last else {})


def _last_maps(chunk: Chunk, at: Mapping[Node, Tensor]) -> Sequence[Node]:
    """Return the linear maps that no other one follows; none where units are added up behind them."""
    graph = chunk.graph
    if graph is None:
        return []
    unread = {
        node
        for name, uses in chunk.uses.items()
        if uses.fallback_reason is not None and chunk.parameters[name].dim() > 1
        for node in _first_ops(graph, graph.leaves[name])
    }
    last: list[Node] = []
    after: set[Node] = set()
    stack = [graph.root[0]]
    while stack:
        node = stack.pop()
        if node in after or node not in graph.names_below or node in last:
            continue
        if node in at:
            last.append(node)
            continue
        if node in unread:
            return []
        after.add(node)
        stack += [child for child, _ in graph.inputs[node] if child is not None]
    after -= set(graph.leaves.values())
    if _adds_up_units(chunk, graph, after):
        return []
    return [node for node in last if not _is_adapter(graph, node, last, at)]


def _adds_up_units(chunk: Chunk, graph: Graph, after: set[Node]) -> bool:
    """Whether these ops are a layer without weights; where a mask decides that, a pass of a few samples shows it."""
    if has_hidden_units(graph, after):
        return True
    candidates = {node for node in after if op_name(graph.names[node]) in GATING}
    if not has_hidden_units(graph, after, candidates):
        return False
    recorded = RecordedCalls()
    outputs = chunk.batch.outputs(chunk.indices[:FEW], lambda inputs: recorded if inputs else nullcontext())
    again = build_graph(outputs, chunk.parameters)
    if again.structure.names != graph.structure.names:
        return True
    gated = {graph.order[again.number[node]] for node in recorded.gated_nodes() if node in again.number}
    return has_hidden_units(graph, after, gated)


def _is_adapter(graph: Graph, outer: Node, last: Sequence[Node], at: Mapping[Node, Tensor]) -> bool:
    """Whether a last map is the second of an adapter: the first multiplies what another last map multiplies."""
    stack, passed = [child for child, _ in graph.inputs[outer]], set[Node]()
    while stack:
        node = stack.pop()
        if node in at:
            return any(base is not outer and _equal(at[base], at[node]) for base in last)
        if node is not None and node not in passed and op_name(graph.names[node]) in LINEAR:
            passed.add(node)
            stack += [child for child, _ in graph.inputs[node]]
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _first_ops(graph: Graph, leaf: Node) -> list[Node]:
    return [edge.consumer for edge in graph.consumers.get(leaf, ())]


def _rows(reading: Reading) -> Tensor | None:
    """Return what the weight of one use multiplied, (samples, N); None for what is no linear map."""
    form = reading.form
    if not isinstance(form, Outer) or form.linear_map is None or form.indexed:
        return None
    rows = form.rows()
    values = rows.image if isinstance(rows, Windows) else rows
    return values.detach().flatten(1)


def _layer(parameter: str) -> str:
    """Return the module that owns a parameter, without what torch's parametrizations put in between."""
    return re.sub(r"(^|\.)parametrizations\.\w+$", "", parameter.rpartition(".")[0])


def _change(now: Tensor | None, before: Tensor | None) -> FeatureChange:
    unknown = Estimate(math.nan, math.nan, 1)
    if now is None or before is None:
        return FeatureChange(unknown, math.nan, math.nan, "no weight matrix is known to come last")
    if now.shape != before.shape:
        reason = f"the representation has {before.shape[1]} and {now.shape[1]} numbers per sample"
        return FeatureChange(unknown, math.nan, math.nan, reason)
    h, h0 = _centered(now), _centered(before)
    size = float(h0.norm())
    precision = torch.finfo(now.dtype).eps
    rounding = ROUNDING * precision * float(torch.maximum(now.abs(), before.abs()).double().norm())
    if size <= rounding:
        return FeatureChange(unknown, math.nan, math.nan, "the representation was the same for all samples")
    value = float((h - h0).norm()) / size
    error = math.hypot(_jackknife(h - h0, h0), rounding / size)
    return FeatureChange(Estimate(value, error, len(h)), _cka(h, h0), rounding / size)


def _centered(features: Tensor) -> Tensor:
    values = torch.view_as_real(features).flatten(1) if features.is_complex() else features
    return values - values.mean(0)


def _cka(h: Tensor, h0: Tensor) -> float:
    """Linear CKA of centered representations."""
    first, second = (h0 @ h0.mT).double(), (h @ h.mT).double()
    size = float(first.norm() * second.norm())
    return float((first * second).sum()) / size if size else math.nan


def _jackknife(difference: Tensor, start: Tensor) -> float:
    """Return the standard error of |difference| / |start| for other samples: groups are left out in turn."""
    samples = len(start)
    count = min(FOLDS, samples)
    if count < 3:
        return math.nan
    group = torch.arange(samples, device=start.device) % count
    left = samples - torch.bincount(group, minlength=count).double()

    def sizes(values: Tensor) -> Tensor:
        """Norms of the centered rows that are left."""
        sums = values.new_zeros(count, values.shape[1]).index_add_(0, group, values)
        squares = values.square().sum(1).double()
        rest = squares.sum() - squares.new_zeros(count).index_add_(0, group, squares)
        # Rows are centered, so that the sum of those left is minus the sum of the group.
        return (rest - sums.square().sum(1).double() / left).clamp(min=0.0).sqrt()

    values = sizes(difference) / sizes(start)
    return math.sqrt(float((values - values.mean()).square().sum()) * (count - 1) / count)
