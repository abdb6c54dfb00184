"""Readouts: map the output of a model to (P,) or (P, C).

A readout is any function `readout(output)` or `readout(output, x)`, such as `lambda out: out["score"]`. This module has
common readouts.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.losses import Loss, function

__all__ = ["correct_logit", "last_token", "loss", "token"]


def _tensor(output: Any) -> Tensor:
    """Return the tensor in an output: itself, its logits, its last hidden state, or the first entry of a tuple."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if value is None and isinstance(output, Mapping):
            value = output.get(name)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    raise InputTypeError(
        f"the model gives {type(output).__name__}, expected a tensor, a tuple that starts with one, or an object with "
        ".logits or .last_hidden_state; write a readout, a function of the output"
    )


def _entry(x: Any, key: Hashable) -> Tensor:
    """Return the tensor under `key` in the inputs."""
    try:
        value = x[key]
    except (KeyError, IndexError, TypeError) as error:
        raise InputValueError(
            f"the inputs have no entry {key!r}, expected a mapping or tuple with this entry; pass x={{..., {key!r}: "
            "...}"
        ) from error
    if not isinstance(value, Tensor):
        raise InputTypeError(f"the entry {key!r} of the inputs is {type(value).__name__}, expected a tensor")
    return value


def last_token(output: Any, x: Any) -> Tensor:
    """Return outputs (P, T, C) at the last position, or the last position of `x["attention_mask"]`: (P, C)."""
    values = _positions(output)
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if not isinstance(mask, Tensor):
        return values[:, -1]
    if mask.shape != values.shape[:2]:
        raise InputValueError(
            f"attention_mask has shape {tuple(mask.shape)}, expected (P, T) = {tuple(values.shape[:2])} like the "
            "output; write a readout for other masks"
        )
    if not bool((mask != 0).any(1).all()):
        raise InputValueError(
            "attention_mask excludes all positions of some sample, expected at least one position per sample"
        )
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (positions * (mask != 0)).argmax(1)
    indices = last.to(values.device)[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, indices)[:, 0]


def token(i: int) -> Callable[[Any], Tensor]:
    """Return a readout of outputs (P, T, C) at position i, counted from the end if negative."""
    if not isinstance(i, int) or isinstance(i, bool):
        raise InputTypeError(f"token({i!r}): expected an integer position, counted from the end if negative")

    def read(output: Any) -> Tensor:
        values = _positions(output)
        if not -values.shape[1] <= i < values.shape[1]:
            raise InputValueError(f"token({i}) of an output with {values.shape[1]} positions, expected a smaller index")
        return values[:, i]

    return read


def _positions(output: Any) -> Tensor:
    values = _tensor(output)
    if values.dim() < 2:
        raise InputValueError(f"the output has shape {tuple(values.shape)}, expected (P, T, C) with T positions")
    return values


def correct_logit(key: Hashable) -> Callable[[Any, Any], Tensor]:
    """Return a readout of the correct class's logit; `x[key]` has labels (P,) for logits (P, C), or (P, T)."""

    def read(output: Any, x: Any) -> Tensor:
        logits, labels = _tensor(output), _entry(x, key)
        if labels.shape != logits.shape[:-1] or labels.is_floating_point() or labels.is_complex():
            raise InputValueError(
                f"labels {key!r} are {labels.dtype} of shape {tuple(labels.shape)}, expected integers of shape "
                f"{tuple(logits.shape[:-1])} for logits of shape {tuple(logits.shape)}"
            )
        if bool(((labels < 0) | (labels >= logits.shape[-1])).any()):
            raise InputValueError(
                f"labels {key!r} run from {int(labels.min())} to {int(labels.max())}, expected classes from 0 to "
                f"{logits.shape[-1] - 1}; exclude samples without a label"
            )
        return logits.gather(-1, labels.long().to(logits.device)[..., None])[..., 0]

    return read


def loss(loss: Loss, key: Hashable) -> Callable[[Any, Any], Tensor]:
    """Return a readout that gives the loss of each sample, with targets in `x[key]`.

    Args:
        loss: Name of `fl.losses`, module, or function of (outputs, targets); called with one sample at a time.
        key: Key of the targets in the inputs.
    """
    criterion = function(loss)

    def read(output: Any, x: Any) -> Tensor:
        values, targets = _tensor(output), _entry(x, key)
        if len(targets) != len(values):
            raise InputValueError(
                f"{len(targets)} targets {key!r} for {len(values)} samples, expected one target per sample"
            )
        pairs = zip(values.unbind(0), targets.to(values.device).unbind(0), strict=True)
        losses = [criterion(value[None], target[None]) for value, target in pairs]
        if any(value.numel() != 1 for value in losses):
            raise InputValueError(
                f"the loss returns shape {tuple(losses[0].shape)} for one sample, expected one number; "
                "use reduction='mean' or 'sum'"
            )
        return torch.stack([value.reshape(()) for value in losses])

    return read
