"""Xu & Ziyin 2024, Fig. 4: output scale and learning rate put every initialization into either phase."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.power_law import exponent
from featlearn_papers.paper_004.two_layers import drawn, loaded

SCHEMES = ("ntk", "mean_field", "kaiming-", "kaiming+", "xavier-", "xavier+")
"""as `fl.steer.parametrize` names them: kernel and learning phase by turns"""
PAIRS = {"NTK and mean field": (0, 1), "Kaiming": (2, 3), "Xavier": (4, 5)}
"""kernel and learning phase of what is one network at the base width"""
LABELS = ("NTK", "mean field", "Kaiming$^-$", "Kaiming$^+$", "Xavier$^-$", "Xavier$^+$")
GAINS = {
    "NTK and mean field": ("about 0.05", (0.02, 0.08)),
    "Kaiming": ("about 0.05", (0.02, 0.08)),
    "Xavier": ("about 0.10", (0.05, 0.15)),
}
VANISHES, STAYS = -0.25, -0.15
"""exponents of the distance over the width: at most, in the kernel phase; at least, in the learning phase"""
NARROW = (
    "Xavier's first weights have variance 2 / (inputs + width), which is 2 / inputs, as in the NTK scaling, while the "
    "width is below the number of inputs, and of Table 1's exponent -1 only above it."
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ten classes, cross-entropy, SGD, two layers; App. B.3, which has 10000 epochs."""

    data: str = "cifar10"
    samples: int = 50_000
    test_samples: int = 10_000
    pooling: int = 1
    """images are averaged over squares of so many pixels"""
    widths: tuple[int, ...] = (100, 300, 1000, 3000, 10_000)
    base_width: int = 100
    """at which the two of a pair coincide"""
    lr: float = 0.05
    batch: int = 128
    epochs: int = 25
    every: int = 5
    """epochs from one measurement of the accuracies to the next"""


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """By width and scheme: best accuracies and initial output (widths, 6), and distance by layer (widths, 6, 3)."""
    data, test = (
        loaded(setup.data, split, samples, setup.pooling, context)
        for split, samples in (("train", setup.samples), ("test", setup.test_samples))
    )
    found = []
    for width in setup.widths:
        networks = drawn(data[0].shape[1], width, SCHEMES, setup.lr, context, base_width=setup.base_width)
        found.append(networks.train(data, test, context, batch=setup.batch, epochs=setup.epochs, every=setup.every))
    return {name: numpy.stack([one[name].numpy() for one in found]) for name in found[0]}


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Sec. 4.1: test accuracies, and what happens to the distance from the initial weights."""
    yield from accuracies(setup, runs)
    yield from distances(setup, runs)
    gap = [runs["test"][:, 0, kernel] - runs["test"][:, 0, learning] for kernel, learning in PAIRS.values()]
    yield Claim(
        id="same",
        claim=f"The two of a pair are the same network at width {setup.base_width}: largest difference of "
        "their test accuracies",
        paper=0.0,
        values=abs(numpy.array(gap)).max(0),
        band=(None, 0.0),
        band_from="print",
        check=True,
        why="The constants of App. B.3 are chosen so.",
    )


def accuracies(setup: Setup, runs: Runs) -> Iterator[Claim]:
    """The learning phase tests better."""
    short = f"{setup.epochs} of 10,000 epochs" if setup.samples >= 50_000 and setup.epochs < 10_000 else None
    for name, (kernel, learning) in PAIRS.items():
        gain = runs["test"][:, :, learning] - runs["test"][:, :, kernel]
        printed, band = GAINS[name]
        yield Claim(
            id=f"gain-{slug(name)}",
            not_judged=short,
            claim=f"{name}: test accuracy is higher in the learning phase, at the largest width by",
            paper=printed,
            values=gain[:, -1],
            band=band,
            band_from="choice",
            least=Scale.LAPTOP,
            why=f"The paper's widths are not known, its networks have 10000 epochs, ours {setup.epochs}.",
            choices=[Choice(made=f"width {setup.widths[-1]}", other=f"width {setup.widths[-2]}", values=gain[:, -2])],
        )
    better = numpy.stack([runs["test"][:, -1, i] - runs["test"][:, 0, i] for _, i in PAIRS.values()])
    yield Claim(
        id="larger",
        claim="In the learning phase a larger model generally leads to better performance: gain in test "
        "accuracy from the smallest width to the largest, mean over the three",
        paper="positive",
        values=better.mean(0),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="mean over the three", other=name, values=row)
            for name, row in zip(("mean field", "Kaiming", "Xavier"), better, strict=True)
        ],
    )


def distances(setup: Setup, runs: Runs) -> Iterator[Claim]:
    """The relative distance vanishes with the width in the kernel phase alone."""
    slopes = exponents(setup, runs["distance"])
    for i, (scheme, label) in enumerate(zip(SCHEMES, LABELS, strict=True)):
        learning, phase = i % 2 == 1, ("kernel", "learning")[i % 2]
        said = "does not vanish" if learning else "vanishes"
        yield Claim(
            id=f"distance-{scheme}",
            claim=f"{plain(label)}, {phase} phase: the relative "
            f"distance from the initial weights {said} with the width: exponent",
            paper=said,
            values=slopes[:, i, 2],
            band=(STAYS, None) if learning else (None, VANISHES),
            band_from="choice",
            least=Scale.LAPTOP,
            why="Theory of the limit: 0 or more in the learning phase, -1/2 or less in the kernel phase."
            + (f" {NARROW}" if scheme == "xavier+" else ""),
            choices=[
                Choice(made="all weights together", other=layer, values=slopes[:, i, j])
                for j, layer in enumerate(("first layer", "readout"))
            ],
        )


def exponents(setup: Setup, values: Array) -> Array:
    """Slope of the logarithm of values (S, widths, ...) over that of the width, by least squares."""
    return exponent(setup.widths, values, axis=1)


def slug(name: str) -> str:
    """A name as part of an id."""
    return name.lower().replace(" and ", "-").replace(" ", "-")


def plain(label: str) -> str:
    """A label without its mathematics."""
    return label.replace("$^", "").replace("$", "")


def plot(setup: Setup, runs: Runs) -> Any:
    """As in the paper: kernel phase solid, learning phase dashed."""
    figure, (left, right) = panels(1, 2, height=2.8, titles=("left", "right"))
    for i, label in enumerate(LABELS):
        color, style = COLORS[i // 2], "o--" if i % 2 else "o-"
        curve(left, setup.widths, runs["test"][:, :, i], label, color=color, style=style)
        curve(right, setup.widths, runs["distance"][:, :, i, 2], label, color=color, style=style)
    left.set(xscale="log", xlabel="width", ylabel="best test accuracy")
    right.set(xscale="log", yscale="log", xlabel="width", ylabel=r"$|\theta - \theta(0)| / |\theta(0)|$")
    for ax in (left, right):
        ax.legend(ncols=2)
    return figure


EXPERIMENT = Experiment(
    id="004/fig4",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=200, test_samples=100, widths=(100, 300), batch=50, epochs=4, every=2),
            seeds=1,
            seconds=1,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(
            setup=Setup(samples=1000, test_samples=1000, pooling=2, widths=(100, 300, 1000, 3000), epochs=60),
            seeds=3,
            seconds=200,
            mebibytes=500,
        ),
        Scale.PAPER: Size(setup=Setup(), seeds=3, seconds=45, mebibytes=6000, device="cuda"),
    },
    measure=measure,
)

FIG_4 = Reproduction(
    id="004/fig4",
    about=(
        "Two-layer ReLU networks of several widths on CIFAR-10, cross-entropy, SGD with batches of 128, in the "
        "scalings of App. B.3, with which the two of a pair are the same network at width 100. For Kaiming in the "
        "kernel phase the print has a learning rate that grows as the width, which is unstable: by Table 1 it falls "
        "as 1 / width. The paper trains for 10000 epochs and does not say its widths; ours are 100 to 10000 with 25 "
        "epochs of all images at paper scale, and 100 to 3000 with 60 epochs of 1000 images of 16 x 16 at laptop "
        "scale, accuracies at every fifth. The distance is that of all weights together, relative to their norm at "
        "the start."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
