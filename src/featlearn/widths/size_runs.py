"""Train a network for a few steps at a width, and measure sizes that scale with the width."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.losses import LossFunction
from featlearn.network.inputs import Inputs, batch_size, map_tensors
from featlearn.widths.attention import MASKED, Logits, record_attention
from featlearn.widths.observation import LayerCall, observe_calls, output_with, random_response, real_tensor
from featlearn.widths.passes import call_model, evaluating

KERNEL_SAMPLES = 6


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


def tangent_kernel(model: nn.Module, x: Inputs, rates: dict[str, float]) -> Tensor:
    """Compute the tangent kernel of a random output direction on a few samples, weighted by `rates`."""
    unique = {id(p): (p, rates[name]) for name, p in model.named_parameters() if p.requires_grad}
    parameters = [p for p, _ in unique.values()]
    roots = [rate**0.5 for _, rate in unique.values()]
    with evaluating(model), torch.enable_grad():
        output = call_model(model, _few(x))
        direction = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(0)).to(output)
        rows = []
        for sample_output in output:
            gradients = torch.autograd.grad(
                (sample_output * direction).sum(), parameters, retain_graph=True, allow_unused=True
            )
            rows.append(
                torch.cat(
                    [root * g.flatten().double() for root, g in zip(roots, gradients, strict=True) if g is not None]
                )
            )
    stacked = torch.stack(rows)
    return stacked @ stacked.T


OBSERVED_STEPS = 3
"""Steps observed for first updates; a zero readout delays gradients by a step, two zero layers by two."""
SIGNS = 0.7
"""Least cosine of an update and its gradient's signs for a sign update; 1 for Adam's first update."""
ROUNDING = 1e-4
"""Cosine of update and gradient below which the gradient is rounding noise, as for key biases."""


@dataclass
class WidthSizes:
    """Sizes at a width and seed, by layer, by parameter, and of the network."""

    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    parameters: dict[str, dict[str, float]] = field(default_factory=dict)
    attention: dict[str, dict[str, float]] = field(default_factory=dict)
    network: dict[str, float] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """parameter -> layer whose output shows the effect of its update"""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    """parameters with several names"""


def train_and_measure(
    model: nn.Module,
    optimizer: Optimizer,
    x: Inputs,
    y: Tensor,
    loss: LossFunction,
    steps: int,
    *,
    proportional: bool,
) -> WidthSizes:
    """Train a network for a few steps, and measure sizes. `proportional` updates scale with the gradient."""
    sizes = WidthSizes()
    parameters = _trainable(model)
    start = {name: p.detach().clone() for name, p in parameters.items()}
    rates = _rates(optimizer, parameters) if proportional else dict.fromkeys(parameters, 1.0)
    first = _run_eval_pass(model, x)
    sizes.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    sizes.owners = {name: _owner(name, first.called_modules) for name in parameters}
    counts: dict[int, int] = {}
    for p in parameters.values():
        counts[id(p)] = counts.get(id(p), 0) + 1
    sizes.tied = {name for name, p in parameters.items() if counts[id(p)] > 1}
    kernel = tangent_kernel(model, x, rates)
    for step in range(steps):
        unobserved = [name for name in parameters if name not in sizes.parameters]
        _step(model, optimizer, x, y, loss, sizes, unobserved if step < OBSERVED_STEPS else [], proportional)
        if step == 0:
            _add_gains(model, first, sizes, start)
    last = _run_eval_pass(model, x)
    for layer, before in first.outputs.items():
        _add_changes(sizes, layer, before, last.outputs.get(layer))
        entry = first.entries[layer]
        sizes.layers[layer]["entry_size"] = 1 if entry is None else entry[0].numel()
    for name, p in parameters.items():
        measured = sizes.parameters.setdefault(name, {})
        measured["weight"], measured["update"] = spectral_norm(start[name]), spectral_norm(p.detach() - start[name])
    for module, first_logits in first.logits.items():
        sizes.attention[module] = _attention_sizes(first_logits, last.logits.get(module))
    sizes.network |= {"output": rms(first.output), "output_change": rms(last.output - first.output)}
    sizes.network["kernel_motion"] = gram_motion(kernel, tangent_kernel(model, x, rates))
    return sizes


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if p.requires_grad}


def _rates(optimizer: Optimizer, names: dict[str, nn.Parameter]) -> dict[str, float]:
    by_id = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: by_id.get(id(p), 0.0) for name, p in names.items()}


@dataclass
class _EvalPass:
    """A pass in eval mode."""

    output: Tensor
    outputs: dict[str, Tensor]
    entries: dict[str, Tensor | None]
    logits: dict[str, Logits]
    called_modules: set[str]


def _run_eval_pass(model: nn.Module, x: Inputs) -> _EvalPass:
    outputs: dict[str, Tensor] = {}
    entries: dict[str, Tensor | None] = {}
    handles = []

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            produced, entry = real_tensor(output), real_tensor((args, kwargs))
            if produced is not None and produced.requires_grad:
                outputs[name] = produced.detach().clone()
                entries[name] = None if entry is None else entry.detach().clone()

        return note

    for name, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters()):
            handles.append(module.register_forward_hook(noting(name), with_kwargs=True))
    try:
        # with gradients, for torch to take the same path as in training
        with evaluating(model), torch.enable_grad(), record_attention(model) as logits:
            output = call_model(model, x).detach()
    finally:
        for handle in handles:
            handle.remove()
    return _EvalPass(output, outputs, entries, logits, set(outputs))


def _owner(parameter: str, called_modules: set[str]) -> str:
    """Return the innermost called module around a parameter."""
    name = parameter.rpartition(".")[0]
    while name and name not in called_modules:
        name = name.rpartition(".")[0]
    return name


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    x: Inputs,
    y: Tensor,
    loss: LossFunction,
    sizes: WidthSizes,
    unobserved: list[str],
    proportional: bool,
) -> None:
    """Take a step, and record the effect of the first update of each unobserved parameter on its layer."""
    names = _trainable(model)
    before = {name: names[name].detach().clone() for name in unobserved}
    optimizer.zero_grad()
    layers = list(dict.fromkeys(sizes.owners[name] for name in unobserved))
    with observe_calls(model, layers) as recorded:
        output = call_model(model, x)
    finish = recorded.link(output)
    value = loss(output, y)
    value.backward()
    finish()
    gradients = {name: _dense(grad) for name in unobserved if (grad := names[name].grad) is not None}
    gradients = {name: gradient for name, gradient in gradients.items() if float(gradient.norm()) > 0}
    optimizer.step()
    for name in gradients:
        owner = sizes.owners[name]
        module, calls = model.get_submodule(owner), recorded.of(owner)
        local = name[len(owner) + 1 :] if owner else name
        effects = _update_sizes(module, calls, {local: before[name]})
        if effects:
            moves, gradient = (names[name].detach() - before[name]).double(), gradients[name].double()
            speed = _speed(moves, gradient, proportional)
            effects["regular"] = float(speed is not None)
            if speed is None:
                effects["response"] = effects["effect"]
            else:
                effects["response"] = speed * random_response(module, calls, local, proportional=proportional)
            sizes.parameters[name] = {**effects, "output_gradient": rms(recorded.output_gradient)}


def _speed(moves: Tensor, gradient: Tensor, proportional: bool) -> float | None:
    """Return the rate of an update along the gradient, or along its signs; None for other normalized updates."""
    if proportional:
        return abs(float((moves * gradient).sum())) / float(gradient.square().sum())
    along, count = abs(float((moves * gradient.sign()).sum())), int((gradient != 0).sum())
    return along / count if along > SIGNS * float(moves.norm()) * count**0.5 else None


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()


def _update_sizes(module: nn.Module, calls: list[LayerCall], before: dict[str, Tensor]) -> dict[str, float]:
    """Return effects of an update on the output of its layer, along the gradient, where they do not average out."""
    product = change = gradients = 0.0
    count, entry = 0, []
    ratios = []
    for call in calls:
        if call.gradient is None:
            continue
        moved = (output_with(module, call, {}) - output_with(module, call, before)).double()
        gradient = call.gradient.double()
        product += float((moved * gradient).sum())
        change += float(moved.square().sum())
        gradients += float(gradient.square().sum())
        count += gradient.numel()
        if call.entry is not None:
            entry.append(rms(real_tensor((call.args, call.kwargs))))
        if call.next_gradient is not None and rms(call.next_gradient) > 0:
            ratios.append(rms(gradient) / rms(call.next_gradient))
    if not change or not gradients or abs(product) < ROUNDING * (change * gradients) ** 0.5:
        return {}
    return {
        "effect": abs(product) / (gradients * count) ** 0.5,
        "gradient": (gradients / count) ** 0.5,
        "count": count,
        "descent": abs(product),
        "entry": sum(entry) / len(entry) if entry else 1.0,
        "multiplier": sum(ratios) / len(ratios) if ratios else 1.0,
    }


def _add_gains(model: nn.Module, first: _EvalPass, sizes: WidthSizes, start: dict[str, Tensor]) -> None:
    """Measure the size of a layer's output for random inputs of size one, with initial weights."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in sizes.shapes.items():
        owner = sizes.owners[name]
        module = model.get_submodule(owner)
        if len(shape) < 2 or name not in sizes.parameters or owner != name.rpartition(".")[0]:
            continue
        entry, output = first.entries.get(owner), first.outputs[owner]
        if entry is None:
            sizes.parameters[name]["gain"] = rms(output)
            continue
        if any(True for _ in module.children()):
            continue
        parameters = {local: start[f"{owner}.{local}" if owner else local] for local, _ in _trainable(module).items()}
        noise = torch.randn(entry.shape, generator=generator).to(entry)
        call = LayerCall(owner, (noise,), {}, None, None, output)
        zero = output_with(module, call, parameters, ((torch.zeros_like(noise),), {}))
        sizes.parameters[name]["gain"] = rms(output_with(module, call, parameters) - zero)


def _add_changes(sizes: WidthSizes, layer: str, before: Tensor, after: Tensor | None) -> None:
    layer_sizes = sizes.layers.setdefault(layer, {})
    layer_sizes["activation"] = rms(before)
    layer_sizes["size"] = before[0].numel()
    if after is not None and after.shape == before.shape:
        layer_sizes["change"] = rms(after - before)
        rows = [values.reshape(len(values), -1).double() for values in (before, after)]
        grams = [values @ values.T for values in rows]
        layer_sizes["kernel_motion"] = gram_motion(*grams)


def _attention_sizes(first: Logits, last: Logits | None) -> dict[str, float]:
    incoherent = first.queries * first.keys * first.head**0.5
    scale = first.scale if first.scale is not None else first.size / incoherent if incoherent else math.nan
    attention_sizes = {"logits": first.size, "scale": scale, "head": float(first.head)}
    if last is not None and last.values.shape == first.values.shape:
        usable = (first.values > MASKED) & (last.values > MASKED)
        attention_sizes["change"] = rms((last.values - first.values)[usable])
    return attention_sizes
