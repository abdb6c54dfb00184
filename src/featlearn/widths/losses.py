"""The loss that a network is trained on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from featlearn.errors import InputTypeError, InputValueError

Loss = Callable[[Any, Tensor], Tensor]


def chosen_loss(loss: str | Loss | None, y: Tensor) -> Loss:
    """The function of (output, y) that a name stands for; without one, by the kind of the targets."""
    if loss is None:
        loss = "mse" if y.is_floating_point() else "cross-entropy"
    named: dict[str, Loss] = {"mse": squared_error, "cross-entropy": cross_entropy}
    if isinstance(loss, str):
        if loss not in named:
            raise InputValueError(f"loss={loss!r}, expected 'mse', 'cross-entropy' or a function of (output, y)")
        return named[loss]
    if not callable(loss):
        raise InputTypeError(f"loss is {type(loss).__name__}, expected 'mse', 'cross-entropy' or a function")
    return loss


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """|f - y|^2, summed over outputs, the mean over samples."""
    if output.shape != y.shape and output.squeeze(-1).shape != y.shape:
        raise InputValueError(
            f"targets have shape {tuple(y.shape)}, expected {tuple(output.shape)} as the outputs have; pass y[:, None] "
            "or one-hot targets"
        )
    return (
        (output.reshape(y.shape) - y).square().flatten(1).sum(1).mean()
        if y.dim() > 1
        else torch.mean((output.reshape(y.shape) - y).square())
    )


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits (P, ..., C) and classes (P, ...), the mean over all of them."""
    if y.is_floating_point() or output.shape[:-1] != y.shape:
        kind = str(y.dtype).removeprefix("torch.")
        raise InputValueError(
            f"targets are {kind} of shape {tuple(y.shape)}, expected whole numbers, the classes, of shape "
            f"{tuple(output.shape[:-1])} for logits of shape {tuple(output.shape)}"
        )
    return functional.cross_entropy(output.flatten(0, -2), y.flatten())
