"""What a few samples show of a network's graph, once for many batches: sample axes, and rules that disagree.

Only what follows from the code of a forward pass is kept. What may change with the weights or with the samples is
checked on every batch: `featlearn.audit.independence`, `featlearn.audit.gradient_check`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.audit.gradient_check import (
    WeightedGradient,
    balanced_gradient,
    disagreement,
    failing_parameters,
    is_rounding,
    largest_entry,
    weighted_gradient,
)
from featlearn.audit.independence import Part, refuse_coupled
from featlearn.errors import CoupledSamplesError, InputValueError
from featlearn.gradients.captured import Chunk
from featlearn.graph.graph import Axes, Graph, Layout, Node, parameter_gradients
from featlearn.graph.samples import ProbedGraph, probed_graph
from featlearn.ops import is_built_in
from featlearn.ops.registry import proved_layouts, sample_axis
from featlearn.separation.repeated_pass import RepeatedPass

AUDITED = 7
"""Samples in an audit: enough to tell samples from positions, few enough to cost little."""


@dataclass(frozen=True)
class Audit:
    """What is known of every graph with these nodes."""

    nodes: tuple[str, ...]
    """Names of all nodes in order."""
    axes: Mapping[int, tuple[int, int] | None]
    """Number of a node -> (before, after) of its sample axis, None where it has none."""
    several_outputs: frozenset[int]
    """Numbers of nodes of which another output than the first is used."""
    blank: frozenset[int]
    """Numbers of nodes that had no gradient: their axes are guesses."""
    to_fallback: Mapping[str, str]
    """Parameters whose readings do not agree with autograd, with the reason."""
    unseen: frozenset[str]
    """Parameters whose gradients were zero, so that nothing was seen of their readings."""
    largest: float
    """The largest entry of any gradient."""

    def axes_in(self, graph: Graph, samples: int) -> tuple[Axes, frozenset[Node]] | None:
        """The sample axes of a graph with the same nodes; None where they do not fit its shapes."""
        found: dict[Node, Layout | None] = {}
        for number, sizes in self.axes.items():
            node = graph.order[number]
            layout = None if sizes is None else Layout(sizes[0], samples, sizes[1])
            if layout is not None:
                shape = graph.output_shape((node, 0))
                fits = layout.before * samples * layout.after == shape.numel()
                if not fits or sample_axis(shape, layout) is None:
                    return None
            found[node] = layout
        return found, frozenset(graph.order[number] for number in self.several_outputs)


def audited(chunk: Chunk, generator: torch.Generator) -> Audit:
    """Read a chunk, and check its readings against autograd. Two backward passes."""
    graph = chunk.graph
    assert graph is not None
    probed = probed_graph(chunk.outputs, graph, chunk.parameters, generator)
    chunk.read(probed.axes, probed.several_outputs)
    expected = WeightedGradient(probed.direction, probed.weights, probed.parameters)
    grads = {value: [gradient] for value, gradient in probed.plain.items()}
    refused = failing_parameters(chunk, list(graph.leaves), expected, grads)
    chunk.send_to_fallback(refused)
    largest = largest_entry(probed.parameters)
    number = graph.number
    axes = {
        number[node]: None if layout is None else (layout.before, layout.after) for node, layout in probed.axes.items()
    }
    several = frozenset(number[node] for node in probed.several_outputs)
    blank = frozenset(number[node] for node in probed.blank)
    unseen = frozenset(name for name, size in largest.items() if size == 0.0)
    if len(chunk.indices) <= AUDITED and not _is_separate(chunk):
        _refuse_coupled_gradients(chunk, probed, generator)
    chunk.unproved = _unproved(chunk)
    return Audit(graph.structure.names, axes, several, blank, refused, unseen, max(largest.values(), default=0.0))


def read_by(chunk: Chunk, audit: Audit, axes: Axes, several_outputs: frozenset[Node]) -> None:
    """Read a chunk with the sample axes of an audit, unless the ops of this batch prove others."""
    graph = chunk.graph
    assert graph is not None
    # A proof decides where the gradients of an audit were zero and showed nothing; else both must agree.
    proved = {} if chunk.hooked else proved_layouts(graph, len(chunk.outputs), axes)
    blank = {graph.order[number] for number in audit.blank}
    chunk.read({**axes, **{node: layout for node, layout in proved.items() if node in blank}}, several_outputs)
    chunk.unproved = _unproved(chunk, proved)


def _unproved(chunk: Chunk, proved: Mapping[Node, Layout] | None = None) -> frozenset[Node]:
    """Return ops that use parameters and whose sample axis does not follow from the ops above them."""
    assert chunk.graph is not None
    used = chunk.use_layouts(chunk.readable(chunk.uses)[0])
    if proved is None:
        proved = {} if chunk.hooked else proved_layouts(chunk.graph, len(chunk.outputs), used)
    return frozenset(node for node, layout in used.items() if proved.get(node) != layout)


def unchecked(chunk: Chunk, audit: Audit) -> list[str]:
    """Return parameters whose gradients were zero in the audit, and those read by a user's rules.

    All of them where the forward pass put hooks on tensors: gradients at an op are asked for before its hooks.
    """
    return [
        name
        for name, uses in chunk.uses.items()
        if uses.fallback_reason is None
        and (chunk.hooked or name in audit.unseen or not all(map(is_built_in, uses.nodes)))
    ]


def check_readings(chunk: Chunk, audit: Audit, names: list[str], generator: Callable[[], torch.Generator]) -> Audit:
    """Check the readings of some parameters against autograd on this chunk; return what is then known of the graph."""
    drawn = weighted_gradient(chunk, names, generator())
    seen = {name for name, size in largest_entry(drawn.gradients).items() if size > 0.0}
    if not seen:  # behind a readout that begins at zero, say
        return audit
    failed = failing_parameters(chunk, names, *balanced_gradient(chunk, names, generator()))
    chunk.send_to_fallback(failed)
    if chunk.hooked or not seen & audit.unseen:
        return audit
    return replace(audit, unseen=audit.unseen - seen, to_fallback={**audit.to_fallback, **failed})


def refuse_underflow(largest: float, dtype: torch.dtype) -> None:
    """Gradients whose squares are not numbers of this precision any more would give a kernel of zeros."""
    if 0.0 < largest < torch.finfo(dtype).tiny ** 0.5:
        raise InputValueError(
            f"the largest gradient is {largest:.1e}, whose square {str(dtype).removeprefix('torch.')} cannot hold; "
            "measure with dtype=torch.float64, or scale the outputs with readout="
        )


def _is_separate(chunk: Chunk) -> bool:
    """Whether samples stay apart in a backward pass because they do in the ops of the forward pass.

    So it is where torch's own derivatives of these ops are all that runs: no hook, and no node of a function of the
    user's own, whose name would end otherwise. Another number of samples must be run by the same calls.
    """
    if chunk.proved is None or chunk.runs_own_backward or chunk.graph is None:
        return False
    other = 3 if chunk.proved.samples != 3 else 4
    places = torch.arange(other, device="cpu") % chunk.count
    repeated = RepeatedPass(chunk.proved, chunk.batch.held, other)
    return repeated.holds(chunk.batch.outputs(chunk.indices[places], repeated.noting))


def _refuse_coupled_gradients(chunk: Chunk, probed: ProbedGraph, generator: torch.Generator) -> None:
    """Samples in smaller batches must have the outputs and gradients that they have beside the others."""
    name = _differing_gradient(chunk, probed, generator)
    if name is None or is_rounding(chunk, name, probed.weights[:, None] * probed.direction):
        return
    from featlearn.audit.coupling_cause import refuse_nonlinear  # loaded where something is refused

    refuse_nonlinear(chunk, [name], generator)
    doubt = "" if chunk.precision < 1e-12 else ". If they do not, rounding is amplified: try dtype=torch.float64"
    raise CoupledSamplesError(
        f"the gradient of {name} for a sample depends on the other samples of its batch, though the outputs do "
        f"not; expected samples that do not influence each other, in a backward pass as in a forward pass{doubt}"
    )


def _differing_gradient(chunk: Chunk, probed: ProbedGraph, generator: torch.Generator) -> str | None:
    """A parameter whose gradients differ between the batch and its halves.

    Raises if the outputs of a sample change in a half, or in a batch of this sample alone.
    """
    order = torch.arange(chunk.count, device="cpu").flip(0)
    grads = {value: [gradient] for value, gradient in probed.plain.items()}
    # An iteration that stops once every sample has converged takes as many steps for most halves as for the batch.
    refuse_coupled(
        chunk,
        [Part(place, chunk.batch.outputs(chunk.indices[place]).detach()) for place in order[:, None].expand(-1, 3)],
    )
    for half in (half for half in order.tensor_split(2) if len(half)):
        places = torch.cat([half, half[:1].expand(max(0, 3 - len(half)))])
        part = Chunk(chunk.batch, chunk.indices[places], chunk.parameters)
        refuse_coupled(chunk, [Part(places, part.outputs.detach())])
        if part.graph is None:
            continue
        weights = weighted_gradient(part, (), generator).weights
        expected = _gradient_along(part, chunk, probed.direction, weights)
        if name := disagreement(chunk, grads, places, expected):
            return name
    return None


def _gradient_along(part: Chunk, chunk: Chunk, direction: Tensor, weights: Tensor) -> WeightedGradient:
    """Autograd's gradient of some samples alone."""
    named = {name: part.parameters[name] for name in chunk.uses}
    cotangent = weights[:, None] * direction.to(part.outputs)
    return WeightedGradient(direction, weights, parameter_gradients(part.outputs, named, cotangent))
