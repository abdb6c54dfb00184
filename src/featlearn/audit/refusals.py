"""Refuse what cannot be measured, with the likely cause and what to do; loaded only for models that need it.

Every pass of a measurement starts from the same state of the random generators. A model that draws weights or masks in
eval mode would be measured for one draw, silently, so it is run again from other states.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.audit.audit import AUDITED, drawn_weights, weighted_gradient
from featlearn.errors import CoupledSamplesError, UnsupportedModelError
from featlearn.gradients.captured import Chunk
from featlearn.graph.graph import numbers, parameter_gradients
from featlearn.network.inputs import ModelWithInputs, call_model, map_tensors
from featlearn.network.isolation import OPERANDS, RandomState, random_state_kept
from featlearn.readouts import parts_of

SMALL_CHANGE = 1e-2
"""Relative change of outputs below which an adaptive solver is the likely cause."""


def refusal(chunk: Chunk, places: Tensor, difference: str, change: float = 1.0) -> CoupledSamplesError:
    """Return the error for outputs that differ in a batch of the samples at `places`; `change`: by how much."""
    batch, indices = chunk.batch, chunk.indices[: chunk.count]
    batch.rewind()
    with random_state_kept() as state:
        batch.outputs(indices)
        draws = state.has_drawn()
    if draws:
        return CoupledSamplesError(
            "the model draws random numbers in eval mode, so that the outputs of a sample change with its batch "
            f"({difference}); expected outputs that x and the weights determine. {random_advice(batch, indices)}"
        )
    whole, part = _recorded_calls(batch, indices), _recorded_calls(batch, indices[places.cpu()])
    cause, remedy = _cause(batch.model, whole, part, len(indices), change)
    return CoupledSamplesError(
        f"the outputs of a sample depend on the other samples of its batch ({difference})"
        f"{_first_difference(whole, part, len(indices), places.cpu())}{cause}; expected f(x)[i] = f(x[i]). {remedy}"
    )


def random_advice(batch: ModelWithInputs, indices: Tensor | slice) -> str:
    """Return what to do about random numbers in eval mode, with a part of the output that does not depend on them."""
    batch.rewind()
    with random_state_kept() as state:
        first = parts_of(batch.call(indices)[0])
        state.seed(1)
        again = parts_of(call_model(batch.model, batch.take(indices)))
    fixed = [
        name
        for (name, a), (_, b) in zip(first, again, strict=False)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.dim() and torch.equal(a, b)
    ]
    noise = "`noise = torch.randn_like(std) if self.training else 0`"
    advice = f"draw in training only, {noise}, or pass the noise in as an input"
    if not fixed:
        return f"To measure it, {advice}"
    return f"Add `readout=lambda out: {fixed[0]}`, which does not depend on them (of a VAE, the mean), or {advice}"


Calls = list[tuple[str, str, list[Tensor]]]
"""Name, type and outputs of modules, in the order in which they finish."""


def _cause(model: nn.Module, whole: Calls, part: Calls, samples: int, change: float) -> tuple[str, str]:
    """Return the likely cause, to follow the first difference, and what to do."""
    if [name for name, *_ in whole] != [name for name, *_ in part]:
        return (
            ": it runs other modules, or as many other times, for another batch, as solvers do that stop once all "
            "samples have converged",
            "Fix the number of steps, or tighten the tolerance of the solver until the difference vanishes",
        )
    if any(type(module).__module__.partition(".")[0] == "torch_geometric" for module in model.modules()):
        return (
            ": messages pass between nodes",
            "Let the samples be graphs: hold one edge_index in the model and pass node features of shape "
            "(graphs, nodes, features)",
        )
    if change < SMALL_CHANGE:
        return (
            " by so little that an adaptive solver may choose its steps from the whole batch",
            "Fix the steps (method='rk4' with step_size in torchdiffeq), or tighten the tolerance",
        )
    return (
        "",
        "Use running statistics, check batch_first, and let a readout take what belongs to samples from x rather than "
        "from outside",
    )


def refuse_nonlinear(chunk: Chunk, names: list[str], generator: torch.Generator) -> None:
    """Raise if gradients of parameters do not scale with the gradient of the outputs.

    A backward pass that clamps gradients or takes their signs has no gradients of single samples to be added.
    """
    named = {name: chunk.parameters[name] for name in names}
    drawn = torch.randn(chunk.outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(chunk.outputs)
    unit = parameter_gradients(chunk.outputs, named, drawn)
    for factor in (2.0**10, 2.0**-10):  # powers of two: nothing is rounded otherwise
        scaled = parameter_gradients(chunk.outputs, named, factor * drawn)
        if wrong := _not_scaled({name: (unit[name], scaled[name]) for name in named}, factor, chunk.precision):
            raise CoupledSamplesError(
                f"the backward pass to {', '.join(wrong[:5])} is not linear in the gradient of the outputs (it clamps "
                "or normalizes gradients, or takes their signs), so that the gradient of a batch is not the sum of "
                "those of its samples; expected the derivative of the forward pass. Leave out what changes gradients "
                "(a hook, a custom autograd.Function) while measuring"
            )


def _not_scaled(pairs: Mapping[str, tuple[Tensor | None, Tensor | None]], factor: float, precision: float) -> list[str]:
    both = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None and a.numel()}
    gaps = numbers([(b / factor - a).abs().max() for a, b in both.values()])
    sizes = numbers([torch.maximum(a.abs().max(), b.abs().max() / factor) for a, b in both.values()])
    return [name for name, gap, size in zip(both, gaps, sizes, strict=True) if gap > precision**0.5 * size]


def _first_difference(whole: Calls, part: Calls, samples: int, places: Tensor) -> str:
    """Return where it happens: the first module to finish whose output for a sample changes with the batch."""
    for (name, kind, a), (_, _, b) in zip(whole, part, strict=False):
        if len(a) == len(b) and not all(_same(s, t, samples, places) for s, t in zip(a, b, strict=True)):
            return f", first seen in {name or 'the model itself'} ({kind})"
    return ""


def _same(whole: Tensor, part: Tensor, samples: int, places: Tensor) -> bool:
    """Return whether `part` holds the samples at `places` of `whole` along one of the axes where they can lie."""
    if whole.is_nested or part.is_nested or not whole.is_floating_point():
        return True
    axes = [i for i, size in enumerate(whole.shape) if size == samples and part.shape[i : i + 1] == (len(places),)]
    chosen = [rows for i in axes if (rows := whole.index_select(i, places.to(whole.device))).shape == part.shape]
    slack = torch.finfo(whole.dtype).eps ** 0.5 * whole.abs().max() if axes else 0.0
    # Without an axis to compare along nothing is known.
    return not axes or any(bool((rows - part).abs().max() <= slack) for rows in chosen)


def _recorded_calls(batch: ModelWithInputs, indices: Tensor) -> Calls:
    """Run some samples, and return the output tensors of every module."""
    calls: Calls = []
    names = {part: name for name, part in batch.model.named_modules()}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        tensors: list[Tensor] = []
        map_tensors(output, lambda tensor: tensors.append(tensor.detach().clone()))
        if module in names:
            calls.append((names[module], type(module).__name__, tensors))

    handle = nn.modules.module.register_module_forward_hook(keep)
    try:
        batch.outputs(indices)
    finally:
        handle.remove()
    return calls


SEEDS = range(1, 9)
"""Other states of the generators. A layer that is dropped now and then may stay in many of them."""


def refuse_random_outputs(
    batches: Sequence[ModelWithInputs],
    random_state: RandomState,
    measure: Callable[[ModelWithInputs], Sequence[Tensor]],
) -> None:
    """Raise if what is measured on a few samples changes with the random numbers that the model draws."""
    for batch in batches:
        few = min(AUDITED, batch.samples)
        sample = replace(batch, x=batch.take(slice(0, few)), samples=few, waiting=True)
        expected = measure(sample)
        precision = 64 * max(torch.finfo(tensor.dtype).eps for tensor in expected)
        for seed in SEEDS:
            changed = _change(measure(replace(sample, rewind=partial(_reseed, batch, random_state, seed))), expected)
            # The same random numbers may give other rounding on a GPU.
            if changed > 0.0 and changed > precision + 10 * _change(measure(sample), expected):
                by = "altogether" if changed == math.inf else f"by {changed:.1e} of their largest value"
                raise UnsupportedModelError(
                    f"the model draws random numbers in eval mode: other ones change its outputs or gradients {by}, "
                    f"expected outputs that x and the weights determine. {random_advice(sample, slice(0, few))}. "
                    "Switch dropout off in eval mode: F.dropout(..., training=self.training). To measure one draw, "
                    "draw it once into a buffer, or call torch.manual_seed(0) at the beginning of forward"
                )


def outputs_and_gradients(batch: ModelWithInputs, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return outputs, and the gradients of a fixed sum of them: the outputs may be zero whatever is drawn."""
    outputs = batch.outputs(slice(0, batch.samples))
    if not outputs.requires_grad:
        return [outputs]
    generator = torch.Generator("cpu").manual_seed(0)
    weights = torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs)
    gradients = parameter_gradients(outputs, parameters, weights).values()
    flat = [gradient.detach().flatten().to(outputs.device) for gradient in gradients if gradient is not None]
    return [outputs.detach(), torch.cat(flat)]


def _reseed(batch: ModelWithInputs, random_state: RandomState, seed: int) -> None:
    batch.rewind()
    random_state.seed(seed)


def _change(measured: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest change of any entry, relative to the largest entry of its tensor."""
    if [a.shape for a in measured] != [b.shape for b in expected]:
        return math.inf
    pairs = [(a, b) for a, b in zip(measured, expected, strict=True) if a.numel()]
    return max((float((a - b).abs().max()) / (float(b.abs().max()) or 1.0) for a, b in pairs), default=0.0)


def refuse_closures(chunk: Chunk) -> None:
    """Raise if weights get another gradient than in training from `torch.cond`, `scan` or other functions of functions.

    In training the compiler turns the weights that such a function reaches through its closure into operands. A
    measurement runs it eagerly, where only its operands get gradients.
    """
    chunk.batch.guard = None  # the compiler does not run where ops are watched
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
    drawn = drawn_weights(chunk, torch.Generator("cpu").manual_seed(0))
    found = weighted_gradient(chunk, named, *drawn).gradients
    return {name: zeros[name] if g is None else g.detach() for name, g in found.items()}
