"""A recorded run as the diagnosis reads it: what is missing or not finite is None; what is damaged is a `RunError`.

Nothing is put in the place of what is damaged: another kernel would give another verdict.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from featlearn.errors import RunError
from featlearn.record import Run

LOST = 2.0
"""A run that broke down is read up to where its loss came to stay above so many times the first."""
EXPLODED = 1e3
"""A loss above so many times the first, and that of no output at all, is a breakdown, even if it is finite later: what
comes down from there is mostly a network whose units are all dead."""
AXES = {
    "kernel": {"mean": "PP", "each": "CPP", "full": "PPCC"},
    "outputs": {"f": "PC"},
    "test": {"f": "TC", "cross": "TP", "cross_full": "TPCC"},
    "optimizer_kernel": {"mean": "PP", "full": "PPCC", "cross": "TP", "cross_full": "TPCC"},
}
"""Of the arrays that are read: P samples of the probe, T test points, C outputs."""


@dataclass(frozen=True)
class Curve:
    """One recorded quantity, where it is finite."""

    steps: Tensor
    """(T,) increasing"""
    values: Tensor
    """(T,)"""

    @property
    def first(self) -> float:
        """At the first measurement."""
        return float(self.values[0])

    @property
    def last(self) -> float:
        """At the last one."""
        return float(self.values[-1])

    @property
    def from_start(self) -> bool:
        """Whether the first measurement was made before training: it then is what later ones are held against."""
        return float(self.steps[0]) == 0.0

    @property
    def rise(self) -> float:
        """Last less first."""
        return self.last - self.first

    def at(self, steps: Tensor) -> Tensor:
        """By linear interpolation, constant beyond the ends."""
        found = numpy.interp(steps.numpy(), self.steps.numpy(), self.values.numpy())
        return torch.from_numpy(numpy.atleast_1d(found))

    def logarithmic_at(self, steps: Tensor) -> Tensor:
        """Logarithms of positive values, by linear interpolation between them."""
        return Curve(self.steps, self.values.log()).at(steps)


class RunData:
    """One run. Of one that broke down, what came after the loss was lost is left out."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._arrays: dict[tuple[str, int, str], Tensor | None] = {}

    @cached_property
    def _lines(self) -> list[tuple[int, Mapping[str, float]]]:
        """(step, values), up to where training broke down."""
        lines = [(int(line["step"]), line["values"]) for line in self.run.lines]
        if self.diverged is None:
            return lines
        fits = [(s, values["probe/loss"]) for s, values in lines if "probe/loss" in values and s < self.diverged]
        end = self.diverged
        for step, loss in reversed(fits):
            if loss <= LOST * fits[0][1]:
                break
            end = step
        return [line for line in lines if line[0] < end]

    @cached_property
    def diverged(self) -> int | None:
        """The step of the first loss that exploded, or was not finite and stayed so; None if training went on."""
        fits = [
            (line["step"], line["values"]["probe/loss"]) for line in self.run.lines if "probe/loss" in line["values"]
        ]
        sound = max((step for step, loss in fits if math.isfinite(loss)), default=-1)
        lost = [step for step, loss in fits if not math.isfinite(loss)]
        told = [event["step"] for event in self.run.events if event["kind"] == "diverged"]
        ends = [step for step in [*lost, *told] if step is not None and step > sound]
        return min([*ends, *self._exploded], default=None)

    @property
    def _exploded(self) -> list[int]:
        """Steps at which the loss is far above the first: the one that was trained, or, if it is not known, each."""
        told, y = self.run.config.get("loss_convention"), self.targets
        if isinstance(told, str):
            names = ["probe/cross_entropy" if told == "cross-entropy" else "probe/loss"]
        else:  # outputs trained on cross-entropy may grow, and the squared error with them
            names = [name for name in ("probe/loss", "probe/cross_entropy") if name in self.run.names]
        none = 0.0 if y is None else float(y.double().square().sum(1).mean())
        found = []
        for name in names:
            fits = [(int(line["step"]), line["values"][name]) for line in self.run.lines if name in line["values"]]
            unit = max(fits[0][1], none if name == "probe/loss" else 1.0) if fits else math.nan
            found.append({step for step, loss in fits if unit > 0 and EXPLODED * unit < loss < math.inf})
        return sorted(set.intersection(*found)) if found else []

    @property
    def steps(self) -> int:
        """The last step that can be used."""
        return self._lines[-1][0] if self._lines else 0

    @property
    def lost(self) -> bool:
        """Whether training broke down before anything could be seen of it."""
        return self.diverged is not None and len(self._lines) < 2

    @property
    def scalar_names(self) -> list[str]:
        """Names of all recorded scalars."""
        return self.run.names

    def curve(self, name: str) -> Curve | None:
        """One scalar where it is finite; None with fewer than two such measurements."""
        pairs = [(s, values[name]) for s, values in self._lines if name in values and math.isfinite(values[name])]
        if len(pairs) < 2:
            return None
        steps, values = torch.tensor(pairs, dtype=torch.float64).mT.contiguous()
        return Curve(steps, values)

    def since_start(self, name: str) -> Curve | None:
        """The same, if it was measured before training."""
        curve = self.curve(name)
        return curve if curve is not None and curve.from_start else None

    def array(self, name: str, step: int, key: str) -> Tensor | None:
        """One recorded array, as it was recorded; None where it is missing or not finite."""
        place = (name, step, key)
        if place not in self._arrays:
            self._arrays[place] = self._read(name, step, key)
        return self._arrays[place]

    def _read(self, name: str, step: int, key: str) -> Tensor | None:
        if step not in self.run.arrays.get(name, ()):
            return None
        found = self.run.array(name, step).get(key)
        if found is None:
            return None
        wrong = self._misfit(found, AXES.get(name, {}).get(key, ""))
        if wrong:
            raise RunError(
                f"{self.run.path}: {key!r} of the array {name!r} at step {step} is {found.dtype} of shape "
                f"{found.shape}, expected {wrong}; it is damaged, or of another run. Remove this file to have the rest "
                "judged"
            )
        tensor = torch.from_numpy(numpy.array(found))
        return tensor if bool(torch.isfinite(tensor).all()) else None

    def _misfit(self, found: numpy.ndarray, axes: str) -> str:
        """What was expected in the place of an array; empty where it fits."""
        if found.dtype.kind not in "fiu" or found.size == 0:
            return "numbers"
        sizes = [self._sizes.get(letter) for letter in axes]
        if not axes or (
            found.ndim == len(axes) and all(b in (a, None) for a, b in zip(found.shape, sizes, strict=True))
        ):
            return ""
        known = ", ".join("any" if size is None else str(size) for size in sizes)
        return f"({', '.join(axes)}) = ({known}) by the targets and test points"

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Of the axes, where they are known: from the targets, and the first outputs of test points."""
        found = {} if self.targets is None else {"P": len(self.targets), "C": self.targets.shape[1]}
        for step in self.run.arrays.get("test", [])[:1]:
            f = self.run.array("test", step).get("f")
            if f is not None and f.ndim:
                found["T"] = len(f)
        return found

    def array_steps(self, name: str) -> list[int]:
        """The steps at which an array was recorded, before training broke down."""
        return [step for step in self.run.arrays.get(name, []) if step <= self.steps]

    @cached_property
    def targets(self) -> Tensor | None:
        """(P, C)"""
        found = next((self.array("targets", step, "y") for step in self.run.arrays.get("targets", [])), None)
        if found is None or found.dim() == 2:
            return found
        return found.reshape(len(found) if found.dim() else 1, -1)

    @cached_property
    def kernel_steps(self) -> list[int]:
        """Steps at which the kernel and the outputs are there, of one and the same probe."""
        y = self.targets
        found = []
        for step in self.array_steps("kernel"):
            kernel, f = self.array("kernel", step, "mean"), self.array("outputs", step, "f")
            if y is not None and kernel is not None and f is not None and bool(kernel.any()):
                found.append(step)
        return found

    def kernel(self, step: int) -> Tensor:
        """(P, P), the mean over outputs, as it was recorded; for a step of `kernel_steps`."""
        kernel = self.array("kernel", step, "mean")
        assert kernel is not None
        return kernel

    def outputs(self, step: int) -> Tensor:
        """(P, C) in double; for a step of `kernel_steps`."""
        f, y = self.array("outputs", step, "f"), self.targets
        assert f is not None
        assert y is not None
        return f.double().reshape(y.shape)

    @cached_property
    def entropy(self) -> bool:
        """Whether it was trained on cross-entropy: as it says, or by which of the two losses fell further."""
        told = self.run.config.get("loss_convention")
        entropy, square = self.curve("probe/cross_entropy"), self.curve("probe/loss")
        if entropy is None or isinstance(told, str):
            return entropy is not None and told == "cross-entropy"
        falls = [float(c.values.min()) / c.first if c is not None and c.first > 0 else 1.0 for c in (entropy, square)]
        return falls[0] < falls[1]

    @cached_property
    def loss(self) -> Curve | None:
        """Of the probe, as it was trained: mean over samples of |f - y|^2, or of the cross-entropy."""
        entropy = self.curve("probe/cross_entropy") if self.entropy else None
        return entropy or self.curve("probe/loss")

    @property
    def batch_norm(self) -> bool:
        """Whether statistics of batches took part in training: kernels are measured without them."""
        told = self.run.config.get("model")
        return isinstance(told, dict) and told.get("batch_norm") is True

    @property
    def optimizer(self) -> tuple[str, float, bool]:
        """Class, momentum, and whether all groups have one learning rate; ("", 0, True) where nothing is known."""
        told = self.run.config.get("optimizer")
        if not isinstance(told, dict):
            return "", 0.0, True
        given = told.get("groups")
        groups = [group for group in given if isinstance(group, dict)] if isinstance(given, list) else []
        momentum = _number(groups[0].get("momentum")) if groups else 0.0
        rates = {_number(group.get("lr")) for group in groups}
        return str(told.get("class") or ""), momentum if 0 <= momentum < 1 else 0.0, len(rates) < 2


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
