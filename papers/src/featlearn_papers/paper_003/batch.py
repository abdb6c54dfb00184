"""Ours, after Beaglehole et al. 2024: neural features against the size of the batch.

The paper's theory is of gradient descent on all samples, its networks are trained in batches of 128; what lies between
is left to future work.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, curve, panels
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

EARLY = 0.1
"""share of the steps that counts as early"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The same rate and number of steps for all batches: only the noise of the gradient differs."""

    images: Perceptron
    """its epochs and batch give the number of steps"""
    batches: tuple[int, ...]
    """from small to large, the last all samples"""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """All batches from the same weights; numbers as `FeatureTracker.through` gives them, (batches, T ...)."""
    train, test = images(setup.images, context), images(setup.images, context, "test")
    found = []
    for batch in setup.batches:
        model = network(setup.images, train, context)
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.images.lr)
        advance = stepping(model, train, optimizer, batch, setup.images.steps, context)
        found.append(followed(model, train, test, advance, setup.images, f"batch {batch}", context))
    return {"steps": found[0].pop("steps"), **{name: [one[name] for one in found] for name in found[0]}}


def at_epochs(setup: Setup, runs: Runs, values: Array) -> Array:
    """(S, batches): (S, batches, T) where all have seen each sample as often as the smallest batch has at its end."""
    steps = runs["steps"][0]
    found = []
    for k, batch in enumerate(setup.batches):
        wanted = steps[-1] * setup.batches[0] / batch
        found.append(values[:, k, numpy.abs(numpy.log(steps / max(wanted, 1))).argmin()])
    return numpy.stack(found, 1)


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """What we expected, set down before the run; nothing here is in the paper."""
    steps = runs["steps"][0]
    first = steps <= EARLY * steps[-1]
    uc, c, pearson = (
        runs[kind][..., which].mean(3)
        for kind, which in (("cosine", UNCENTERED), ("cosine", CENTERED), ("pearson", UNCENTERED))
    )
    yield Claim(
        id="higher",
        claim="The C-NFC is above the UC-NFC for every batch size: smallest difference of their means "
        "over layers and moments",
        paper=None,
        values=(c - uc).mean(2).min(1),
        band=(0.0, None),
        band_from="choice",
        choices=[
            Choice(
                made="the cosine",
                other="Pearson's",
                values=(runs["pearson"][..., CENTERED].mean(3) - pearson).mean(2).min(1),
            )
        ],
    )
    yield Claim(
        id="near-one",
        claim="Early (first tenth of the steps) the C-NFC is close to 1 for every batch size: smallest",
        paper=None,
        values=c[:, :, first].mean(2).min(1),
        band=(0.8, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
        why="As in Fig. 2.",
    )
    yield Claim(
        id="steps",
        claim="After as many steps the UC-NFC hardly depends on the batch: range over batch sizes",
        paper=None,
        values=numpy.ptp(uc[:, :, -1], axis=1),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="as many steps", other="as many epochs", values=numpy.ptp(at_epochs(setup, runs, uc), axis=1)),
            Choice(made="the cosine", other="Pearson's", values=numpy.ptp(pearson[:, :, -1], axis=1)),
        ],
    )
    moved = at_epochs(setup, runs, runs["change"].mean(3))
    yield Claim(
        id="epochs",
        claim="After as many epochs weights have moved further the smaller the batch",
        paper=None,
        values=numpy.diff(moved, axis=1).max(1) < 0,
        band=(1, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="There are more steps.",
    )
    noisy = c[:, 0, first].mean(1) - c[:, -1, first].mean(1)
    yield Claim(
        id="noise",
        claim="Early, noise of gradients lowers the C-NFC: that of the smallest batch less that of all samples",
        paper=None,
        values=noisy,
        band=(None, 0.0),
        band_from="choice",
        least=Scale.LAPTOP,
        why="At this rate the loss on all samples overshoots between steps 10 and 20, and their C-NFC is lowest then.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Means over layers along training, by step and by epoch."""
    figure, axes = panels(2, 3, height=2.1)
    steps = runs["steps"][0]
    uc, c = (runs["cosine"][..., which].mean(3) for which in (UNCENTERED, CENTERED))
    paths = {
        "UC-NFC": (uc, "step"),
        "C-NFC": (c, "step"),
        "UC-NFC, Pearson's": (runs["pearson"][..., 0].mean(3), "step"),
        "UC-NFC by epoch": (uc, "epoch"),
        "training loss": (runs["train"], "step"),
        "|W - W0| / |W|": (runs["change"].mean(3), "step"),
    }
    for ax, (title, (values, unit)) in zip(axes, paths.items(), strict=True):
        for k, batch in enumerate(setup.batches):
            x = steps * batch / setup.images.samples if unit == "epoch" else steps
            label = "all samples" if batch == setup.images.samples else f"batches of {batch}"
            curve(ax, x, values[:, k], label, color=COLORS[k])
        ax.set(xscale="log", yscale="log" if "loss" in title else "linear", xlabel=unit)
        ax.minorticks_off()
        ax.set_title(title, loc="left")
        if "NFC" in title:
            ax.set_ylim(0, 1.05)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


EXPERIMENT = Experiment(
    id="003/batch",
    sizes={
        Scale.SMOKE: Size(setup=Setup(images=DIGITS, batches=(8, 256)), seeds=1, seconds=1, mebibytes=30),
        Scale.LAPTOP: Size(setup=Setup(images=MNIST, batches=(8, 32, 128, 2000)), seeds=3, seconds=80, mebibytes=200),
    },
    measure=measure,
)

BATCH = Reproduction(
    id="003/batch",
    about=(
        "Not in the paper, which leaves batch sizes to future work: perceptrons of three hidden layers of 128 on 2000 "
        "images of MNIST, from the same weights, by SGD with batches of 8, 32, 128 and all 2000 samples, at the same "
        "rate (5, falling to zero along half a cosine) for the same 900 steps; what the same number of epochs gives is "
        "read off the same runs. Squared error to one-hot targets less 1/C. Bands were set before the run."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
