"""Ours, after Beaglehole et al. 2024: neural features under Adam, LARS and speed limits beside gradient descent.

The paper derives its centered correlation for gradient descent and leaves other optimizers to future work.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import featlearn as fl
from featlearn.models import MLP
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, GRAY, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.small_perceptrons import (
    CENTERED,
    DIGITS,
    MNIST,
    UNCENTERED,
    followed,
    network,
    stepping,
)
from featlearn_papers.paper_003.tracking import Perceptron, images

OPTIMIZERS = ("SGD", "Adam", "LARS", "SLO, equal speeds", "SLO, first layer fast")
"""axis 1 of all numbers, after the seeds"""
SGD, ADAM, LARS_AXIS, EQUAL, FAST = range(5)
EARLY = 0.1
"""share of the steps that counts as early"""


class LARS(torch.optim.Optimizer):
    """Layerwise adaptive rates (You et al. 2017) in their simplest form: W <- W - lr |W| g / |g|, tensor by tensor.

    Without momentum and weight decay. In every step a tensor moves by the share lr of its own norm: it is SLO with
    speeds |W|.
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter whose gradient is not zero."""
        for group in self.param_groups:
            for weight in group["params"]:
                size = weight.grad.norm()
                if size > 0:
                    weight -= group["lr"] * weight.norm() / size * weight.grad


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Rates were chosen so that all optimizers learn the training set, on a seed that is not judged (100)."""

    images: Perceptron
    """its rate is that of SGD; all rates fall to zero along half a cosine"""
    adam: float = 1e-3
    lars: float = 0.02
    slo: float = 0.1
    fast: float = 2.5
    """speed of the first layer"""
    slow: float = 0.4
    """of all others"""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """All optimizers from the same weights on the same batches; numbers as `FeatureTracker.through` gives them."""
    train, test = images(setup.images, context), images(setup.images, context, "test")
    found = []
    for position, name in enumerate(OPTIMIZERS):
        model = network(setup.images, train, context)
        advance = stepping(
            model, train, optimizer(position, model, setup), setup.images.batch, setup.images.steps, context
        )
        found.append(followed(model, train, test, advance, setup.images, name, context))
    return {"steps": found[0].pop("steps"), **{name: [one[name] for one in found] for name in found[0]}}


