"""Products of parameters that only stand for one weight: weights formed before a sample meets them, and adapters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.graph.graph import build_graph
from featlearn.linearization.function_calls import Call
from featlearn.linearization.link import forms_weight

_CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]
LINEAR_MAPS = frozenset(["linear", "matmul", "__matmul__", "mm", "bmm", "mv", *_CONVOLUTIONS])
"""Functions of an input, a weight, and perhaps a bias, in this order."""
_PRODUCTS = ["mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__"]
_REARRANGEMENTS = ["to", "dropout", "contiguous", "view", "reshape", "transpose", "permute", "flatten", "unflatten"]
SCALINGS = frozenset([*_PRODUCTS, *_REARRANGEMENTS])
"""Functions that leave a linear map one."""
SUMS = frozenset(("add", "__add__", "__radd__", "add_", "__iadd__"))


@dataclass(frozen=True)
class FormedWeight:
    """A weight that is computed from parameters alone, in a nonlinear way."""

    call: int
    """The call that gives it."""
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Adapter:
    """Two linear maps in sequence beside a frozen one with the same input, to whose output theirs is added."""

    inner: int
    """The call that applies the first map."""
    outer: int
    """The call that applies the second map."""
    parameters: tuple[str, ...]
    """Of the first map, and then of the second."""


Merged = FormedWeight | Adapter


def merged_weights(
    calls: Sequence[Call], touched: Callable[[Tensor], bool], parameters: Mapping[str, Tensor]
) -> tuple[Merged, ...]:
    """Find the products of parameters in a pass. `touched`: whether a tensor depends on the samples."""
    maps = {
        number: call
        for number, call in enumerate(calls)
        if call.name in LINEAR_MAPS and len(call.arguments) > 1 and all(map(_is_tensor, call.arguments[:2]))
    }
    return (*_formed(calls, maps, touched, parameters), *_adapters(calls, maps, touched, parameters))


def _formed(
    calls: Sequence[Call], maps: Mapping[int, Call], touched: Callable[[Tensor], bool], parameters: Mapping[str, Tensor]
) -> Iterator[FormedWeight]:
    makers = {id(call.result): number for number, call in reversed(list(enumerate(calls)))}
    seen: set[int] = set()
    for call in maps.values():
        for operand in call.arguments[:2]:
            maker = makers.get(id(operand))
            if maker is None or maker in seen or operand.grad_fn is None or touched(operand):
                continue
            seen.add(maker)
            graph = build_graph(operand, parameters)
            if forms_weight(graph):
                yield FormedWeight(maker, tuple(name for name in parameters if name in graph.leaves))


def _adapters(
    calls: Sequence[Call], maps: Mapping[int, Call], touched: Callable[[Tensor], bool], parameters: Mapping[str, Tensor]
) -> Iterator[Adapter]:
    applied = {
        number: call for number, call in maps.items() if touched(call.arguments[0]) and not touched(call.arguments[1])
    }
    trained = {number: call for number, call in applied.items() if call.arguments[1].requires_grad}
    frozen = {number: call for number, call in applied.items() if not call.arguments[1].requires_grad}
    for outer, second in trained.items():
        for inner, first in trained.items():
            if second.arguments[0] is not first.result:
                continue
            beside = [base.result for base in frozen.values() if base.arguments[0] is first.arguments[0]]
            if any(_added(calls, second.result, base, touched) for base in beside):
                names = (*_names(first.arguments[1], parameters), *_names(second.arguments[1], parameters))
                yield Adapter(inner, outer, names)


def _added(calls: Sequence[Call], one: Tensor, other: Tensor, touched: Callable[[Tensor], bool]) -> bool:
    """Whether two results are added, scaled or rearranged before."""
    here, there = {id(one)}, {id(other)}
    for call in calls:
        tensors = call.tensors
        ids = set(map(id, tensors))
        if call.name in SUMS and ids & here and ids & there:
            return True
        others = sum(touched(tensor) for tensor in tensors)
        for reached in (here, there):
            if ids & reached and ((call.name in SCALINGS and others == 1) or (call.name in SUMS and reached is there)):
                reached.add(id(call.result))
    return False


def _names(weight: Tensor, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    if weight.grad_fn is None:
        return tuple(name for name, parameter in parameters.items() if parameter is weight)
    leaves = build_graph(weight, parameters).leaves
    return tuple(name for name in parameters if name in leaves)


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, Tensor)


def applied_map(function: Callable[..., Any], arguments: tuple[Any, ...], x: Tensor, weight: Tensor) -> Tensor:
    """Apply the linear map of a call to another input with another weight, without its bias."""
    rest = (None, *arguments[3:]) if len(arguments) > 2 else ()
    result: Tensor = function(x, weight, *rest)
    return result


def weights_of(merged: Sequence[Merged]) -> list[int]:
    """Return the numbers of the calls whose result, or whose weight, a merged weight is made of."""
    numbers = [(one.call,) if isinstance(one, FormedWeight) else (one.inner, one.outer) for one in merged]
    return [number for some in numbers for number in some]


@dataclass(frozen=True, eq=False)
class Steps:
    """Changes of merged weights between two states, by the number of a call."""

    formed: Mapping[int, Tensor]
    """Call that gives a weight -> its change."""
    adapters: Mapping[int, tuple[int, Tensor, Tensor]]
    """Call of the second map -> call of the first, and the changes of both weights."""


def steps_between(
    merged: Sequence[Merged], before: Mapping[int, Tensor], after: Mapping[int, Tensor], names: set[str]
) -> Steps:
    """Return the changes of merged weights where some parameters move.

    A weight moves with the last of its parameters.
    """
    formed: dict[int, Tensor] = {}
    adapters: dict[int, tuple[int, Tensor, Tensor]] = {}
    for one in merged:
        moves = one.parameters[-1] in names
        if isinstance(one, FormedWeight):
            change = after[one.call] - before[one.call]
            formed[one.call] = change if moves else torch.zeros_like(change)
        elif moves:
            inner, outer = (after[number] - before[number] for number in (one.inner, one.outer))
            adapters[one.outer] = (one.inner, inner, outer)
    return Steps(formed, adapters)
