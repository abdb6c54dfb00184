"""Readouts: map the output of a model to (P,) or (P, C).

A readout is any function `readout(output)` or `readout(output, x)`, such as `lambda out: out["score"]`. This module has
common readouts.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from featlearn.errors import InputTypeError, InputValueError
from featlearn.losses import Loss, function
from featlearn.signatures import name_keywords

__all__ = ["correct_logit", "last_token", "loss", "next_token", "segmentation", "token"]


TARGET_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types of token ids and labels."""


class TargetedInputs(NamedTuple):
    """Inputs of a model, with the targets that a readout compares its outputs with."""

    inputs: Any
    targets: Tensor
    """(P, ...) classes of positions or pixels; negative classes are ignored."""
    from_ids: bool = False
    """True if the targets are the token ids of the inputs, shifted by one."""
    keyword: str | None = None
    """Parameter of the model's forward for targets; None if the model is called without them."""
    passed: Tensor | None = None
    """Value of that parameter."""


class LastPositionError(InputValueError):
    """The model gives logits at its last position only, as some do without targets."""


def parts_of(output: Any) -> list[tuple[str, Any]]:
    """Return (expression, value) for each entry of a model's output: ("out.logits", ...), ("out[1]", ...)."""
    if isinstance(output, Mapping):
        return [(f"out[{key!r}]", value) for key, value in output.items()]
    if hasattr(output, "_fields"):
        return [(f"out.{name}", getattr(output, name)) for name in output._fields]
    if isinstance(output, tuple):
        return [(f"out[{number}]", value) for number, value in enumerate(output)]
    if dataclasses.is_dataclass(output):
        return [(f"out.{field.name}", getattr(output, field.name)) for field in dataclasses.fields(output)]
    return []


def main_tensor(output: Any) -> tuple[str, Tensor] | None:
    """Return (expression, tensor) for the part of an output that is measured.

    That is the output itself, its logits, its last hidden state, or its first floating tensor with a sample axis.
    """
    if isinstance(output, Tensor):
        return "out", output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return (f"out[{name!r}]" if type(output) is dict else f"out.{name}"), value
    for expression, value in parts_of(output):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return expression, value
    return None


def _tensor(output: Any) -> Tensor:
    """Return the tensor of an output that is measured: see `main_tensor`."""
    if isinstance(output, Tensor):
        return output
    part = main_tensor(output)
    if part is None:
        raise InputTypeError(
            f"the model gives {type(output).__name__}, expected a tensor, or a tuple, mapping or dataclass with a "
            "floating tensor in it; pass readout=, a function of the output that returns a tensor"
        )
    return part[1]


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


@name_keywords()
def next_token(
    targets: Tensor | Hashable = None, *, shift: bool | None = None, ignore_index: int = -100
) -> "LogProbability":
    """Return a readout that gives the mean log-probability of each sequence's targets: (P,) from logits (P, T, V).

    The mean is over the positions of a sequence that have a target. It is minus the cross-entropy loss of that
    sequence alone. Negative targets (-100, or the -1 of nanoGPT) have no target, and neither has `ignore_index`.

    >>> fl.ntk(model, ids, readout=fl.readouts.next_token())  # targets: the ids shifted by one
    >>> fl.ntk(model, ids, readout=fl.readouts.next_token(targets))  # targets: (P, T), the token after each position
    >>> fl.watch(model, probe=(ids, targets), out="runs/gpt", readout=fl.readouts.next_token())

    Args:
        targets: Integers (P, T), or (P, T - 1) if the last position has none. A key names an entry of the inputs. None
            takes the targets of the probe, `labels` or `targets` among the inputs, or else the ids shifted by one.
        shift: Whether targets are shifted by one against the logits, as `labels` of causal models are. By default they
            are shifted if they repeat the ids.
        ignore_index: A class that is no target, such as the id of padding.
    """
    return LogProbability("next_token", targets, shift=shift, ignore_index=ignore_index)


