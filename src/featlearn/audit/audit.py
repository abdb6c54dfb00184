"""What a few samples show of a network's graph, and checks of per-sample gradients against autograd.

An audit keeps only what follows from the code of a forward pass: sample axes, and rules that disagree. What may change
with the weights or with the samples is checked on every batch.

Weighted sums of per-sample gradients must be autograd's: a use that was missed and a rule that is wrong both show in
the sum. The weights differ from sample to sample, so that gradients that are complete but belong to other samples do
not cancel.

To check the sample of a gradient at an op, a backward pass has random weights of its own for every sample and
direction. It must give, entry by entry, the weighted sum of the passes without them. It shows wrong axes, samples in
another order and samples that influence each other, however small a sample's gradient is.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from featlearn.audit.independence import Part, last_digit_changed, refuse_coupled
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Dense, Factor, Gradients, as_dense
from featlearn.contraction.windows import Windows
from featlearn.errors import CoupledSamplesError, InputValueError, UnsupportedModelError
from featlearn.gradients.captured import Chunk
from featlearn.gradients.formed import Backpropagated, UseGradients, backpropagate, formed_gradients
from featlearn.graph.graph import (
    Axes,
    Graph,
    Layout,
    Node,
    backward_to,
    build_graph,
    numbers,
    parameter_gradients,
)
from featlearn.graph.samples import ProbedGraph, attribution_error, probed_graph, sample_layout
from featlearn.network.state import KeptState
from featlearn.ops.registry import proved_layouts, sample_axis
from featlearn.separation import RepeatedPass

if TYPE_CHECKING:
    from featlearn.network.copies import StoredResult

AUDITED = 7
"""Samples in an audit: enough to tell samples from positions, few enough to cost little."""


@dataclass(frozen=True)
class WeightedGradient:
    """Autograd's gradient of sum_p weights_p direction . f_p."""

    direction: Tensor
    """(1, C)"""
    weights: Tensor
    """(rows of the outputs,)"""
    gradients: Mapping[str, Tensor | None]
    """Parameter -> gradient."""


