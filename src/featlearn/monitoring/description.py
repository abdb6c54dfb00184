"""The entries of run.json that are written before training."""

import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.monitoring.probe_data import ProbeData, WatchedNetwork, as_targets, has_labels, is_classification
from featlearn.network.inputs import Readout
from featlearn.readouts import DefaultReadout, LogProbability
from featlearn.torch_internals import AnyBatchNorm, AnyDropout

LARGEST_STATE = 2**26
"""Bytes of initial weights, at most, that are stored in a run."""


def stored_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str] | None]:
    """Weights as arrays t0, t1 ..., and their names; ({}, None) if they are too large."""
    size = sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, Tensor))
    if size > LARGEST_STATE or not all(isinstance(t, Tensor) for t in state.values()):
        return {}, None
    return {f"t{number}": _array(tensor) for number, tensor in enumerate(state.values())}, list(state)


def _array(tensor: Tensor) -> numpy.ndarray:
    # numpy has no bfloat16 and smaller; float32 holds them exactly
    small = tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    found: numpy.ndarray = (tensor.float() if small else tensor).numpy()
    return found


def description(watched: WatchedNetwork, given: WatchedNetwork, outputs: Tensor, **settings: Any) -> dict[str, Any]:
    """Return the arguments of the watch, with versions, seed and device; `given` has whole probes."""
    first = next(watched.model.parameters())
    return {
        "model": model_entry(watched.model),
        "optimizer": optimizer_entry(watched.optimizer),
        "probe": _probe_entry(watched.probe, given.probe) | {"stride": watched.stride, **_task(watched.probe, outputs)},
        "test": None if given.test is None else _probe_entry(watched.test, given.test),
        "readout": readout_entry(watched.readout),
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


def readout_entry(readout: Readout | None) -> str:
    """Return the name of a readout, with what it measures where it is one of the library's."""
    if readout is None:
        return "output"
    if isinstance(readout, DefaultReadout | LogProbability):
        return str(readout)
    return str(getattr(readout, "__qualname__", type(readout).__qualname__))


def _probe_entry(measured: ProbeData | None, given: ProbeData) -> dict[str, Any]:
    """Return the hash and the size of a probe, and how many of its samples are measured."""
    samples = given.samples if measured is None else measured.samples
    return {"sha256": given.digest, "samples": given.samples, "measured": samples}


def _task(data: ProbeData, outputs: Tensor) -> dict[str, Any]:
    classes = outputs.shape[1]
    classification = data.y is not None and is_classification(as_targets(data.y, outputs))
    return {"outputs": classes, "labels": has_labels(data.y, classes), "classification": classification}


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
