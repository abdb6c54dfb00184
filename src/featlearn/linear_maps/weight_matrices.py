"""Weights as the linear maps that the forward pass applied: h = W x for the rows x of every sample and position.

They are found from the uses of parameters, not from modules: a fused attention weight that a layer cuts into
pieces gives several matrices, a layer called twice gives one with more rows, a normalized weight enters with its value.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.contraction.factors import Factors, matrix_view
from featlearn.gradients.captured import Chunk
from featlearn.graph.attention_paths import attentions, nearest
from featlearn.graph.graph import Node, backward
from featlearn.ops import Outer
from featlearn.ops.reading import Reading


@dataclass(frozen=True)
class WeightMatrix:
    """One weight matrix and all the places where the forward pass applied it."""

    layer: str
    """`named_modules()` name of the first owner of its parameters."""
    parameters: tuple[str, ...]
    weight: Tensor
    """(outputs, inputs), float64; the blocks of a grouped layer stand on the diagonal."""
    readings: tuple[Reading, ...]
    blocks: int = 1
    row_taps: int = 1
    """How many neighboring inputs belong to one channel (the kernel's area of a convolution)."""
    grad_taps: int = 1
    """The same for outputs (transposed convolutions)."""
    plain: bool = True
    """Whether the weight is the parameter itself, perhaps rearranged, and not made from it."""
    role: str | None = None
    """`"q"`, `"k"` or `"v"` for what enters attention as queries, keys or values."""
    units: Tensor | None = None
    """Which outputs of the op these are, where it is one part of a fused projection."""

    @property
    def positions(self) -> int:
        """How many rows each sample has."""
        return sum(reading.form.positions for reading in self.readings if isinstance(reading.form, Outer))


@dataclass(frozen=True)
class WeightMatrices:
    """All weight matrices of a network by name, and the weights that are none: parameter -> reason."""

    found: Mapping[str, WeightMatrix]
    left_out: Mapping[str, str]
    roles: Mapping[tuple[str, ...], Sequence["Parts"]]


Parts = Mapping[str, Tensor]
"""Role in attention -> which of an op's units have it; empty where they have none."""


def weight_matrices(chunk: Chunk, like: WeightMatrices | None = None) -> WeightMatrices:
    """Every weight that multiplies rows in the forward pass of this chunk.

    `like`: what another chunk of the same network has, whose roles in attention are taken over.
    """
    whole, left_out = _whole(chunk)
    roles = _roles(chunk, whole) if like is None else like.roles
    layers: dict[str, list[WeightMatrix]] = defaultdict(list)
    for parameters in sorted(whole, key=lambda names: [*chunk.parameters].index(names[0])):
        known = roles.get(parameters, ())
        for number, one in enumerate(whole[parameters]):
            layers[one.layer] += _taken_apart(one, known[number] if number < len(known) else {})
    named: dict[str, WeightMatrix] = {}
    for layer, same in layers.items():
        named |= _named(layer, same, named)
    return WeightMatrices(named, left_out, roles)


Whole = dict[tuple[str, ...], list[WeightMatrix]]
"""Parameters -> the weights that are made from them."""


def _whole(chunk: Chunk) -> tuple[Whole, dict[str, str]]:
    """Weights before fused ones are taken apart, and parameters that are left out."""
    owners: dict[int, list[str]] = defaultdict(list)
    readings: dict[int, Reading] = {}
    left_out: dict[str, str] = {}
    for name, uses in chunk.uses.items():
        if uses.fallback_reason is not None and _is_matrix(chunk.parameters[name]):
            left_out[name] = uses.fallback_reason
        for reading in uses.readings if uses.fallback_reason is None else ():
            owners[id(reading)].append(name)
            readings[id(reading)] = reading
    whole: Whole = defaultdict(list)
    keys: dict[tuple[str, ...], list[object]] = defaultdict(list)
    for number, reading in readings.items():
        names = tuple(sorted(owners[number], key=[*chunk.parameters].index))
        single = _weight_matrix(chunk, names, reading)
        if isinstance(single, str):
            left_out |= {name: single for name in names if _is_matrix(chunk.parameters[name])}
        elif single is not None:
            _place(whole[names], keys[names], single, _key(chunk, names, reading))
    for name, uses in chunk.uses.items():
        used = any(name in names for names in whole)
        if uses.fallback_reason is None and not used and name not in left_out and _is_matrix(chunk.parameters[name]):
            left_out[name] = "its rules give gradients directly: it is added or multiplied entry by entry, or a table"
    kept = {names: same for names, same in whole.items() if not left_out.keys() & set(names)}
    return kept, left_out


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _layer(parameter: str) -> str:
    """The module that owns a parameter; what torch's parametrizations put in between is no layer."""
    return re.sub(r"(^|\.)parametrizations\.\w+$", "", parameter.rpartition(".")[0])


def _key(chunk: Chunk, names: tuple[str, ...], reading: Reading) -> object:
    """Equal for two uses of one weight: their orientation, and for a weight that is made from parameters how it is."""
    form = reading.form
    assert isinstance(form, Outer)
    where = chunk.uses[names[0]].matrix_view
    if where is not None:
        return form.rows_first != where.flipped[reading.value], where.scales[reading.value]
    # The gradient of one fixed combination of its entries: other entries, or other functions of them, have another.
    graph = chunk.graph
    assert graph is not None
    shape, dtype = graph.output_shape(reading.value), graph.output_dtype(reading.value)
    generator = torch.Generator("cpu").manual_seed(0)
    mixture = torch.randn(shape, generator=generator).to(chunk.outputs.device, dtype)
    edge = GradientEdge(*reading.value)
    gradients = backward([edge], [chunk.parameters[name] for name in names], [mixture])
    bits = [b"" if g is None else g.detach().double().cpu().numpy().tobytes() for g in gradients]
    return (form.rows_first, *bits)


def _place(same: list[WeightMatrix], keys: list[object], new: WeightMatrix, key: object) -> None:
    """A weight applied several times is one matrix."""
    if key in keys:
        number = keys.index(key)
        same[number] = replace(same[number], readings=(*same[number].readings, *new.readings))
    else:
        same.append(new)
        keys.append(key)


def _weight_matrix(chunk: Chunk, names: tuple[str, ...], reading: Reading) -> WeightMatrix | str | None:
    """One use as a linear map; a reason if it cannot be one, None for what is no matrix product at all."""
    form = reading.form
    if not isinstance(form, Outer):
        return None
    if form.indexed:
        return "rows of it are looked up, as in an embedding table"
    if form.linear_map is None:
        return f"the rule for {reading.use.node.name()} declares no LinearMap"
    layers = sorted({_layer(name) for name in names})
    if len(layers) > 1:
        return f"the weight is made from parameters of several layers: {', '.join(layers)}"
    operand, where = form.linear_map.weight, chunk.uses[names[0]].matrix_view
    plain = where is not None and where.scales[reading.value] == 1.0
    if operand is None:
        operand = _rearranged(chunk, names, reading)
    if operand is None:
        return "the weight is computed from its parameters, and the op has not kept it"
    if form.linear_map.weight is not None and operand.shape != reading.use.shape:
        given, expected = tuple(operand.shape), tuple(reading.use.shape)
        return f"the rule for {reading.use.node.name()} declares a weight of shape {given}, expected {expected}"
    sizes = (form.row_size, form.grad_size) if form.rows_first else (form.grad_size, form.row_size)
    blocks = operand.detach().double().reshape(form.blocks, *sizes)
    matrix = torch.block_diag(*(blocks.mT if form.rows_first else blocks))
    taps = form.linear_map.row_taps, form.linear_map.grad_taps
    return WeightMatrix(layers[0], names, matrix, (reading,), form.blocks, *taps, plain)


def _rearranged(chunk: Chunk, names: tuple[str, ...], reading: Reading) -> Tensor | None:
    """The operand where it is the parameter itself, perhaps with its entries in another order."""
    where = chunk.uses[names[0]].matrix_view
    if len(names) > 1 or where is None:
        return None
    view = matrix_view(
        chunk.parameters[names[0]].detach(), Factors((), where.blocks, where.first, where.second, order=where.order)
    )
    view = where.scales[reading.value] * view
    return view.mT if where.flipped[reading.value] else view


def _roles(chunk: Chunk, whole: Whole) -> dict[tuple[str, ...], list[Parts]]:
    """What the ops that feed attention give to it: gradients of queries, keys and values reach the units they use."""
    graph = chunk.graph
    assert graph is not None
    readings = {reading.use.node: reading for same in whole.values() for one in same for reading in one.readings}
    masks: dict[Node, dict[str, Tensor]] = defaultdict(dict)
    generator = torch.Generator("cpu").manual_seed(0)
    for attention in attentions(graph, readings.keys()):
        for role, value in (("q", attention.q), ("k", attention.k), ("v", attention.v)):
            nodes = nearest(value, readings.keys())
            if not nodes:
                continue
            shape, dtype = graph.output_shape(value), graph.output_dtype(value)
            cotangent = torch.randn(shape, generator=generator).to(chunk.outputs.device, dtype)
            edges = [GradientEdge(node, 0) for node in nodes]
            for node, gradient in zip(nodes, backward([GradientEdge(*value)], edges, [cotangent]), strict=True):
                form = readings[node].form
                assert isinstance(form, Outer)
                if gradient is not None:
                    used = (form.grads(gradient.detach()).flatten(2) != 0).flatten(0, 1).any(0)
                    masks[node][role] = masks[node][role] | used if role in masks[node] else used
    return {names: [_parts(one, masks) for one in same] for names, same in whole.items()}


def _parts(one: WeightMatrix, masks: Mapping[Node, Parts]) -> Parts:
    """The roles of a weight's units, if it has the same ones wherever it is applied and every unit has just one."""
    found = [masks.get(reading.use.node, {}) for reading in one.readings]
    if not found[0] or any(mask.keys() != found[0].keys() for mask in found):
        return {}
    count = torch.stack([*found[0].values()]).sum(0)
    if bool((count > 1).any()):
        return {}
    return found[0] if bool((count == 1).all()) else _completed(found[0])


def _completed(parts: Parts) -> Parts:
    """Units without a role (dead ones) get that of the regular order of heads and roles which fits all others."""
    roles, units = list(parts), len(next(iter(parts.values())))
    if units % len(roles):
        return {}
    place = torch.arange(units, device=next(iter(parts.values())).device)
    for size in (d for d in range(units // len(roles), 0, -1) if units // len(roles) % d == 0):
        turn = place // size % len(roles)  # (heads, roles, size)
        owners = [{role for role in roles if bool(parts[role][turn == number].any())} for number in range(len(roles))]
        if all(len(owner) == 1 for owner in owners) and len(set.union(*owners)) == len(roles):
            return {owner.pop(): turn == number for number, owner in enumerate(owners)}
    return {}


def _taken_apart(one: WeightMatrix, parts: Parts) -> list[WeightMatrix]:
    """A weight with its role, or the parts of a fused one."""
    if len(parts) <= 1:
        return [replace(one, role=next(iter(parts), None))]
    places = {role: mask.nonzero().flatten() for role, mask in parts.items()}
    return [
        replace(one, weight=one.weight[places[role]], role=role, units=places[role]) for role in "qkv" if role in places
    ]


def _named(layer: str, same: Sequence[WeightMatrix], taken: Mapping[str, WeightMatrix]) -> dict[str, WeightMatrix]:
    """One weight has its layer's name; several are told apart by role, by parameter, or else by number."""
    if len(same) == 1:
        return {layer: same[0]}
    roles = [one.role for one in same]
    if None not in roles and len(set(roles)) == len(roles):
        ordered = sorted(same, key=lambda one: "qkv".index(str(one.role)))
        return _numbered([(f"{layer}.{one.role}".lstrip("."), one) for one in ordered], taken)
    return _numbered([(one.parameters[0], one) for one in same], taken)


def _numbered(named: Sequence[tuple[str, WeightMatrix]], taken: Mapping[str, WeightMatrix]) -> dict[str, WeightMatrix]:
    """Equal names get a number each."""
    names = [name for name, _ in named]
    found: dict[str, WeightMatrix] = {}
    for name, one in named:
        number, unique = 0, name
        while names.count(name) > 1 or unique in taken:
            unique = f"{name}[{number}]"
            if unique not in found and unique not in taken:
                break
            number += 1
        found[unique] = one
    return found
