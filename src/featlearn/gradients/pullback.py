"""From the operand that met the samples back to the parameter."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.contraction.factors import in_type
from featlearn.errors import UnsupportedModelError
from featlearn.graph.graph import Graph, Node, Value, backward
from featlearn.graph.uses import REARRANGEMENTS
from featlearn.ops import Outer
from featlearn.ops.reading import Reading
from featlearn.torch_internals import saved


class MatrixView(NamedTuple):
    """A common view (blocks, first, second) of one parameter, in which all of its uses are outer products."""

    blocks: int
    first: int
    second: int
    flipped: Mapping[Value, bool]
    """Operands that are the transpose of that view."""
    scales: Mapping[Value, float]
    """What the operands are multiplied by: NTK and mean-field layers have weights like W / sqrt(n)."""
    fixed: bool
    """Whether they are multiplied by nothing. Factors are read from the graph."""
    view: tuple[Any, ...] = ()
    """How the parameter was rearranged into this view; () if its entries keep their order."""
    order: Tensor | None = None
    """Where each entry of the parameter stands in the view, where that is not its own place."""


class ParameterUses(NamedTuple):
    """All uses of one parameter, each read by the rule of its op; or why they cannot be read."""

    readings: tuple[Reading, ...]
    """One for every use; empty where they cannot be read."""
    fallback_reason: str | None
    """Why the parameter goes to the fallback, None if it does not."""
    nodes: tuple[str, ...]
    """Names of the nodes that use the parameter, for the plan."""
    matrix_view: MatrixView | None
    """Set where every use is an outer product in the same matrix view: nothing needs to be formed."""


def common_matrix_view(graph: Graph, name: str, readings: tuple[Reading, ...]) -> MatrixView | None:
    """The view in which every use is an outer product and a rearrangement of the parameter, times a number."""
    leaf = graph.leaves[name]
    views: set[tuple[Any, ...]] = set()
    flipped: dict[Value, bool] = {}
    scales: dict[Value, float] = {}
    fixed = True
    for reading in readings:
        form = reading.form
        chain, factors = _rearrangements(reading.value[0], leaf)
        if not isinstance(form, Outer) or chain is None:
            return None
        fixed &= not factors
        scales[reading.value] = math.prod(factors, start=1.0)
        transposed = _transposed(graph, chain, leaf)
        sizes = (form.row_size, form.grad_size) if form.rows_first else (form.grad_size, form.row_size)
        if transposed:
            sizes = sizes[::-1]
        flipped[reading.value] = bool(transposed)
        signature = () if transposed is not None else tuple(_signature(graph, node) for node in chain)
        views.add((form.blocks, *sizes, signature))
    if len(views) != 1:
        return None
    (blocks, first, second, signature) = views.pop()
    order = _entry_order(graph, leaf, *next(iter(scales.items()))) if signature else None
    return MatrixView(blocks, first, second, flipped, scales, fixed, signature, order)


def _entry_order(graph: Graph, leaf: Node, value: Value, scale: float) -> Tensor:
    """Where each entry of the parameter stands when rearranged: the numbers of the places, sent back through it."""
    size, shape = graph.output_shape(value).numel(), graph.output_shape(value)
    places = torch.arange(size, device=leaf.variable.device)
    order, base = torch.zeros_like(places), 2**7  # digits that every floating type holds exactly
    weight = 1
    while weight < size:
        digits = (places // weight % base).reshape(shape).to(graph.output_dtype(value))
        (found,) = backward([GradientEdge(*value)], [leaf.variable], [digits])
        assert found is not None
        order += weight * (found.detach().flatten() / scale).round().long()
        weight *= base
    return order


def _rearrangements(node: Node, leaf: Node) -> tuple[list[Node] | None, list[float]]:
    """The nodes from an operand down to the parameter that rearrange their one input, and what they multiply it by.

    None if another kind of node is among them.
    """
    chain, factors = [], []
    while node is not leaf:
        factor = _factor_of(node)
        if factor is not None:
            factors.append(factor[0])
            node = node.next_functions[factor[1]][0]
        elif node.name() in REARRANGEMENTS:
            chain.append(node)
            node = node.next_functions[0][0]
        else:
            return None, factors
    return chain, factors


def _factor_of(node: Node) -> tuple[float, int] | None:
    """The number by which a node multiplies one of its inputs, and which one; None if it does anything else."""
    name = node.name()
    if name == "NegBackward0":
        return -1.0, 0
    if name not in ("MulBackward0", "DivBackward0"):
        return None
    inputs = [child for child, _ in node.next_functions]
    if sum(child is not None for child in inputs) != 1:
        return None
    place = 0 if inputs[0] is not None else 1
    other = saved(node, "other" if place == 0 else "self")
    # A number of Python is a tensor without axes on the CPU; one on a device would have to be waited for.
    if not isinstance(other, Tensor) or other.dim() or other.device.type != "cpu" or other.is_complex():
        return None
    number = float(other)
    if not math.isfinite(number) or not number or (name == "DivBackward0" and place == 1):
        return None
    return (number if name == "MulBackward0" else 1 / number), place


_ORDER_KEEPING = ("Alias", "Clone", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")


def _transposed(graph: Graph, chain: list[Node], leaf: Node) -> bool | None:
    """Whether a chain leaves the order of the elements (False) or transposes a matrix (True); None for all else."""
    shape, turns = graph.output_shape((leaf, 0)), 0
    for node in reversed(chain):
        output = graph.output_shape((node, 0))
        if not node.name().startswith(_ORDER_KEEPING):
            if len(shape) != 2 or output != shape[::-1]:
                return None
            # On a matrix a permutation is either a transpose or nothing; for a square one its arguments decide.
            turns += _swaps(node)
        elif turns % 2 and output != shape:
            return None
        shape = output
    return turns % 2 == 1


def _swaps(node: Node) -> int:
    name = node.name()
    if name.startswith("Permute"):
        return int([d % 2 for d in saved(node, "dims")] == [1, 0])
    if name.startswith(("Transpose", "Swapaxes")):
        return int(saved(node, "dim0") % 2 != saved(node, "dim1") % 2)
    return 1


def _signature(graph: Graph, node: Node) -> tuple[Any, ...]:
    """Equal for nodes that rearrange in the same way. Views and squeezes keep the order: their shape says it all."""
    arguments = [saved(node, key) for key in ("dims", "dim0", "dim1")]
    return (
        node.name(),
        *(tuple(a) if isinstance(a, list | tuple) else a for a in arguments),
        graph.output_shape((node, 0)),
    )


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
