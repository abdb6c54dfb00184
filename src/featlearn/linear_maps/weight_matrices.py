"""Weights as the linear maps of the forward pass: h = W x for the rows x of every sample and position.

Matrices come from uses of parameters, not modules. A fused attention weight gives several matrices, a layer called
twice gives a single matrix with more rows, and a normalized weight enters with its value.
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
from featlearn.ops.registry import Reading


@dataclass(frozen=True)
class WeightMatrix:
    """A weight matrix and all its uses in the forward pass."""

    layer: str
    """`named_modules()` name of the first owner of its parameters."""
    parameters: tuple[str, ...]
    weight: Tensor
    """(outputs, inputs), float64; block diagonal for grouped layers."""
    readings: tuple[Reading, ...]
    blocks: int = 1
    row_taps: int = 1
    """Number of adjacent inputs per channel (the kernel area of a convolution)."""
    grad_taps: int = 1
    """Number of adjacent outputs per channel (transposed convolutions)."""
    plain: bool = True
    """Whether the weight is the parameter, possibly rearranged, and not computed from it."""
    role: str | None = None
    """`"q"`, `"k"` or `"v"` for queries, keys, or values of attention."""
    units: Tensor | None = None
    """Output indices of the op, for a part of a fused projection."""

    @property
    def positions(self) -> int:
        """Number of rows per sample."""
        return sum(reading.form.positions for reading in self.readings if isinstance(reading.form, Outer))


@dataclass(frozen=True)
class WeightMatrices:
    """All weight matrices of a network by name."""

    by_name: Mapping[str, WeightMatrix]
    left_out: Mapping[str, str]
    """Parameters that are not linear maps -> reason."""
    roles: Mapping[tuple[str, ...], Sequence["Parts"]]


Parts = Mapping[str, Tensor]
"""Role in attention -> mask of an op's units; empty without roles."""


def weight_matrices(chunk: Chunk, like: WeightMatrices | None = None) -> WeightMatrices:
    """Return all weights that multiply rows in the forward pass of this chunk.

    `like` are the matrices of another chunk of the same network, whose attention roles are reused.
    """
    unsplit, left_out = _unsplit_weights(chunk)
    roles = _roles(chunk, unsplit) if like is None else like.roles
    layers: dict[str, list[WeightMatrix]] = defaultdict(list)
    for parameters in sorted(unsplit, key=lambda names: [*chunk.parameters].index(names[0])):
        parts = roles.get(parameters, ())
        for number, matrix in enumerate(unsplit[parameters]):
            layers[matrix.layer] += _split(matrix, parts[number] if number < len(parts) else {})
    named: dict[str, WeightMatrix] = {}
    for layer, layer_matrices in layers.items():
        named |= _name_matrices(layer, layer_matrices, named)
    return WeightMatrices(named, left_out, roles)


Unsplit = dict[tuple[str, ...], list[WeightMatrix]]
"""Parameters -> weights computed from them."""


def _unsplit_weights(chunk: Chunk) -> tuple[Unsplit, dict[str, str]]:
    """Return weights before splitting fused ones, and parameters that are not linear maps."""
    owners: dict[int, list[str]] = defaultdict(list)
    readings: dict[int, Reading] = {}
    left_out: dict[str, str] = {}
    for name, uses in chunk.uses.items():
        if uses.fallback_reason is not None and _is_matrix(chunk.parameters[name]):
            left_out[name] = uses.fallback_reason
        for reading in uses.readings if uses.fallback_reason is None else ():
            owners[id(reading)].append(name)
            readings[id(reading)] = reading
    whole: Unsplit = defaultdict(list)
    keys: dict[tuple[str, ...], list[object]] = defaultdict(list)
    for number, reading in readings.items():
        names = tuple(sorted(owners[number], key=[*chunk.parameters].index))
        matrix = _weight_matrix(chunk, names, reading)
        if isinstance(matrix, str):
            left_out |= {name: matrix for name in names if _is_matrix(chunk.parameters[name])}
        elif matrix is not None:
            _add_use(whole[names], keys[names], matrix, _key(chunk, names, reading))
    for name, uses in chunk.uses.items():
        used = any(name in names for names in whole)
        if uses.fallback_reason is None and not used and name not in left_out and _is_matrix(chunk.parameters[name]):
            left_out[name] = "its rules give gradients directly: it is added or multiplied elementwise, or a table"
    accepted = {names: matrices for names, matrices in whole.items() if not left_out.keys() & set(names)}
    return accepted, left_out


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _layer(parameter: str) -> str:
    """Return the module that owns a parameter, without torch's parametrization modules."""
    return re.sub(r"(^|\.)parametrizations\.\w+$", "", parameter.rpartition(".")[0])


