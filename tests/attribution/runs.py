"""Small watched runs, and plain training that they are compared with."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.record import Run

P, Q, D = 13, 5, 4


def linear(outputs: int) -> nn.Module:
    """A linear model: its kernel does not change, so that a replay has no error."""
    torch.manual_seed(0)
    return nn.Linear(D, outputs).double()


def perceptron(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, outputs)).double()


def data(kind: str, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test samples of a task."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(P + Q, D, generator=generator, dtype=torch.float64)
    if kind == "cross-entropy":
        y = torch.randint(outputs, (P + Q,), generator=generator)
    else:
        y = torch.randn(P + Q, outputs, generator=generator, dtype=torch.float64)
        y = (y > 0).double() if kind == "bce" else y
    return x[:P], y[:P], x[P:], y[P:]


def order(steps: int, size: int | None) -> list[Tensor]:
    """Indices of each batch; all samples where `size` is None."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randperm(P, generator=generator)[:size] for _ in range(steps)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Any,
    x: Tensor,
    y: Tensor,
    batches: Sequence[Tensor],
    without: Sequence[int] = (),
    watch: Any = None,
) -> nn.Module:
    """Train, with some samples left out of every batch."""
    function = fl.losses.function(loss)
    for batch in batches:
        batch = torch.tensor([index for index in batch.tolist() if index not in without], dtype=torch.long)
        value = function(model(x[batch]), y[batch])
        optimizer.zero_grad(), value.backward(), optimizer.step()
        if watch is not None:
            watch.step(loss=value, samples=batch)
    return model


def watched(
    folder: Path, model: nn.Module, make: Any, loss: str, batches: Sequence[Tensor], **options: Any
) -> tuple[Run, nn.Module]:
    """A run watched with `replay=`, and a copy of the model before it."""
    kind = loss if loss in ("cross-entropy", "bce") else "mse"
    outputs = [*model.modules()][-1].out_features
    x, y, x2, y2 = data(kind, outputs)
    before, optimizer = copy.deepcopy(model), make(model.parameters())
    options = {"test": (x2, y2), "quantities": ["gap"], "pictures": False} | options
    watch = fl.watch(
        model, (x, y), out=folder / "run", optimizer=optimizer, loss=loss, replay=(x, y), budget=None, **options
    )
    with watch:
        train(model, optimizer, loss, x, y, batches, watch=watch)
    return watch.run, before
