"""The watched network with its probes and its initial weights."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn.errors import InputTypeError, InputValueError
from featlearn.gradients.directions import Outputs
from featlearn.losses import Loss, form, gradient
from featlearn.network.checks import unwrapped
from featlearn.network.inputs import Inputs, Readout, batch_size, map_tensors, tensors_in
from featlearn.readouts import DefaultReadout, LogProbability
from featlearn.shapes import checked_tensor

Probe = tuple[Inputs, Tensor | None] | Mapping[str, Any]
"""Inputs with their targets, or a batch of a model that takes `labels`."""


@dataclass(frozen=True)
class ProbeData:
    """Inputs with their targets."""

    x: Inputs
    y: Tensor | None
    """(P, C) targets, (P,) for one output, or (P,) class labels; None if there is no task, or the readout reads it."""
    digest: str = ""
    """SHA-256 of inputs and targets."""

    @property
    def samples(self) -> int:
        """Number of samples P."""
        return batch_size(self.x)

    def every(self, stride: int) -> "ProbeData":
        """Every `stride`-th sample; a slice would be biased, as data may be sorted."""
        samples = self.samples

        def rows(tensor: Tensor) -> Tensor:
            return tensor[::stride].clone() if tensor.dim() and len(tensor) == samples else tensor

        return replace(self, x=map_tensors(self.x, rows), y=None if self.y is None else rows(self.y))

    def read_by(self, readout: DefaultReadout | LogProbability) -> "ProbeData":
        """Return the data for a readout: without y if it reads the targets itself, with y flattened if it flattens
        outputs.
        """
        if isinstance(readout, LogProbability) or readout.reads_targets:
            return replace(self, y=None)
        return replace(self, y=self.y.flatten(1)) if readout.flat and self.y is not None else self


def probe_data(pair: Any, name: str, model: nn.Module, readout: Readout | None = None) -> ProbeData:
    """Return the pair (x, y), or a batch with labels, checked and copied to the device of the model."""
    if isinstance(pair, Mapping):
        pair = (pair, None)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        hint = "(x, None) for kernels without a task" if isinstance(pair, Tensor) else "one batch: next(iter(loader))"
        raise InputTypeError(
            f"{name} is {type(pair).__name__}, expected a pair (x, y): inputs and their targets; pass {hint}"
        )
    x, y = pair
    samples = batch_size(x, f"the x of {name}")
    if y is not None and (not isinstance(y, Tensor) or not y.dim() or len(y) != samples):
        what = f"of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise InputValueError(
            f"the y of {name} is {what}, expected a tensor of targets (P, C), (P,) numbers or class labels, or classes "
            f"of positions (P, T) or pixels (P, H, W), for P = {samples} samples"
        )
    for tensor in tensors_in(x):
        _refuse_not_finite(tensor, f"the x of {name}")
    if y is not None:
        _refuse_not_finite(y, f"the y of {name}")
    homes = list({p.device for p in model.parameters()})

    def copied(tensor: Tensor) -> Tensor:
        # Loaders often overwrite a batch with the next one.
        with torch.inference_mode(False):
            return tensor.detach().to(homes[0] if len(homes) == 1 else tensor.device, copy=True)

    x, y = map_tensors(x, copied), None if y is None else copied(y)
    digest = tensors_digest([*tensors_in(x), *([] if y is None else [y])])
    is_read = isinstance(readout, LogProbability)
    # Whether a default readout takes these targets shows once the model has run.
    if y is not None and (is_read or (readout is None and y.dim() > (2 if y.is_floating_point() else 1))):
        from featlearn.network.targets import paired  # late: few models need it

        x = paired(model, x, y, readout)
    elif y is None and (is_read or isinstance(x, Mapping)):
        from featlearn.network.targets import with_targets  # late: few models need it

        x = with_targets(model, x, readout)
    return ProbeData(x, y, digest)


def tensors_digest(tensors: Sequence[Tensor]) -> str:
    """Return the SHA-256 of tensors with their types and shapes."""
    result = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        result.update(f"{plain.dtype} {tuple(plain.shape)};".encode())
        result.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def joined(x: Inputs, x2: Inputs) -> Inputs | None:
    """Return the samples of two inputs as one batch; None where they do not fit together."""
    tensors, others = tensors_in(x), tensors_in(x2)
    samples, more = batch_size(x), batch_size(x2)
    if len(tensors) != len(others):
        return None
    parts = []
    for tensor, other in zip(tensors, others, strict=True):
        rows = [t.dim() > 0 and len(t) == count for t, count in ((tensor, samples), (other, more))]
        alike = (tensor.shape[1:], tensor.dtype) == (other.shape[1:], other.dtype) and samples != 1 != more
        if all(rows) and alike:
            parts.append(torch.cat([tensor, other]))
        elif not any(rows) and torch.equal(tensor, other):
            parts.append(tensor)
        else:
            return None
    remaining = iter(parts)
    return map_tensors(x, lambda _: next(remaining))


def _refuse_not_finite(tensor: Tensor, name: str) -> None:
    if not tensor.is_floating_point():
        return
    wrong = ~tensor.isfinite()
    # Additive attention masks consist of zeros and -inf, which is valid.
    if bool(wrong.any()) and not bool(((tensor == 0) | tensor.isneginf()).all()):
        raise InputValueError(
            f"{name}, of shape {tuple(tensor.shape)}, has {int(wrong.sum())} entries that are nan or infinite, "
            "expected finite numbers; nothing can be measured with them: leave these samples out"
        )


@dataclass(frozen=True)
class Sizes:
    """What the work of a measurement depends on, besides the network."""

    samples: int
    tests: int
    """Number of test points; 0 without a test probe."""
    kernel: Outputs
    """Output directions of the kernels."""
    full: bool
    """Whether the first and the last kernel are between all outputs."""
    features: int
    """Number of output directions of the neural features."""


@dataclass(frozen=True)
class WatchedNetwork:
    """What stays the same between measurements: network, probes, optimizer, readout, initial weights."""

    model: nn.Module
    probe: ProbeData
    test: ProbeData | None = None
    optimizer: Optimizer | None = None
    readout: Readout | None = None
    initial: Mapping[str, Any] = field(default_factory=dict)
    """The state dict at the first measurement, on the CPU; empty if unknown."""
    stride: int = 1
    """Stride over the samples that were passed: the others are not measured."""
    loss: Loss | None = None
    """The training loss, if it is known."""

    @cached_property
    def both(self) -> Inputs | None:
        """Inputs of the probe and then of the test probe, in one batch; None where there is no such batch."""
        return None if self.test is None else joined(self.probe.x, self.test.x)

    def reduced(self, stride: int) -> "WatchedNetwork":
        """Return the same network with every `stride`-th sample of its probes."""
        if stride == 1:
            return self
        test = None if self.test is None or self.test.samples < 2 * stride else self.test.every(stride)
        return replace(self, probe=self.probe.every(stride), test=test or self.test, stride=stride)


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer has any parameter of the model."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in trained for p in model.parameters())


def kept_state(model: nn.Module) -> dict[str, Any]:
    """A copy of the state dict on the CPU."""
    state = unwrapped(model).state_dict()
    return {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}


def decays(optimizer: Optimizer | None) -> bool:
    """Whether the optimizer decays weights."""
    groups = [] if optimizer is None else optimizer.param_groups
    return any(float(group.get("weight_decay") or 0.0) > 0 for group in groups)


def pull_on_outputs(y: Tensor, outputs: Tensor, loss: Loss | None) -> Tensor | None:
    """Return the (P, C) derivative of the training loss by the outputs, up to a factor; None if the loss is not known.

    Without a loss, class labels mean cross-entropy. Targets of zeros and ones may belong to two losses.
    """
    kind = None if loss is None else form(loss)
    if loss is not None and kind is None:
        return gradient(loss, outputs, y)[1].double()
    targets = as_targets(y, outputs)
    if kind == "cross-entropy" or (loss is None and has_labels(y, outputs.shape[1])):
        rows = targets - (targets.sum(1, keepdim=True) - 1) / targets.shape[1]
        return outputs.double().softmax(1) - rows
    if kind == "bce":
        return outputs.double().sigmoid() - targets
    return None if loss is None and is_binary(targets) else outputs.double() - targets


def has_labels(y: Tensor | None, classes: int) -> bool:
    """Whether targets are class labels."""
    return y is not None and y.dim() == 1 and not y.is_floating_point() and classes > 1


def as_targets(y: Tensor, outputs: Tensor) -> Tensor:
    """(P, C) targets in double; class labels become one-hot rows less their mean over classes."""
    classes = outputs.shape[1]
    if has_labels(y, classes):
        if not bool(((y >= 0) & (y < classes)).all()):
            raise InputValueError(f"labels run from {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}")
        hot = torch.zeros(outputs.shape, dtype=torch.float64, device=outputs.device)
        return hot.scatter_(1, y.long().to(outputs.device)[:, None], 1.0) - 1 / classes
    targets = checked_tensor(y, "y").to(outputs.device)
    targets = targets[:, None] if targets.dim() == 1 else targets
    if targets.shape != outputs.shape:
        labels = y.numel() == len(y) and y.is_floating_point() and bool((y == y.round()).all())
        plain = "y.long()" if y.dim() == 1 else "y[:, 0].long()"
        hint = f"; these are {str(y.dtype).removeprefix('torch.')} numbers, whole: for labels pass {plain}"
        raise InputValueError(
            f"y has shape {tuple(y.shape)}, expected (P, C) = {tuple(outputs.shape)} as the outputs have, or class "
            f"labels{hint if labels else ''}"
        )
    return targets


def is_binary(targets: Tensor) -> bool:
    """Whether all targets (P, C) are 0 or 1, and both occur: those of a loss for each output by itself."""
    return bool(((targets == 0) | (targets == 1)).all()) and len(targets.unique()) == 2


def is_classification(targets: Tensor) -> bool:
    """Whether every row of targets (P, C) has one large entry and is otherwise constant, the same in all rows."""
    if targets.shape[1] < 2:
        return False
    high, low = targets.amax(1), targets.amin(1)
    one = (targets == high[:, None]).sum(1) == 1
    rest = (targets == low[:, None]).sum(1) == targets.shape[1] - 1
    return bool((one & rest).all()) and len(high.unique()) == len(low.unique()) == 1
