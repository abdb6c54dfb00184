"""Check per-sample gradients against autograd: their weighted sums, and the sample that each is ascribed to.

A use that was missed and a rule that is wrong both show in the sum. The weights differ from sample to sample, so that
gradients that are complete but belong to other samples do not cancel.

To check the sample of a gradient at an op, a backward pass has random weights of its own for every sample and
direction. It must give, entry by entry, the weighted sum of the passes without them. It shows wrong axes, samples in
another order and samples that influence each other, however small a sample's gradient is.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featlearn.audit.independence import last_digit_changed
from featlearn.contraction.deferred_checks import DeferredChecks
from featlearn.contraction.factors import Dense, Factor, Gradients, as_dense
from featlearn.contraction.windows import Windows
from featlearn.errors import CoupledSamplesError, UnsupportedModelError
from featlearn.gradients.captured import Chunk
from featlearn.gradients.formed import Backpropagated, UseGradients, backpropagate, formed_gradients
from featlearn.graph.graph import Layout, Node, backward_to, numbers, parameter_gradients, splits
from featlearn.graph.samples import sample_error
from featlearn.network.isolation import OPERANDS


@dataclass(frozen=True)
class WeightedGradient:
    """Autograd's gradient of sum_p weights_p direction . f_p."""

    direction: Tensor
    """(1, C)"""
    weights: Tensor
    """(rows of the outputs,)"""
    gradients: Mapping[str, Tensor | None]
    """Parameter -> gradient."""


