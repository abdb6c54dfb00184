"""A recorded run as the diagnosis reads it: missing or non-finite data is None, damaged data raises a `RunError`.

Damaged data is never replaced: another kernel would give another verdict.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from featlearn.diagnosis.loss_kind import CROSS_ENTROPY, KINDS, SQUARE, LossKind, declared
from featlearn.errors import RunError
from featlearn.record import Run

Item = TypeVar("Item")
LOST = 2.0
"""A diverged run is read up to where its loss stays above this multiple of the first."""
EXPLODED = 1e3
"""A loss above this multiple of both the first loss and the loss of zero outputs is a divergence, even if it falls
later: such networks mostly consist of dead units."""
PROPORTIONAL = 0.3
"""Standard deviation of the logarithm of the ratio of two losses up to which they are the same loss."""
SAME_UNIT = 0.15
"""Logarithm of a ratio of two losses up to which both are in the same unit."""
SMALL = 1e-3
"""A first loss below this share of the largest one begins near zero."""
_NORM = re.compile("weights/.+/norm")
AXES = {
    "kernel": {"mean": "PP", "each": "CPP", "full": "PPCC"},
    "outputs": {"f": "PC"},
    "test": {"f": "TC", "cross": "TP", "cross_full": "TPCC"},
    "optimizer_kernel": {"mean": "PP", "full": "PPCC", "cross": "TP", "cross_full": "TPCC"},
}
"""Axes of the arrays: P samples of the probe, T test points, C outputs."""


@dataclass(frozen=True)
class Curve:
    """The finite values of one recorded quantity."""

    steps: Tensor
    """(T,) increasing"""
    values: Tensor
    """(T,)"""

    @property
    def first(self) -> float:
        """Value of the first measurement."""
        return float(self.values[0])

    @property
    def last(self) -> float:
        """Value of the last measurement."""
        return float(self.values[-1])

    @property
    def from_start(self) -> bool:
        """Whether the first measurement was made before training, so that later ones can be compared with it."""
        return float(self.steps[0]) == 0.0

    @property
    def rise(self) -> float:
        """Last minus first value."""
        return self.last - self.first

    def at(self, steps: Tensor) -> Tensor:
        """Values by linear interpolation, constant beyond the ends."""
        found = numpy.interp(steps.numpy(), self.steps.numpy(), self.values.numpy())
        return torch.from_numpy(numpy.atleast_1d(found))

    def logarithmic_at(self, steps: Tensor) -> Tensor:
        """Logarithms of positive values, linearly interpolated."""
        return Curve(self.steps, self.values.log()).at(steps)


class RunData:
    """One run; data after a divergence is left out."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._arrays: dict[tuple[str, int, str], Tensor | None] = {}

    @cached_property
    def _lines(self) -> list[tuple[int, Mapping[str, float]]]:
        """(step, values) before a divergence."""
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
        """The first step at which the loss exploded, or became non-finite for good; None if it did not."""
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
        """Steps at which the training loss is far above the first; if its kind is unknown, every recorded loss."""
        told, y = declared(self.run.config.get("loss_convention")), self.targets
        # Under cross-entropy outputs may grow, and with them the squared error.
        kinds = KINDS if told is None else (told,)
        names = [name for kind in kinds if (name := f"probe/{kind.scalar}") in self.run.names]
        none = 0.0 if y is None else float(y.double().square().sum(1).mean())
        found = []
        for name in names:
            fits = [(int(line["step"]), line["values"][name]) for line in self.run.lines if name in line["values"]]
            unit = max(fits[0][1], none if name == "probe/loss" else 1.0) if fits else math.nan
            found.append({step for step, loss in fits if unit > 0 and EXPLODED * unit < loss < math.inf})
        return sorted(set.intersection(*found)) if found else []

    @property
    def steps(self) -> int:
        """The last usable step."""
        return self._lines[-1][0] if self._lines else 0

    @property
    def lost(self) -> bool:
        """Whether training diverged before the second measurement."""
        return self.diverged is not None and len(self._lines) < 2

    @property
    def scalar_names(self) -> list[str]:
        """Names of all recorded scalars."""
        return self.run.names

    @property
    def samples(self) -> int:
        """Number of samples of the probe, as far as it is known."""
        probe = self.run.config.get("probe")
        return int(_number(probe.get("samples"))) if isinstance(probe, dict) else 0

    def curve(self, name: str, *, least: int = 2) -> Curve | None:
        """The finite values of one scalar; None if there are fewer than `least`."""
        # Kernels of different sets of weights are not compared.
        begin = self.unfrozen if name.startswith("ntk/") else 0
        pairs = [
            (s, values[name])
            for s, values in self._lines
            if s >= begin and name in values and math.isfinite(values[name])
        ]
        if len(pairs) < least:
            return None
        steps, values = torch.tensor(pairs, dtype=torch.float64).mT.contiguous()
        return Curve(steps, values)

    def last(self, name: str) -> float:
        """The last finite value of a scalar; nan if there is none."""
        curve = self.curve(name, least=1)
        return math.nan if curve is None else curve.last

    def since_start(self, name: str) -> Curve | None:
        """The same; None if it was not measured before training."""
        curve = self.curve(name)
        return curve if curve is not None and curve.from_start else None

    def array(self, name: str, step: int, key: str) -> Tensor | None:
        """One recorded array; None if it is missing or not finite."""
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
        """The expected type or shape of an array; empty if it fits."""
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
        """Known sizes of the axes, from the targets and the first outputs on test points."""
        found = {} if self.targets is None else {"P": len(self.targets), "C": self.targets.shape[1]}
        for step in self.run.arrays.get("test", [])[:1]:
            f = self.run.array("test", step).get("f")
            if f is not None and f.ndim:
                found["T"] = len(f)
        return found

    def array_steps(self, name: str) -> list[int]:
        """The steps at which an array was recorded, before a divergence."""
        return [step for step in self.run.arrays.get(name, []) if step <= self.steps]

    @cached_property
    def targets(self) -> Tensor | None:
        """(P, C)"""
        found = next((self.array("targets", step, "y") for step in self.run.arrays.get("targets", [])), None)
        if found is None or found.dim() == 2:
            return found
        return found.reshape(len(found) if found.dim() else 1, -1)

    @property
    def kernels(self) -> list[tuple[int, Tensor]]:
        """Steps and kernels (P, P) in double, of one set of trained weights; also where there are no targets."""
        steps = [step for step in self.array_steps("kernel") if step >= self.unfrozen]
        pairs = [(step, self.array("kernel", step, "mean")) for step in steps]
        return [(step, kernel.double()) for step, kernel in pairs if kernel is not None]

    @cached_property
    def kernel_steps(self) -> list[int]:
        """Steps at which both kernel and outputs were recorded."""
        y = self.targets
        found = []
        for step in self.array_steps("kernel"):
            if step < self.unfrozen:
                continue  # a kernel of other weights
            kernel, f = self.array("kernel", step, "mean"), self.array("outputs", step, "f")
            if y is not None and kernel is not None and f is not None and bool(kernel.any()):
                found.append(step)
        return found

    def kernel(self, step: int) -> Tensor:
        """(P, P), the recorded mean over outputs; for a step of `kernel_steps`."""
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
    def loss_kind(self) -> LossKind:
        """The training loss: as declared, else the one that goes in proportion to the loss passed to `watch.step`.

        Where no loss was passed, the one that fell furthest.
        """
        kind = declared(self.run.config.get("loss_convention"))
        curves = self._losses
        if kind is not None or len(curves) < 2:
            return kind if kind in curves else next(iter(curves), SQUARE)
        spreads = self._spreads
        if any(math.isfinite(spread) for spread in spreads.values()):
            return min(spreads, key=lambda name: spreads[name])
        recorded = [kind for kind in curves if f"probe/{kind.scalar}" in self.run.names]
        return min(
            recorded or curves, key=lambda name: float(curves[name].values.min()) / max(curves[name].first, 1e-300)
        )

    @property
    def loss_is_known(self) -> bool:
        """Whether the training loss is `loss_kind`: it was declared, or goes in proportion to the loss passed."""
        if declared(self.run.config.get("loss_convention")) is not None:
            return True
        spread, passed = self._spreads.get(self.loss_kind, math.inf), self.curve("loss")
        if passed is None or self.targets is None or not spread <= PROPORTIONAL:
            return False
        # Two losses that change little are in proportion, whatever they are.
        change, outputs = float(passed.values.log().std()), self.targets.shape[1]
        units = (1.0,) if self.loss_kind is CROSS_ENTROPY else (1.0, 0.5, 1 / outputs, 0.5 / outputs)
        ratio = self._ratios[self.loss_kind].mean().exp()
        same_unit = any(abs(math.log(float(ratio) * unit)) < SAME_UNIT for unit in units)
        return spread <= (0.5 if same_unit else 0.25) * change

    @cached_property
    def _losses(self) -> dict[LossKind, Curve]:
        """The loss on the probe for every kind that fits the targets."""
        curves = {kind: curve for kind in KINDS if (curve := self.curve(f"probe/{kind.scalar}")) is not None}
        if CROSS_ENTROPY not in curves and self.targets is not None:
            rows = as_probabilities(self.targets.double())
            if bool((rows > -1e-6).all()) and rows.shape[1] > 1:
                curve = self._from_outputs(lambda f: float(CROSS_ENTROPY.mean(f, rows)))
                curves |= {} if curve is None else {CROSS_ENTROPY: curve}
        return curves

    @cached_property
    def _ratios(self) -> dict[LossKind, Tensor]:
        """Logarithms of the ratio of each loss on the probe to the loss passed to `watch.step`."""
        passed = self.curve("loss")
        if passed is None or not bool((passed.values > 0).all()):
            return {}
        ratios = {kind: _log_ratio(curve, passed) for kind, curve in self._losses.items()}
        if CROSS_ENTROPY in ratios:  # a divergence from soft targets is the cross-entropy without their entropy
            curve = self._losses[CROSS_ENTROPY]
            less = Curve(curve.steps, (curve.values - self._floor(CROSS_ENTROPY)).clamp_min(0.0))
            ratios[CROSS_ENTROPY] = min(ratios[CROSS_ENTROPY], _log_ratio(less, passed), key=_spread)
        return ratios

    @cached_property
    def _spreads(self) -> dict[LossKind, float]:
        return {kind: _spread(ratio) for kind, ratio in self._ratios.items()}

    def _from_outputs(self, measure: Callable[[Tensor], float]) -> Curve | None:
        """A number of the outputs on the probe (P, C), over the steps at which they were recorded."""
        y = self.targets
        pairs = []
        for step in self.array_steps("outputs"):
            f = self.array("outputs", step, "f")
            if f is not None and y is not None and f.numel() == y.numel():
                pairs.append((float(step), measure(f.double().reshape(y.shape))))
        if len(pairs) < 2:
            return None
        steps, values = torch.tensor(pairs, dtype=torch.float64).mT.contiguous()
        return Curve(steps, values)

    @cached_property
    def loss(self) -> Curve | None:
        """The training loss on the probe: mean over samples of |f - y|^2, or of a cross-entropy."""
        return self._losses.get(self.loss_kind)

    def _floor(self, kind: LossKind) -> float:
        """The part of the loss that no network can learn: the entropy of soft targets."""
        if kind is SQUARE or self.targets is None:
            return 0.0
        rows = self.targets.double()
        rows = (as_probabilities(rows) if kind is CROSS_ENTROPY else rows).clamp(0.0, 1.0)
        if kind is CROSS_ENTROPY:
            return float(-torch.xlogy(rows, rows).sum(1).mean())
        return float(-(torch.xlogy(rows, rows) + torch.xlogy(1 - rows, 1 - rows)).mean())

    @cached_property
    def centered_loss(self) -> Curve | None:
        """Squared error on the probe less what a constant added to each output would mend; None for other losses.

        A constant in the targets is learned first, and is most of the first loss where it is large.
        """
        if self.loss_kind is not SQUARE or self.targets is None:
            return None
        y = self.targets.double()

        def centered_error(f: Tensor) -> float:
            return float((f - y - (f - y).mean(0)).square().sum(1).mean())

        return self._from_outputs(centered_error)

    @cached_property
    def loss_left(self) -> float:
        """Share of the learnable loss that is left: on the probe, or of the loss of the steps, the smaller one.

        What no network can learn, the entropy of soft targets, is subtracted. nan if neither is known, and for losses
        that have no lower end at zero or begin there: their ratio says nothing.
        """
        probe, passed, shares = self.loss, self.curve("loss"), []
        if passed is not None and is_ratio(passed):
            shares.append(_left_of_noisy(passed))
        if probe is not None and probe.from_start and is_ratio(probe):
            floor = self._floor(self.loss_kind)
            shares.append((float(probe.values.min()) - floor) / max(probe.first - floor, 1e-300))
        # Where the loss passed has no ratio, the probe loss of another criterion stands for nothing.
        unknown = passed is not None and not is_ratio(passed) and not self.loss_is_known
        return math.nan if unknown else min(shares, default=math.nan)

    @cached_property
    def why_no_ratio(self) -> str:
        """Why `loss_left` is nan."""
        curve = self.curve("loss") or self.loss
        if curve is None:
            return "the loss was not recorded before and after training"
        if float(curve.values.min()) < 0:
            return "the loss becomes negative, so that its ratio to the first says nothing"
        if not is_ratio(curve):
            return "the loss begins near zero, so that its ratio to the first says nothing"
        return "the loss was not recorded before training"

    @cached_property
    def outputs_moved(self) -> float:
        """Change of the predictions on the probe, relative to what was to be learned at the start; nan if unknown.

        Predictions and targets are centered over samples.
        """
        y, steps = self.targets, self.array_steps("outputs")
        if y is None or len(steps) < 2 or steps[0] != 0 or not self.loss_is_known:
            return math.nan
        first, last = (self.array("outputs", step, "f") for step in (0, steps[-1]))
        if first is None or last is None or first.numel() != y.numel() or last.numel() != y.numel():
            return math.nan
        kind = self.loss_kind
        rows = as_probabilities(y.double()) if kind is CROSS_ENTROPY else y.double()
        p, q = (kind.predictions(f.double().reshape(y.shape)) for f in (first, last))
        moved, wanted = (part - part.mean(0) for part in (q - p, rows - p))
        return float(moved.norm() / wanted.norm()) if bool(wanted.any()) else math.nan

    @property
    def decays(self) -> bool:
        """Whether the optimizer decays weights; where the run does not say, whether they grew no larger."""
        if any(name.startswith("convergence/") for name in self.run.names):
            return True  # measured only while weights decay, which may have begun after the configuration was written
        described = self.run.config.get("optimizer")
        groups = described.get("groups") if isinstance(described, dict) else None
        if not isinstance(groups, list):
            norms = [curve for name in self.run.names if _NORM.fullmatch(name) and (curve := self.since_start(name))]
            return math.hypot(*(curve.last for curve in norms)) <= math.hypot(*(curve.first for curve in norms))
        return any(_number(group.get("weight_decay")) > 0 for group in groups if isinstance(group, dict))

    def failure_of(self, quantity: str) -> str:
        """The message of the first failed measurement of a quantity; empty if there is none."""
        for event in self.run.events:
            if event["kind"] in ("failed", "diverged") and event.get("what") in (quantity, "measurement"):
                return str(event.get("message") or "")
        return ""

    @cached_property
    def dead(self) -> bool:
        """Whether the last recorded outputs are the same for all samples, and the first were not or had no chance."""
        steps = self.array_steps("outputs")
        f = self.array("outputs", steps[-1], "f") if steps else None
        return f is not None and len(f) > 1 and bool((f == f[:1]).all()) and self.steps > 0

    @property
    def dead_layers(self) -> list[str]:
        """Layers whose kernel is zero, so that no gradient reaches them; of a dead network."""
        names = [name for name in self.scalar_names if name.startswith("ntk/layers/") and name.endswith("/share")]
        layers = []
        for name in names:
            share = self.curve(name, least=1)
            if share is not None and share.last == 0:
                layers.append(name.removeprefix("ntk/layers/").removesuffix("/share"))
        return layers

    @cached_property
    def unfrozen(self) -> int:
        """The last step at which the set of trained weights changed; 0 if it never did."""
        steps = [event["step"] for event in self.run.events if event["kind"] == "trained_set_changed"]
        return max([step for step in steps if step is not None], default=0)

    @property
    def batch_norm(self) -> bool:
        """Whether the network has BatchNorm: kernels are measured in eval mode, without batch statistics."""
        told = self.run.config.get("model")
        return isinstance(told, dict) and told.get("batch_norm") is True

    @property
    def optimizer(self) -> tuple[str, float, bool]:
        """Class, momentum, and whether all groups share one learning rate; ("", 0, True) if unknown."""
        told = self.run.config.get("optimizer")
        if not isinstance(told, dict):
            return "", 0.0, True
        given = told.get("groups")
        groups = [group for group in given if isinstance(group, dict)] if isinstance(given, list) else []
        momentum = _number(groups[0].get("momentum")) if groups else 0.0
        rates = {_number(group.get("lr")) for group in groups}
        return str(told.get("class") or ""), momentum if 0 <= momentum < 1 else 0.0, len(rates) < 2


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most `most` items, spread evenly, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def is_ratio(curve: Curve) -> bool:
    """Return whether the ratio of a loss to its first value says how much was learned."""
    return curve.first > 0 and float(curve.values.min()) >= 0 and curve.first >= SMALL * float(curve.values.max())


