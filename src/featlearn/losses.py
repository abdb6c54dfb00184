"""Losses by name: one table for every function that takes a ``loss``.

| name | value for P samples with C outputs |
| --- | --- |
| `"mse"`, `"mean-over-outputs"` | 1/(P C) sum (f - y)^2, as `nn.MSELoss()` |
| `"mean"` | 1/P sum (f - y)^2 |
| `"mean-half"` | 1/(2P) sum (f - y)^2 |
| `"sum-half"` | 1/2 sum (f - y)^2 |
| `"cross-entropy"` | as `nn.CrossEntropyLoss()`: the mean over samples |
| `"bce"` | as `nn.BCEWithLogitsLoss()`: the mean over samples and outputs |

A loss may also be any `nn.Module` or function of (outputs, targets) that returns one number.
"""

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from featlearn.errors import InputTypeError, InputValueError, did_you_mean
from featlearn.shapes import checked_finite, checked_probabilities, refuse_labels

__all__ = ["function", "gradient", "name"]

LossName = Literal["mse", "cross-entropy", "bce", "sum-half", "mean", "mean-half", "mean-over-outputs"]
LossFunction = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> one number"""
Loss = LossName | LossFunction

NAMES: tuple[str, ...] = get_args(LossName)
"""Every name in the table."""
SUGGESTIONS = {"ce": "cross-entropy", "xent": "cross-entropy", "nll": "cross-entropy", "l2": "mse", "squared": "mse"}
"""Other names of losses, which are refused with the name to use."""


def function(loss: Loss) -> LossFunction:
    """Return the function of (outputs, targets) that a name stands for; a module or function is returned as it is.

    The functions behind the names check shapes: outputs (P,) and targets (P, 1) never broadcast to (P, P).

    >>> fl.losses.function("mse")(outputs, y)  # nn.MSELoss()(outputs, y)
    """
    if isinstance(loss, str):
        return _FUNCTIONS[_checked_name(loss)]
    if not callable(loss):
        raise InputTypeError(
            f"loss is {type(loss).__name__}, expected one of {', '.join(map(repr, NAMES))}, an nn.Module, or a function"
            " of (outputs, targets)"
        )
    return loss


def name(loss: Loss) -> LossName | None:
    """Return the name of a loss, or None for a module or function that is not in the table.

    `nn.MSELoss()` and `functional.mse_loss` are `"mse"`. `nn.CrossEntropyLoss(label_smoothing=0.1)` has no name.
    """
    if isinstance(loss, str):
        return _checked_name(loss)
    function(loss)
    if not isinstance(loss, nn.Module):
        return _NAMES.get(loss)
    for module in (nn.MSELoss(), nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()):
        if type(loss) is type(module) and _settings(loss) == _settings(module):
            return _NAMES[type(module)]
    return None


def gradient(loss: Loss, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a loss and its gradient with respect to the outputs.

    Args:
        loss: Name, module or function.
        outputs: Outputs of shape (P,) or (P, C).
        y: Targets. Outputs (P, 1) are passed on as (P,) if the targets are (P,) numbers.

    Returns:
        The value, a scalar, and the gradient in the shape of the outputs.
    """
    call, known = function(loss), name(loss)
    if known is not None:
        check_targets(known, outputs, y)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = outputs.detach().clone().requires_grad_(True)
        value = call(_like_targets(leaf, y), y.to(leaf.device))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputTypeError(f"the loss returns {got}, expected a tensor of one number with a gradient")
        (slope,) = torch.autograd.grad(value.reshape(()), leaf)
    return value.detach().reshape(()), slope


def form(loss: Loss) -> Literal["mse", "cross-entropy", "bce"] | None:
    """Return which prediction the gradient compares with the targets: f, softmax(f) or sigmoid(f); None if no name."""
    known = name(loss)
    return known if known in ("cross-entropy", "bce") else None if known is None else "mse"


