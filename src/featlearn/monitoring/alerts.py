"""Alerts about a run that is not doing what it should, from numbers that are measured anyway. Each is raised once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from featlearn import losses
from featlearn.dynamics import rate
from featlearn.losses import Loss
from featlearn.monitoring.probe_data import WatchedNetwork, decays, has_labels
from featlearn.monitoring.records import Record
from featlearn.readouts import LogProbability
from featlearn.record import Run

FITTED, FALLEN = 0.5, 0.7
"""Share of the first loss below which training counts as done, and below which as done once it stops falling."""
LAZY = 0.15
"""Linearization gap of lazy training, as in a diagnosis."""
LINEAR = 1e-3
"""Gap relative to the change of the weights below which the model itself is linear in them."""
PATIENCE = 8
"""Steps that a layer has to begin moving: layers behind zero gates wait for others."""
UNMOVED = 1e-6
"""Relative change of a layer's weights that is rounding, where they decay."""
OTHERS_MOVED = 1e-2
"""Relative change of another layer within which a layer should have moved, too."""
STALLED_FROM = 128
"""First step at which training may count as stalled."""
FLAT, STILL = 0.02, 0.05
"""Relative fall of the loss within a doubling of steps, and change of the features, below which both stand still."""
RISEN = 2.0
"""Multiple of the lowest loss from which, above the first loss, the rate is too large, whatever the optimizer."""
COSTLY = 10_000
"""Training steps that pay for one kernel, from which kernels are not affordable."""


class Alert(NamedTuple):
    """One alert, as it is written to `events.jsonl`."""

    step: int
    kind: str
    number: float
    text: str
    action: str

    def __str__(self) -> str:
        return f"featlearn: alert at step {self.step}: {self.text}. {self.action}"