def optimizer(position: int, model: MLP, setup: Setup) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS`."""
    parameters = list(model.parameters())
    if position == SGD:
        return torch.optim.SGD(parameters, lr=setup.images.lr)
    if position == ADAM:
        return torch.optim.Adam(parameters, lr=setup.adam)
    if position == LARS_AXIS:
        return LARS(parameters, setup.lars)
    if position == EQUAL:
        return fl.steer.SLO(parameters, setup.slo)
    return fl.steer.SLO(fl.steer.speed_groups(model, {"hidden.0": setup.fast, "*": setup.slow}), setup.slo)


def early(runs: Runs, which: int, kind: str = "cosine", share: float = EARLY) -> Array:
    """(S, optimizers): mean over layers and the first tenth of the steps, or another share of it."""
    steps = runs["steps"][0]
    found: Array = runs[kind][:, :, steps <= max(share * steps[-1], 1)][..., which].mean((2, 3))
    return found


def end(runs: Runs, which: int, kind: str = "cosine") -> Array:
    """(S, optimizers): mean over layers at the end."""
    found: Array = runs[kind][:, :, -1, :, which].mean(2)
    return found


def learned(runs: Runs, share: float = 0.1) -> Array:
    """(S, optimizers): UC-NFC, mean over layers, when the training loss is first at a share of that at first."""
    reached = (runs["train"] <= share * runs["train"][:, :, :1]).argmax(2)
    values = runs["cosine"][..., UNCENTERED].mean(3)
    return numpy.take_along_axis(values, reached[..., None], 2)[..., 0]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """What we expected, set down before the run; nothing here is in the paper."""
    gaps = {
        kind: (runs[kind][..., CENTERED] - runs[kind][..., UNCENTERED]).mean((2, 3)) for kind in ("cosine", "pearson")
    }
    made, other = "the cosine", "Pearson's"
    yield Claim(
        id="higher",
        claim="The C-NFC is above the UC-NFC whatever the optimizer: difference of their means over "
        "layers and moments, smallest of the optimizers",
        paper=None,
        values=gaps["cosine"].min(1),
        band=(0.0, None),
        band_from="choice",
        choices=[
            Choice(made=made, other=other, values=gaps["pearson"].min(1)),
            *(
                Choice(made="the optimizer where it is smallest", other=name, values=gaps["cosine"][:, k])
                for k, name in enumerate(OPTIMIZERS)
            ),
        ],
    )
    centered, pearson = early(runs, CENTERED), early(runs, CENTERED, "pearson")
    yield Claim(
        id="adam-centered",
        claim="Early (first tenth of the steps) the C-NFC is lower with Adam than with SGD: difference",
        paper=None,
        values=centered[:, SGD] - centered[:, ADAM],
        band=(0.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="W - W0 = -lr J^T L X after one step of gradient descent, from which the C-NFC "
        "follows; Adam moves along signs of gradients.",
        choices=[
            Choice(made=made, other=other, values=pearson[:, SGD] - pearson[:, ADAM]),
            Choice(
                made="the first tenth",
                other="the first hundredth",
                values=early(runs, CENTERED, share=0.01)[:, SGD] - early(runs, CENTERED, share=0.01)[:, ADAM],
            ),
        ],
    )
    last = end(runs, UNCENTERED)
    yield Claim(
        id="adam-uncentered",
        claim="At the end the UC-NFC is lower with Adam than with SGD: difference",
        paper=None,
        values=last[:, SGD] - last[:, ADAM],
        band=(0.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="After as many steps the weights have moved further with Adam.",
        choices=[
            Choice(
                made=made,
                other=other,
                values=end(runs, UNCENTERED, "pearson")[:, SGD] - end(runs, UNCENTERED, "pearson")[:, ADAM],
            ),
            Choice(
                made="the end of training",
                other="the first moment with a tenth of the first training loss",
                values=learned(runs)[:, SGD] - learned(runs)[:, ADAM],
            ),
        ],
    )
    yield from speed_claims(setup, runs)


def speed_claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """On optimizers that set the speed of each layer."""
    last = end(runs, UNCENTERED)
    yield Claim(
        id="lars-slo",
        claim="LARS does what SLO with equal speeds does: distance of their UC-NFC at the end",
        paper=None,
        values=abs(last[:, LARS_AXIS] - last[:, EQUAL]),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
        why="Weights of hidden layers begin with similar norms.",
    )
    first = runs["cosine"][:, :, -1, 0, UNCENTERED]
    yield Claim(
        id="fast",
        claim="SLO with a fast first layer raises that layer's UC-NFC above LARS's: difference at the end",
        paper=None,
        values=first[:, FAST] - first[:, LARS_AXIS],
        band=(0.0, None),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    left = runs["train"][:, :, -1] / runs["train"][:, :, 0]
    yield Claim(
        id="learn",
        claim="All optimizers learn the training set: loss at the end over that of the first step, "
        "largest of the optimizers",
        paper=None,
        values=left.max(1),
        band=(None, 0.2),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    moved = runs["change"][:, LARS_AXIS, 0]
    yield Claim(
        id="lars-step",
        claim="The first step of LARS moves all layers by the same share of their norm: largest less "
        "smallest, over the rate",
        paper=None,
        values=numpy.ptp(moved, axis=1) / setup.lars,
        band=(None, 0.01),
        band_from="theory",
        check=True,
        why="By its definition.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Means over layers along training, the first layer alone, and losses."""
    figure, axes = panels(2, 3, height=2.1)
    steps = runs["steps"][0]
    paths = {
        "UC-NFC": runs["cosine"][..., UNCENTERED].mean(3),
        "C-NFC": runs["cosine"][..., CENTERED].mean(3),
        "UC-NFC, first layer": runs["cosine"][..., 0, UNCENTERED],
        "C - UC, Pearson's": (runs["pearson"][..., CENTERED] - runs["pearson"][..., UNCENTERED]).mean(3),
        "training loss": runs["train"],
        "|W - W0| / |W|": runs["change"].mean(3),
    }
    for ax, (title, values) in zip(axes, paths.items(), strict=True):
        for k, name in enumerate(OPTIMIZERS):
            curve(ax, steps, values[:, k], name, color=COLORS[k])
        ax.set(xscale="log", yscale="log" if "loss" in title else "linear", xlabel="step")
        ax.minorticks_off()
        ax.set_title(title, loc="left")
        if "NFC" in title:
            ax.set_ylim(0, 1.05)
        if "C - UC" in title:
            ax.axhline(0, color=GRAY, linewidth=0.5, label="_zero")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, columnspacing=1.0)
    return figure


EXPERIMENT = Experiment(
    id="003/optimizers",
    sizes={
        Scale.SMOKE: Size(setup=Setup(images=DIGITS), seeds=1, seconds=2, mebibytes=30),
        Scale.LAPTOP: Size(setup=Setup(images=MNIST), seeds=3, seconds=60, mebibytes=200),
    },
    measure=measure,
)

OPTIMIZERS_FIGURE = Reproduction(
    id="003/optimizers",
    about=(
        "Not in the paper, which leaves other optimizers to future work: perceptrons of three hidden layers of 128 on "
        "2000 images of MNIST, from the same weights and on the same batches of 128, 900 steps with rates that fall to "
        "zero along half a cosine. SGD at rate 5; Adam at 0.001; LARS in its simplest form, W <- W - 0.02 |W| g / |g| "
        "(no momentum, no weight decay), which is SLO with speeds |W|; SLO, W <- W - 0.1 C g / |g|, with C = 1 in all "
        "layers, and with 2.5 in the first and 0.4 in the others. Rates were chosen by the training loss of one seed "
        "that is not judged (those of LARS and SLO are twice the first try). "
        "Squared error to one-hot targets less 1/C. Bands were set before the run."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
