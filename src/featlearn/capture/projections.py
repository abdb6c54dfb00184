"""Weights as the linear maps that the forward pass applied: h = W x for the rows x of every sample and position.

A projection is found from the uses of parameters, not from modules: a fused attention weight that a layer cuts into
pieces gives several, a layer called twice gives one with more rows, a normalised weight enters with its value.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.capture.graph import Node, backward
from featlearn.capture.snapshot import Snapshot
from featlearn.capture.succession import attentions, sources
from featlearn.capture.uses import Reading
from featlearn.linalg.factors import Factors, matrix_view
from featlearn.ops import Outer


@dataclass(frozen=True)
class Projection:
    """One weight matrix and all the places where the forward pass applied it."""

    layer: str
    """`named_modules()` name of the first owner of its parameters."""
    parameters: tuple[str, ...]
    weight: Tensor
    """(outputs, inputs), float64; the blocks of a grouped layer stand on the diagonal."""
    readings: tuple[Reading, ...]
    row_taps: int = 1
    """How many neighbouring inputs belong to one channel (the kernel's area of a convolution)."""
    grad_taps: int = 1
    """The same for outputs (transposed convolutions)."""
    role: str | None = None
    """`"q"`, `"k"` or `"v"` for what enters attention as queries, keys or values."""
    units: Tensor | None = None
    """Which outputs of the op these are, where it is one part of a fused projection."""

    @property
    def positions(self) -> int:
        """How many rows each sample has."""
        return sum(reading.form.positions for reading in self.readings if isinstance(reading.form, Outer))


@dataclass(frozen=True)
class Projections:
    """All projections of a network by name, and the weights that are none, with the reason."""

    found: Mapping[str, Projection]
    left_out: Mapping[str, str]


def projections(snapshot: Snapshot) -> Projections:
    """Every weight that multiplies rows in the forward pass of this chunk."""
    owners: dict[int, list[str]] = defaultdict(list)
    readings: dict[int, Reading] = {}
    left_out: dict[str, str] = {}
    for name, access in snapshot.access.items():
        if access.refusal is not None:
            if snapshot.parameters[name].dim() > 1:
                left_out[_layer(name)] = access.refusal
            continue
        for reading in access.uses.readings:
            owners[id(reading)].append(name)
            readings[id(reading)] = reading
    found: dict[str, list[Projection]] = defaultdict(list)
    for key, reading in readings.items():
        names = tuple(sorted(owners[key]))
        layers = {_layer(name) for name in names}
        layer = min(layers)
        if isinstance(reading.form, Outer) and reading.form.indexed:
            left_out[layer] = "its weight is an embedding table"
        elif isinstance(reading.form, Outer):
            single = _projection(snapshot, names, reading, reading.form)
            if len(layers) > 1:
                left_out[layer] = f"its weight is made of the parameters of several layers: {', '.join(sorted(layers))}"
            elif isinstance(single, str):
                left_out[layer] = single
            else:
                _place(found[layer], single)
    order = {name: place for place, name in enumerate(snapshot.parameters)}
    kept = {layer: same for layer, same in found.items() if layer not in left_out}
    roles = _roles(snapshot, [one for same in kept.values() for one in same])
    named: dict[str, Projection] = {}
    for layer in sorted(kept, key=lambda layer: order[kept[layer][0].parameters[0]]):
        named |= _named(layer, [part for one in kept[layer] for part in _parts(one, roles)])
    return Projections(named, left_out)


def _named(layer: str, same: Sequence[Projection]) -> dict[str, Projection]:
    """One projection has the name of its layer, several are told apart by their roles or else by their numbers."""
    if len(same) == 1:
        return {layer: same[0]}
    roles = [one.role for one in same]
    if None in roles or len(set(roles)) < len(roles):
        return {f"{layer}.{number}".lstrip("."): one for number, one in enumerate(same)}
    ordered = sorted(same, key=lambda one: "qkv".index(str(one.role)))
    return {f"{layer}.{one.role}".lstrip("."): one for one in ordered}


Roles = Mapping[Node, Mapping[str, Tensor]]
"""Op -> role in attention -> which of the op's units have it."""


def _roles(snapshot: Snapshot, found: Sequence[Projection]) -> Roles:
    """What the ops that feed attention give to it: gradients of queries, keys and values reach the units they use."""
    graph = snapshot.graph
    assert graph is not None
    readings = {reading.use.node: reading for one in found for reading in one.readings}
    masks: dict[Node, dict[str, Tensor]] = defaultdict(dict)
    generator = torch.Generator("cpu").manual_seed(0)
    for attention in attentions(graph):
        for role, value in (("q", attention.q), ("k", attention.k), ("v", attention.v)):
            nodes = sources([value], readings.keys())
            if not nodes:
                continue
            shape, dtype = graph.output_shape(value), graph.output_dtype(value)
            cotangent = torch.randn(shape, generator=generator).to(snapshot.outputs.device, dtype)
            edges = [GradientEdge(node, 0) for node in nodes]
            for node, gradient in zip(nodes, backward([GradientEdge(*value)], edges, [cotangent]), strict=True):
                form = readings[node].form
                assert isinstance(form, Outer)
                if gradient is not None:
                    used = (form.grads(gradient.detach()).flatten(2) != 0).flatten(0, 1).any(0)
                    masks[node][role] = masks[node][role] | used if role in masks[node] else used
    # A unit that enters twice has no role.
    return {node: by for node, by in masks.items() if int(torch.stack([*by.values()]).sum(0).max()) == 1}


def _parts(one: Projection, roles: Roles) -> list[Projection]:
    """A projection with its role, or a fused one taken apart."""
    masks = [roles.get(reading.use.node, {}) for reading in one.readings]
    if not masks[0] or any(mask.keys() != masks[0].keys() for mask in masks):
        return [one]
    if not bool(torch.stack([*masks[0].values()]).any(0).all()):
        return [one]  # some units go elsewhere
    if len(masks[0]) == 1:
        return [replace(one, role=next(iter(masks[0])))]
    parts = []
    for role, mask in masks[0].items():
        units = mask.nonzero().flatten()
        parts.append(replace(one, weight=one.weight[units], role=role, units=units))
    return parts


def _layer(parameter: str) -> str:
    """The module that owns a parameter; what torch's parametrizations put in between is no layer."""
    return re.sub(r"(^|\.)parametrizations\.\w+$", "", parameter.rpartition(".")[0])


def _place(same: list[Projection], new: Projection) -> None:
    """A weight applied several times is one projection."""
    for number, old in enumerate(same):
        if old.weight.shape == new.weight.shape and torch.equal(old.weight, new.weight):
            same[number] = replace(old, readings=(*old.readings, *new.readings))
            return
    same.append(new)


def _projection(snapshot: Snapshot, names: tuple[str, ...], reading: Reading, form: Outer) -> Projection | str:
    operand = form.weight()
    if operand is None:
        operand = _rearranged(snapshot, names, reading)
    if operand is None:
        return "its weight is computed from its parameters, and the op has not kept it"
    sizes = (form.row_size, form.grad_size) if form.rows_first else (form.grad_size, form.row_size)
    blocks = operand.detach().double().reshape(form.blocks, *sizes)
    matrix = torch.block_diag(*(blocks.mT if form.rows_first else blocks))
    return Projection(_layer(names[0]), names, matrix, (reading,), form.row_taps, form.grad_taps)


def _rearranged(snapshot: Snapshot, names: tuple[str, ...], reading: Reading) -> Tensor | None:
    """The operand where it is the parameter itself, perhaps with its entries in another order."""
    where = snapshot.access[names[0]].coordinates
    if len(names) > 1 or where is None:
        return None
    view = matrix_view(
        snapshot.parameters[names[0]].detach(), Factors((), where.blocks, where.first, where.second, order=where.order)
    )
    return view.mT if where.flipped[reading.value] else view
