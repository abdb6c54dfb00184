"""A network divided into what is linearized and its output function: f = g(h), with h the last op with a parameter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import FeatlearnError
from featlearn.graph.graph import Node, build_graph
from featlearn.kernel.jacobian_products import Reparametrized
from featlearn.linearization.effective_weights import FormedWeight, Merged, merged_weights, weights_of
from featlearn.linearization.function_calls import Call, Change, ChangedCalls, RecordedCalls
from featlearn.linearization.link import common_nodes, has_hidden_units, is_nonlinear, nodes_after, nonlinear_ops
from featlearn.measurement import Measurement
from featlearn.network.inputs import ModelWithInputs

FEW = 5
"""Samples on which a network is divided."""


@dataclass(frozen=True)
class Division:
    """Where a network is divided, by the number of a call in its forward pass."""

    names: tuple[str, ...] = ()
    """Of all calls of torch functions in a pass."""
    head: int | None = None
    """The call that gives h; None where the output function is linear, or the identity is taken for it."""
    link: tuple[str, ...] = ()
    """The nonlinear ops of the output function."""
    merged: tuple[Merged, ...] = ()
    """Products of parameters that stand for one weight."""


UNDIVIDED = Division()


def changed_outputs(
    division: Division, batch: ModelWithInputs, parameters: dict[str, Tensor], changes: Mapping[int, Change]
) -> Tensor:
    """Return the (n, C) outputs of a pass with these parameters, in which the results of some calls are changed."""
    model = Reparametrized(batch.model, parameters)
    return replace(batch, model=model).outputs(_all(batch), _inside(lambda: ChangedCalls(division.names, changes)))


def divided(measurement: Measurement, *, link: bool, effective: bool) -> Division:
    """Divide a network by a pass of a few samples; the whole network is linearized where that is not exact.

    `link`: at its output function. `effective`: with the products of parameters that stand for one weight.
    """
    try:
        return _divided(_few(measurement), dict(measurement.parameters), link, effective)
    except FeatlearnError:  # its calls cannot be seen, or they are others in each pass
        return UNDIVIDED


def weights_at(
    division: Division, measurement: Measurement, parameters: dict[str, Tensor]
) -> tuple[dict[int, Tensor], Tensor]:
    """Return call -> the weight that it forms or applies with these parameters, and the outputs of a few samples."""
    weights: dict[int, Tensor] = {}
    changes: dict[int, Change] = {}
    for number in weights_of(division.merged):

        def keep(function: Any, arguments: tuple[Any, ...], result: Any, number: int = number) -> Any:
            formed = any(isinstance(one, FormedWeight) and one.call == number for one in division.merged)
            weights[number] = (result if formed else arguments[1]).detach().clone()
            return result

        changes[number] = keep
    outputs = changed_outputs(division, _few(measurement), parameters, changes)
    return weights, outputs.detach()


def _few(measurement: Measurement) -> ModelWithInputs:
    whole = measurement.batches[0]
    indices = torch.arange(min(FEW, whole.samples), device="cpu")
    return replace(whole, x=whole.take(indices), samples=len(indices))


def _divided(batch: ModelWithInputs, parameters: dict[str, Tensor], link: bool, effective: bool) -> Division:
    recorded, inputs = RecordedCalls(), list[Tensor]()

    def noting(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        inputs.extend(tensors)
        return recorded if tensors else nullcontext()

    outputs = replace(batch, model=Reparametrized(batch.model, parameters)).outputs(_all(batch), noting)
    names = tuple(call.name for call in recorded.calls)
    if outputs.grad_fn is None:
        return Division(names)
    graph = build_graph(outputs, parameters)
    touched = _touched(recorded.calls, inputs)
    at: dict[Node, int] = {}
    for number, call in enumerate(recorded.calls):
        if call.node is not None and touched(call.result):
            at.setdefault(call.node, number)
    merged = merged_weights(recorded.calls, touched, parameters) if effective else ()
    gated = recorded.gated_nodes() if link else set()
    for node in common_nodes(graph) if link else ():
        after = nodes_after(graph, node)
        # A linearized softmax or exponential is no sensible h: only what adds up units, or comes before, is.
        if node not in at or is_nonlinear(graph, node, gated, likelihoods=True):
            continue
        if has_hidden_units(graph, after, gated):
            continue
        division = Division(names, at[node], tuple(nonlinear_ops(graph, after, gated)), merged)
        exact = division.link and _is_exact(division, batch, parameters, recorded.calls[at[node]].result, outputs)
        return division if exact else Division(names, merged=merged)
    return Division(names, merged=merged)


def _is_exact(
    division: Division, batch: ModelWithInputs, parameters: dict[str, Tensor], head: Tensor, outputs: Tensor
) -> bool:
    """Whether the outputs depend on the parameters through h alone."""
    assert division.head is not None
    leaf = head.detach().clone().requires_grad_()
    again = changed_outputs(division, batch, parameters, {division.head: lambda function, arguments, result: leaf})
    slack = torch.finfo(outputs.dtype).eps ** 0.75 * float(outputs.detach().abs().max())
    same = float((again - outputs).detach().abs().max()) <= slack
    return same and not build_graph(again, parameters).leaves


def _touched(calls: Sequence[Call], inputs: Sequence[Tensor]) -> Callable[[Tensor], bool]:
    """Return a function that says whether a tensor of a pass depends on the samples."""
    touched, known = set(map(id, inputs)), set[int]()
    for call in calls:
        arguments, results = call.tensors, [call.result] if isinstance(call.result, Tensor) else []
        if isinstance(call.result, tuple | list):
            results = [one for one in call.result if isinstance(one, Tensor)]
        # What no call has given may have been made from samples by code that is not seen.
        meets = any(id(t) in touched or (id(t) not in known and t.grad_fn is not None) for t in arguments)
        if meets:
            touched.update(map(id, results))
            if call.name.endswith("_") and arguments:  # written in place
                touched.add(id(arguments[0]))
        else:
            known.update(map(id, results))
    return lambda tensor: id(tensor) in touched


def _inside(
    mode: Callable[[], AbstractContextManager[Any]],
) -> Callable[[Sequence[Tensor]], AbstractContextManager[Any]]:
    return lambda inputs: mode() if inputs else nullcontext()


def _all(batch: ModelWithInputs) -> Tensor:
    return torch.arange(batch.samples, device="cpu")