def as_probabilities(y: Tensor) -> Tensor:
    """Return targets (P, C) shifted so that each row sums to one: they may be recorded without their mean."""
    return y - (y.sum(1, keepdim=True) - 1) / y.shape[1]


def _log_ratio(recorded: Curve, passed: Curve) -> Tensor:
    """Return the logarithms of the ratio of two losses at the steps that both have."""
    common = recorded.steps[(recorded.steps >= passed.steps[0]) & (recorded.values > 0)]
    values = Curve(recorded.steps, recorded.values.clamp_min(1e-300))
    return values.logarithmic_at(common) - passed.logarithmic_at(common)


def _spread(log_ratio: Tensor) -> float:
    """Return the standard deviation; inf for fewer than three steps."""
    return float(log_ratio.std()) if len(log_ratio) > 2 else math.inf


def fell(curve: Curve) -> bool:
    """Return whether a loss fell from its first to its last quarter by more than twice the standard error."""
    count = len(curve.values) // 4
    if count < 2:
        return curve.last < curve.first
    begin, end = curve.values[:count], curve.values[-count:]
    error = math.sqrt(float(begin.var() + end.var()) / count)
    return float(begin.mean() - end.mean()) > 2 * error


def _left_of_noisy(curve: Curve) -> float:
    """The last quarter of a loss divided by the first quarter, geometric means; 1 if noise explains the difference.

    The loss of a single small batch may be a tenth of the next one's.
    """
    count = len(curve.values) // 4
    if count < 2 or not bool((curve.values > 0).all()):
        return curve.last / curve.first
    logs = curve.values.log()
    begin, end = logs[:count], logs[-count:]
    change = float(end.mean() - begin.mean())
    error = math.sqrt(float(begin.var() + end.var()) / count)
    return math.exp(change) if change < -2 * error else 1.0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
