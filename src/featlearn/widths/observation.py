"""Record inputs, outputs, and gradients of the layers of a network in a pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from featlearn.network.inputs import map_tensors, tensors_in

BARRIERS = (
    "Mm",
    "Bmm",
    "Addmm",
    "Baddbmm",
    "Convolution",
    "Embedding",
    "ScaledDotProduct",
    "Softmax",
    "Cudnn",
    "Mkldnn",
)
"""Autograd nodes that mix channels, so that gradients belong to other units."""
LONGEST_PATH = 60
DRAWS = 4
"""Number of random gradients."""


@dataclass(eq=False)
class LayerCall:
    """A call of a module with trainable parameters."""

    layer: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: Tensor | None
    """first real input tensor, with its graph"""
    node: Any
    """the autograd node that made the output"""
    output: Tensor
    """detached output"""
    gradient: Tensor | None = None
    """gradient of the loss with respect to the output"""
    entry_gradient: Tensor | None = None
    next_gradient: Tensor | None = None
    """gradient of the loss with respect to the input of the next layer, or to the network's output after the last"""


@dataclass
class Pass:
    """All calls of one forward pass, in order."""

    calls: list[LayerCall] = field(default_factory=list)
    output_gradient: Tensor | None = None
    """gradient of the loss with respect to the network's output"""

    def of(self, layer: str) -> list[LayerCall]:
        """Return the calls of a layer."""
        return [call for call in self.calls if call.layer == layer]

    def link(self, output: Tensor) -> Callable[[], None]:
        """Find the layer that follows each call; call the returned function after the backward pass."""
        if output.requires_grad:
            output.register_hook(lambda gradient: setattr(self, "output_gradient", gradient.detach()))
        nodes = [call.node for call in self.calls]
        followers: list[tuple[LayerCall, LayerCall | None]] = []
        for number, call in enumerate(self.calls):
            follower = next(
                (other for other in self.calls[number + 1 :] if _reaches(other.entry, call.node, nodes)), None
            )
            if follower is not None or _reaches(output, call.node, nodes):
                followers.append((call, follower))

        def finish() -> None:
            for call, follower in followers:
                call.next_gradient = self.output_gradient if follower is None else follower.entry_gradient

        return finish


def real_tensor(thing: Any) -> Tensor | None:
    """Return the first real tensor in nested inputs or outputs."""
    return next((tensor for tensor in tensors_in(thing) if tensor.is_floating_point()), None)


def _reaches(tensor: Tensor | None, node: Any, nodes: Sequence[Any]) -> bool:
    """Return whether a tensor is computed from the output of `node` without mixing units."""
    if tensor is None or tensor.grad_fn is None or node is None:
        return False
    pending: list[Any] = [tensor.grad_fn]
    visited = 0
    while pending and visited < LONGEST_PATH:
        item = pending.pop()
        visited += 1
        if item is node:
            return True
        if item is None or item.name().startswith(BARRIERS) or _gates(item) or any(item is other for other in nodes):
            continue
        pending += [following for following, _ in item.next_functions]
    return False


def _gates(node: Any) -> bool:
    """Return whether a node multiplies activations with each other, as opposed to a constant multiplier."""
    factors = [
        parent for parent, _ in node.next_functions if parent is not None and "AccumulateGrad" not in parent.name()
    ]
    return len(factors) > 1 and node.name().startswith(("Mul", "Div"))


@contextmanager
def observe_calls(model: nn.Module, layers: Sequence[str]) -> Iterator[Pass]:
    """Record the calls of these modules in a forward pass inside."""
    recorded = Pass()
    handles = []
    for name in layers:
        handles.append(model.get_submodule(name).register_forward_hook(_recorder(name, recorded), with_kwargs=True))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _recorder(name: str, recorded: Pass) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        produced = real_tensor(output)
        if produced is None or not produced.requires_grad:
            return
        entry = real_tensor((args, kwargs))
        copied = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        call = LayerCall(name, copied[0], copied[1], entry, produced.grad_fn, produced.detach().clone())
        produced.register_hook(lambda gradient: setattr(call, "gradient", gradient.detach()))
        if entry is not None and entry.requires_grad:
            entry.register_hook(lambda gradient: setattr(call, "entry_gradient", gradient.detach()))
        recorded.calls.append(call)

    return note


def output_with(
    module: nn.Module, call: LayerCall, parameters: dict[str, Tensor], entry: Any = None, *, gradients: bool = False
) -> Tensor:
    """Return the output of a layer for the inputs of a call, with other parameters or inputs, without side effects."""
    state = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    args, kwargs = (call.args, call.kwargs) if entry is None else entry
    was_training = module.training
    try:
        module.eval()
        with torch.set_grad_enabled(gradients):
            result = functional_call(module, {**state, **parameters}, args, kwargs)
    finally:
        module.train(was_training)
    output = real_tensor(result)
    assert output is not None
    return output


def random_response(module: nn.Module, calls: Sequence[LayerCall], parameter: str, *, proportional: bool) -> float:
    """Measure how far a step of size one moves the output of a layer along random gradients r of size one.

    With g the gradient of a parameter for r, it is |g|^2 / |r|^2 for a step along g, as of SGD, and |g|_1 / (|r|
    sqrt(count)) for one along the signs of g, as Adam's first. r is the same at all widths as far as it can be, and
    does not know the data, so that powers are clean: |h|^2 and |h|_1 of a linear map's inputs.
    """
    generator = torch.Generator().manual_seed(0)
    weight = dict(module.named_parameters(remove_duplicate=False))[parameter]
    total = 0.0
    for _ in range(DRAWS):
        gradient, size, count = torch.zeros_like(weight), 0.0, 0
        for call in calls:
            with torch.enable_grad():
                changed = weight.detach().clone().requires_grad_(True)
                output = output_with(module, call, {parameter: changed}, gradients=True)
                noise = torch.randn(output.shape, generator=generator).to(output)
                gradient += torch.autograd.grad((output * noise).sum(), changed)[0]
            size, count = size + float(noise.square().sum()), count + noise.numel()
        g = gradient.double()
        total += float(g.square().sum()) / size if proportional else float(g.abs().sum()) / (size * count) ** 0.5
    return total / DRAWS
