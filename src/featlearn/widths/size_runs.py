"""Train a network for a few steps at one size, and measure what scales with the size."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from featlearn.losses import LossFunction
from featlearn.network.inputs import Inputs, batch_size, map_tensors
from featlearn.torch_internals import without_fused_recurrent_layers
from featlearn.widths.attention import MASKED, Logits, record_attention
from featlearn.widths.passes import call_model, call_traced, evaluating
from featlearn.widths.uses import LOOKUPS, ParameterUse, RecordedOps, find_uses, module_entries

KERNEL_SAMPLES = 6
OBSERVED_STEPS = 3
"""Steps observed for first updates; a zero readout delays gradients by a step, two zero layers by two."""
SIGNS = 0.7
"""Least cosine of an update and its gradient's signs for a sign update; 1 for Adam's first update."""
ROUNDING = 1e-4
"""Gradients of vectors that are this much smaller than those that reach them are rounding noise, as for key biases."""


def rms(values: Tensor | None) -> float:
    """Compute the root mean square."""
    return 0.0 if values is None or not values.numel() else float(values.double().square().mean().sqrt())


def spectral_norm(weight: Tensor) -> float:
    """Compute the largest singular value; convolutions are flattened after the first axis, vectors have their norm."""
    if not bool(torch.isfinite(weight).all()):
        return float("nan")
    matrix = weight.double().flatten(1) if weight.dim() > 1 else weight.double().reshape(1, -1)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())


def gram_motion(before: Tensor, after: Tensor) -> float:
    """Compute |K' - K| / |K|; nan if K is zero."""
    size = float(before.norm())
    return float((after - before).norm()) / size if size else float("nan")


def _few(x: Inputs) -> Inputs:
    samples = batch_size(x)
    return map_tensors(x, lambda tensor: tensor[:KERNEL_SAMPLES] if tensor.dim() and len(tensor) == samples else tensor)


def tangent_kernel(model: nn.Module, x: Inputs, rates: Mapping[str, float]) -> Tensor:
    """Compute the tangent kernel of a random output direction on a few samples, weighted by `rates`."""
    trainable = [(p, rates.get(name, 0.0)) for name, p in model.named_parameters() if p.requires_grad]
    with evaluating(model), torch.enable_grad():
        output = call_model(model, _few(x))
        direction = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(0)).to(output)
        rows = []
        for sample_output in output:
            gradients = torch.autograd.grad(
                (sample_output * direction).sum(), [p for p, _ in trainable], retain_graph=True, allow_unused=True
            )
            pairs = zip(trainable, gradients, strict=True)
            rows.append(torch.cat([rate**0.5 * g.flatten().double() for (_, rate), g in pairs if g is not None]))
    stacked = torch.stack(rows)
    return stacked @ stacked.T


@dataclass
class SizeRun:
    """Measurements at one size and seed, by use, by attention module, and of the network."""

    uses: dict[str, ParameterUse] = field(default_factory=dict)
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)
    attention: dict[str, dict[str, float]] = field(default_factory=dict)
    network: dict[str, float] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    """uses of parameters that have several names"""
    unused: tuple[str, ...] = ()
    """parameters without a use"""


