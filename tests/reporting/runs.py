"""Runs to report on: a small one that was watched, and ones written by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import featlearn as fl
from featlearn.record import Run, RunWriter, open_run

HOSTILE = "<script>alert(1)</script>--></script>\"'&<img src=x onerror=alert(2)>${x}"


def watched(path: Path, *, seed: int = 0, gamma: float = 8.0, steps: int = 60) -> Run:
    """A network on 30 digits of 3 classes, everything measured."""
    torch.manual_seed(seed)
    digits = fl.data.digits()
    some = (digits.labels < 3).nonzero().flatten()[:45]
    x, y = digits.x[some].flatten(1).float(), nn.functional.one_hot(digits.labels[some], 3).float() - 1 / 3
    model = fl.steer.scale_output(nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 3)), 1 / gamma)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05 * model.rate_factor)
    with fl.watch(
        model, (x[:30], y[:30]), out=path, test=(x[30:], y[30:]), optimizer=optimizer, loss="mean", budget=None
    ) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x[:30]) - y[:30]).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            watch.step(loss=loss)
    return watch.run


def by_hand(
    path: Path,
    scalars: Mapping[str, list[float]],
    steps: list[int],
    arrays: Mapping[str, list[Mapping[str, numpy.ndarray]]] | None = None,
    **config: Any,
) -> Run:
    """A run with these numbers at these steps; `arrays` at the first of them."""
    writer = RunWriter(path, {"name": path.name, **config})
    for i, step in enumerate(steps):
        writer.scalars(step, {name: values[i] for name, values in scalars.items() if i < len(values)})
    for name, contents in (arrays or {}).items():
        for step, content in zip(steps, contents, strict=False):
            writer.array(name, step, **content)
    writer.close()
    return open_run(path)
