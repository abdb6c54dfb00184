"""The default learning rate, from the first kernel; stable at every output scale."""

import torch
from torch import Tensor

from featlearn.cli.settings import Settings
from featlearn.cli.training_task import TrainingTask
from featlearn.network.inputs import read_output
from featlearn.quantities.ntk import ntk

SHARE = 0.5
"""Learning rate times largest curvature, a quarter of the limit of stability, since kernels grow."""
ROWS = 1280
"""Samples times outputs of the kernel from which it is computed."""


def step_size(task: TrainingTask, settings: Settings) -> float:
    """The default of --lr.

    Gradient descent is stable below 2 / (c k), c the curvature of the loss in the outputs and k the largest eigenvalue
    of the kernel between all outputs. A network whose output is multiplied by a, or its L weights by the L-th root of
    that, has k ~ a^2: a lazy one needs the rate 1 / a^2 (`fl.steer.scale_output`). A rich one grows until its outputs
    are as large as the targets, and then k by a^(-2 (L - 1) / L), for which we leave room from the start.
    Adam and its kin move each weight by about the rate: no output shall then move by more than the size of the targets.
    """
    batch = min(settings.batch or task.samples, task.samples)
    x, y = task.some(slice(batch))
    kernel = _kernel(task, batch)
    if settings.optimizer not in ("sgd", "momentum"):
        weights = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
        reach = (weights * float(kernel.diagonal().mean())) ** 0.5
        size = float(y.square().mean().sqrt()) if y.is_floating_point() else 1.0
        return min(1e-3, size / reach) if reach > 0 else 1e-3
    layers = task.weight_layers
    scale = (settings.output_scale or 1.0) * settings.init_scale**layers
    share = min(SHARE, 4 * SHARE * scale ** (2 - 2 / layers)) * (0.1 if settings.optimizer == "momentum" else 1.0)
    largest = float(torch.linalg.eigvalsh(kernel)[-1])
    return share / (largest * curvature(task, x, y)) if largest > 0 else 1.0


def _kernel(task: TrainingTask, batch: int) -> Tensor:
    """(P C, P C) kernel between all outputs, of as many samples as fit, scaled to the whole batch."""
    with torch.no_grad():
        one = task.some(slice(1))[0]
        outputs: int = read_output(task.output(one), one, None).numel()
    samples = min(batch, max(2, ROWS // max(1, outputs)))
    full: Tensor = ntk(task.model, task.some(slice(samples))[0], outputs="full").double()
    return full.transpose(1, 2).reshape(samples * outputs, samples * outputs) * (batch / samples)


def curvature(task: TrainingTask, x: object, y: Tensor) -> float:
    """Upper bound of the second derivative of the loss in the outputs; for an unknown loss, its value at the start."""
    known = {"mean": 2.0, "cross-entropy": 1.0, "mean-over-outputs": 2.0 / max(1, y[0].numel())}
    if task.convention is not None:
        return known[task.convention] / len(y)
    with torch.no_grad():
        output = read_output(task.output(x), x, None)
    f = output.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(task.loss(f, y), f, create_graph=True)
    if not slope.requires_grad:  # linear in the outputs
        return 1.0 / len(y)
    direction = torch.ones_like(f) + torch.arange(f.numel(), device=f.device).reshape(f.shape) / f.numel()
    size = 0.0
    for _ in range(20):  # power iteration
        direction = direction / direction.norm()
        (product,) = torch.autograd.grad(slope, f, direction, retain_graph=True)
        direction, size = product, float(product.norm())
        if not size > 0:
            return 1.0 / len(y)
    return size
