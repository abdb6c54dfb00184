"""What a run states of its network, optimizer, samples and versions, as text for tables."""

import json
from collections.abc import Mapping
from typing import Any

from featlearn.record import Run

LONGEST = 40
"""Largest number of characters of a setting."""
UNKNOWN = "–"
"""Cell of what is not known."""


def entry(run: Run, *path: str) -> Any:
    """Return an entry of the configuration; None if it is missing."""
    value: Any = run.config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def facts(run: Run) -> dict[str, str]:
    """Return label -> text, of what is known of optimizer, model, probe, loss, precision, seed, and device."""
    groups = entry(run, "optimizer", "groups")
    rates = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], Mapping) else {}
    total, measured = run.probe_samples or (None, None)
    model = entry(run, "model", "class")
    values = {
        "optimizer": entry(run, "optimizer", "class"),
        "lr": rates.get("lr"),
        "momentum": rates.get("momentum"),
        "weight decay": rates.get("weight_decay"),
        "model": None if model is None else str(model).rpartition(".")[2],
        "parameters": entry(run, "model", "trainable"),
        "probe samples": total if measured == total else f"{measured} of {total}",
        "loss": entry(run, "loss_convention"),
        "precision": entry(run, "dtype"),
        "seed": entry(run, "seed"),
        "device": entry(run, "device"),
    }
    return {label: short(value) for label, value in values.items() if value is not None}


def short(value: Any) -> str:
    """Return a value of a configuration as text of at most LONGEST characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    plain = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"