@name_keywords()
def segmentation(targets: Tensor | Hashable = None, *, ignore_index: int = -100) -> "LogProbability":
    """Return a readout that gives the mean log-probability of each image's labels: (P,) from logits (P, C, H, W).

    The mean is over the pixels with a label. Negative labels and `ignore_index` are no labels. A single channel is the
    logit of a foreground: labels are then 0 or 1.

    Args:
        targets: Labels (P, H, W) or (P, 1, H, W), or the key of an entry of the inputs. None takes the targets of the
            probe.
        ignore_index: A class that is no label, such as 255.
    """
    return LogProbability("segmentation", targets, shift=False, ignore_index=ignore_index)


class LogProbability:
    """Readout of the mean log-probability of each sample's targets; made by `next_token` and `segmentation`."""

    def __init__(
        self,
        kind: Literal["next_token", "segmentation"],
        targets: Tensor | Hashable = None,
        *,
        shift: bool | None = None,
        ignore_index: int = -100,
    ) -> None:
        if isinstance(targets, Tensor) and (targets.dim() < 2 or targets.is_complex()):
            expected = "(P, T)" if kind == "next_token" else "(P, H, W)"
            raise InputValueError(f"targets have shape {tuple(targets.shape)}, expected integers of shape {expected}")
        self.kind, self.targets, self.shift, self.ignore_index = kind, targets, shift, ignore_index

    def __str__(self) -> str:
        of = "a sequence's targets" if self.kind == "next_token" else "the labeled pixels of an image"
        return f"{self.kind}: mean log-probability of {of}"

    def _call(self, setting: str) -> str:
        """Return the call that makes this readout with another setting."""
        targets = "targets" if isinstance(self.targets, Tensor) else "" if self.targets is None else repr(self.targets)
        return f"fl.readouts.{self.kind}({', '.join(filter(None, [targets, setting]))})"

    def __call__(self, output: Any, x: Any = None) -> Tensor:
        """Return (P,) from an output and the inputs that gave it."""
        return self.of(_tensor(output), self.targets_in(x))

    def targets_in(self, x: Any) -> Tensor:
        """Return the targets of these inputs."""
        if isinstance(x, TargetedInputs):
            return x.targets
        if isinstance(self.targets, Tensor):
            return self.targets
        if self.targets is not None:
            targets = _entry(x, self.targets)
            return shifted(targets) if self.shift else targets
        labels = x.get("labels", x.get("targets")) if isinstance(x, Mapping) else None
        ids = token_ids(x if isinstance(x, Mapping) else {"": x[0] if isinstance(x, tuple) and x else x})
        if isinstance(labels, Tensor):
            is_copy = ids is not None and repeats(labels, ids) if self.shift is None else self.shift
            return shifted(labels) if is_copy else labels
        if ids is None or self.kind != "next_token":
            raise InputValueError(
                f"there are no targets for readouts.{self.kind}, expected them as its argument, in the probe, or as "
                f"`labels` among the inputs; add `readout=fl.readouts.{self.kind}(targets)`"
            )
        mask = x.get("attention_mask") if isinstance(x, Mapping) else None
        return shifted(ids, mask)

    def of(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return the mean log-probability (P,) of targets under logits (P, ..., C), or (P, C, ...) for images."""
        logits, classes = aligned(values, targets, images=self.kind == "segmentation")
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        classes = classes.to(logits.device).long()
        counts = (classes >= 0) & (classes != self.ignore_index)
        kept = torch.where(counts, classes, 0)
        size = max(logits.shape[-1], 2)
        if bool((kept >= size).any()):
            raise InputValueError(
                f"targets run up to {int(kept.max())}, expected classes below {size} as the output has; if that is no "
                f"class, add `readout={self._call(f'ignore_index={int(kept.max())}')}`"
            )
        if not bool(counts.flatten(1).any(1).all()):
            missing = (~counts.flatten(1).any(1)).nonzero().flatten().tolist()
            raise InputValueError(
                f"{len(missing)} samples have no target at all (all are ignored), the first at {missing[0]} of its "
                "chunk, expected at least one each; leave these samples out"
            )
        if logits.shape[-1] == 1:
            signs = 2 * kept.to(logits.dtype) - 1
            each = logsigmoid(signs * logits[..., 0])
        else:
            each = logits.log_softmax(-1).gather(-1, kept[..., None])[..., 0]
        weights = counts.to(each.dtype)
        return (each * weights).flatten(1).sum(1) / weights.flatten(1).sum(1)


def aligned(values: Tensor, targets: Tensor, *, images: bool) -> tuple[Tensor, Tensor]:
    """Return logits with classes last, and the targets of their positions.

    Raises:
        InputValueError: The shapes do not fit.
    """
    shape = tuple(values.shape)
    if images and targets.dim() == values.dim() and targets.shape[1] == 1:
        targets = targets[:, 0]
    if not images and targets.dim() == 2 and values.dim() == 3 and targets.shape[1] == shape[1] - 1:
        values = values[:, :-1]
    for axis in (1,) if images else (-1, 1):
        if values.dim() > 2 and values.movedim(axis, -1).shape[:-1] == targets.shape:
            return values.movedim(axis, -1), targets
    if values.dim() == 3 and shape[1] == 1 < targets.shape[1]:
        raise LastPositionError(
            f"the model gives logits {shape} at one position for targets {tuple(targets.shape)}, expected one for each "
            "target; add `readout=fl.readouts.last_token`, or return the logits of all positions"
        )
    expected = f"(P, H, W) = {(shape[0], *shape[2:])}" if images else f"(P, T) = {shape[:2]}"
    raise InputValueError(
        f"targets have shape {tuple(targets.shape)} and the output {shape}, expected targets {expected}"
    )


_NOT_IDS = ("mask", "type", "position", "label", "target", "segment", "length", "cache")
_DECODER_IDS = ("decoder_input_ids", "tgt", "trg", "tgt_ids")


def token_ids(named: Mapping[Any, Any]) -> Tensor | None:
    """Return the token ids (P, T) among named inputs: those of the decoder if there are several; None if unclear."""
    ids = {
        str(name): value
        for name, value in named.items()
        if isinstance(value, Tensor)
        and value.dim() == 2
        and value.dtype in TARGET_TYPES
        and not any(word in str(name) for word in _NOT_IDS)
    }
    preferred = [name for name in (*_DECODER_IDS, "input_ids") if name in ids]
    if preferred:
        return ids[preferred[0]]
    return next(iter(ids.values())) if len(ids) == 1 else None


def shifted(ids: Tensor, mask: Any = None) -> Tensor:
    """Return the token that follows each position: (P, T), with -100 at the last one and where the mask is 0."""
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        counts = torch.cat([(mask[:, 1:] != 0) & (mask[:, :-1] != 0), torch.zeros_like(mask[:, :1] != 0)], 1)
        targets = torch.where(counts, targets, -100)
    return targets


def repeats(targets: Tensor, ids: Tensor) -> bool:
    """Return whether targets equal the ids wherever they are not negative."""
    return targets.shape == ids.shape and bool(((targets == ids) | (targets < 0)).all())


@dataclasses.dataclass(frozen=True)
class DefaultReadout:
    """A readout that was not passed, but follows from output and targets."""

    name: str
    """Entry of run.json."""
    sentence: str
    """The line that says what is measured; empty if nothing was chosen."""
    log_probability: LogProbability | None = None
    """What is read off the main tensor; None for the tensor itself."""
    flat: bool = False
    """Flatten the tensor to (P, C)."""

    def __str__(self) -> str:
        return self.name

    def __call__(self, output: Any, x: Any) -> Any:
        """Return (P,) or (P, C) from an output and its inputs."""
        values = _tensor(output)
        if self.log_probability is not None:
            return self.log_probability.of(values, self.log_probability.targets_in(x))
        return values.flatten(1) if self.flat else values

    @property
    def reads_targets(self) -> bool:
        """True if the targets are part of what is measured."""
        return self.log_probability is not None
