"""Networks of torch's own layers alone, in sequence: what a forward pass does to samples and to itself is known.

Each of these layers reads its weights and treats samples along the first axis one by one, writes to nothing and draws
no random number in eval mode. No code of the user runs, so that none of it needs to be asked of the network again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_globals

from featlearn.capture.probe import Inputs, Readout


def _always(layer: Any) -> bool:
    del layer
    return True


_SEQUENCE = (nn.Sequential, nn.Identity)
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink,
)  # fmt: skip
_POOLING = (
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
)  # fmt: skip
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_CONDITIONS: Mapping[type[nn.Module], Callable[[Any], bool]] = {
    **dict.fromkeys((*_SEQUENCE, *_PRODUCTS, *_ELEMENTWISE, *_POOLING, *_DROPOUT, nn.GroupNorm), _always),
    # Otherwise the shape of what it normalises, or joins, is a plain attribute, which no graph shows.
    nn.LayerNorm: lambda layer: layer.weight is not None,
    nn.Flatten: lambda layer: layer.start_dim == 1,
}
"""Which layers they are, and under what condition."""

_FORWARD: Mapping[type[nn.Module], Any] = {
    kind: kind.forward for kind in _CONDITIONS if kind.forward.__module__ == kind.__module__
}
"""What each does, unless it has been replaced."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(parts: Sequence[nn.Module], x: Inputs, readout: Readout | None) -> bool:
    """Whether a network of these modules, with these inputs, is such a one: no hooks, no readout, nothing replaced."""
    if readout is not None or type(x) is not Tensor or x.dim() < 2 or x.requires_grad or x.is_inference():
        return False
    if any(getattr(module_globals, f"_global{hooks}") for hooks in _HOOKS):
        return False
    return all(map(_is_as_torch_made_it, parts))


def _is_as_torch_made_it(layer: nn.Module) -> bool:
    kind, own = type(layer), layer.__dict__
    if kind not in _FORWARD or kind.forward is not _FORWARD[kind] or not _CONDITIONS[kind](layer):
        return False
    if "forward" in own or own.get("inplace") or any(own[hooks] for hooks in _HOOKS):
        return False
    return all(p is None or (type(p) is nn.Parameter and not p._backward_hooks) for p in own["_parameters"].values())