class _Names:
    """Trainable parameters by their first names, with all names of each."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        self.all: dict[str, list[str]] = {}
        self.tensors: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                key = first.setdefault(id(parameter), name)
                self.all.setdefault(key, []).append(name)
                self.tensors[key] = parameter
        self.first = {name: key for key, names in self.all.items() for name in names}


def learning_rates(model: nn.Module, optimizer: Optimizer) -> dict[str, float]:
    """Return the learning rate of every trainable parameter, by its first name."""
    by_id = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: by_id.get(id(p), 0.0) for name, p in _Names(model).tensors.items()}


def train_and_measure(
    model: nn.Module, optimizer: Optimizer, x: Inputs, y: Tensor, loss: LossFunction, steps: int, *, proportional: bool
) -> SizeRun:
    """Train a network for a few steps, and measure it. `proportional` updates scale with the gradient."""
    names, run = _Names(model), SizeRun()
    start = {name: p.detach().clone() for name, p in names.tensors.items()}
    rates = learning_rates(model, optimizer)
    weights = rates if proportional else dict.fromkeys(rates, 1.0)
    first = _EvalPass(model, x, names)
    run.uses = first.uses
    used = {use.parameter for use in run.uses.values()}
    run.unused = tuple(name for name, all_names in names.all.items() if not used & set(all_names))
    run.tied = {key for key, use in run.uses.items() if len(names.all[names.first[use.parameter]]) > 1}
    kernel = tangent_kernel(model, x, weights)
    for step in range(steps):
        waiting = [key for key in run.uses if "effect" not in run.sizes.get(key, {})]
        _step(model, optimizer, x, y, loss, run, names, waiting if step < OBSERVED_STEPS else [])
    last = _EvalPass(model, x, names)
    for key, use in run.uses.items():
        name = names.first[use.parameter]
        sizes = run.sizes.setdefault(key, {})
        moved = names.tensors[name].detach() - start[name]
        sizes |= {"weight": spectral_norm(start[name]), "update": spectral_norm(moved)}
        sizes |= {"gain": use.factor * rms(start[name]) * use.fan_in**0.5, "factor": use.factor, "lr": rates[name]}
        sizes |= _changes(use, first, last)
    for module, first_logits in first.logits.items():
        run.attention[module] = _attention_sizes(first_logits, last.logits.get(module))
    run.network |= {"output": rms(first.output), "output_change": rms(last.output - first.output)}
    run.network["kernel_motion"] = gram_motion(kernel, tangent_kernel(model, x, weights))
    return run


class _EvalPass:
    """A pass in eval mode: its output, uses, attention logits, and recorded ops."""

    def __init__(self, model: nn.Module, x: Inputs, names: _Names) -> None:
        with ExitStack() as stack:
            # with gradients, for torch to take the same path as in training
            for context in (evaluating(model), torch.enable_grad(), without_fused_recurrent_layers()):
                stack.enter_context(context)
            entries = stack.enter_context(module_entries(model))
            self.logits = stack.enter_context(record_attention(model))
            with RecordedOps() as ops:
                output, inputs = call_traced(model, x)
            self.uses = find_uses(output, names.all, names.tensors, inputs, entries)
            self.output = output.detach()
            self.ops = {key: ops.of(use.calls[0][1]) for key, use in self.uses.items()}


def _changes(use: ParameterUse, first: _EvalPass, last: _EvalPass) -> dict[str, float]:
    """Return the size of a use's output, and its change by its own update and by those of earlier layers."""
    before, after = first.ops.get(use.name), last.ops.get(use.name)
    if before is None:
        return {}
    sizes = {"activation": rms(before.output) * use.after}
    if after is None or after.output.shape != before.output.shape:
        return sizes
    sizes["change"] = rms(after.output - before.output) * use.after
    rows = [values.reshape(len(values), -1).double() for values in (before.output, after.output)]
    grams = [values @ values.T for values in rows]
    sizes["kernel_motion"] = gram_motion(*grams)
    old = before.operand(use.operand)
    replayed = None if old is None else after.with_operand(use.operand, old)
    if replayed is not None:
        sizes["own_change"] = rms(after.output - replayed) * use.after
        sizes["inherited_change"] = rms(replayed - before.output) * use.after
    return sizes


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    x: Inputs,
    y: Tensor,
    loss: LossFunction,
    run: SizeRun,
    names: _Names,
    waiting: list[str],
) -> None:
    """Take a step, and record the first update of each waiting use."""
    optimizer.zero_grad()
    if not waiting:
        loss(call_model(model, x), y).backward()
        optimizer.step()
        return
    before = {name: p.detach().clone() for name, p in names.tensors.items()}
    with without_fused_recurrent_layers():
        output, inputs = call_traced(model, x)
        uses = find_uses(output, names.all, names.tensors, inputs, set())
        value = loss(output, y)
        uses = {key: uses[key] for key in waiting if key in uses}
        nodes = list({node: None for use in uses.values() for _, node in use.calls})
        edges: list[Any] = [GradientEdge(node, 0) for node in nodes]
        at_output, *gradients = torch.autograd.grad(value, [output, *edges], retain_graph=True, allow_unused=True)
        arriving: dict[Any, Tensor | None] = dict(zip(nodes, gradients, strict=True))
        counts = Counter(names.first[use.parameter] for use in run.uses.values())
        by_use = {
            key: use.gradient(names.tensors[name], arriving)
            for key, use in uses.items()
            if counts[name := names.first[use.parameter]] > 1
        }
        value.backward()
    whole = {name: p.grad.detach().to_dense().clone() for name, p in names.tensors.items() if p.grad is not None}
    optimizer.step()
    for key, use in uses.items():
        name = names.first[use.parameter]
        gradient = by_use.get(key, whole.get(name))
        if gradient is not None and name in whole and float(whole[name].norm()) > 0:
            moves = (names.tensors[name].detach() - before[name]).double()
            present = [g for _, node in use.calls if (g := arriving[node]) is not None]
            sizes = _update_sizes(run.uses[key], moves, gradient.double(), whole[name], present)
            if sizes:
                run.sizes[key] = {**sizes, "output_gradient": rms(at_output)}


def _update_sizes(
    use: ParameterUse, moves: Tensor, gradient: Tensor, whole: Tensor, arriving: list[Tensor]
) -> dict[str, float]:
    """Return the sizes of an update: its effect along the gradient, and its rate, by any kind of update.

    The rate is how far the update moves the use's output, for inputs and (if updates are proportional to gradients)
    arriving gradients of size one. `along_signs` is the cosine of the update and the gradient's signs.
    """
    squares = sum(float(g.double().square().sum()) for g in arriving)
    count = sum(g.numel() for g in arriving)
    product = abs(float((moves * gradient).sum()))
    if not product or not squares or (use.is_vector and float(gradient.norm()) < ROUNDING * squares**0.5):
        return {}
    whole = whole.double()
    signs = int((whole != 0).sum())
    along = abs(float((moves * whole.sign()).sum()))
    is_matrix = moves.dim() > 1 and not use.is_vector and use.op not in LOOKUPS
    largest = spectral_norm(moves) if is_matrix else rms(moves)
    aligned = (use.fan_in / use.fan_out) ** 0.5 if is_matrix else 1.0
    return {
        "effect": product / (squares * count) ** 0.5 * use.after,
        "descent": product,
        "rate_gradient": abs(float((moves * whole).sum())) / float(whole.square().sum()) * use.factor**2 * use.fan_in,
        "rate_signs": along / signs * use.factor * use.fan_in,
        "rate_spectral": largest * aligned * use.factor,
        "along_signs": along / (float(moves.norm()) * signs**0.5),
        "update_rms": rms(moves),
        "update_spectral": largest,
    }


def _attention_sizes(first: Logits, last: Logits | None) -> dict[str, float]:
    incoherent = first.queries * first.keys * first.head**0.5
    scale = first.scale if first.scale is not None else first.size / incoherent if incoherent else math.nan
    attention_sizes = {"logits": first.size, "scale": scale, "head": float(first.head)}
    if last is not None and last.values.shape == first.values.shape:
        usable = (first.values > MASKED) & (last.values > MASKED)
        attention_sizes["change"] = rms((last.values - first.values)[usable])
    return attention_sizes