def _key(chunk: Chunk, names: tuple[str, ...], reading: Reading) -> object:
    """Return a key that is equal for uses of the same weight: orientation, and how the weight is computed."""
    form = reading.form
    assert isinstance(form, Outer)
    view = chunk.uses[names[0]].matrix_view
    if view is not None:
        return form.rows_first != view.flipped[reading.value], view.scales[reading.value]
    # The gradient of a fixed random combination of its entries identifies the entries and their function.
    graph = chunk.graph
    assert graph is not None
    shape, dtype = graph.output_shape(reading.value), graph.output_dtype(reading.value)
    generator = torch.Generator("cpu").manual_seed(0)
    mixture = torch.randn(shape, generator=generator).to(chunk.outputs.device, dtype)
    edge = GradientEdge(*reading.value)
    gradients = backward([edge], [chunk.parameters[name] for name in names], [mixture])
    bits = [b"" if g is None else g.detach().double().cpu().numpy().tobytes() for g in gradients]
    return (form.rows_first, *bits)


def _add_use(matrices: list[WeightMatrix], keys: list[object], matrix: WeightMatrix, key: object) -> None:
    """Add a use; a weight applied several times is a single matrix."""
    if key in keys:
        number = keys.index(key)
        matrices[number] = replace(matrices[number], readings=(*matrices[number].readings, *matrix.readings))
    else:
        matrices.append(matrix)
        keys.append(key)


def _weight_matrix(chunk: Chunk, names: tuple[str, ...], reading: Reading) -> WeightMatrix | str | None:
    """Return a use as a linear map, a reason if it is not linear, or None if it is not a matrix product."""
    form = reading.form
    if not isinstance(form, Outer):
        return None
    if form.indexed:
        return "its rows are looked up, as in an embedding table"
    if form.linear_map is None:
        return f"the rule for {reading.use.node.name()} declares no LinearMap"
    layers = sorted({_layer(name) for name in names})
    if len(layers) > 1:
        return f"the weight is computed from parameters of several layers: {', '.join(layers)}"
    operand, view = form.linear_map.weight, chunk.uses[names[0]].matrix_view
    plain = view is not None and view.scales[reading.value] == 1.0
    if operand is None:
        operand = _rearranged(chunk, names, reading)
    if operand is None:
        return "the weight is computed from its parameters, and the op did not save it"
    if form.linear_map.weight is not None and operand.shape != reading.use.shape:
        declared, expected = tuple(operand.shape), tuple(reading.use.shape)
        return f"the rule for {reading.use.node.name()} declares a weight of shape {declared}, expected {expected}"
    sizes = (form.row_size, form.grad_size) if form.rows_first else (form.grad_size, form.row_size)
    blocks = operand.detach().double().reshape(form.blocks, *sizes)
    matrix = torch.block_diag(*(blocks.mT if form.rows_first else blocks))
    taps = form.linear_map.row_taps, form.linear_map.grad_taps
    return WeightMatrix(layers[0], names, matrix, (reading,), form.blocks, *taps, plain)