def drawn_weights(chunk: Chunk, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a direction (1, C) and weights (rows of the outputs,)."""
    rows, classes = chunk.outputs.shape
    direction = torch.randn(1, classes, generator=generator, dtype=torch.float64, device="cpu").to(chunk.outputs)
    return direction, torch.randn(rows, generator=generator, dtype=torch.float64, device="cpu").to(chunk.outputs)


def weighted_gradient(chunk: Chunk, names: Collection[str], direction: Tensor, weights: Tensor) -> WeightedGradient:
    """Compute the gradients of some parameters by one backward pass."""
    named = {name: chunk.parameters[name] for name in names}
    cotangent = weights[:, None] * direction.to(chunk.outputs)
    return WeightedGradient(direction, weights, parameter_gradients(chunk.outputs, named, cotangent))


def balanced_gradient(
    chunk: Chunk, names: Collection[str], generator: torch.Generator
) -> tuple[WeightedGradient, UseGradients]:
    """Like `weighted_gradient`, with weights that make the gradients of all samples about equally large, so that
    small ones count.

    Also the gradients of the direction at the ops that use these parameters: two backward passes in all.
    """
    direction, weights = drawn_weights(chunk, generator)
    layouts = chunk.use_layouts(chunk.readable(names)[0])
    at_uses, _ = backward_to(chunk.outputs, [(node, 0) for node in layouts], {}, direction.expand_as(chunk.outputs))
    squares = torch.zeros_like(weights, dtype=torch.float64)
    for node, layout in layouts.items():
        gradient = at_uses[node, 0]
        if gradient is not None:
            squares += layout.split(gradient.detach()).double().square().sum((0, 2))
    sizes = squares.sqrt().to(weights)
    weights = weights / torch.where(sizes > 0, sizes, 1.0)
    return weighted_gradient(chunk, names, direction, weights), {value: [g] for value, g in at_uses.items()}


def failing_parameters(
    chunk: Chunk, names: Collection[str], expected: WeightedGradient, grads: UseGradients | None = None
) -> dict[str, str]:
    """Parameters whose rules fail or disagree with autograd, with the reason; `grads` at the ops if they are known."""
    readable, _ = chunk.readable(names)
    if grads is None:
        grads = backpropagate(chunk, chunk.use_layouts(readable), expected.direction).grads
    failed: dict[str, str] = {}
    try:  # a rule may be the user's
        checks = _compared(chunk, readable, grads, expected)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        checks = []
        for name in readable:
            try:
                checks += _compared(chunk, [name], grads, expected)
            except Exception as error:
                failed[name] = f"the rules for {_nodes(chunk, name)} fail: {type(error).__name__}: {error}"
    cotangent = expected.weights[:, None] * expected.direction
    for name, difference in _differing(checks, chunk):
        if not is_rounding(chunk, name, cotangent, difference):
            failed[name] = f"the rules for {_nodes(chunk, name)} disagree with autograd"
    return failed


def disagreements(
    chunk: Chunk, grads: UseGradients, places: Tensor, expected: WeightedGradient
) -> Iterator[tuple[str, float]]:
    """Yield parameters whose gradient in another batch, of the samples at `places`, is not the sum of the chunk's.

    Also by how much. `expected` is of the other batch.
    """
    readable, _ = chunk.readable(expected.gradients)
    counted = expected.weights.new_zeros(chunk.count).index_add(
        0, places.to(expected.weights.device) % chunk.count, expected.weights
    )
    checks = _compared(chunk, readable, grads, replace(expected, weights=counted))
    # Another batch takes other code paths, whose rounding shows where the terms of a gradient cancel.
    return _differing(checks, chunk, cancelling=64.0)


STATES = 4
"""States of the weights that show how much of a gradient is rounding."""


def is_rounding(chunk: Chunk, name: str, cotangent: Tensor, difference: float) -> bool:
    """Return whether weights that differ in their last digits change a gradient about as much as a disagreement.

    A gradient may be nothing but rounding (of a key bias, which softmax ignores). A ReLU whose input is zero but for
    rounding may be on in one batch and off in another.
    """
    parameter = {name: chunk.parameters[name]}
    before = parameter_gradients(chunk.outputs, parameter, cotangent)[name]
    if before is None:
        return False
    for seed in range(STATES):
        with last_digit_changed(chunk.batch.model, units=8, seed=seed):
            moved = Chunk(chunk.batch, chunk.indices, chunk.parameters)
            if moved.graph is None:
                return False
            gradient = parameter_gradients(moved.outputs, parameter, cotangent)[name]
        if gradient is None:
            return False
        if difference <= 4 * float((gradient - before).norm()):  # as 32 units of one digit
            return True
    return False


def largest_entry(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Parameter -> the largest entry of its gradient, 0 where it has none."""
    some = {name: g.detach().abs().max() for name, g in gradients.items() if g is not None and g.numel()}
    return {**dict.fromkeys(gradients, 0.0), **dict(zip(some, numbers(list(some.values())), strict=True))}


Check = tuple[str, Tensor, Tensor, Tensor]
"""A parameter, by how much its sum differs from autograd's, how large its terms are, and how large autograd's is."""


def _compared(chunk: Chunk, names: Sequence[str], grads: UseGradients, expected: WeightedGradient) -> list[Check]:
    weights = expected.weights
    if len(weights) > chunk.count:  # the copy of a single sample
        weights = weights.sum(0, keepdim=True)
    found = formed_gradients(chunk, names, {(node, 0): grads[node, 0] for node in chunk.use_layouts(names)})
    return [(name, *_difference(gradients, weights, expected.gradients[name])) for name, gradients in found]


def _difference(gradients: Gradients, weights: Tensor, expected: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    total, size = _weighted_sum(gradients, weights)
    reference = _flat(expected, total)
    length = _norm(reference)
    return _norm(total.sub_(reference)), size, length


def _norm(vector: Tensor) -> Tensor:
    """Return the norm in float64, a few entries at a time: a copy of all would take twice the memory of a weight."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in vector.split(2**22)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _differing(checks: Sequence[Check], chunk: Chunk, cancelling: float = 2.0) -> Iterator[tuple[str, float]]:
    """Yield parameters that do not agree, and by how much.

    `cancelling`: units of rounding, of the whole gradient, that may be left where the terms of one parameter cancel.
    """
    values = numbers([value for check in checks for value in check[1:]])
    triples = zip(values[::3], values[1::3], values[2::3], strict=True)
    # Gradients that are not finite give a kernel that is not, which is refused for that.
    rows = [(name, *three) for (name, *_), three in zip(checks, triples, strict=True) if math.isfinite(three[2])]
    whole = sum(size + length for _, _, size, length in rows if math.isfinite(size))
    for name, difference, size, length in rows:
        # Half of the digits. Gradients that vanish but for rounding (a bias in front of a mean that is taken away) may
        # disagree in all digits.
        precision = chunk.precision_of(name)
        slack = min(0.05, precision**0.5) * (size + length) + min(0.02, cancelling * precision) * whole
        if not difference <= slack:
            yield name, difference


def _nodes(chunk: Chunk, name: str) -> str:
    return ", ".join(sorted(set(chunk.uses[name].nodes)))


def _weighted_sum(gradients: Gradients, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i w_i g_i, and a bound of its size before anything cancels."""
    if isinstance(gradients, Dense):
        terms = weights.to(gradients.gradient)[:, None] * gradients.gradient[:, 0]
        return terms.sum(0), torch.linalg.vector_norm(terms, dim=1, dtype=torch.float64).sum()
    size = torch.zeros((), dtype=torch.float64, device=gradients.parts[0].grads.device)
    for part in gradients.parts:
        lengths = torch.linalg.vector_norm(part.grads[0], dim=-1, dtype=torch.float64)
        if isinstance(part.held, Windows):
            lengths = lengths * part.held.lengths()
        elif not part.indexed:
            lengths = lengths * torch.linalg.vector_norm(part.rows, dim=-1, dtype=torch.float64)
        size = size + (lengths.sum((1, 2)) * weights.abs().to(lengths)).sum()
    weighted = replace(gradients, parts=tuple(_weighted(part, weights) for part in gradients.parts))
    formed = as_dense(weighted).gradient[:, 0]
    return formed[0] if len(formed) == 1 else formed.sum(0), size


def _weighted(part: Factor, weights: Tensor) -> Factor:
    """The samples times their weights; rows that are written out become positions of one sample: their sum."""
    grads = part.grads * weights.to(part.grads)[:, None, None, None]
    if isinstance(part.held, Windows):
        return replace(part, grads=grads)
    return replace(part, held=part.rows.flatten(0, 1)[None], grads=grads.flatten(1, 2)[:, None])


def _flat(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like)
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.detach().flatten().to(like)


def refuse_unequal_sums(
    chunk: Chunk, found: Mapping[str, Dense], directions: Tensor, generator: torch.Generator
) -> None:
    """Raise if gradients of single samples do not add up to that of the batch: its samples are then coupled."""
    outputs = chunk.outputs
    drawn = torch.randn(chunk.count, len(directions), generator=generator, dtype=torch.float64, device="cpu")
    cotangent = (drawn @ directions.double().cpu()).to(outputs)
    rows = cotangent if len(outputs) == chunk.count else torch.cat([cotangent, torch.zeros_like(cotangent)])
    expected = parameter_gradients(outputs, {name: chunk.parameters[name] for name in chunk.uses}, rows)
    # A gradient may be nothing but rounding: that of all parameters says how large rounding is.
    whole = math.hypot(*numbers([g.detach().abs().double().norm() for g in expected.values() if g is not None]), 0.0)
    for name, gradients in found.items():
        terms = gradients.gradient * drawn.to(gradients.gradient)[..., None]
        total, reference = terms.sum((0, 1)), _flat(expected[name], gradients.gradient[0, 0])
        size = max(*numbers([terms.norm(), reference.norm()]), whole)
        difference = float((total - reference).norm())
        differs = not difference <= chunk.precision**0.5 * size and math.isfinite(size)
        if differs and not is_rounding(chunk, name, rows, difference):
            from featlearn.audit.refusals import refuse_nonlinear  # loaded where something is refused

            refuse_nonlinear(chunk, [name], generator)
            raise CoupledSamplesError(
                f"the gradients of {name} for single samples do not add up to that of the batch: a sample's gradient "
                "depends on the other samples; expected samples that do not influence each other, in a backward pass "
                "as in a forward pass"
            )


def expect_confirmed(deferred: DeferredChecks, chunk: Chunk, backpropagated: Backpropagated) -> None:
    """Require that the sample axis of every op in doubt is confirmed."""
    slack = chunk.precision**0.5
    for error in _errors(chunk, backpropagated).values():
        deferred.expect(lambda error: error < slack, error)


def correct_axes(chunk: Chunk, backpropagated: Backpropagated) -> bool:
    """Read a chunk again where a sample axis is not confirmed; return whether that was necessary.

    Parameters at ops for which no axis is confirmed go to the fallback.
    """
    assert chunk.graph is not None
    errors, slack = _errors(chunk, backpropagated), chunk.precision**0.5
    wrong = [node for node, error in zip(errors, numbers(list(errors.values())), strict=True) if not error < slack]
    right: dict[Node, Layout] = {}
    for node in wrong:
        shape, gradients = chunk.graph.output_shape((node, 0)), _weighted_gradients(backpropagated, node)
        if layout := sample_layout(shape, len(chunk.outputs), *gradients, slack):
            right[node] = layout
    chunk.send_to_fallback(
        {
            name: f"the samples lie in no regular order at {reading.use.node.name()}"
            for name, uses in chunk.uses.items()
            for reading in uses.readings
            if reading.use.node in wrong and reading.use.node not in right
        }
    )
    if right:
        chunk.read({**chunk.axes, **right}, chunk.several_outputs)
    return bool(wrong)


def _errors(chunk: Chunk, backpropagated: Backpropagated) -> dict[Node, Tensor]:
    """Return, for every op in doubt, how far gradients are from those of the sample axis that it is read with."""
    errors = {}
    for node, _ in backpropagated.coded:
        layout = chunk.axes[node]
        assert layout is not None
        errors[node] = attribution_error(*_weighted_gradients(backpropagated, node), layout)
    return errors


def _weighted_gradients(
    backpropagated: Backpropagated, node: Node
) -> tuple[Sequence[Tensor | None], Tensor, Tensor | None]:
    """Return the gradients at an op for every direction, the weights, and the gradient with weights."""
    assert backpropagated.weights is not None
    return backpropagated.grads[node, 0], backpropagated.weights, backpropagated.coded[node, 0]


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


def check_readings(chunk: Chunk, audit: Audit, names: list[str], generator: Callable[[], torch.Generator]) -> Audit:
    """Check the readings of some parameters against autograd on this chunk; return what is then known of the graph."""
    drawn = weighted_gradient(chunk, names, *drawn_weights(chunk, generator()))
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
    if name is None:
        return
    from featlearn.audit.refusals import refuse_nonlinear  # loaded where something is refused

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
        _, weights = drawn_weights(part, generator)
        expected = weighted_gradient(part, chunk.uses, probed.direction, weights)
        cotangent = weights[:, None] * probed.direction.to(weights)
        for name, difference in disagreements(chunk, grads, places, expected):
            if not is_rounding(part, name, cotangent, difference):
                return name
    return None


def refuse_rewriting(model: nn.Module, before: Mapping[str, Tensor], state: KeptState) -> None:
    """Raise if a forward pass has set weights (max_norm, initialization from data) or made new ones."""
    after, rewritten = dict(model.named_parameters()), state.rewritten()
    changed = [name for name in {**before, **after} if after.get(name) is not before.get(name)]
    changed = changed or [name for name, parameter in before.items() if id(parameter) in rewritten]
    if changed:
        raise UnsupportedModelError(
            f"a forward pass in eval mode rewrites {', '.join(changed[:5])}, expected a model that only reads its "
            "weights; run it once on a batch of your own if it initializes itself from data"
        )


def refuse_foreign_weights(originals: Mapping[str, Tensor], results: Sequence["StoredResult"], example: Chunk) -> None:
    """Raise if a copy of a model depends on the weights of the original: by stored results, or by a closure."""
    reached = example.graph.variables if example.graph is not None else frozenset()
    for result in results:
        names = list(build_graph(result.original, originals).leaves) if id(result.leaf) in reached else []
        if names:
            raise UnsupportedModelError(
                f"{', '.join(names[:5])} act through a tensor that the model computed once and keeps, which a copy in "
                "another precision cannot follow; reset the model's state, or convert the model itself, "
                "model.double(), and measure that"
            )
    copied = {id(p) for p in example.parameters.values()}
    if reached & ({id(p) for p in originals.values()} - copied):
        raise UnsupportedModelError(
            "a copy of the model still reaches the weights of the original (through a closure or a hook), so it cannot "
            "be measured in another precision; convert the model itself, model.double(), and measure that"
        )
