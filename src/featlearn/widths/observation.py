"""What the layers of a network take in and give out in one pass, and the gradients that come back to them."""

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
"""Autograd nodes that mix channels: behind them a gradient is no longer that of the same units."""
LONGEST_PATH = 60
DRAWS = 4
"""of random gradients"""


@dataclass(eq=False)
class LayerCall:
    """One call of a module that holds trainable parameters."""

    layer: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: Tensor | None
    """the first real tensor that went in, with its graph"""
    node: Any
    """the autograd node that made the output"""
    output: Tensor
    """what came out, detached"""
    gradient: Tensor | None = None
    """of the loss, by the output"""
    entry_gradient: Tensor | None = None
    next_gradient: Tensor | None = None
    """of the loss, by what the next layer takes in, or by the network's output behind the last layer"""


@dataclass
class Pass:
    """All calls of one forward pass, in order."""

    calls: list[LayerCall] = field(default_factory=list)
    output_gradient: Tensor | None = None
    """of the loss, by the output of the network"""

    def of(self, layer: str) -> list[LayerCall]:
        """The calls of one layer."""
        return [call for call in self.calls if call.layer == layer]

    def link(self, output: Tensor) -> Callable[[], None]:
        """Find the layer that follows each; call what is returned after the backward pass."""
        if output.requires_grad:
            output.register_hook(lambda gradient: setattr(self, "output_gradient", gradient.detach()))
        own = [call.node for call in self.calls]
        followers: list[tuple[LayerCall, LayerCall | None]] = []
        for number, call in enumerate(self.calls):
            later = next((one for one in self.calls[number + 1 :] if _reaches(one.entry, call.node, own)), None)
            if later is not None or _reaches(output, call.node, own):
                followers.append((call, later))

        def finish() -> None:
            for call, later in followers:
                call.next_gradient = self.output_gradient if later is None else later.entry_gradient

        return finish


def real_tensor(thing: Any) -> Tensor | None:
    """The first tensor of real numbers in nested inputs or outputs."""
    return next((tensor for tensor in tensors_in(thing) if tensor.is_floating_point()), None)


def _reaches(tensor: Tensor | None, node: Any, own: Sequence[Any]) -> bool:
    """Whether a tensor is made from the output of `node` by operations that treat units alike."""
    if tensor is None or tensor.grad_fn is None or node is None:
        return False
    ahead: list[Any] = [tensor.grad_fn]
    seen = 0
    while ahead and seen < LONGEST_PATH:
        one = ahead.pop()
        seen += 1
        if one is node:
            return True
        if one is None or one.name().startswith(BARRIERS) or _gates(one) or any(one is other for other in own):
            continue
        ahead += [following for following, _ in one.next_functions]
    return False


def _gates(node: Any) -> bool:
    """Whether a node multiplies activations with each other: the factor of one is the other, and no multiplier."""
    factors = [one for one, _ in node.next_functions if one is not None and "AccumulateGrad" not in one.name()]
    return len(factors) > 1 and node.name().startswith(("Mul", "Div"))


@contextmanager
def observed(model: nn.Module, layers: Sequence[str]) -> Iterator[Pass]:
    """Note the calls of these modules in a forward pass inside."""
    seen = Pass()
    handles = []
    for name in layers:
        handles.append(model.get_submodule(name).register_forward_hook(_noting(name, seen), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _noting(name: str, seen: Pass) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        made = real_tensor(output)
        if made is None or not made.requires_grad:
            return
        entry = real_tensor((args, kwargs))
        copied = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        call = LayerCall(name, copied[0], copied[1], entry, made.grad_fn, made.detach().clone())
        made.register_hook(lambda gradient: setattr(call, "gradient", gradient.detach()))
        if entry is not None and entry.requires_grad:
            entry.register_hook(lambda gradient: setattr(call, "entry_gradient", gradient.detach()))
        seen.calls.append(call)

    return note


def output_with(
    module: nn.Module, call: LayerCall, parameters: dict[str, Tensor], entry: Any = None, *, gradients: bool = False
) -> Tensor:
    """What a layer gives for the inputs of a call, with other parameters, or other inputs; it is not changed."""
    state = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    args, kwargs = (call.args, call.kwargs) if entry is None else entry
    was = module.training
    try:
        module.eval()
        with torch.set_grad_enabled(gradients):
            given = functional_call(module, {**state, **parameters}, args, kwargs)
    finally:
        module.train(was)
    found = real_tensor(given)
    assert found is not None
    return found


def random_response(module: nn.Module, calls: Sequence[LayerCall], parameter: str, *, proportional: bool) -> float:
    """How far a step of size one moves what a layer gives along random gradients r of size one.

    With g the gradient of a parameter for r, it is |g|^2 / |r|^2 for a step along g, as of SGD, and |g|_1 / (|r|
    sqrt(count)) for one along the signs of g, as Adam's first. r is the same at all widths as far as it can be, and
    does not know the data, so that powers are clean: |h|^2 and |h|_1 of a linear map's inputs.
    """
    generator = torch.Generator().manual_seed(0)
    weight = dict(module.named_parameters(remove_duplicate=False))[parameter]
    total = 0.0
    for _ in range(DRAWS):
        given, size, count = torch.zeros_like(weight), 0.0, 0
        for call in calls:
            with torch.enable_grad():
                changed = weight.detach().clone().requires_grad_(True)
                output = output_with(module, call, {parameter: changed}, gradients=True)
                noise = torch.randn(output.shape, generator=generator).to(output)
                given += torch.autograd.grad((output * noise).sum(), changed)[0]
            size, count = size + float(noise.square().sum()), count + noise.numel()
        long = given.double()
        total += float(long.square().sum()) / size if proportional else float(long.abs().sum()) / (size * count) ** 0.5
    return total / DRAWS