def _rearranged(chunk: Chunk, names: tuple[str, ...], reading: Reading) -> Tensor | None:
    """Return the operand if it is the parameter, possibly with rearranged entries."""
    layout = chunk.uses[names[0]].matrix_view
    if len(names) > 1 or layout is None:
        return None
    operand = matrix_view(
        chunk.parameters[names[0]].detach(), Factors((), layout.blocks, layout.first, layout.second, order=layout.order)
    )
    operand = layout.scales[reading.value] * operand
    return operand.mT if layout.flipped[reading.value] else operand


def _roles(chunk: Chunk, unsplit: Unsplit) -> dict[tuple[str, ...], list[Parts]]:
    """Determine roles of units by the gradients of queries, keys, and values of attention."""
    graph = chunk.graph
    assert graph is not None
    readings = {
        reading.use.node: reading for matrices in unsplit.values() for matrix in matrices for reading in matrix.readings
    }
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
    return {names: [_parts(matrix, masks) for matrix in matrices] for names, matrices in unsplit.items()}


def _parts(matrix: WeightMatrix, masks: Mapping[Node, Parts]) -> Parts:
    """Return the roles of a weight's units, if they are equal in all uses and unique per unit."""
    use_masks = [masks.get(reading.use.node, {}) for reading in matrix.readings]
    if not use_masks[0] or any(mask.keys() != use_masks[0].keys() for mask in use_masks):
        return {}
    count = torch.stack([*use_masks[0].values()]).sum(0)
    if bool((count > 1).any()):
        return {}
    return use_masks[0] if bool((count == 1).all()) else _fill_dead_units(use_masks[0])


def _fill_dead_units(parts: Parts) -> Parts:
    """Assign units without a role (dead units) the role of the regular order that fits all others."""
    roles, units = list(parts), len(next(iter(parts.values())))
    if units % len(roles):
        return {}
    index = torch.arange(units, device=next(iter(parts.values())).device)
    for size in (d for d in range(units // len(roles), 0, -1) if units // len(roles) % d == 0):
        role_index = index // size % len(roles)  # (heads, roles, size)
        owners = [
            {role for role in roles if bool(parts[role][role_index == number].any())} for number in range(len(roles))
        ]
        if all(len(owner) == 1 for owner in owners) and len(set.union(*owners)) == len(roles):
            return {owner.pop(): role_index == number for number, owner in enumerate(owners)}
    return {}


def _split(matrix: WeightMatrix, parts: Parts) -> list[WeightMatrix]:
    """Return a weight with its role, or the parts of a fused weight."""
    if len(parts) <= 1:
        return [replace(matrix, role=next(iter(parts), None))]
    indices = {role: mask.nonzero().flatten() for role, mask in parts.items()}
    return [
        replace(matrix, weight=matrix.weight[indices[role]], role=role, units=indices[role])
        for role in "qkv"
        if role in indices
    ]


def _name_matrices(
    layer: str, matrices: Sequence[WeightMatrix], used: Mapping[str, WeightMatrix]
) -> dict[str, WeightMatrix]:
    """Name a single weight like its layer, and several weights by role, parameter, or number."""
    if len(matrices) == 1:
        return {layer: matrices[0]}
    roles = [matrix.role for matrix in matrices]
    if None not in roles and len(set(roles)) == len(roles):
        ordered = sorted(matrices, key=lambda matrix: "qkv".index(str(matrix.role)))
        return _number_duplicates([(f"{layer}.{matrix.role}".lstrip("."), matrix) for matrix in ordered], used)
    return _number_duplicates([(matrix.parameters[0], matrix) for matrix in matrices], used)


def _number_duplicates(
    named: Sequence[tuple[str, WeightMatrix]], used: Mapping[str, WeightMatrix]
) -> dict[str, WeightMatrix]:
    """Append numbers to duplicate names."""
    names = [name for name, _ in named]
    result: dict[str, WeightMatrix] = {}
    for name, matrix in named:
        number, unique = 0, name
        while names.count(name) > 1 or unique in used:
            unique = f"{name}[{number}]"
            if unique not in result and unique not in used:
                break
            number += 1
        result[unique] = matrix
    return result
