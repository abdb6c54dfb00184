"""What is recorded of a moment: numbers under their names, and arrays."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from featlearn import metrics
from featlearn.network.checks import trainable_parameters
from featlearn.quantities.layer_alignment import pair_alignment
from featlearn.watch.moment import MANY_OUTPUTS, Moment
from featlearn.watch.names import Names
from featlearn.watch.seen import Sight, has_labels, is_classification

LARGE = 2**20
"""Outputs of more numbers than this are recorded at the first and the last measurement only."""


@dataclass
class Reading:
    """What was read."""

    scalars: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> key -> numbers."""

    def add(self, other: "Reading") -> None:
        """Both."""
        self.scalars |= other.scalars
        self.arrays |= other.arrays


@dataclass
class Place:
    """Where a measurement stands in the run."""

    names: Names
    end: bool
    """Whether it is the first or the last: arrays that are large are recorded then."""
    last: bool
    """Whether it is the last."""
    previous: tuple[int, Tensor] | None = None
    """Step and kernel of the measurement before."""
    apart: float = 0.0
    """Seconds spent on what is recorded at either end of a run only: they say nothing of what comes between."""

    @contextmanager
    def only_at_an_end(self) -> Iterator[None]:
        """Count these seconds apart."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.apart += time.perf_counter() - begun


Read = Callable[[Moment, Place], Reading]


def probe(moment: Moment, place: Place) -> Reading:
    """How well the probe is fitted."""
    reading = Reading(_fit("probe", moment.seen.probe, moment.outputs, moment.targets))
    if place.end or moment.outputs.numel() <= LARGE:
        reading.arrays["outputs"] = _arrays(f=moment.outputs)
    if moment.targets is not None and moment.origin is None:
        reading.arrays["targets"] = _arrays(y=moment.targets)
    return reading


def _fit(name: str, sight: Sight, outputs: Tensor, targets: Tensor | None) -> dict[str, float]:
    if targets is None:
        return {}
    f = outputs.double()
    found = {f"{name}/loss": float((f - targets).square().sum(1).mean())}
    if is_classification(targets):
        labels = targets.argmax(1)
        found[f"{name}/accuracy"] = float((f.argmax(1) == labels).double().mean())
        if has_labels(sight.y, f.shape[1]):
            found[f"{name}/cross_entropy"] = float(cross_entropy(f, labels))
    return found


def kernel(moment: Moment, place: Place) -> Reading:
    """The tangent kernel: size, shape, how far it has moved, what it shares with the task, which layers make it."""
    whole, y = moment.kernel.double(), moment.targets
    spectrum = metrics.spectrum(whole, y)
    found = {
        "ntk/norm": float(whole.norm()),
        "ntk/trace": float(whole.trace()),
        "ntk/effective_rank": float(metrics.effective_rank(whole)),
    }
    reading = Reading(found, {"spectrum": {"eigenvalues": spectrum.eigenvalues}})
    reading.arrays["kernel"] = _arrays(mean=moment.kernel)
    if place.end:
        with place.only_at_an_end():
            each = moment.kernel_each if len(moment.kernel_each) > 1 else None
            reading.arrays["kernel"] |= _arrays(each=each, full=moment.kernel_full)
    first = whole if moment.origin is None else moment.origin.kernel
    if first is not None:
        found["ntk/distance"] = float(metrics.kernel_distance(whole, first))
        found["ntk/centered_distance"] = float(metrics.kernel_distance(whole, first, centered=True))
    if place.previous is not None and place.previous[0] < moment.step:
        found["ntk/velocity"] = float(metrics.kernel_distance(whole, place.previous[1])) / (
            moment.step - place.previous[0]
        )
    square = float((whole * whole).sum())
    layers = {place.names[name]: each.mean(0).double() for name, each in moment.layer_kernels.items()}
    for name, part in layers.items():
        found[f"ntk/layers/{name}/share"] = float((part * whole).sum()) / square if square else math.nan
    if y is not None:
        assert spectrum.task_power is not None
        reading.arrays["spectrum"]["task_power"] = spectrum.task_power
        found["ntk/alignment"] = float(metrics.alignment(whole, y))
        found["ntk/centered_alignment"] = float(metrics.centered_alignment(whole, y))
        for name, part in layers.items():
            found[f"ntk/layers/{name}/alignment"] = float(metrics.alignment(part, y))
        if 1 < y.shape[1] <= MANY_OUTPUTS:
            matrix = metrics.specialization(moment.kernel_each, y)
            found["ntk/specialization"] = float(matrix.diagonal().mean())
            reading.arrays["specialization"] = {"ksm": matrix}
    return reading


def features(moment: Moment, place: Place) -> Reading:
    """Neural feature correlations of every layer (003)."""
    names = ["uncentered", "weight_change"]
    if moment.origin is not None and moment.seen.initial:
        names = ["uncentered", "centered", "double_centered", "ptk_centered", "centered_share", "weight_change"]
    found = {}
    for layer, values in moment.features.items():
        for name in names:
            # At the start nothing has moved, and there is nothing yet to compare with.
            value = 0.0 if name == "weight_change" and moment.origin is None else getattr(values, name)
            found[f"features/{place.names[layer]}/{name}"] = float(value)
    for name in ("uncentered", "centered"):
        if name in names:
            found[f"features/mean/{name}"] = moment.features.mean(name)
    return Reading(found)


def layers(moment: Moment, place: Place) -> Reading:
    """Alignment and balance of layers that follow each other (004, 002)."""
    found = {}
    for names, pair in moment.pairs.items():
        key = "layers/" + "--".join(place.names[name] for name in names)
        aligned = pair_alignment(pair, "fro")
        found[f"{key}/alignment"], found[f"{key}/random"] = aligned.value, aligned.random
        found[f"{key}/balance_drift"] = _drift(moment, names)
    return Reading(found)


def _drift(moment: Moment, names: tuple[str, str]) -> float:
    """|balance - balance at the start| / (|W|^2 / rate), W the first of the two at the start."""
    if moment.origin is None:
        return 0.0
    first, size = moment.origin.balances.get(names), moment.origin.weights.get(names, 0.0)
    now = moment.balances[names]
    return float((now - first).norm()) / size if first is not None and first.shape == now.shape and size else math.nan


def weights(moment: Moment, place: Place) -> Reading:
    """Norms of the weights and how far they are from where they began: by layer, and all of them."""
    own: dict[str, list[Tensor]] = {}
    for name, parameter in trainable_parameters(moment.model).items():
        now = parameter.detach()
        begun = moment.seen.initial.get(name, None if moment.seen.initial or moment.origin is not None else now)
        gone = now.new_tensor(math.nan) if begun is None else (now - begun.to(now.device)).double().norm()
        size = now.new_tensor(math.nan) if begun is None else begun.to(now.device).double().norm()
        own.setdefault(name.rpartition(".")[0], []).append(
            torch.stack([part.double() for part in (now.double().norm(), gone, size)])
        )
    totals = {name: torch.stack(parts).square().sum(0).cpu() for name, parts in own.items()}
    found: dict[str, float] = {}
    for name, (norm, gone, size) in totals.items():
        found |= _moved(f"weights/{place.names[name]}", norm, gone, size)
    return Reading(found | _moved("weights", *torch.stack([*totals.values()]).sum(0)))


def _moved(name: str, norm: Tensor, gone: Tensor, size: Tensor) -> dict[str, float]:
    """From squares: |W| and |W - W0| / |W0|, nan where W0 vanishes."""
    return {
        f"{name}/norm": math.sqrt(norm),
        f"{name}/distance": math.sqrt(gone / size) if float(size) > 0 else math.nan,
    }


def test(moment: Moment, place: Place) -> Reading:
    """Fit and kernel of the test probe."""
    sight, f, y = moment.seen.test, moment.test_outputs, moment.test_targets
    if sight is None or f is None or moment.test_kernel is None:
        return Reading()
    found = _fit("test", sight, f, y)
    if y is not None:
        found["ntk/test/alignment"] = float(metrics.alignment(moment.test_kernel, y))
        found["ntk/test/centered_alignment"] = float(metrics.centered_alignment(moment.test_kernel, y))
    reading = Reading(found)
    if place.end:
        with place.only_at_an_end():
            cross, whole = moment.cross_kernels or (None, None)
        reading.arrays["test"] = _arrays(cross=cross, cross_full=whole, kernel=moment.test_kernel, f=f, y=y)
    return reading


def optimizer(moment: Moment, place: Place) -> Reading:
    """The kernel of the update that the optimiser makes (002 Eq. 91)."""
    kernel = moment.optimizer_kernel
    if kernel is None:
        return Reading()
    found = {"ntk/optimizer/norm": float(kernel.double().norm())}
    if moment.targets is not None:
        found["ntk/optimizer/alignment"] = float(metrics.alignment(kernel, moment.targets))
    reading = Reading(found)
    if place.last:
        with place.only_at_an_end():
            cross, whole = moment.optimizer_cross_kernels or (None, None)
            full = moment.optimizer_kernel_full
        reading.arrays["optimizer_kernel"] = _arrays(mean=kernel, full=full, cross=cross, cross_full=whole)
    return reading


BUILT_IN: Mapping[str, Read] = {
    "kernel": kernel, "features": features, "layers": layers, "weights": weights, "test": test, "optimizer": optimizer,
}  # fmt: skip
"""Names of what can be switched on and off, in the order in which they are read."""


def _arrays(**given: Tensor | None) -> dict[str, Any]:
    """In single precision, those that are there."""
    return {key: tensor.detach().float().numpy() for key, tensor in given.items() if tensor is not None}
