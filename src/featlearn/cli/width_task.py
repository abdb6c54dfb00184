"""The user's function for `featlearn widths`: networks of any width, data, loss and optimizer."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from featlearn.cli.user_task import load_function
from featlearn.errors import InputTypeError, InputValueError, did_you_mean

RATES: dict[str, float] = {"sgd": 0.01, "adam": 0.001, "adamw": 0.001}
KINDS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class WidthTask:
    """Arguments of `fl.scale_check`."""

    make_model: Callable[[int], Any]
    data: Any
    loss: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]


def width_task(place: str, width: int, optimizer: str, lr: float | None) -> WidthTask:
    """Call the function at `place`, with a width if it takes one, and read what it returns."""
    function: Callable[..., Any] = load_function(place)

    def default(model: Any) -> torch.optim.Optimizer:
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else model
        entries: torch.optim.Optimizer = KINDS[optimizer](parameters, lr=RATES[optimizer] if lr is None else lr)
        return entries

    if _takes_width(function):
        entries = _entries(function(width), place, "model")

        def make_model(width: int) -> Any:
            entries = _entries(function(width), place, "model")
            optimizer_of_model = entries.get("optimizer")
            return entries["model"] if optimizer_of_model is None else (entries["model"], optimizer_of_model)

        return WidthTask(make_model, entries["data"], entries.get("loss"), default)
    entries = _entries(function(), place, "make_model")
    return WidthTask(entries["make_model"], entries["data"], entries.get("loss"), entries.get("optimizer") or default)


def _takes_width(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _entries(returned: Any, place: str, model: str) -> dict[str, Any]:
    """Return the entries of a mapping or of a tuple."""
    names = (model, "data", "loss", "optimizer")
    if isinstance(returned, tuple | list) and 2 <= len(returned) <= 4:
        return dict(zip(names, returned, strict=False))
    if not isinstance(returned, Mapping):
        raise InputTypeError(
            f"{place} returns {type(returned).__name__}, expected ({model}, (x, y), loss) or a mapping with "
            f"{', '.join(names)}"
        )
    unknown = [key for key in returned if key not in names]
    missing = [key for key in names[:2] if key not in returned]
    if unknown or missing:
        wrong = f"no {missing[0]!r}" if missing else f"{unknown[0]!r}{did_you_mean(str(unknown[0]), names)}"
        raise InputValueError(f"{place} returns a mapping with {wrong}, expected {', '.join(names)}")
    return dict(returned)