class AlertRules:
    """Judges every measurement of a run by the numbers recorded so far."""

    def __init__(self, watched: WatchedNetwork) -> None:
        self._watched = watched
        self._raised: set[str] = set()
        self._losses: list[tuple[int, float]] = []
        """Step and loss on the probe, relative to the first."""
        self._first: dict[str, float] = {}
        self._moved: list[tuple[int, float]] = []
        self._rates: dict[int, float] = {}
        self._norms: dict[str, float] = {}
        """Layer -> norm of its weights at the first measurement."""
        self._unmoved: dict[str, tuple[float, int, float]] = {}
        """Layer -> distance from the start, since which step, and the largest distance of a layer at that step."""

    def after(self, step: int, record: Record) -> Sequence[Alert]:
        """Return the new alerts after a measurement."""
        self._follow_loss(step, record)
        found = [
            self._unstable(step, record),
            self._dead(step, record.scalars),
            self._frozen(step, record.scalars),
            self._lazy(step, record.scalars),
            self._stalled(step, record.scalars),
        ]
        return self._new(found)

    def resume(self, run: Run) -> None:
        """Take the numbers and the alerts of an earlier process."""
        for line in run.lines:
            self.after(line["step"], Record(line["values"]))
        self._raised = {event["kind"] for event in run.events if "action" in event}

    def unaffordable(self, step: int, steps: float) -> Sequence[Alert]:
        """Return the alert that one kernel costs as much as so many steps of training may spend on measuring."""
        if steps < COSTLY:
            return []
        text = f"{steps:,.0f} steps of training pay for one kernel, so few will be measured"
        action = "Pass a smaller probe, or quantities={'kernel': False, 'features': False}"
        return self._new([Alert(step, "unaffordable", steps, text, action)])

    def failed(self, step: int, what: str, error: Exception) -> Sequence[Alert]:
        """Return the alert that a quantity does not fit into memory."""
        text = f"{what} does not fit into memory: {error}"
        return self._new([Alert(step, "unaffordable", math.nan, text, "Pass a smaller probe")])

    def _new(self, alerts: Iterable[Alert | None]) -> Sequence[Alert]:
        new = [alert for alert in alerts if alert is not None and alert.kind not in self._raised]
        self._raised.update(alert.kind for alert in new)
        return new

    def _follow_loss(self, step: int, record: Record) -> None:
        values = {name: record.scalars[f"probe/{name}"] for name in self._objectives(record)}
        if isinstance(self._watched.readout, LogProbability) or getattr(self._watched.readout, "reads_targets", False):
            outputs = record.arrays.get("outputs")
            values["log_probability"] = math.nan if outputs is None else -float(torch.as_tensor(outputs["f"]).mean())
        if not self._first:
            self._first = {name: value for name, value in values.items() if value > 0}
        left = [values[name] / first for name, first in self._first.items() if name in values]
        if left:
            # The training loss may be any of them: it has fallen if one has, and risen if all have.
            self._losses.append((step, min(left)))
        if self._watched.optimizer is not None:
            self._rates[step] = max(float(group["lr"]) for group in self._watched.optimizer.param_groups)

    def _objectives(self, record: Record) -> Sequence[str]:
        loss = self._watched.loss
        form = None if loss is None else losses.form(loss)
        names = {"mse": ["loss"], "cross-entropy": ["cross_entropy"], "bce": ["binary_cross_entropy"]}
        wanted = names.get(form or "", ["loss", "cross_entropy", "binary_cross_entropy"])
        return [name for name in wanted if f"probe/{name}" in record.scalars]

    @property
    def _left(self) -> float:
        return self._losses[-1][1] if self._losses else math.nan

    def _before(self, step: int) -> tuple[int, float] | None:
        """Return the last measured loss before half of the steps."""
        return next(((s, value) for s, value in reversed(self._losses) if 2 * s <= step), None)

    def _lazy(self, step: int, numbers: Mapping[str, float]) -> Alert | None:
        gap, error = numbers.get("gap/link", math.nan), numbers.get("gap/link_error", math.nan)
        before = self._before(step)
        stopped = before is not None and step >= PATIENCE and self._left > (1 - FLAT) * before[1]
        done = self._left <= FITTED or (self._left <= FALLEN and stopped)
        linear = gap <= LINEAR * numbers.get("weights/distance", 0.0)
        if not (done and gap + 2 * error < LAZY) or linear:
            return None
        text = f"training is lazy: a linear model misses {gap:.1%} of what the network learned"
        return Alert(step, "lazy", gap, text, "fl.advise(watch.run, toward='rich') tries what would change that")

    def _stalled(self, step: int, numbers: Mapping[str, float]) -> Alert | None:
        moved, before = numbers.get("features/moved", math.nan), self._before(step)
        if before is None or step < STALLED_FROM or not moved < STILL or not self._left > FITTED:
            return None
        warming_up = self._rates.get(step, 0.0) > 1.01 * self._rates.get(before[0], math.inf)
        fallen = 1 - self._left / before[1]
        if fallen >= FLAT or warming_up:
            return None
        text = f"the loss fell by {max(fallen, 0.0):.1%} from step {before[0]} on, and features moved by {moved:.1%}"
        return Alert(step, "stalled", fallen, text, "Raise the learning rate, or check that gradients reach all layers")

    def _dead(self, step: int, numbers: Mapping[str, float]) -> Alert | None:
        layers = [name.split("/")[1] for name in numbers if name.startswith("features/") and name.endswith("/constant")]
        if not layers:
            return None
        text = f"layer {layers[0]} gets the same input for every sample: the units before it are dead"
        return Alert(step, "dead_layer", float(len(layers)), text, "Lower the learning rate, and start again")

    def _frozen(self, step: int, numbers: Mapping[str, float]) -> Alert | None:
        moved: dict[str, float] = {}
        decayed = decays(self._watched.optimizer)
        for name in numbers:
            kind, _, rest = name.partition("/")
            layer, _, last = rest.rpartition("/")
            if kind == "weights" and layer and last == "distance":
                norm, distance = numbers[f"weights/{layer}/norm"], numbers[name]
                first = self._norms.setdefault(layer, norm)
                distance = norm if math.isnan(distance) else distance
                moved[layer] = sideways(norm / first, distance) if decayed and first else distance
        most, frozen = max(moved.values(), default=0.0), []
        unmoved = UNMOVED if decayed else 0.0
        for layer, distance in moved.items():
            before, since, then = self._unmoved.get(layer, (math.nan, step, most))
            if not abs(distance - before) <= unmoved:
                self._unmoved[layer] = (distance, step, most)
            elif step >= max(4 * PATIENCE if since else PATIENCE, 1.5 * since) and abs(most - then) > OTHERS_MOVED:
                frozen.append((layer, since))
        if not frozen:
            return None
        (layer, since), more = frozen[0], f" and {len(frozen) - 1} more" if frozen[1:] else ""
        text = f"layer {layer}{more} has not moved since step {since}"
        action = "Give its parameters to the optimizer, or call requires_grad_(False) if that is meant"
        return Alert(step, "frozen_layer", float(len(frozen)), text, action)

    def _unstable(self, step: int, record: Record) -> Alert | None:
        lowest = min((value for _, value in self._losses), default=1.0)
        if self._left > 1 and self._left > RISEN * lowest:
            times = self._left / lowest
            text = f"the loss on the probe is {times:.2g} times its lowest: the learning rate is too large"
            return Alert(step, "unstable", times, text, f"Divide it by {times:.2g}, or warm it up")
        kernel = record.arrays.get("kernel")
        outputs, watched = record.arrays.get("outputs"), self._watched
        if kernel is None or outputs is None or watched.optimizer is None:
            return None
        measured = torch.as_tensor(kernel["mean"]), torch.as_tensor(outputs["f"]).double()
        share = stability_share(*measured, watched.probe.y, watched.loss, watched.optimizer)
        if not share >= 1:
            return None
        text = f"the learning rate is {share:.2g} times the largest stable one"
        return Alert(step, "unstable", share, text, f"Divide it by {2 * share:.2g}")


