"""Per-sample gradients of a captured batch, for any parameters and any output directions.

Quantities see only `Factors` and `Dense` of `featlearn.contraction.factors`; how an op produced them stays in here.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.contraction.factors import Dense, Factor, Factors, Gradients, as_dense, in_type, merged
from featlearn.contraction.hardware import LITTLE
from featlearn.contraction.proportional_outputs import ProportionalOutputs
from featlearn.contraction.windows import Windows
from featlearn.errors import UnsupportedModelError
from featlearn.gradients.captured import Chunk, MatrixView
from featlearn.graph.graph import Node, Value, backward, backward_to
from featlearn.ops import Direct, Outer
from featlearn.ops.registry import Reading

UseGradients = Mapping[Value, Sequence[Tensor | None]]
"""Op that uses a parameter -> gradients at its output, one for each direction; None where it has none."""


class Backpropagated(NamedTuple):
    """What backward passes from the outputs have given."""

    grads: dict[Value, Sequence[Tensor | None]]
    coded: Mapping[Value, Tensor | None]
    """Gradients of sum_k weights[p, k] direction_k . f_p at the ops that were asked for."""
    weights: Tensor | None
    """(samples, directions), None where nothing was asked for."""


def backpropagate(
    chunk: Chunk,
    nodes: Collection[Node],
    directions: Tensor,
    *,
    apart: bool = False,
    last: bool = False,
    coded: Collection[Node] = (),
    generator: torch.Generator | None = None,
) -> Backpropagated:
    """Gradients at ops that use parameters, one backward pass for each direction (K, C).

    One pass more gives the ops in `coded` a random mixture with weights of its own for every sample. `apart`:
    directions will be multiplied one by one, and lie in memory that way. `last`: activations are dropped when they
    have served.
    """
    values: list[Value] = [(node, 0) for node in nodes]
    if not values:
        return Backpropagated({}, {}, None)
    if not coded:
        return Backpropagated(dict(_use_gradients(chunk, values, directions, apart, last)), {}, None)
    weights = torch.randn(len(chunk.outputs), len(directions), generator=generator, dtype=torch.float64, device="cpu")
    cotangent = (weights @ directions.double().cpu()).to(chunk.outputs)
    found, _ = backward_to(chunk.outputs, [(node, 0) for node in coded], {}, cotangent)
    grads = dict(_use_gradients(chunk, values, directions, apart, last))
    return Backpropagated(grads, found, weights.to(chunk.outputs))


def formed_gradients(
    chunk: Chunk,
    names: Sequence[str],
    grads: dict[Value, Sequence[Tensor | None]],
    dense: Collection[str] = (),
    proportional: ProportionalOutputs | None = None,
) -> Iterator[tuple[str, Gradients]]:
    """Per-sample gradients of parameters that can be read, one by one; `grads` is emptied on the way.

    Those in `dense` are formed. With `proportional`, one direction may stand for all: Gram matrices are only right
    when summed over directions.
    """
    operands: dict[int, Tensor] = {}
    # Biases before weights: what arrives at an op is dropped with its last use, and weights take most of it.
    groups = _groups_of_operands(chunk, [name for name in names if chunk.uses[name].matrix_view is None])
    groups += [[name] for name in names if chunk.uses[name].matrix_view is not None]
    last = {reading.use.node: group[0] for group in groups for reading in chunk.uses[group[0]].readings}
    for group in groups:
        name, uses = group[0], chunk.uses[group[0]]
        values = dict.fromkeys([(reading.use.node, 0) for reading in uses.readings])
        arrived = {value: grads.pop(value) if last[value[0]] == name else grads[value] for value in values}
        formed: dict[str, Gradients] = {}
        if uses.matrix_view is not None:
            factors = _factors(chunk, uses.readings, uses.matrix_view, arrived)
            if proportional is not None:
                factors = proportional.apply(name, factors)
            formed[name] = as_dense(factors) if name in dense else factors
            del factors
        else:
            formed.update(_pull_back(chunk, group, uses.readings, arrived, operands))
        del arrived
        for name in group:
            gradients = formed.pop(name)
            yield name, gradients if gradients.samples == chunk.count else gradients.take(slice(0, chunk.count))
            del gradients


def _groups_of_operands(chunk: Chunk, names: Sequence[str]) -> list[list[str]]:
    """Group parameters with the same operands while they have no more entries than these, which are held anyway."""
    groups: list[list[str]] = []
    open_groups: dict[tuple[int, ...], tuple[list[str], int]] = {}
    for name in names:
        readings, entries = chunk.uses[name].readings, chunk.parameters[name].numel()
        key = tuple(map(id, readings))
        group, room = open_groups.get(key, ([], 0))
        if not group or entries > room:
            group, room = [], sum(reading.use.shape.numel() for reading in readings)
            groups.append(group)
        group.append(name)
        open_groups[key] = group, room - entries
    return groups


def preactivation_gradients(chunk: Chunk, readings: Sequence[Reading], direction: Tensor) -> list[Tensor]:
    """Gradients of direction . f at the outputs of outer uses: (samples, positions, units) for each of them.

    `direction` is (C,), or (samples, C) for a direction of its own in every sample.
    """
    values: list[Value] = list(dict.fromkeys((reading.use.node, 0) for reading in readings))
    if direction.dim() == 2 and len(chunk.outputs) > chunk.count:
        direction = direction.repeat(2, 1)  # a single sample stands beside its copy
    found, _ = backward_to(chunk.outputs, values, {}, direction.to(chunk.outputs).expand_as(chunk.outputs))
    units = []
    for reading in readings:
        form, grad = reading.form, found[reading.use.node, 0]
        assert isinstance(form, Outer)
        units.append(form.grads(_arrived(chunk, reading, grad)).detach()[: chunk.count].flatten(2).to(chunk.accumulate))
    return units


def _use_gradients(chunk: Chunk, values: list[Value], directions: Tensor, apart: bool, last: bool) -> UseGradients:
    """Gradients at node outputs, direction by direction."""
    if _worth_batching(chunk, directions) and (batched := _batched_gradients(chunk, values, directions)) is not None:
        return batched
    found: dict[Value, list[Tensor | None]] = defaultdict(list)
    stacks: dict[Value, Tensor] = {}
    count, samples = directions.shape[0], chunk.outputs.shape[0]  # len() of a tensor takes five calls
    placed = directions.to(chunk.outputs, non_blocking=True)
    for k in range(count):
        cotangent = placed[k].expand_as(chunk.outputs)
        final = last and k == count - 1
        at_values, _ = backward_to(chunk.outputs, values, {}, cotangent, last=final)
        for value, gradient in at_values.items():
            if gradient is not None and count > 1 and (gradient.dim() == 2 or gradient.shape[:1] == (samples,)):
                # Side by side at once: then no direction's is held twice, and rows of a matrix (samples and positions)
                # have all directions together, as products want them. What is the same for all samples is held once.
                rows = gradient[:1] if gradient.stride(0) == 0 else gradient
                held = rows.shape[0]
                if value not in stacks:
                    sizes = (count, held) if apart else (held, count)
                    whole = gradient.new_empty(*sizes, *gradient.shape[1:])
                    stacks[value] = whole if apart else whole.transpose(0, 1)
                if stacks[value].shape[1] >= held:
                    gradient = stacks[value][k].copy_(rows).expand_as(gradient)
            found[value].append(gradient)
    return dict(found)


def _batched_gradients(chunk: Chunk, values: list[Value], directions: Tensor) -> UseGradients | None:
    """All directions in one pass; None where an op on the path cannot be vectorized."""
    count, outputs = directions.shape[0], chunk.outputs  # len() of a tensor takes five calls
    cotangents = directions.to(outputs, non_blocking=True)[:, None].expand(-1, *outputs.shape)
    edges = [GradientEdge(*value) for value in values]
    try:
        found = backward([outputs], edges, [cotangents], batched=True)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        return None
    nothing: list[Tensor | None] = [None] * count
    return {v: nothing if whole is None else StackedGradients(whole) for v, whole in zip(values, found, strict=True)}


def _factors(chunk: Chunk, readings: Sequence[Reading], where: MatrixView, grads: UseGradients) -> Factors:
    parts = []
    for reading in readings:
        assert isinstance(reading.form, Outer)
        part = _factor(chunk, reading, reading.form, grads, flipped=where.flipped[reading.value])
        scale = where.scales[reading.value]
        parts.append(part if scale == 1.0 else replace(part, grads=scale * part.grads))
    return Factors(merged(parts), where.blocks, where.first, where.second, where.view, where.order)


def _factor(chunk: Chunk, reading: Reading, form: Outer, grads: UseGradients, *, flipped: bool = False) -> Factor:
    arrived, rows_first = grads[reading.use.node, 0], form.rows_first != flipped
    rows = form.rows()
    held: Tensor | Windows = rows
    if isinstance(rows, Windows):
        held = replace(rows, image=in_type(rows.image, chunk.accumulate))
    elif rows.is_floating_point():
        held = in_type(rows, chunk.accumulate)
    if isinstance(arrived, StackedGradients) and (whole := arrived.viewed(form.grads)) is not None:
        return Factor(held, in_type(whole, chunk.accumulate), rows_first, form.row_size)
    found = [in_type(form.grads(_arrived(chunk, reading, grad))) for grad in arrived]
    if not isinstance(held, Windows) and (used := used_positions(found)) is not None:
        held, found = held[:, used], [grad[:, used] for grad in found]
    return Factor(held, stacked(found, chunk.accumulate), rows_first, form.row_size)


def _arrived(chunk: Chunk, reading: Reading, grad: Tensor | None) -> Tensor:
    """What arrives at a use: zeros where the outputs do not depend on it."""
    return chunk.outputs.new_zeros(reading.use.output) if grad is None else grad


def _pull_back(
    chunk: Chunk, names: Sequence[str], readings: tuple[Reading, ...], grads: UseGradients, formed: dict[int, Tensor]
) -> dict[str, Dense]:
    """Form the gradient of every operand, and pull it back to the parameters that are behind all of them."""
    graph = chunk.graph
    assert graph is not None
    operands: dict[Value, Tensor] = {}
    for reading in readings:
        if id(reading) not in formed:
            formed[id(reading)] = _operand_gradient(chunk, reading, grads)
        term = formed[id(reading)]
        operands[reading.value] = operands[reading.value] + term if reading.value in operands else term
    gradients = pull_back({name: graph.leaves[name] for name in names}, operands)
    return {name: Dense(in_type(gradient, chunk.accumulate)) for name, gradient in gradients.items()}


def _operand_gradient(chunk: Chunk, reading: Reading, grads: UseGradients) -> Tensor:
    """(samples, directions, *operand shape)"""
    use, form, graph = reading.use, reading.form, chunk.graph
    assert graph is not None
    dtype = graph.output_dtype(reading.value)
    if isinstance(form, Direct):
        terms = [form.gradient(_arrived(chunk, reading, grad)) for grad in grads[use.node, 0]]
        whole = terms[0].unsqueeze(1) if len(terms) == 1 else torch.stack(terms, 1)
        return in_type(whole, dtype)
    factor = _factor(chunk, reading, form, grads)
    first, second = form.row_size, form.grad_size
    if not form.rows_first:
        first, second = second, first
    formed = as_dense(Factors((factor,), form.blocks, first, second)).gradient
    return formed.reshape(*formed.shape[:2], *use.shape).to(dtype)


def _worth_batching(chunk: Chunk, directions: Tensor) -> bool:
    """On a GPU small passes leave it idle, and all directions go together if their gradients fit; a CPU loops."""
    outputs, graph = chunk.outputs, chunk.graph
    count = directions.shape[0]
    if not outputs.is_cuda or count == 1 or graph is None:
        return False
    needed = graph.structure.output_bytes * count
    return needed < LITTLE or needed < torch.cuda.mem_get_info(outputs.device)[0] // 4


class StackedGradients(Sequence[Tensor | None]):
    """The gradients of all directions, one after the other in one tensor."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return self.whole.shape[0]

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> list[Tensor | None]: ...
    def __getitem__(self, place: int | slice) -> Tensor | list[Tensor | None]:
        return list(self.whole[place]) if isinstance(place, slice) else self.whole[place]

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Tensor | None:
        """What `view` makes of each, as one tensor, if it only looks at them in another way; None if it copies."""
        whole = self.whole
        first = view(whole[0])
        if first.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return None
        return whole.as_strided(
            (whole.shape[0], *first.shape), (whole.stride(0), *first.stride()), first.storage_offset()
        )


