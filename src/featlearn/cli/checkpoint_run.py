"""`featlearn diagnose FILE.py:setup --checkpoints DIR`: measure saved checkpoints of the user's task."""

from pathlib import Path

import torch

from featlearn.cli.settings import TrainingSettings
from featlearn.cli.training import resolve_device, show_warnings
from featlearn.cli.training_task import move_task
from featlearn.cli.user_task import user_task
from featlearn.monitoring.checkpoints import watch_checkpoints


def measure_checkpoints(subject: str, settings: TrainingSettings, checkpoints: Path, out: Path, *, quiet: bool) -> None:
    """Measure checkpoints with the network, samples, and test points of the user's function; record the run."""
    torch.manual_seed(settings.seed)
    task = move_task(user_task(subject, settings), resolve_device(settings.device))
    all_samples = task.samples <= settings.probe
    with show_warnings(quiet):
        watch_checkpoints(
            task.model,
            checkpoints,
            probe=task.some(slice(settings.probe)),
            out=out,
            loss=task.loss_name,
            # Kernel regression on some samples is not comparable to a network trained on all.
            test=task.test if all_samples else None,
            settings={"subject": subject, "probe": settings.probe, "checkpoints": checkpoints.name},
        )
