"""Train and watch a network."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featlearn.cli.built_in_task import built_in_task
from featlearn.cli.device import checked_device
from featlearn.cli.settings import TrainingSettings
from featlearn.cli.training_progress import ProgressDisplay
from featlearn.cli.training_task import TrainingTask, move_task, scale_task
from featlearn.cli.user_task import BUILT_IN, user_task
from featlearn.monitoring.entry import watch
from featlearn.quantities.sample_gradients import ntk_diagonal
from featlearn.steer import safe_lr

MOMENTUM = 0.1
"""Momentum 0.9 multiplies the effective step size by 10."""


def step_size(task: TrainingTask, settings: TrainingSettings) -> float:
    """Return the default of --lr: `fl.steer.safe_lr` for the samples of a step.

    The kernel scales as a^2 if the output is multiplied by a, or L weights by the L-th root of a. A lazy network then
    needs the rate 1 / a^2; a rich network needs less, because its kernel grows. Adaptive optimizers move each weight by
    about the rate. Their rate is limited so that no output moves by more than the size of the targets.
    """
    x, y = task.some(slice(min(settings.batch or task.samples, task.samples)))
    if settings.optimizer not in ("sgd", "momentum"):
        return _adaptive_rate(task, x, y)
    scale = (settings.output_scale or 1.0) * settings.init_scale**task.weight_layers
    rate = safe_lr(task.model, x, y, loss=task.loss_name or task.loss, output_scale=scale)
    return rate * (MOMENTUM if settings.optimizer == "momentum" else 1.0)


def _adaptive_rate(task: TrainingTask, x: object, y: Tensor) -> float:
    """Return the rate at which moving all weights by it changes outputs by at most the size of the targets."""
    weights = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    reach = (weights * float(ntk_diagonal(task.model, x).double().mean())) ** 0.5
    size = float(y.square().mean().sqrt()) if y.is_floating_point() else 1.0
    return min(1e-3, size / reach) if reach > 0 else 1e-3


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}

SMALL = 10**8
"""Weights times samples per step below which a step takes about ten milliseconds."""


def train(place: str | None, settings: TrainingSettings, out: Path, progress: ProgressDisplay) -> tuple[float, Any]:
    """Train the built-in task, or the task of the user's function at `place`, and record the run in `out`.

    Returns the learning rate and the watched network. Interrupted or failed runs are recorded up to that point.
    """
    settings = settings.resolved(user_network=place is not None)
    task, optimizer = _create_task(place, settings)
    rate = float(optimizer.param_groups[0]["lr"])
    all_samples = task.samples <= settings.probe
    with (
        show_warnings(progress.quiet),
        _few_threads(task, settings),
        watch(
            task.model,
            task.some(slice(settings.probe)),
            out=out,
            optimizer=optimizer,
            budget=settings.budget,
            loss=task.loss_name,
            name=out.name,
            settings={**_entry(place, settings), "lr": rate, "subject": place},
            # Kernel regression on some samples is not comparable to a network trained on all.
            test=task.test if all_samples else None,
        ) as recorder,
    ):
        for batch in _batches(task, settings):
            loss = _step(task, optimizer, batch)
            recorder.step(loss=loss)
            progress.step(recorder.steps, loss)
    return rate, recorder.run.network


def learning_rate(place: str | None, settings: TrainingSettings) -> float:
    """Return the learning rate that `train` uses with these settings."""
    _, optimizer = _create_task(place, settings.resolved(user_network=place is not None))
    return float(optimizer.param_groups[0]["lr"])


def _create_task(place: str | None, settings: TrainingSettings) -> tuple[TrainingTask, torch.optim.Optimizer]:
    """Create the task and its optimizer."""
    torch.manual_seed(settings.seed)
    task = built_in_task(settings) if place is None else user_task(place, settings)
    task = move_task(scale_task(task, settings), resolve_device(settings.device))
    return task, task.optimizer or _optimizer(task, settings)


def _entry(place: str | None, settings: TrainingSettings) -> dict[str, Any]:
    """Return the settings to record; those of built-in networks, data, and losses are None for a user's task."""
    return settings.entry if place is None else {**settings.entry, **dict.fromkeys(BUILT_IN)}


def _step(task: TrainingTask, optimizer: torch.optim.Optimizer, batch: torch.Tensor | slice) -> torch.Tensor:
    x, y = task.some(batch)
    optimizer.zero_grad()
    loss = task.loss(task.output(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _batches(task: TrainingTask, settings: TrainingSettings) -> Iterator[torch.Tensor | slice]:
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        if settings.batch is None or settings.batch >= task.samples:
            yield slice(None)
        else:
            yield torch.randperm(task.samples, generator=generator)[: settings.batch]


def _optimizer(task: TrainingTask, settings: TrainingSettings) -> torch.optim.Optimizer:
    rate = step_size(task, settings) if settings.lr is None else settings.lr
    trainable = [p for p in task.model.parameters() if p.requires_grad]
    return OPTIMIZERS[settings.optimizer](trainable, lr=rate)


def resolve_device(name: str) -> str:
    """Return the device of an option; `auto` is a GPU if available."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return checked_device(name)


@contextmanager
def _few_threads(task: TrainingTask, settings: TrainingSettings) -> Iterator[None]:
    """Use a single thread for small networks, which are slower with several."""
    before = torch.get_num_threads()
    weights = sum(p.numel() for p in task.model.parameters())
    if weights * min(settings.batch or task.samples, task.samples) < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def show_warnings(quiet: bool) -> Iterator[None]:
    """Print warnings in our own format; suppress them if quiet."""

    def show(message: Warning | str, *others: object) -> None:
        print(f"featlearn: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        # Users cannot fix warnings in torch's code.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        warnings.showwarning = show  # type: ignore[assignment] # catch_warnings restores the old function
        if quiet:
            with redirect_stderr(StringIO()):
                yield
        else:
            yield