def check_targets(loss: LossName, outputs: Tensor, y: Tensor) -> None:
    """Refuse targets that a named loss cannot have for these outputs."""
    checked_finite(y, "y")
    if loss == "cross-entropy":
        _refuse_bad_classes(outputs, y)
        if y.shape == outputs.shape:
            checked_probabilities(y, y.reshape(-1, y.shape[-1]).double())
        elif bool(((y != IGNORED) & ((y < 0) | (y >= outputs.shape[-1]))).any()):
            raise InputValueError(
                f"y has classes from {int(y.min())} to {int(y.max())}, expected 0 to {outputs.shape[-1] - 1}"
            )
        return
    _refuse_other_shape(outputs, y)
    refuse_labels(y, "y")
    if loss == "bce" and not bool(((y >= 0) & (y <= 1)).all()):
        raise InputValueError(
            f"y has entries from {float(y.min()):.3g} to {float(y.max()):.3g}, expected probabilities between 0 and 1 "
            "for loss='bce'"
        )


IGNORED = nn.CrossEntropyLoss().ignore_index
"""Class of positions that cross-entropy leaves out."""


def _checked_name(loss: str) -> LossName:
    if loss not in NAMES:
        raise InputValueError(
            f"loss={loss!r}, expected {', '.join(map(repr, NAMES))}, an nn.Module, or a function of (outputs, targets)"
            f"{did_you_mean(SUGGESTIONS.get(loss.lower(), loss), NAMES)}"
        )
    return cast(LossName, loss)


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the options of a loss module; a buffer (class weights) counts as one."""
    options = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return options | {key: True for key, _ in module.named_buffers(recurse=False)} | {"training": None}


def _refuse_other_shape(outputs: Tensor, y: Tensor) -> None:
    if outputs.shape != y.shape and not (outputs.shape[-1:] == (1,) and outputs.shape[:-1] == y.shape):
        raise InputValueError(
            f"y has shape {tuple(y.shape)}, expected {tuple(outputs.shape)} as the outputs have; pass y[:, None], or "
            "one-hot targets for classes (class indices go with loss='cross-entropy')"
        )


def _refuse_bad_classes(outputs: Tensor, y: Tensor) -> None:
    classes = not y.is_floating_point() and outputs.shape[:-1] == y.shape
    if outputs.dim() < 2 or not (classes or outputs.shape == y.shape):
        raise InputValueError(
            f"y is {str(y.dtype).removeprefix('torch.')} of shape {tuple(y.shape)}, expected classes (whole numbers) of"
            f" shape {tuple(outputs.shape[:-1])} or probabilities of shape {tuple(outputs.shape)} for cross-entropy"
        )


def _like_targets(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs[..., 0] if outputs.shape[-1:] == (1,) and outputs.shape[:-1] == y.shape else outputs


def _squared_error(factor: float, over: Callable[[Tensor], int]) -> LossFunction:
    """Return factor * sum (f - y)^2 / over(f)."""

    def value(outputs: Tensor, y: Tensor) -> Tensor:
        _refuse_other_shape(outputs, y)
        return factor * (_like_targets(outputs, y) - y).square().sum() / over(outputs)

    return value


def _mean_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    _refuse_other_shape(outputs, y)
    return functional.mse_loss(_like_targets(outputs, y), y)


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean over samples and positions: logits (P, ..., C), classes (P, ...) or rows (P, ..., C)."""
    _refuse_bad_classes(outputs, y)
    targets = y.flatten(0, -2).to(outputs.dtype) if y.shape == outputs.shape else y.flatten()
    return functional.cross_entropy(outputs.flatten(0, -2), targets)


def _binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    _refuse_other_shape(outputs, y)
    return functional.binary_cross_entropy_with_logits(_like_targets(outputs, y), y)


_FUNCTIONS: dict[LossName, LossFunction] = {
    "mse": _mean_squared_error,
    "mean-over-outputs": _mean_squared_error,
    "mean": _squared_error(1.0, len),
    "mean-half": _squared_error(0.5, len),
    "sum-half": _squared_error(0.5, lambda outputs: 1),
    "cross-entropy": _cross_entropy,
    "bce": _binary_cross_entropy,
}
_NAMES: dict[Any, LossName] = {
    nn.MSELoss: "mse",
    nn.CrossEntropyLoss: "cross-entropy",
    nn.BCEWithLogitsLoss: "bce",
    functional.mse_loss: "mse",
    functional.cross_entropy: "cross-entropy",
    functional.binary_cross_entropy_with_logits: "bce",
}
_NAMES.update({call: word for word, call in _FUNCTIONS.items() if word != "mean-over-outputs"})
