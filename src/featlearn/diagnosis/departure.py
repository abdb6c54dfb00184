"""How far the network departs from the path of training with its frozen first kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from featlearn.diagnosis.loss_speed import LossSpeed
from featlearn.diagnosis.machine import FrozenPath, frozen_path, kernels_at, nearest, recorded_path
from featlearn.diagnosis.run_data import RunData
from featlearn.linalg.estimate import Estimate

LINEAR = 0.1
"""Linearization gap up to which a departure shows what the replay itself misses: other samples than the probe, another
optimizer, kernels between outputs that were not recorded."""


@dataclass(frozen=True, eq=False)
class Departure:
    """|g - f| / |f - f0| for outputs g of training with the frozen first kernel, where its path comes closest to f.

    Outputs are centered over samples. On test points g is taken at the same time. The standard error is the departure
    while the network was still close to its linearization, where the frozen kernel is exact and only the replay can be
    wrong. `between_kernels` is the distance from g to the same for the last kernel, in the same unit: where it is
    small, the kernel did not change enough to make the network depart, and it is the replay that is off.
    """

    probe: Estimate
    """at the end of the run, on the probe"""
    test: Estimate | None
    """the same on the test points; None where they were not recorded"""
    steps: tuple[int, ...] = ()
    on_probe: tuple[float, ...] = ()
    """at each of the steps"""
    on_test: tuple[float, ...] = ()
    between_kernels: float = math.nan
    """at the end, on the test points if both paths are known there; nan if the last kernel is not as the first one"""
    reason: str = ""
    """why it is unknown"""

    @property
    def value(self) -> Estimate:
        """On the test points where they are known, else on the probe."""
        return self.probe if self.test is None else self.test

    def __float__(self) -> float:
        return float(self.value)


def unknown_departure(reason: str) -> Departure:
    """A departure that is not known."""
    return Departure(Estimate(math.nan, math.nan, 1), None, reason=reason)


def departure(run_data: RunData) -> Departure:
    """The departure at every recorded kernel after which the loss had fallen."""
    steps, loss = run_data.kernel_steps, run_data.loss
    if not steps or steps[0] != 0 or loss is None or loss.first <= 0:
        return unknown_departure("the first kernel, with outputs and targets, was not recorded")
    speed = LossSpeed(run_data)
    levels = {step: speed.loss_of(run_data.outputs(step)) for step in steps[1:]}
    first = speed.loss_of(run_data.outputs(0))
    fallen = [step for step, level in levels.items() if level < first]
    if not fallen:
        return unknown_departure("the loss on the probe did not fall")
    path, test0 = _path(run_data, 0)
    if path is None:
        return unknown_departure("training with the first kernel could not be computed")
    start = run_data.outputs(0)
    on_probe: list[float] = []
    on_test: list[float] = []
    for step in fallen:
        g, g_test = nearest(path, run_data.outputs(step))
        on_probe.append(_distance(g, run_data.outputs(step), start))
        f = run_data.array("test", step, "f")
        known = g_test is not None and f is not None and test0 is not None and f.shape == test0.shape
        on_test.append(_distance(g_test, _rows(f), _rows(test0)) if known else math.nan)  # type: ignore[arg-type]
    gap = run_data.curve("gap/probe", least=1)
    linear = {} if gap is None else dict(zip(gap.steps.tolist(), gap.values.tolist(), strict=True))
    early = [i for i, step in enumerate(fallen) if linear.get(float(step), math.inf) <= LINEAR][:1] or [0]
    return Departure(
        _estimate(on_probe, early, len(start)),
        _estimate(on_test, early, len(start)) if math.isfinite(on_test[-1]) else None,
        tuple(fallen),
        tuple(on_probe),
        tuple(on_test),
        _between_kernels(run_data, path, fallen[-1]),
    )


def _path(run_data: RunData, step: int) -> tuple[FrozenPath | None, Tensor | None]:
    """Training with the frozen kernel of a step, and the first outputs on test points where these are followed."""
    test0 = run_data.array("test", 0, "f")
    if test0 is not None and kernels_at(run_data, "kernel", step) is not None:
        return recorded_path(run_data, "kernel", step, test0), test0
    whole = run_data.array("kernel", step, "full")
    kernel = whole if whole is not None and whole.dim() == 4 else run_data.kernel(step)
    return frozen_path(run_data, kernel, None, None), None


def _between_kernels(run_data: RunData, first: FrozenPath, last: int) -> float:
    """Distance between the paths of the first kernel and of that of the last step, each where it is nearest then."""
    begun, ended = (run_data.array("kernel", step, "full") is None for step in (0, last))
    later, test0 = _path(run_data, last) if begun == ended else (None, None)
    if later is None:
        return math.nan
    f, f_test = run_data.outputs(last), run_data.array("test", last, "f")
    (g, g_test), (h, h_test) = nearest(first, f), nearest(later, f)
    if g_test is None or h_test is None or f_test is None or test0 is None:
        return _distance(g, h, run_data.outputs(0), f)
    return _distance(g_test, h_test, _rows(test0), _rows(f_test))


def _estimate(values: Sequence[float], early: Sequence[int], samples: int) -> Estimate:
    replayed = [values[i] for i in early if math.isfinite(values[i])]
    # the first comparison is itself the end of a run that was stopped early
    error = max(replayed) if replayed and early[-1] < len(values) - 1 else math.nan
    return Estimate(values[-1], error, samples)


def _distance(g: Tensor, f: Tensor, start: Tensor, end: Tensor | None = None) -> float:
    """|g - f| / |end - start|, centered over samples; the end is f unless it is given."""
    moved, off = (part - part.mean(0) for part in ((f if end is None else end) - start, g - f))
    return float(off.norm() / moved.norm()) if bool(moved.any()) else math.nan


def _rows(f: Tensor) -> Tensor:
    return f.double().reshape(len(f), -1)


def departs(one: Departure, limit: float) -> bool | None:
    """Whether the departure is above a limit by twice its error; None if the error is as large as that.

    None, too, if the kernel changed so little that its paths stay within the limit: it is the replay that is off then,
    by training on more samples than the probe, say.
    """
    value, error = float(one.value), float(one.value.stderr)
    if not math.isfinite(value) or not math.isfinite(error):
        return None
    if value - 2 * error > limit:
        return None if one.between_kernels <= limit else True
    return False if value + 2 * error <= limit else None