def sideways(norm: float, distance: float) -> float:
    """Return how far weights are from a multiple of the first ones, relative to these: decay alone does not count."""
    along = (1 + norm**2 - distance**2) / 2
    return math.sqrt(max(norm**2 - along**2, 0.0))


def stability_share(
    kernel: Tensor, outputs: Tensor, y: Tensor | None, loss: Loss | None, optimizer: Optimizer
) -> float:
    """Return the learning rate relative to the largest stable one of gradient descent on the probe; nan if unknown.

    It is known for plain SGD, with or without momentum, and a named loss or class labels. The curvature is the largest
    eigenvalue of the Gauss-Newton matrix with the kernel's mean over outputs: a lower bound for a squared error.
    """
    name = losses.name(loss) if loss is not None else "cross-entropy" if has_labels(y, outputs.shape[1]) else None
    if name == "sum-half":  # it grows with the batch, which may be smaller than the probe
        name = None
    groups = optimizer.param_groups
    alike = len({(float(group["lr"]), group.get("momentum"), group.get("nesterov")) for group in groups}) == 1
    if name is None or type(optimizer) is not torch.optim.SGD or not alike:
        return math.nan
    if name == "cross-entropy":  # mean eigenvalue of diag(p) - p p^T, without that of a constant
        slopes = (1 - outputs.softmax(1).square().sum(1)) / max(outputs.shape[1] - 1, 1)
    elif name == "bce":
        slopes = (outputs.sigmoid() * (1 - outputs.sigmoid())).mean(1)
    else:
        slopes = torch.ones(len(outputs), dtype=torch.float64)
    root = slopes.sqrt()
    largest = float(torch.linalg.eigvalsh(root[:, None] * kernel.double() * root)[-1])
    momentum = float(groups[0]["momentum"])
    limit = 2 * (1 + momentum) / (1 + 2 * momentum if groups[0]["nesterov"] else 1)
    return rate(float(groups[0]["lr"]), name, *outputs.shape) * largest / limit
