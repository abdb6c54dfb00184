"""The default learning rate, from the first kernel; stable at every output scale."""

from torch import Tensor

from featlearn.cli.settings import Settings
from featlearn.cli.training_task import TrainingTask
from featlearn.quantities.diagonal import ntk_diagonal
from featlearn.steer import safe_lr

MOMENTUM = 0.1
"""Steps with momentum 0.9 add up to ten."""


def step_size(task: TrainingTask, settings: Settings) -> float:
    """The default of --lr: `fl.steer.safe_lr` of the samples of one step.

    A network whose output is multiplied by a, or its L weights by the L-th root of that, has a kernel ~ a^2: a lazy
    one needs the rate 1 / a^2, a rich one less, for it grows (`fl.steer.safe_lr`).
    Adam and its kin move each weight by about the rate: no output shall then move by more than the size of the targets.
    """
    x, y = task.some(slice(min(settings.batch or task.samples, task.samples)))
    if settings.optimizer not in ("sgd", "momentum"):
        return _adaptive_rate(task, x, y)
    scale = (settings.output_scale or 1.0) * settings.init_scale**task.weight_layers
    rate = safe_lr(task.model, x, y, loss=task.loss_name or task.loss, output_scale=scale)
    return rate * (MOMENTUM if settings.optimizer == "momentum" else 1.0)


def _adaptive_rate(task: TrainingTask, x: object, y: Tensor) -> float:
    """At which a step of all weights by the rate moves no output by more than the size of the targets."""
    weights = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    reach = (weights * float(ntk_diagonal(task.model, x).double().mean())) ** 0.5
    size = float(y.square().mean().sqrt()) if y.is_floating_point() else 1.0
    return min(1e-3, size / reach) if reach > 0 else 1e-3