def used_positions(grads: Sequence[Tensor]) -> Tensor | None:
    """Positions at which any gradient is not zero, if they are less than half: what is read from a sequence may be its
    last token alone. None on a GPU, which would have to be waited for."""
    positions = grads[0].shape[1]
    # The first sample tells it nearly always.
    if positions < 4 or grads[0].is_cuda or 2 * int((grads[0][0] != 0).flatten(1).any(1).sum()) >= positions:
        return None
    used = torch.zeros(positions, dtype=torch.bool, device=grads[0].device)
    for grad in grads:
        used |= (grad != 0).movedim(1, 0).flatten(1).any(1)
        if 2 * int(used.sum()) >= positions:
            return None
    return used.nonzero().flatten()


def stacked(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(directions, samples, positions, blocks, m), in memory sample by sample, then direction by direction, then as the
    op has it: what is multiplied together then lies together."""
    if len(grads) == 1:
        return in_type(grads[0], dtype)[None]
    if (whole := side_by_side(grads)) is not None and whole.dtype == dtype:
        return whole
    order = sorted((1, 2, 3), key=grads[0].stride().__getitem__, reverse=True)
    samples, inner = len(grads[0]), [grads[0].shape[axis] for axis in order]
    whole = torch.empty(samples, len(grads), *inner, dtype=dtype, device=grads[0].device)
    for k, grad in enumerate(grads):
        whole[:, k].copy_(grad.permute(0, *order))
    return whole.permute(1, 0, *(2 + order.index(axis) for axis in (1, 2, 3)))


def side_by_side(grads: Sequence[Tensor]) -> Tensor | None:
    """The same gradients as one tensor, if they already lie in one at equal distances."""
    first, step = grads[0], grads[1].storage_offset() - grads[0].storage_offset()
    same = all(
        grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and grad.storage_offset() == first.storage_offset() + k * step
        and (grad.shape, grad.stride(), grad.dtype) == (first.shape, first.stride(), first.dtype)
        for k, grad in enumerate(grads)
    )
    if not same or step <= 0:
        return None
    return first.as_strided((len(grads), *first.shape), (step, *first.stride()), first.storage_offset())


def pull_back(leaves: Mapping[str, Node], operands: Mapping[Value, Tensor]) -> dict[str, Tensor]:
    """Turn gradients of operands, (samples, directions, *shape), into those of parameters, (samples, directions, N).

    Parameters that share their operands are pulled back by one pass, whose cost does not grow with their number.
    """
    samples, directions = next(iter(operands.values())).shape[:2]
    direct = {node: gradient for (node, _), gradient in operands.items() if node in leaves.values()}
    starts = [GradientEdge(*value) for value in operands if value[0] not in direct]
    cotangents = [gradient.flatten(0, 1) for value, gradient in operands.items() if value[0] not in direct]
    parameters = {name: leaf.variable for name, leaf in leaves.items()}
    pulled = dict(zip(leaves, _batched(starts, [*parameters.values()], cotangents), strict=True)) if starts else {}
    gradients = {}
    for name, leaf in leaves.items():
        parameter, terms = parameters[name], [pulled[name]] if starts else []
        if leaf in direct:
            terms.append(in_type(direct[leaf].reshape(-1, *parameter.shape), parameter.dtype))
        total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
        if parameter.is_complex():
            total = torch.view_as_real(total.to(parameter.dtype))
        gradients[name] = total.reshape(samples, directions, -1)
    return gradients


def _batched(starts: list[GradientEdge], parameters: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Return one vector-Jacobian product for every row of the cotangents, for each parameter."""
    try:
        return _present(backward(starts, parameters, cotangents, batched=True))
    except UnsupportedModelError:
        # An op (or a custom backward pass) that cannot be vectorized: one row at a time.
        rows = [_present(backward(starts, parameters, row)) for row in zip(*cotangents, strict=True)]
        return [torch.stack(column) for column in zip(*rows, strict=True)]


def _present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return gradients of parameters that all have one."""
    present = [gradient for gradient in gradients if gradient is not None]
    assert len(present) == len(gradients)
    return present
