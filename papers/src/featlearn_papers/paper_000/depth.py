"""ReLU networks of several depths on MNIST, from the same data and learning rate.

The experiment behind Fig. 6 of Shan & Bordelon 2021a and Fig. 5 of 2021b; the one with two hidden layers is that of
`mnist`, on squared error.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import mnist


@dataclass(frozen=True, kw_only=True)
class Setup:
    """`mnist.Setup` with one network for each depth."""

    hidden_layers: tuple[int, ...] = (1, 2, 3, 4)
    """of the networks that the paper calls 2-layer to 5-layer"""
    training: mnist.Setup


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Kernels along training, depths first; see `followed`."""
    given = mnist.task(setup.training, context)
    found: dict[str, list[Any]] = {}
    for count in setup.hidden_layers:
        model = MLP(
            given.x.shape[1],
            given.y.shape[1],
            width=setup.training.width,
            hidden_layers=count,
            parametrization="ntk",
            weight_variance=(1.0, 2.0, 1.0),
            generator=context.generator(2),
        ).to(context.device)
        numbers = followed(model, given, setup.training, context)
        for name, values in numbers.items():
            found.setdefault(name, []).append(values)
    return {"steps": setup.training.moments, **{name: torch.stack(values) for name, values in found.items()}}


def followed(
    model: torch.nn.Module, given: mnist.ClassificationTask, setup: mnist.Setup, context: Context
) -> dict[str, Tensor]:
    """Gradient descent with kernels at the moments (T,).

    Loss, accuracy on held-out samples, alignments of the mean kernel with Y Y^T and its norm; class alignments
    (T, PARTS, C, C) as in `mnist`; rate times the largest eigenvalue of the mean kernel, `sharpness` (T,), and of the
    whole kernel between all outputs before and after, `stability` (2,): descent needs less than 2.
    """
    rows: dict[str, list[Tensor]] = {}
    session = fl.Session(model, given.x, dtype=torch.float64)

    def look() -> None:
        with torch.no_grad():
            f, held_out = model(given.x), model(given.test[0])
        parts: Any = session.ntk(outputs="each", by="layer")
        whole, readout = torch.stack(list(parts.values())).sum(0), parts["readout"]
        kernels, mean = torch.stack([whole, readout, whole - readout]), whole.mean(0)
        for name, value in {
            "loss": (f - given.y).square().mean(),
            "accuracy": (held_out.argmax(1) == given.test[1].argmax(1)).double().mean(),
            "alignment": fl.metrics.alignment(mean, given.y),
            "centered_alignment": fl.metrics.centered_alignment(mean, given.y),
            "norm": mean.norm(),
            "sharpness": given.rate * torch.linalg.eigvalsh(mean)[-1],
            "classes": fl.metrics.class_alignment(kernels, given.y),
            "centered_classes": fl.metrics.class_alignment(kernels, given.y, centered=True),
        }.items():
            rows.setdefault(name, []).append(value.cpu())

    def stability() -> Tensor:
        # in double: the rounding of deep networks after training is too large for the operator's checks
        return given.rate * fl.NTKOperator(deepcopy(model).double(), given.x.double()).top(1).values[0].cpu()

    moments, optimizer = set(setup.moments), torch.optim.SGD(model.parameters(), lr=setup.lr)
    look()
    before = stability()
    for step in range(1, setup.steps + 1):
        optimizer.zero_grad()
        mse_loss(model(given.x), given.y).backward()
        optimizer.step()
        if step in moments:
            look()
            context.progress(step, setup.steps, loss=float(rows["loss"][-1]))
    return {
        **{name: torch.stack(values) for name, values in rows.items()},
        "stability": torch.stack([before, stability()]),
    }


MEASURES = ("own", "centered own", "traced", "centered traced")
"""Alignment for several outputs, which the papers leave open: the mean over outputs of that of K^cc with its own target
y^c, or that of the mean kernel with Y Y^T; raw, or with kernel and targets centered."""


def alignments(runs: Runs, measure: str) -> Any:
    """(S, depths, T), by one of `MEASURES`; of every output, (S, depths, T, C), for its own target."""
    prefix = "centered_" if measure.startswith("centered") else ""
    if measure.endswith("traced"):
        return runs[f"{prefix}alignment"]
    return numpy.diagonal(runs[f"{prefix}classes"][:, :, :, 0], axis1=-2, axis2=-1)


def effective_rate(before: Any, after: Any) -> Any:
    """gamma of Shan & Bordelon 2021a, Eq. 20 (corrected), from two alignments, for K0 and y y^T of norm 1.

    `fl.metrics.feature_rate(normalized=True)` is the same from kernels.
    """
    return after * numpy.sqrt((1 - before**2) / (1 - after**2)) - before


DEPTH = Experiment(
    id="000/depth",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                training=mnist.Setup(
                    data="digits", samples=60, test_samples=40, width=50, lr=8.0, steps=100, growth=1.6
                )
            ),
            seeds=1,
            seconds=3,
            mebibytes=50,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(training=mnist.Setup(samples=200, test_samples=150, steps=1000, growth=1.5)),
            seeds=3,
            seconds=150,
            mebibytes=400,
        ),
        Scale.PAPER: Size(
            setup=Setup(training=mnist.Setup(growth=1.5)), seeds=5, seconds=150, mebibytes=8000, device="cuda"
        ),
    },
    measure=measure,
)
