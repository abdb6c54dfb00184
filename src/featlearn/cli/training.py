"""One watched training run."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

import torch

from featlearn.cli.built_in import built_in
from featlearn.cli.device import checked_device
from featlearn.cli.own_subject import own_subject
from featlearn.cli.progress import Progress
from featlearn.cli.settings import Settings
from featlearn.cli.step_size import step_size
from featlearn.cli.subject import Subject, placed, scaled
from featlearn.monitoring.entry import watch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "momentum": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad,
}  # fmt: skip

SMALL = 10**8
"""Weights times samples of a step, below which it is over in about ten milliseconds."""


def train(place: str | None, settings: Settings, out: Path, progress: Progress) -> float:
    """Train what the settings, or a function of the user, say, and record it in `out`.

    Returns the learning rate. What is interrupted, or fails, is recorded until there.
    """
    torch.manual_seed(settings.seed)
    settings = settings.resolved(own=place is not None)
    subject = built_in(settings) if place is None else own_subject(place, settings)
    subject = placed(scaled(subject, settings), _device(settings.device))
    optimizer = subject.optimizer or _optimizer(subject, settings)
    rate = float(optimizer.param_groups[0]["lr"])
    whole = subject.samples <= settings.probe
    with _told(progress), _few_threads(subject, settings), watch(
        subject.model, subject.some(slice(settings.probe)), out, optimizer=optimizer, budget=settings.budget,
        loss=subject.convention, name=out.name, settings={**settings.entry, "lr": rate, "subject": place},
        # Regression on a part of the samples is not what the network did: nothing to compare it with.
        test=subject.test if whole else None,
    ) as watched:  # fmt: skip
        for batch in _batches(subject, settings):
            loss = _step(subject, optimizer, batch)
            watched.step(loss=loss)
            progress.step(watched.steps, loss)
    return rate


def _step(subject: Subject, optimizer: torch.optim.Optimizer, batch: torch.Tensor | slice) -> torch.Tensor:
    x, y = subject.some(batch)
    optimizer.zero_grad()
    loss = subject.loss(subject.output(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _batches(subject: Subject, settings: Settings) -> Iterator[torch.Tensor | slice]:
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        if settings.batch is None or settings.batch >= subject.samples:
            yield slice(None)
        else:
            yield torch.randperm(subject.samples, generator=generator)[: settings.batch]


def _optimizer(subject: Subject, settings: Settings) -> torch.optim.Optimizer:
    rate = step_size(subject, settings) if settings.lr is None else settings.lr
    trainable = [p for p in subject.model.parameters() if p.requires_grad]
    return OPTIMIZERS[settings.optimizer](trainable, lr=rate)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return checked_device(name)


@contextmanager
def _few_threads(subject: Subject, settings: Settings) -> Iterator[None]:
    """One thread for a small network: several would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    weights = sum(p.numel() for p in subject.model.parameters())
    if (
        weights * min(settings.batch or subject.samples, subject.samples) < SMALL
        and "OMP_NUM_THREADS" not in os.environ
    ):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _told(progress: Progress) -> Iterator[None]:
    """Warnings as lines of ours; nothing where quiet is asked for."""

    def show(message: Warning | str, *others: object) -> None:
        print(f"featlearn: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show  # type: ignore[assignment] # catch_warnings puts the old one back
        if progress.quiet:
            with redirect_stderr(StringIO()):
                yield
        else:
            yield
