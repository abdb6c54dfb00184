"""The entries of run.json that are written before training."""

import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.monitoring.probe_data import ProbeData, WatchedNetwork, as_targets, has_labels, is_classification
from featlearn.torch_internals import AnyBatchNorm, AnyDropout


def description(watched: WatchedNetwork, outputs: Tensor, **settings: Any) -> dict[str, Any]:
    """Arguments of the watch, with versions, seed and device."""
    first = next(watched.model.parameters())
    return {
        "model": model_entry(watched.model),
        "optimizer": optimizer_entry(watched.optimizer),
        "probe": probe_entry(watched.probe, outputs),
        "test": None if watched.test is None else probe_entry(watched.test, None),
        "versions": versions(),
        "seed": torch.initial_seed(),
        "device": str(first.device),
        "dtype": str(first.dtype).removeprefix("torch."),
        "batch": None,
        "finished": False,
        "overhead": None,
        **settings,
    }


def model_entry(model: nn.Module) -> dict[str, Any]:
    """Class, size and layers of the network."""
    parts = list(model.modules())
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "layers": [name for name, part in model.named_modules() if any(True for _ in part.parameters(recurse=False))],
        "batch_norm": any(isinstance(part, AnyBatchNorm) for part in parts),
        "dropout": any(isinstance(part, AnyDropout) and part.p > 0 for part in parts),
    }


def optimizer_entry(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """Class of the optimizer and settings of each parameter group."""
    if optimizer is None:
        return None
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def probe_entry(data: ProbeData, outputs: Tensor | None) -> dict[str, Any]:
    """Hash and size of a probe."""
    found: dict[str, Any] = {"sha256": data.digest, "samples": data.samples}
    if outputs is not None:
        found["outputs"] = outputs.shape[1]
        found["labels"] = has_labels(data.y, outputs.shape[1])
        found["classification"] = data.y is not None and is_classification(as_targets(data.y, outputs))
    return found


def versions() -> dict[str, str]:
    """Versions of featlearn, torch, numpy and Python."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("featlearn")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "featlearn": own,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def every_entry(every: Any) -> Any:
    """A JSON entry for a schedule."""
    return every if isinstance(every, str | int) else getattr(every, "__name__", "a function")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, Mapping):
        return None
    return value if isinstance(value, str | int | float | bool | tuple | list | None) else str(value)
