"""Deep ReLU networks on MNIST from weights of several scales.

The experiment behind Xu & Ziyin 2024, Fig. 2, and with more layers Fig. 6.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers
from featlearn_papers.frame.scale import Scale

NORMS = ("fro", "spectral")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ten classes, cross-entropy, full batch, Kaiming weights times sigma."""

    data: str = "mnist"
    samples: int = 500
    normalization: str = "channel"
    """of pixels: "channel" for mean 0 and deviation 1, "unit" for values from 0 to 1"""
    width: int = 128
    hidden_layers: int = 3
    sigmas: tuple[float, ...] = (0.3, 0.5, 1.0, 2.0, 3.0)
    lrs: tuple[float, ...] = (0.1, 0.1, 0.1, 0.003, 0.001)
    """one for each sigma, by the training accuracy alone"""
    steps: int = 1000
    moments: int = 50
    """at which the alignment is measured, besides the start"""

    @property
    def stride(self) -> int:
        """Steps between measurements."""
        return self.steps // self.moments

    @property
    def unscaled(self) -> int:
        """Where sigma is 1."""
        return self.sigmas.index(1.0)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """zeta (sigmas, norms, pairs, T), loss and training accuracy (sigmas, T), for the same draws, scaled."""
    data = context.dataset(
        setup.data,
        samples=setup.samples,
        generator=context.generator(),
        flatten=True,
        normalization=setup.normalization,
    )
    x, labels = data.x.to(context.device), data.labels.to(context.device)
    found = []
    for i, (sigma, lr) in enumerate(zip(setup.sigmas, setup.lrs, strict=True)):
        model = MLP(
            x.shape[1],
            10,
            width=setup.width,
            hidden_layers=setup.hidden_layers,
            weight_variance=2.0,
            generator=context.generator(1),
        ).to(context.device)
        fl.steer.scale_init(model, sigma)
        found.append(trained(setup, model, x, labels, lr))
        context.progress(i + 1, len(setup.sigmas), sigma=sigma, loss=found[-1]["loss"][-1])
    every = {name: numpy.stack([numpy.asarray(one[name]) for one in found]) for name in found[0]}
    return {"steps": setup.stride * numpy.arange(setup.moments + 1), **every}


def trained(setup: Setup, model: torch.nn.Module, x: Tensor, labels: Tensor, lr: float) -> dict[str, Any]:
    """The numbers of one network at the moments of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    alignments, losses, accuracies = [], [], []
    for step in range(setup.stride * setup.moments + 1):
        f = model(x)
        loss = torch.nn.functional.cross_entropy(f, labels)
        if step % setup.stride == 0:
            alignments.append(
                [
                    [pair.value for pair in fl.layer_alignment(model, x[:2], norm=norm).values()]  # type: ignore[arg-type]
                    for norm in NORMS
                ]
            )
            losses.append(float(loss.detach()))
            accuracies.append(float((f.argmax(1) == labels).double().mean()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"alignment": numpy.moveaxis(numpy.array(alignments), 0, -1), "loss": losses, "accuracy": accuracies}


SIZES = {
    Scale.SMOKE: Size(
        setup=Setup(
            data="digits", samples=200, width=32, sigmas=(0.5, 1.0, 3.0), lrs=(0.1, 0.1, 0.001), steps=100, moments=5
        ),
        seeds=1,
        seconds=1,
        mebibytes=20,
    ),
    Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=60, mebibytes=100),
    Scale.PAPER: Size(setup=Setup(samples=2000), seeds=5, seconds=136, mebibytes=200),
}


def raw(setup: Setup) -> Setup:
    """The same on pixels from 0 to 1, whose small networks need a larger learning rate to reach the accuracy."""
    lrs = tuple(3 * lr if sigma < 1 else lr for sigma, lr in zip(setup.sigmas, setup.lrs, strict=True))
    return replace(setup, normalization="unit", lrs=lrs)


def unscaled(setup: Setup) -> Setup:
    """The network with sigma = 1 alone, at the moments of six layers."""
    return replace(setup, sigmas=(1.0,), lrs=(setup.lrs[setup.unscaled],), moments=min(setup.moments, SIX.moments))


SIX = Setup(hidden_layers=5, lrs=(0.1, 0.1, 0.1, 1e-3, 3e-5), moments=25)
FOUR_LAYERS = Experiment(id="004/four-layers", sizes=SIZES, measure=measure)
FOUR_LAYERS_RAW = Experiment(
    id="004/four-layers-raw",
    sizes={scale: replace(size, setup=raw(size.setup)) for scale, size in SIZES.items()},
    measure=measure,
)

SIX_LAYERS = Experiment(
    id="004/six-layers",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                data="digits",
                samples=200,
                width=32,
                hidden_layers=5,
                sigmas=(0.5, 1.0, 3.0),
                lrs=(0.1, 0.1, 3e-5),
                steps=100,
                moments=5,
            ),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=SIX, seeds=3, seconds=85, mebibytes=100),
        Scale.PAPER: Size(setup=replace(SIX, samples=2000), seeds=5, seconds=300, mebibytes=200),
    },
    measure=measure,
)
FOUR_LAYERS_UNSCALED = Experiment(
    id="004/four-layers-unscaled",
    sizes={scale: replace(size, setup=unscaled(size.setup), seconds=size.seconds / 5) for scale, size in SIZES.items()},
    measure=measure,
)
