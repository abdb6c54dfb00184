"""A network divided into what is linearized and its output function: f = g(h), with h the last op with a parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.errors import FeatlearnError
from featlearn.graph.graph import Node, build_graph
from featlearn.graph.link import common_nodes, hidden_units, nodes_after, nonlinear_ops
from featlearn.measurement import Measurement
from featlearn.network.function_calls import Call, Change, ChangedCalls, RecordedCalls
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


UNDIVIDED = Division()


class Reparametrized(nn.Module):
    """A network called with other tensors in the places of its parameters."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self._tensors = tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network gives with them."""
        return torch.func.functional_call(self.model, self._tensors, args, kwargs)


def changed_outputs(
    division: Division, batch: ModelWithInputs, parameters: dict[str, Tensor], changes: Mapping[int, Change]
) -> Tensor:
    """Return the (n, C) outputs of a pass with these parameters, in which the results of some calls are changed."""
    model = Reparametrized(batch.model, parameters)
    return replace(batch, model=model).outputs(_all(batch), _inside(lambda: ChangedCalls(division.names, changes)))


def divided(measurement: Measurement) -> Division:
    """Divide a network by a pass of a few samples; the whole network is linearized where that is not exact."""
    whole = measurement.batches[0]
    indices = torch.arange(min(FEW, whole.samples), device="cpu")
    batch = replace(whole, x=whole.take(indices), samples=len(indices))
    try:
        return _divided(batch, dict(measurement.parameters))
    except FeatlearnError:  # its calls cannot be seen, or they are others in each pass
        return UNDIVIDED


def _divided(batch: ModelWithInputs, parameters: dict[str, Tensor]) -> Division:
    recorded, inputs = RecordedCalls(), list[Tensor]()

    def noting(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        inputs.extend(tensors)
        return recorded if tensors else nullcontext()

    outputs = replace(batch, model=Reparametrized(batch.model, parameters)).outputs(_all(batch), noting)
    names = tuple(call.name for call in recorded.calls)
    if outputs.grad_fn is None:
        return Division(names)
    graph = build_graph(outputs, parameters)
    at: dict[Node, int] = {}
    for number in _with_samples(recorded.calls, inputs):
        call = recorded.calls[number]
        if call.node is not None:
            at.setdefault(call.node, number)
    for node in common_nodes(graph):
        after = nodes_after(graph, node)
        if node not in at or hidden_units(graph, after):
            continue
        division = Division(names, at[node], tuple(nonlinear_ops(graph, after)))
        exact = division.link and _is_exact(division, batch, parameters, recorded.calls[at[node]].result, outputs)
        return division if exact else Division(names)
    return Division(names)


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


def _with_samples(calls: Sequence[Call], inputs: Sequence[Tensor]) -> Iterator[int]:
    """Yield the numbers of calls whose results depend on the samples: of those that give one tensor."""
    touched, known = set(map(id, inputs)), set[int]()
    for number, call in enumerate(calls):
        arguments, results = call.tensors, [call.result] if isinstance(call.result, Tensor) else []
        if isinstance(call.result, tuple | list):
            results = [one for one in call.result if isinstance(one, Tensor)]
        # What no call has given may have been made from samples by code that is not seen.
        meets = any(id(t) in touched or (id(t) not in known and t.grad_fn is not None) for t in arguments)
        if meets:
            touched.update(map(id, results))
            if call.name.endswith("_") and arguments:  # written in place
                touched.add(id(arguments[0]))
            if isinstance(call.result, Tensor):
                yield number
        else:
            known.update(map(id, results))


def _inside(
    mode: Callable[[], AbstractContextManager[Any]],
) -> Callable[[Sequence[Tensor]], AbstractContextManager[Any]]:
    return lambda inputs: mode() if inputs else nullcontext()


def _all(batch: ModelWithInputs) -> Tensor:
    return torch.arange(batch.samples, device="cpu")
