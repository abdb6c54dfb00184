"""The readout of models that give something else than one row of numbers per sample."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputTypeError, InputValueError
from featlearn.readouts import DefaultReadout, LogProbability, TargetedInputs, main_tensor, parts_of
from featlearn.shapes import describe

CAUSAL = "its ids shifted by one, as for a causal model"


def default_readout(raw: Any, x: Any) -> DefaultReadout:
    """Choose the readout for an output of a model, and the inputs that gave it.

    Raises:
        InputTypeError: The output has no tensor to measure.
        InputValueError: No choice is obvious; the message has the line to add.
    """
    expression, values = output_tensor(raw)
    targets = x.targets if isinstance(x, TargetedInputs) else None
    if values.dim() <= 2:
        named = expression in ("out", "out.logits")
        shape = "(P, C)" if values.dim() == 2 else "(P,)"
        sentence = "" if named else f"measuring {expression}, of shape {shape}: {describe_output(raw)}"
        return DefaultReadout("output" if named else expression, sentence)
    is_segmented = targets is not None and values.dim() >= 4 and _fits_images(values, targets)
    has_same_shape = targets is not None and targets.is_floating_point() and targets.shape == values.shape
    if has_same_shape and (values.shape[1] > 1 or not is_segmented):
        count = values[0].numel()
        return DefaultReadout(
            f"{expression}.flatten(1)",
            f"measuring the {count} numbers of each sample's output as its outputs (`readout=lambda out: "
            f"{expression}.flatten(1)` says so)",
            flat=True,
        )
    if is_segmented:
        readout = LogProbability("segmentation")
        return DefaultReadout(str(readout), _sentence(readout, "labels of the probe", "segmentation()"), readout)
    if targets is not None and not targets.is_floating_point() and values.dim() == 3:
        readout = LogProbability("next_token")
        source = CAUSAL if x.from_ids else "those that were passed"
        return DefaultReadout(str(readout), _sentence(readout, source, "next_token()"), readout)
    samples = len(values)
    raise InputValueError(
        f"the model gives {describe(raw)}, expected (P,) = ({samples},) or (P, C) = ({samples}, C), one row a sample; "
        f"add {_line(expression, values, x)}"
    )


def _fits_images(values: Tensor, targets: Tensor) -> bool:
    plain = targets[:, 0] if targets.dim() == values.dim() and targets.shape[1] == 1 else targets
    binary = values.shape[1] == 1 and bool(((targets == 0) | (targets == 1) | (targets < 0)).all())
    return plain.shape == (len(values), *values.shape[2:]) and (binary or not targets.is_floating_point())


def output_tensor(raw: Any) -> tuple[str, Tensor]:
    """Return (expression, tensor) for the part of an output that is measured; raise if there is none."""
    part = main_tensor(raw)
    if part is not None:
        return part
    if isinstance(raw, list) and raw:
        raise InputTypeError(
            f"the model gives a list of {describe(raw[0])}, one for each sample, expected a tensor of shape (P,) or "
            f"(P, C); add {_list_line(raw[0])}"
        )
    raise InputTypeError(
        f"the model gives {describe(raw)}, expected a tensor of shape (P,) or (P, C), or an object with .logits; "
        "pass readout=, a function that turns the output into such a tensor"
    )


def _list_line(first: Any) -> str:
    """Return a readout for a list with one entry per sample, such as the boxes of a detector."""
    parts = [
        (name, value) for name, value in parts_of(first) if isinstance(value, Tensor) and value.is_floating_point()
    ]
    scores = [name for name, _ in parts if "score" in name or "logit" in name]
    name = (scores or [name for name, _ in parts] or ["out"])[0].replace("out", "one", 1)
    return f"`readout=lambda out: torch.stack([{name}.sum() for one in out])`, one number for each sample"


def _line(expression: str, values: Tensor, x: Any) -> str:
    """Return the line to add for an output with more than two axes."""
    if values.dim() == 3:
        entries = list(x.items()) if isinstance(x, Mapping) else list(enumerate(x)) if isinstance(x, tuple) else []
        ids = [
            key
            for key, value in entries
            if isinstance(value, Tensor) and value.shape == values.shape[:2] and value.dtype == torch.int64
        ]
        if ids:
            return (
                f"`readout=fl.readouts.next_token({ids[-1]!r}, shift=True)`, the mean log-probability of the next "
                f"token of input {ids[-1]!r}"
            )
        return (
            f"`readout=lambda out: {expression}.mean(1)`, the mean over {values.shape[1]} positions, or, for classes "
            "of positions, `readout=fl.readouts.next_token(targets)`"
        )
    return (
        f"`readout=lambda out: {expression}.flatten(1)` for all {values[0].numel()} numbers, or, for a segmentation "
        f"with labels {(len(values), *values.shape[2:])}, `readout=fl.readouts.segmentation(labels)`"
    )


def describe_output(raw: Any) -> str:
    """Return what an output is, and how to choose another part of it."""
    return f"the model gives a {type(raw).__name__}; readout= chooses another part"


def _sentence(readout: LogProbability, source: str, call: str) -> str:
    meaning = str(readout).partition(": ")[2]
    return f"measuring the {meaning} (one output per sample); targets: {source}. Same: readout=fl.readouts.{call}"
