"""A convolutional network on two classes of CIFAR-10, one output for each, and how its kernels specialize.

The experiment behind Shan & Bordelon 2021b, Fig. 3B, App. E.3.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import CNN
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One-hot targets, batches without replacement, squared error summed over outputs and divided by `divisor`."""

    data: str = "cifar10"
    samples: int = 9000
    probe: int = 300
    """of them, on which kernels are measured"""
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    width: int = 33
    kernel_size: int = 7
    lr: float = 20.0
    divisor: int = 10
    """the classes over which the loss is averaged in print, though there are two outputs; 2 takes their mean"""
    batch: int = 100
    epochs: int = 20
    epochs_measured: tuple[int, ...] = (0, 1, 2, 4, 8, 14, 20)


def task(setup: Setup, context: Context) -> tuple[Tensor, Tensor]:
    """Images (P, channels, height, width) and one-hot targets (P, 2), drawn by the seed from all training files."""
    options: dict[str, Any] = {"normalization": "channel"} if setup.data == "cifar10" else {}
    data = context.dataset(setup.data, classes=(0, 1), samples=setup.samples, generator=context.generator(), **options)
    images = torch.nn.functional.avg_pool2d(data.x, setup.pooling)
    return images.to(context.device), data.one_hot().to(context.device)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """After the epochs (T,), on the probe: loss, accuracy, class alignments (T, C, C), raw and centered.

    `stability` (T,) is the rate of a batch times the largest eigenvalue that the mean of both kernels would have on
    one: descent with a frozen kernel needs less than 2. All are nan once the outputs have overflowed.
    """
    x, y = task(setup, context)
    model = CNN(
        x.shape[1],
        y.shape[1],
        width=setup.width,
        kernel_size=setup.kernel_size,
        parametrization="ntk",
        weight_variance=(1.0, 2.0, 1.0),
        generator=context.generator(1),
    ).to(context.device)
    optimizer, order = torch.optim.SGD(model.parameters(), lr=setup.lr), context.generator(2)
    seen, targets = x[: setup.probe], y[: setup.probe]
    session = fl.Session(model, seen)
    rows: dict[str, list[Tensor]] = {}

    def look(epoch: int) -> None:
        with torch.no_grad():
            f = model(seen)
        if not f.isfinite().all():
            for values in rows.values():
                values.append(torch.full_like(values[-1], torch.nan))
            return
        kernels: Any = session.ntk(outputs="each")
        largest = torch.linalg.eigvalsh(kernels.mean(0))[-1] / setup.probe
        for name, value in {
            "loss": (f - targets).square().sum(1).mean(),
            "accuracy": (f.argmax(1) == targets.argmax(1)).double().mean(),
            "classes": fl.metrics.class_alignment(kernels, targets),
            "centered_classes": fl.metrics.class_alignment(kernels, targets, centered=True),
            "stability": 2 * setup.lr / setup.divisor * largest,
        }.items():
            rows.setdefault(name, []).append(value.cpu())
        context.progress(epoch, setup.epochs, loss=float(rows["loss"][-1]))

    look(0)
    for epoch in range(1, setup.epochs + 1):
        for chosen in torch.randperm(setup.samples, generator=order).split(setup.batch):
            optimizer.zero_grad()
            ((model(x[chosen]) - y[chosen]).square().sum() / (len(chosen) * setup.divisor)).backward()
            optimizer.step()
        if epoch in setup.epochs_measured:
            look(epoch)
    steps = [epoch * -(-setup.samples // setup.batch) for epoch in setup.epochs_measured]
    return {"steps": steps, **{name: torch.stack(values) for name, values in rows.items()}}


def _experiment(id: str, divisor: int, seeds: int) -> Experiment[Setup]:
    smaller = Setup(samples=1000, pooling=2, divisor=divisor, epochs=20)
    return Experiment(
        id=id,
        sizes={
            Scale.SMOKE: Size(
                setup=Setup(
                    data="digits",
                    samples=80,
                    probe=40,
                    width=8,
                    kernel_size=3,
                    divisor=divisor,
                    batch=20,
                    epochs=4,
                    epochs_measured=(0, 2, 4),
                ),
                seeds=1,
                seconds=1,
                mebibytes=50,
            ),
            Scale.LAPTOP: Size(setup=smaller, seeds=seeds, seconds=45, mebibytes=800),
            Scale.PAPER: Size(setup=Setup(divisor=divisor), seeds=5, seconds=60, mebibytes=8000, device="cuda"),
        },
        measure=measure,
    )


CONVOLUTION = _experiment("001/convolution", 10, 5)
FAST_CONVOLUTION = _experiment("001/fast-convolution", 2, 3)
"""the loss averaged over the two outputs: five times the rate, beyond the limit of stability at the start"""
