"""Linearize a network in one direction, through its output function and in effective weights."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from featlearn.kernel.jacobian_products import (
    JvpMethod,
    Tangents,
    derivatives_by_cotangent,
    divides,
    dual_outputs,
    forward_mode,
    parameter_pairs,
    parts_of_dual,
)
from featlearn.linearization.division import UNDIVIDED, Division, changed_outputs
from featlearn.linearization.effective_weights import Steps, applied_map
from featlearn.linearization.function_calls import Change
from featlearn.measurement import Measurement
from featlearn.network.elementary_ops import ElementaryOps
from featlearn.network.inputs import ModelWithInputs


class Linearized(NamedTuple):
    """A network and its linearization in the direction u, on n samples."""

    outputs: Tensor
    """(n, C) outputs f."""
    product: Tensor
    """(n, C) J u."""
    through_link: Tensor
    """(n, C) g(h + J_h u), for f = g(h), in effective weights."""


def linearized(
    method: JvpMethod,
    measurement: Measurement,
    batch: ModelWithInputs,
    tangents: Tangents,
    division: Division = UNDIVIDED,
    steps: Steps | None = None,
) -> Linearized:
    """Linearize a network in one direction, and its part up to h in effective weights whose changes are `steps`."""
    head, seen = division.head, list[tuple[Tensor, Tensor]]()
    merging = steps is not None and bool(division.merged)
    if head is None or merging or not divides(method):
        outputs, product = _outputs_and_product(method, measurement, batch, tangents)
    if not divides(method) or not (merging or head is not None):
        return Linearized(outputs, product, outputs + product)
    if method is forward_mode:
        changes = _changes_of_weights(steps if merging else None, _dual_of, _dual_plus)
        if head is not None:
            changes[head] = _then_seen(changes.get(head), lambda result: seen.append(parts_of_dual(result)))
        again, along = dual_outputs(
            measurement, batch, tangents, 0, lambda duals: changed_outputs(division, batch, duals, changes)
        )
        h, change = seen[0] if head is not None else (again, along)
    else:
        h, change = _twice_backward_divided(measurement, batch, tangents, division, steps if merging else None)
        if head is not None and not merging:
            again, along = _behind_head(measurement, batch, division, head, h, change)
    if not merging:
        outputs, product = again, along
    if head is None:
        return Linearized(outputs, product, h + change)
    moved = h + change
    replacing: dict[int, Change] = {head: lambda function, arguments, result: moved}
    through = changed_outputs(division, batch, dict(measurement.parameters), replacing)
    return Linearized(outputs, product, through.detach())


def _outputs_and_product(
    method: JvpMethod, measurement: Measurement, batch: ModelWithInputs, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    if method is forward_mode:
        return dual_outputs(measurement, batch, tangents, 0)
    return batch.outputs(slice(None)).detach(), method(measurement, batch, tangents)[0].detach()


def _changes_of_weights(
    steps: Steps | None, form: Callable[[Tensor, Tensor], Tensor], add: Callable[[Tensor, Tensor], Tensor]
) -> dict[int, Change]:
    """Give merged weights their own changes: `form(weight, change)`, and `add(result, change)` behind an adapter."""
    changes: dict[int, Change] = {}
    inputs: dict[int, tuple[Any, tuple[Any, ...], Tensor]] = {}

    def formed(function: Any, arguments: tuple[Any, ...], result: Tensor, change: Tensor) -> Tensor:
        return form(result, change.to(result.dtype))

    def note(function: Any, arguments: tuple[Any, ...], result: Tensor, inner: int) -> Tensor:
        inputs[inner] = (function, arguments, parts_of_dual(arguments[0])[0].detach())
        return result

    def added(function: Any, arguments: tuple[Any, ...], result: Tensor, step: tuple[int, Tensor, Tensor]) -> Tensor:
        return add(result, _both_maps(inputs[step[0]], function, arguments, step))

    for number, change in (steps.formed if steps else {}).items():
        changes[number] = partial(formed, change=change)
    for outer, step in (steps.adapters if steps else {}).items():
        changes[step[0]] = partial(note, inner=step[0])
        changes[outer] = partial(added, step=step)
    return changes


def _dual_of(weight: Tensor, change: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(parts_of_dual(weight)[0], change)
    return dual


def _dual_plus(result: Tensor, change: Tensor) -> Tensor:
    primal, tangent = parts_of_dual(result)
    return _dual_of(primal, tangent + change)


def _both_maps(
    first: tuple[Any, tuple[Any, ...], Tensor],
    function: Any,
    arguments: tuple[Any, ...],
    step: tuple[int, Tensor, Tensor],
) -> Tensor:
    """Apply the changes of both maps of an adapter, one after the other: what the product rule leaves out."""
    inner_function, inner_arguments, x = first
    _, inner, outer = step
    between = applied_map(inner_function, inner_arguments, x, inner.to(x))
    return applied_map(function, arguments, between, outer.to(x))


def _then_seen(change: Change | None, see: Callable[[Tensor], None]) -> Change:
    """Return a change that passes its result to `see`: the head may be the second map of an adapter."""

    def changed(function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> Any:
        last = result if change is None else change(function, arguments, result)
        see(last)
        return last

    return changed


def _behind_head(
    measurement: Measurement, batch: ModelWithInputs, division: Division, head: int, h: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs g(h) and J_g times the change of h."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h, change)
        replacing: dict[int, Change] = {head: lambda function, arguments, result: dual}
        return parts_of_dual(changed_outputs(division, batch, dict(measurement.parameters), replacing))


def _twice_backward_divided(
    measurement: Measurement,
    batch: ModelWithInputs,
    tangents: Tangents,
    division: Division,
    steps: Steps | None,
) -> tuple[Tensor, Tensor]:
    """Return h, or the outputs without a head, and their change in effective weights."""
    heads: list[Tensor] = []
    leaves: list[tuple[Tensor, Tensor]] = []

    def form(weight: Tensor, change: Tensor) -> Tensor:
        leaf = weight.detach().requires_grad_()
        leaves.append((leaf, change[None]))
        return leaf

    def add(result: Tensor, change: Tensor) -> Tensor:
        return result + form(torch.zeros_like(result), change.detach())

    changes = _changes_of_weights(steps, form, add)
    if division.head is not None:
        changes[division.head] = _then_seen(changes.get(division.head), heads.append)
    with ElementaryOps():
        outputs = changed_outputs(division, batch, dict(measurement.parameters), changes)
        h = heads[0] if heads else outputs
        return h.detach(), derivatives_by_cotangent(h, [*parameter_pairs(measurement, tangents), *leaves])[0].detach()