def weighted_gradient(chunk: Chunk, names: Collection[str], generator: torch.Generator) -> WeightedGradient:
    """A random direction and random weights, by one backward pass."""
    outputs = chunk.outputs
    direction = torch.randn(1, outputs.shape[1], generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    weights = torch.randn(len(outputs), generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    named = {name: chunk.parameters[name] for name in names}
    return WeightedGradient(direction, weights, parameter_gradients(outputs, named, weights[:, None] * direction))


def balanced_gradient(
    chunk: Chunk, names: Collection[str], generator: torch.Generator
) -> tuple[WeightedGradient, UseGradients]:
    """The same with weights that make the gradients of all samples about equally large, so that small ones count.

    Also the gradients of the direction at the ops that use these parameters: two backward passes in all.
    """
    drawn = weighted_gradient(chunk, (), generator)
    layouts = chunk.use_layouts(chunk.readable(names)[0])
    at_uses, _ = backward_to(
        chunk.outputs, [(node, 0) for node in layouts], {}, drawn.direction.expand_as(chunk.outputs)
    )
    squares = torch.zeros_like(drawn.weights, dtype=torch.float64)
    for node, layout in layouts.items():
        gradient = at_uses[node, 0]
        if gradient is not None:
            squares += layout.split(gradient.detach()).double().square().sum((0, 2))
    sizes = squares.sqrt().to(drawn.weights)
    weights = drawn.weights / torch.where(sizes > 0, sizes, 1.0)
    named = {name: chunk.parameters[name] for name in names}
    gradients = parameter_gradients(chunk.outputs, named, weights[:, None] * drawn.direction)
    return WeightedGradient(drawn.direction, weights, gradients), {value: [g] for value, g in at_uses.items()}


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
    for name in _differing(checks, chunk):
        if not is_rounding(chunk, name, cotangent):
            failed[name] = f"the rules for {_nodes(chunk, name)} disagree with autograd"
    return failed


def disagreement(chunk: Chunk, grads: UseGradients, places: Tensor, expected: WeightedGradient) -> str | None:
    """A parameter whose gradient in another batch, of the samples at `places`, is not the sum of those in the chunk.

    `expected` is of the other batch.
    """
    readable, _ = chunk.readable(expected.gradients)
    counted = expected.weights.new_zeros(chunk.count).index_add(
        0, places.to(expected.weights.device) % chunk.count, expected.weights
    )
    checks = _compared(chunk, readable, grads, replace(expected, weights=counted))
    # Another batch takes other code paths, whose rounding shows where the terms of a gradient cancel.
    return next(_differing(checks, chunk, cancelling=64.0), None)


STATES = 4
"""States of the weights that show how much of a gradient is rounding."""


def is_rounding(chunk: Chunk, name: str, cotangent: Tensor) -> bool:
    """Return whether weights that differ in their last digits change a gradient as much as a disagreement would.

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
        if not float((gradient - before).norm()) <= chunk.precision**0.5 * float(before.norm()) / 4:
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
    difference, length = (torch.linalg.vector_norm(one, dtype=torch.float64) for one in (total - reference, reference))
    return difference, size, length


def _differing(checks: Sequence[Check], chunk: Chunk, cancelling: float = 2.0) -> Iterator[str]:
    """Parameters that do not agree.

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
            yield name


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
    return as_dense(weighted).gradient[:, 0].sum(0), size


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


def refuse_closures(chunk: Chunk) -> None:
    """Raise if weights get another gradient than in training from `torch.cond`, `scan` or other functions of functions.

    In training the compiler turns the weights that such a function reaches through its closure into operands. A
    measurement runs it eagerly, where only its operands get gradients.
    """
    if chunk.batch.guard is not None:  # the compiler does not run where ops are watched
        chunk.batch.guard.on = False
    with torch.compiler.set_stance("default"):
        expected = _gradients(Chunk(chunk.batch, chunk.indices, chunk.parameters))
    try:
        gradients = _gradients(chunk)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {OPERANDS}") from error
    errors = numbers([(gradients[name] - g).abs().max() for name, g in expected.items()])
    sizes = numbers([g.abs().max() for g in expected.values()])
    slack = chunk.precision**0.5
    if wrong := [name for name, e, size in zip(expected, errors, sizes, strict=True) if e > slack * size]:
        raise UnsupportedModelError(
            f"{', '.join(wrong[:5])} get another gradient than in training, where torch compiles functions that use "
            f"them; {OPERANDS}"
        )


def _gradients(chunk: Chunk) -> dict[str, Tensor]:
    """Gradients of the same random combination of outputs in every call, zeros where there are none."""
    named = {name: p for name, p in chunk.parameters.items() if p.numel()}
    zeros = {name: torch.zeros_like(p, requires_grad=False) for name, p in named.items()}
    if chunk.graph is None:
        return zeros
    found = weighted_gradient(chunk, named, torch.Generator("cpu").manual_seed(0)).gradients
    return {name: zeros[name] if g is None else g.detach() for name, g in found.items()}


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
        differs = not float((total - reference).norm()) <= chunk.precision**0.5 * size and math.isfinite(size)
        if differs and not is_rounding(chunk, name, rows):
            from featlearn.audit.coupling_cause import refuse_nonlinear  # loaded where something is refused

            refuse_nonlinear(chunk, [name], generator)
            raise CoupledSamplesError(
                f"the gradients of {name} for single samples do not add up to that of the batch: a sample's gradient "
                "depends on the other samples; expected samples that do not influence each other, in a backward pass "
                "as in a forward pass"
            )


def expect_confirmed(deferred: DeferredChecks, chunk: Chunk, backpropagated: Backpropagated) -> None:
    """Require that the sample axis of every op in doubt is confirmed."""
    slack = chunk.precision**0.5
    for node, _ in backpropagated.coded:
        error = _error(chunk, backpropagated, node, _layout(chunk, node))
        deferred.expect(lambda error: error < slack, error)


def correct_axes(chunk: Chunk, backpropagated: Backpropagated) -> bool:
    """Read a chunk again where a sample axis is not confirmed; return whether that was necessary.

    Parameters at ops for which no axis is confirmed go to the fallback.
    """
    nodes, slack = [node for node, _ in backpropagated.coded], chunk.precision**0.5
    errors = numbers([_error(chunk, backpropagated, node, _layout(chunk, node)) for node in nodes])
    wrong = [node for node, error in zip(nodes, errors, strict=True) if not error < slack]
    layouts = {node: _confirmed_layout(chunk, backpropagated, node, slack) for node in wrong}
    right = {node: layout for node, layout in layouts.items() if layout is not None}
    chunk.send_to_fallback(
        {
            name: f"the samples lie in no regular order at {reading.use.node.name()}"
            for name, uses in chunk.uses.items()
            for reading in uses.readings
            if reading.use.node in layouts and reading.use.node not in right
        }
    )
    if right:
        chunk.read({**chunk.axes, **right}, chunk.several_outputs)
    return bool(wrong)


def _layout(chunk: Chunk, node: Node) -> Layout:
    layout = chunk.axes[node]
    assert layout is not None
    return layout


def _confirmed_layout(chunk: Chunk, backpropagated: Backpropagated, node: Node, slack: float) -> Layout | None:
    assert chunk.graph is not None
    for layout in splits(chunk.graph.output_shape((node, 0)), len(chunk.outputs)):
        if float(_error(chunk, backpropagated, node, layout)) < slack:
            return layout
    return None


def _error(chunk: Chunk, backpropagated: Backpropagated, node: Node, layout: Layout) -> Tensor:
    """Return the largest difference of any sample, relative to the largest entry of that sample."""
    weights, coded = backpropagated.weights, backpropagated.coded[node, 0]
    assert weights is not None
    mixed: Tensor | None = None
    for k, gradient in enumerate(backpropagated.grads[node, 0]):
        if gradient is not None:
            term = layout.split(gradient.detach()) * weights[:, k].to(gradient)[:, None]
            mixed = term if mixed is None else mixed.add_(term)
    if coded is None:
        return torch.zeros(()) if mixed is None else mixed.abs().amax().double().sign()
    split = layout.split(coded.detach())
    return sample_error(torch.zeros_like(split) if mixed is None else mixed, split)
