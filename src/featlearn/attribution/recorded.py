"""Read from a run what `fl.watch(..., replay=...)` has recorded."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from featlearn import losses
from featlearn.attribution.kernel_path import LARGEST_ADAPTIVE_STEP, LARGEST_STEP, KernelPath, Momentum
from featlearn.attribution.objective import objective_of, target_rows
from featlearn.attribution.trust import RunFacts
from featlearn.errors import InputTypeError, InputValueError
from featlearn.record import Run

GAPS = ("gap/link_test", "gap/test", "gap/link", "gap/probe")
"""Recorded linearization gaps, the best one first."""


@dataclass(frozen=True, eq=False)
class RecordedPath:
    """The path of a run, with what its forecasts need."""

    run: Run
    path: KernelPath
    loss: losses.LossName
    test_targets: Tensor | None
    """(Q, C); None where the test points have no targets."""
    facts: RunFacts
    """What forecasts depend on."""
    base: dict[int, Tensor]
    """Recorded step -> outputs (P + Q, C) of the replay of the run itself."""

    @property
    def test_outputs(self) -> Tensor:
        """Outputs on the test points at the end (Q, C)."""
        return self.path.outputs[-1, self.path.samples :]


def recorded_path(run: Any) -> RecordedPath:
    """Return the recorded path of a run; refuse a run without one."""
    if not isinstance(run, Run):
        raise InputTypeError(f"run is {type(run).__name__}, expected a Run: watch.run, or fl.open_run(path)")
    steps = run.arrays.get("replay", [])
    entry = run.config.get("replay")
    if not steps or not isinstance(entry, dict):
        raise InputValueError(
            f"the run {run.name!r} has no kernels of its training samples; record them with fl.watch(..., "
            "optimizer=optimizer, loss=..., replay=(x_train, y_train))"
        )
    if len(steps) < 2:
        raise InputValueError(f"the run {run.name!r} recorded its start alone, expected at least one step")
    arrays = [{key: torch.from_numpy(value) for key, value in run.array("replay", step).items()} for step in steps]
    kernels = _kernels([_flat_kernel(each) for each in arrays])
    outputs = torch.stack([torch.cat([each["f_train"], each["f_test"]]) for each in arrays])
    order = [part.long() for each in arrays for part in each["order"].split(each["sizes"].tolist())]
    if len(order) != steps[-1]:
        raise InputValueError(f"the run has samples of {len(order)} steps, expected {steps[-1]}; copy the run again")
    loss = losses.name(cast(losses.LossName, entry["loss"]))
    assert loss is not None
    samples = len(arrays[0]["f_train"])
    y_test = arrays[0].get("y_test")
    path = KernelPath(
        steps=steps,
        kernels=kernels,
        outputs=outputs,
        targets=target_rows(loss, outputs[0, :samples], arrays[0]["y"], "replay"),
        order=order,
        rates=torch.cat([each["rates"] for each in arrays]),
        objective=objective_of(loss, outputs.shape[2]),
        momentum=_momentum(entry),
        largest_step=LARGEST_STEP if entry["optimizer"] == "SGD" else LARGEST_ADAPTIVE_STEP,
    )
    base = {step: f[..., 0] for step, f in path.replay(torch.ones(samples, 1), stops=steps).items()}
    final, begun = outputs[-1, samples:], outputs[0, samples:]
    change = float((final - begun).norm())
    return RecordedPath(
        run=run,
        path=path,
        loss=loss,
        test_targets=None if y_test is None else _test_rows(loss, final, y_test),
        facts=RunFacts(
            gap=_gap(run),
            optimizer="adaptive" if entry["optimizer"] != "SGD" else "momentum" if path.momentum.decay else "SGD",
            self_error=float((base[steps[-1]][samples:] - final).norm()) / change if change else math.nan,
        ),
        base=base,
    )


def _test_rows(loss: losses.LossName, f: Tensor, y: Tensor) -> Tensor | None:
    try:
        return target_rows(loss, f, y, "test")
    except InputValueError:  # targets that the diagnosis reads otherwise, such as labels beside a squared error
        return None


def _flat_kernel(arrays: dict[str, Tensor]) -> Tensor | None:
    """Return the kernel (P + Q, P), or ((P + Q) C, P C); None where it was not measured."""
    if "k_train" not in arrays:
        return None
    kernel = torch.cat([arrays["k_train"], arrays["k_test"]])
    if kernel.dim() == 2:
        return kernel
    rows, columns, outputs, _ = kernel.shape
    return kernel.permute(0, 2, 1, 3).reshape(rows * outputs, columns * outputs)


def _kernels(measured: list[Tensor | None]) -> list[Tensor]:
    """Return a kernel for each step: where none was measured, the next one, else the previous one."""
    if not any(kernel is not None for kernel in measured):
        raise InputValueError("the run is too short: no kernel was recorded, expected at least 10 steps")
    filled: list[Tensor | None] = [None] * len(measured)
    for number in reversed(range(len(measured))):
        later = filled[number + 1] if number + 1 < len(measured) else None
        filled[number] = measured[number] if measured[number] is not None else later
    last = next(kernel for kernel in reversed(measured) if kernel is not None)
    return [last if kernel is None else kernel for kernel in filled]


def _momentum(entry: dict[str, Any]) -> Momentum:
    name = entry["optimizer"]
    if name in ("Adam", "AdamW"):
        decay = float(entry["betas"][0])
        return Momentum(decay, 1 - decay, corrected=True)
    return Momentum(
        float(entry.get("momentum", 0.0)), 1 - float(entry.get("dampening", 0.0)), bool(entry.get("nesterov", False))
    )


def _gap(run: Run) -> float:
    for name in GAPS:
        if name in run.names:
            return float(run.scalar(name)[1][-1])
    return math.nan
