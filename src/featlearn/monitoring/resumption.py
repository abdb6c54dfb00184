"""Resuming a run: its initial state is read back from disk."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from featlearn.errors import RunError
from featlearn.monitoring.numbers import Names
from featlearn.monitoring.observer import Observer
from featlearn.monitoring.probe_data import WatchedNetwork
from featlearn.monitoring.step_measurement import Baseline
from featlearn.monitoring.work import Cost
from featlearn.record import Run


def resumed(observer: Observer, run: Run) -> None:
    """Restore the names, samples and initial weights of a run in an observer."""
    config = run.config
    watched = observer.watched
    probe = config.get("probe")
    if not isinstance(probe, Mapping) or probe.get("sha256") != watched.probe.digest:
        raise RunError(
            f"{run.path} was recorded with another probe, expected the same samples in the same order; pass them, or "
            "start a new run"
        )
    stride = probe.get("stride", 1)
    watched = watched.reduced(stride if isinstance(stride, int) and stride > 1 else 1)
    names = config.get("layer_names")
    if isinstance(names, Mapping):
        observer.names = Names({str(key): str(value) for key, value in names.items()})
    observer.watched = replace(watched, initial=_initial(run, watched))
    if not observer.watched.initial:
        observer.baseline = _baseline(run)


def measured_steps(run: Run) -> set[int]:
    """Steps at which a measurement was finished; other lines hold losses, rates and numbers of the user."""
    outputs = set(run.arrays.get("outputs", ()))  # of every measurement, unless they are large
    others = {*run.user_names, "loss", "lr"}
    return {line["step"] for line in run.lines if line["step"] in outputs or line["values"].keys() - others}


def trained_before(run: Run) -> float:
    """Seconds of training according to the last line; 0 if it has none."""
    seconds = run.lines[-1]["seconds"]
    return float(seconds) if seconds is not None and math.isfinite(seconds) else 0.0


def cost_before(run: Run) -> Cost | None:
    """Cost of the run so far; None if unknown because the run was killed."""
    measuring = run.config.get("measuring")
    return Cost(trained_before(run), float(measuring)) if isinstance(measuring, int | float) else None


def measured_by_share(run: Run) -> tuple[list[int], list[int]]:
    """Return the steps at which frequent quantities, and at which kernels were measured."""
    names = {line["step"]: line["values"] for line in run.lines}
    frequent = [step for step, values in names.items() if any(name.startswith("weights/") for name in values)]
    return frequent, list(run.arrays.get("kernel", ()))


def _initial(run: Run, watched: WatchedNetwork) -> dict[str, Any]:
    """The stored weights; if they were too large to be stored, those that are known otherwise, or none."""
    names = run.config.get("initial")
    if not isinstance(names, list) or 0 not in run.arrays.get("initial", ()):
        return dict(watched.initial)
    arrays, expected = run.array("initial", 0), watched.model.state_dict()
    if names != list(expected) or any(f"t{number}" not in arrays for number in range(len(names))):
        raise RunError(f"{run.path} was recorded with another model, expected the same layers; start a new run")
    return {name: torch.from_numpy(arrays[f"t{number}"]).to(expected[name].dtype) for number, name in enumerate(names)}


def _baseline(run: Run) -> Baseline:
    kernel = torch.from_numpy(run.array("kernel", 0)["mean"]) if 0 in run.arrays.get("kernel", ()) else None
    outputs = torch.from_numpy(run.array("outputs", 0)["f"]) if 0 in run.arrays.get("outputs", ()) else None
    return Baseline(kernel, outputs)
