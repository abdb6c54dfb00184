"""Pair inputs with the targets that a readout compares outputs with."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from featlearn.errors import InputValueError
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, Readout, batch_size
from featlearn.readouts import LogProbability, TargetedInputs, repeats, shifted, token_ids

LABELS = ("labels", "targets", "target", "label")


def with_targets(model: nn.Module, x: Inputs, readout: Readout | None, *, passing: bool = False) -> Inputs:
    """Pair inputs with the targets of a default readout or of a `LogProbability`; other inputs come back as they are.

    Targets are, in this order: those of the readout, entries of the inputs such as `labels`, and the ids shifted by
    one. Labels that repeat the ids, as causal models take them, are shifted.

    Args:
        model: Network whose forward names the inputs.
        x: Inputs.
        readout: The readout that was passed.
        passing: Pass targets to the model's forward, which has a parameter for them.
    """
    if not (readout is None or isinstance(readout, LogProbability)):
        return x
    named, takes = _named_inputs(model, x)
    if not isinstance(x, TargetedInputs):
        targets, from_ids = _targets(model, x, named, readout)
        if targets is None:
            return x
        x = TargetedInputs(x, targets, from_ids)
    keyword = next((name for name in ("targets", "target") if name in takes and name not in named), None)
    if keyword is not None and (passing or takes[keyword].default is inspect.Parameter.empty):
        # Its loss is not measured. The ids are valid classes, where targets may be ignored or too few.
        ids = token_ids(named)
        return x._replace(keyword=keyword, passed=x.targets.clamp_min(0) if ids is None else ids)
    decodes = _is_encoder_decoder(model) and not x.from_ids and not _has_decoder_inputs(named)
    if decodes and "labels" in takes and "labels" not in named:
        return x._replace(keyword="labels", passed=x.targets)
    return x


def paired(model: nn.Module, x: Inputs, targets: Tensor, readout: Readout | None) -> TargetedInputs:
    """Pair inputs with targets of the same samples; targets that repeat the ids are shifted by one."""
    shift = readout.shift if isinstance(readout, LogProbability) else None
    if shift is None:
        ids = token_ids(_named_inputs(model, x)[0])
        shift = ids is not None and not _is_encoder_decoder(model) and repeats(targets, ids.to(targets.device))
    return TargetedInputs(x, shifted(targets) if shift else targets)


def can_pass_targets(model: nn.Module, x: Inputs) -> bool:
    """Return whether the model's forward has an unused parameter for targets."""
    if not isinstance(x, TargetedInputs) or x.keyword is not None:
        return False
    named, takes = _named_inputs(model, x)
    return any(name in takes and name not in named for name in ("targets", "target"))


def _targets(
    model: nn.Module, x: Inputs, named: Mapping[str, Any], readout: LogProbability | None
) -> tuple[Tensor | None, bool]:
    """Return the targets of inputs, and whether they are the ids shifted by one."""
    if readout is not None and isinstance(readout.targets, Tensor):
        if len(readout.targets) != batch_size(x):
            raise InputValueError(
                f"readouts.{readout.kind} has {len(readout.targets)} targets for {batch_size(x)} samples, expected one "
                "for each; put targets among the inputs where there are several batches"
            )
        return paired(model, x, readout.targets, readout).targets, False
    if readout is not None and readout.targets is not None:
        value = named.get(str(readout.targets))
        if value is None and isinstance(readout.targets, int) and isinstance(x, tuple):
            value = x[readout.targets] if -len(x) <= readout.targets < len(x) else None
        if not isinstance(value, Tensor):
            raise InputValueError(
                f"the inputs have no tensor {readout.targets!r}, expected one of {', '.join(map(repr, named))}"
            )
        return paired(model, x, value, readout).targets, False
    labels = next((named[name] for name in LABELS if isinstance(named.get(name), Tensor)), None)
    if labels is not None and labels.dim() >= 2:
        return paired(model, x, labels, readout).targets, False
    ids = token_ids(named)
    if (
        ids is None
        or (readout is not None and readout.kind != "next_token")
        or (_is_encoder_decoder(model) and not _has_decoder_inputs(named))
    ):
        return None, False
    return shifted(ids, None if _has_decoder_inputs(named) else named.get("attention_mask")), True


def _has_decoder_inputs(named: Mapping[str, Any]) -> bool:
    return any(named.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False))


def _named_inputs(model: nn.Module, x: Inputs) -> tuple[dict[str, Any], Mapping[str, inspect.Parameter]]:
    """Return inputs by the names of the model's parameters, and these parameters."""
    x = x.inputs if isinstance(x, TargetedInputs) else x
    try:
        takes = inspect.signature(unwrapped(model).forward).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    if isinstance(x, Mapping):
        return {str(key): value for key, value in x.items()}, takes
    values = x if isinstance(x, tuple) else (x,)
    positional = [p.name for p in takes.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = positional + [str(number) for number in range(len(positional), len(values))]
    return dict(zip(names, values, strict=False)), takes
