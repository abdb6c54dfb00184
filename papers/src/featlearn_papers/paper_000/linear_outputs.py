"""Deep linear networks with ten outputs, each trained on a linear target of its own.

The experiment behind Fig. 4B of Shan & Bordelon 2021a and Fig. 4D of 2021b.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Inputs on the unit sphere, Gaussian teachers, loss averaged over samples and outputs, full batch.

    Four weight layers; weights are N(0, gain^2) in the NTK parametrization.
    """

    inputs: int = 25
    width: int = 100
    samples: int = 60
    outputs: int = 10
    hidden_layers: int = 3
    gains: tuple[float, ...] = (1.0, 0.3)
    lr: float = 50.0
    steps: int = 800
    moments: int = 20
    """at which kernels are measured, after the start"""


def task(setup: Setup, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """X (P, D) of unit rows and Y (P, C), Y = X S with S of N(0, 1)."""
    drawn = torch.randn(setup.samples, setup.inputs, generator=generator, dtype=torch.float64)
    X = drawn / drawn.norm(dim=1, keepdim=True)
    return X, X @ torch.randn(setup.inputs, setup.outputs, generator=generator, dtype=torch.float64)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Gains first: loss, alignment of the mean kernel with Y Y^T, class alignments (G, T, C, C).

    `symmetry` (G, layers - 1) is what App. A.3 assumes to vanish: the spread over outputs of alpha(c, c), the weight of
    each layer's Gram matrix in K^cc, over its mean, after training.
    """
    X, Y = (one.to(context.device) for one in task(setup, context.generator()))
    found: dict[str, list[Any]] = {"loss": [], "alignment": [], "classes": [], "symmetry": []}
    for i, gain in enumerate(setup.gains):
        model = (
            MLP(
                setup.inputs,
                setup.outputs,
                width=setup.width,
                hidden_layers=setup.hidden_layers,
                activation="linear",
                parametrization="ntk",
                weight_variance=1.0,
                generator=context.generator(1),
            )
            .double()
            .to(context.device)
        )
        fl.steer.scale_init(model, gain)
        for name, values in trained(model, X, Y, setup).items():
            found[name].append(values)
        terms = fl.theory.deep_linear.subkernel_terms([weight.detach() for weight in model.parameters()], X)
        weights = torch.stack([term.coefficients.diagonal() for term in terms[:-1]])
        found["symmetry"].append((weights.std(1) / weights.mean(1)).tolist())
        context.progress(i + 1, len(setup.gains), gain=gain, loss=found["loss"][-1][-1])
    steps = setup.steps // setup.moments * numpy.arange(setup.moments + 1)
    return {"steps": steps, **{name: numpy.array(values) for name, values in found.items()}}


def trained(model: torch.nn.Module, X: Tensor, Y: Tensor, setup: Setup) -> dict[str, list[Any]]:
    """Of gradient descent, at the moments."""
    optimizer, session = torch.optim.SGD(model.parameters(), lr=setup.lr), fl.Session(model, X)
    found: dict[str, list[Any]] = {"loss": [], "alignment": [], "classes": []}
    stride = setup.steps // setup.moments
    for step in range(stride * setup.moments + 1):
        loss = (model(X) - Y).square().mean()
        if step % stride == 0:
            kernels: Any = session.ntk(outputs="each")
            found["loss"].append(float(loss.detach()))
            found["alignment"].append(float(fl.metrics.alignment(kernels.mean(0), Y)))
            found["classes"].append(fl.metrics.class_alignment(kernels, Y).tolist())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


LINEAR_OUTPUTS = Experiment(
    id="000/linear-outputs",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(inputs=12, width=40, samples=30, lr=15.0, steps=240, moments=6),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=5, seconds=10, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(), seeds=5, seconds=10, mebibytes=100),
    },
    measure=measure,
)

WIDE_LINEAR_OUTPUTS = Experiment(
    id="000/wide-linear-outputs",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(inputs=30, width=60, samples=20, lr=100.0, steps=120, moments=6),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(inputs=500, width=500, samples=100, gains=(1.0, 0.5), lr=500.0, steps=200, moments=8),
            seeds=5,
            seconds=60,
            mebibytes=400,
        ),
        Scale.PAPER: Size(
            setup=Setup(inputs=500, width=500, samples=1000, gains=(1.0, 0.5), lr=1000.0, steps=600, moments=10),
            seeds=5,
            seconds=60,
            mebibytes=4000,
            device="cuda",
        ),
    },
    measure=measure,
)
"""the width that the caption of Fig. 4B gives, taken for the inputs too"""
