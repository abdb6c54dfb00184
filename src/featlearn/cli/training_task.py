"""A network with its data and loss, before training."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.cli.settings import TrainingSettings
from featlearn.losses import LossFunction, LossName
from featlearn.network.inputs import batch_size, map_tensors
from featlearn.steer import scale_init, scale_output


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingTask:
    """Network, data, loss and optionally an optimizer."""

    model: nn.Module
    x: Any
    """inputs of the training samples: a tensor, a tuple (`model(*x)`) or a mapping (`model(**x)`)"""
    y: Tensor
    loss: LossFunction
    """function of the model's output and y"""
    loss_name: LossName | None
    """the name of the loss in `fl.watch`; None if it has none"""
    test: tuple[Any, Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    """the user's optimizer; None for the optimizer of the settings"""

    @property
    def samples(self) -> int:
        """Number of samples P."""
        return batch_size(self.x)

    @property
    def weight_layers(self) -> int:
        """Number of trainable weights: parameters with two axes or more."""
        return max(1, sum(p.requires_grad and p.dim() > 1 for p in self.model.parameters()))

    def some(self, index: Any) -> tuple[Any, Tensor]:
        """Return (x, y) of the samples at a slice or a tensor of indices."""
        samples = self.samples

        def rows(tensor: Tensor) -> Tensor:
            return tensor[index] if tensor.dim() and len(tensor) == samples else tensor

        return map_tensors(self.x, rows), self.y[index]

    def output(self, x: Any) -> Any:
        """Call the model."""
        if isinstance(x, tuple):
            return self.model(*x)
        return self.model(**x) if hasattr(x, "keys") else self.model(x)


def scale_task(task: TrainingTask, settings: TrainingSettings) -> TrainingTask:
    """Scale the initial weights, and scale outputs relative to their initial values."""
    if settings.init_scale != 1:
        scale_init(task.model, settings.init_scale)
    if settings.output_scale is None:
        return task
    return replace(task, model=scale_output(task.model, settings.output_scale))


def move_task(task: TrainingTask, device: str) -> TrainingTask:
    """Move the task to a device."""

    def to_device(thing: Any) -> Any:
        return map_tensors(thing, lambda tensor: tensor.to(device))

    test = None if task.test is None else (to_device(task.test[0]), task.test[1].to(device))
    return replace(task, model=task.model.to(device), x=to_device(task.x), y=task.y.to(device), test=test)
