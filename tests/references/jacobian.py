"""The slow, obvious tangent kernel: one backward pass per scalar output on the graph of the whole batch."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Readout = Callable[..., Tensor] | None


def call(model: nn.Module, x: Any) -> Any:
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, tuple):
        return model(*x)
    return model(x)


def outputs_of(model: nn.Module, x: Any, readout: Readout = None) -> Tensor:
    """The outputs as (P, C), in whatever mode the model is in."""
    output = call(model, x)
    if readout is not None:
        takes_input = len(inspect.signature(readout).parameters) >= 2
        output = readout(output, x) if takes_input else readout(output)
    elif hasattr(output, "logits"):
        output = output.logits
    return output[:, None] if output.ndim == 1 else output


class eval_mode:
    """All training flags off, set by hand and restored: some modules act on `.eval()` and `.train()`."""

    def __init__(self, model: nn.Module) -> None:
        self.flags = [(module, module.training) for module in model.modules()]

    def __enter__(self) -> None:
        for module, _ in self.flags:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module, flag in self.flags:
            module.training = flag


def dense_jacobian(model: nn.Module, x: Any, readout: Readout = None) -> dict[str, Tensor]:
    """Each trainable parameter's derivative, name -> (P, C, numel); a complex parameter counts its real coordinates."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # cuDNN has no backward pass for recurrent layers in eval mode
    with eval_mode(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        f = outputs_of(model, x, readout)
        rows: dict[str, list[Tensor]] = {name: [] for name in named}
        for output in f.flatten():
            gradients = torch.autograd.grad(output, list(named.values()), retain_graph=True, allow_unused=True)
            for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
                rows[name].append(as_real_vector(torch.zeros_like(parameter) if gradient is None else gradient))
    return {name: torch.stack(row).reshape(*f.shape, -1) for name, row in rows.items()}


def as_real_vector(gradient: Tensor) -> Tensor:
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.flatten().double()


def dense_ntk(
    model: nn.Module,
    x: Any,
    x2: Any = None,
    outputs: str | int = "mean",
    readout: Readout = None,
    by: str = "network",
) -> Tensor | dict[str, Tensor]:
    """mean, sum, int -> (P, P2); each -> (C, P, P2); full -> (P, P2, C, C); a dict of these by layer or parameter."""
    first = dense_jacobian(model, x, readout)
    return kernel_of(first, first if x2 is None else dense_jacobian(model, x2, readout), outputs, by)


def kernel_of(
    first: dict[str, Tensor], second: dict[str, Tensor], outputs: str | int = "mean", by: str = "network"
) -> Tensor | dict[str, Tensor]:
    """The kernel that belongs to two Jacobians, which are the slow part: one serves all modes."""
    kernels = {name: contract(first[name], second[name], outputs) for name in first}
    if by == "parameter":
        return kernels
    if by == "layer":
        layers: dict[str, Tensor] = {}
        for name, kernel in kernels.items():
            layer = name.rpartition(".")[0]
            layers[layer] = layers[layer] + kernel if layer in layers else kernel
        return layers
    return torch.stack(list(kernels.values())).sum(0)


def contract(first: Tensor, second: Tensor, outputs: str | int) -> Tensor:
    full = torch.einsum("mcj,ndj->mncd", first, second)
    if outputs == "full":
        return full
    each = full.diagonal(dim1=2, dim2=3).permute(2, 0, 1)
    if outputs == "each":
        return each
    if outputs == "sum":
        return each.sum(0)
    if outputs == "mean":
        return each.mean(0)
    return each[outputs]
