"""What `fl.watch` records for `fl.replay`: kernels of training samples, and the samples and rate of every step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from featlearn import losses
from featlearn.audited_model import AuditedModel
from featlearn.errors import InputTypeError, InputValueError, MemoryBudgetError
from featlearn.kernel.step_rates import SUPPORTED
from featlearn.monitoring.probe_data import ProbeData, WatchedNetwork, tensors_digest
from featlearn.monitoring.schedule import Schedule
from featlearn.network.inputs import Inputs, tensors_in
from featlearn.planning.memory import readable_bytes
from featlearn.quantities.ntk import ntk_of

GROWTH = 1.45
"""Factor between the steps at which kernels are recorded."""
LARGEST_FULL, LARGEST_KERNEL = 2**25, 2**27
"""Bytes of a recorded kernel: between all outputs, else shared by all outputs."""
SETTLED = 10
"""Adaptive rates count from this step on: the second moment of fewer gradients is mostly noise."""

Samples = Any
"""Indices of a step's training samples: a tensor or list of whole numbers, or a slice."""


class ReplayRecorder:
    """Records a run for `fl.replay`."""

    def __init__(self, watched: WatchedNetwork, data: ProbeData) -> None:
        self.data, self._watched = data, watched
        self.optimizer = checked_optimizer(watched.optimizer)
        if watched.loss is None or losses.name(watched.loss) is None:
            names = ", ".join(map(repr, losses.NAMES))
            raise InputValueError(f"replay=... needs the training loss by name, expected loss= as one of {names}")
        if data.y is None:
            raise InputValueError("replay has no targets, expected a pair (x, y) of the training samples")
        self._test = watched.test or watched.probe
        self._audited = AuditedModel(watched.model, readout=watched.readout)
        self._schedule = Schedule("log", growth=GROWTH)
        self._order: list[Tensor] = []
        self._rates: list[float] = []
        self._outputs: str | None = None
        self._recorded = -1
        self.step = 0

    def add_step(self, step: int, samples: Samples) -> bool:
        """Add the samples of a step; return whether kernels are due."""
        if step != self.step + 1:
            raise InputValueError(f"step={step} after step {self.step}, expected every step once with replay=")
        self._order.append(self._indices(samples))
        self._rates.append(self._rate)
        self.step = step
        return self._schedule.due(step)

    @property
    def _rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _indices(self, samples: Samples) -> Tensor:
        total = self.data.samples
        if samples is None:
            raise InputValueError(
                f"watch.step() without samples=, expected the indices of this step's samples among the {total} of "
                "replay=: watch.step(loss=loss, samples=indices), or samples=slice(None) if all were used"
            )
        if isinstance(samples, slice):
            return torch.arange(total, dtype=torch.int32)[samples]
        try:
            indices = torch.as_tensor(samples).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputTypeError(f"samples is {type(samples).__name__}, expected indices or a slice") from error
        if indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool or not len(indices):
            kind = str(indices.dtype).removeprefix("torch.")
            raise InputTypeError(f"samples is {kind} of shape {tuple(indices.shape)}, expected indices (B,)")
        if int(indices.min()) < 0 or int(indices.max()) >= total:
            raise InputValueError(
                f"samples has indices from {int(indices.min())} to {int(indices.max())}, expected 0 to {total - 1}: "
                f"replay= has {total} samples"
            )
        return indices.to(torch.int32)

    @property
    def due_at_end(self) -> bool:
        """Whether steps were made since the last record."""
        return self.step > self._recorded

    def measure(self) -> dict[str, dict[str, Any]]:
        """Measure kernels and outputs now; return the arrays to record, with the steps since the last record."""
        outputs = {"f_train": self._outputs_on(self.data.x), "f_test": self._outputs_on(self._test.x)}
        arrays: dict[str, Any] = {**outputs, **self._kernels(outputs["f_train"].shape[1])}
        arrays["sizes"] = torch.tensor([len(indices) for indices in self._order], dtype=torch.int32)
        arrays["order"] = torch.cat(self._order) if self._order else torch.zeros(0, dtype=torch.int32)
        arrays["rates"] = torch.tensor(self._rates, dtype=torch.float64)
        if self._recorded < 0:
            arrays["y"] = self._checked_targets(outputs["f_train"])
            if self._test.y is not None:
                arrays["y_test"] = self._test.y
        self._order, self._rates, self._recorded = [], [], self.step
        return {"replay": {key: value.cpu() for key, value in arrays.items()}}

    def _checked_targets(self, f: Tensor) -> Tensor:
        loss, y = self._watched.loss, self.data.y
        name = None if loss is None else losses.name(loss)
        assert name is not None
        assert y is not None
        try:
            losses.check_targets(name, f, y)
        except InputValueError as error:
            raise InputValueError(f"the targets of replay do not fit the loss {name!r}: {error}") from error
        return y

    def _outputs_on(self, x: Inputs) -> Tensor:
        with self._audited.measuring([x]) as measurement:
            return measurement.outputs(measurement.batches[0]).detach()

    def _kernels(self, outputs: int) -> dict[str, Tensor]:
        """Return kernels of training and test samples with training samples, divided by the learning rate."""
        optimizer, rate = self.optimizer, self._rate
        adaptive = not isinstance(optimizer, SGD)
        if (adaptive and self.step < SETTLED) or rate == 0:
            return {}  # the next record stands for these steps
        kind = self._kind(outputs)
        equal = not adaptive and len({float(group["lr"]) for group in optimizer.param_groups}) == 1
        arguments: dict[str, Any] = {"outputs": kind, "optimizer": None if equal else optimizer}
        scale = 1.0 if equal else rate
        train = ntk_of(self._audited, x=self.data.x, **arguments)
        test = ntk_of(self._audited, self.data.x, x=self._test.x, **arguments)
        return {"k_train": train / scale, "k_test": test / scale}

    def _kind(self, outputs: int) -> str:
        """Return which kernels are recorded, the same throughout the run."""
        if self._outputs is None:
            samples = self.data.samples
            shared = 4 * samples * (samples + self._test.samples)
            if shared > LARGEST_KERNEL:
                fitting = int((LARGEST_KERNEL / 4) ** 0.5)
                raise MemoryBudgetError(
                    f"each kernel of the {samples:,} samples of replay= takes {readable_bytes(shared)}, expected at "
                    f"most {readable_bytes(LARGEST_KERNEL)}; pass at most about {fitting:,} training and test samples"
                )
            self._outputs = "full" if outputs > 1 and shared * outputs**2 <= LARGEST_FULL else "mean"
        return self._outputs

    def description(self) -> dict[str, Any]:
        """Return what run.json says."""
        group = self.optimizer.param_groups[0]
        names = ("momentum", "dampening", "nesterov", "betas", "weight_decay")
        assert self._watched.loss is not None
        return {
            "samples": self.data.samples,
            "train_inputs": tensors_digest(tensors_in(self.data.x)),
            "test_inputs": tensors_digest(tensors_in(self._test.x)),
            "loss": losses.name(self._watched.loss),
            "optimizer": type(self.optimizer).__name__,
            **{name: group[name] for name in names if name in group},
        }


def checked_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """Return an optimizer whose steps a replay can repeat; refuse others by name."""
    kinds = ", ".join(kind.__name__ for kind in SUPPORTED)
    if optimizer is None:
        raise InputValueError(f"replay=... needs optimizer=, expected one of {kinds}: a replay repeats its steps")
    if type(optimizer) not in SUPPORTED:
        raise InputTypeError(f"optimizer is {type(optimizer).__name__}, expected one of {kinds} for replay=")
    groups: list[dict[str, Any]] = optimizer.param_groups
    names = ["momentum"] if isinstance(optimizer, SGD | RMSprop) else ["betas"]
    names = names if isinstance(optimizer, SGD | RMSprop | Adam | AdamW) else []
    for name in names:
        if len({str(group[name]) for group in groups}) > 1:
            raise InputValueError(f"groups of the optimizer differ in {name}, expected one value for replay=")
    return optimizer
