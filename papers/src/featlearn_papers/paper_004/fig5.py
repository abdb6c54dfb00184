"""Xu & Ziyin 2024, Fig. 5: at a fixed width, the exponent of the initial weights decides the phase."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy

from featlearn.theory import phases
from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import COLORS, curve, panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.power_law import exponent
from featlearn_papers.paper_004.two_layers import drawn, loaded

LAYERS = ("first layer", "readout")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Ten classes, cross-entropy, SGD, two layers of fixed width."""

    data: str = "cifar10"
    samples: int = 500
    test_samples: int = 500
    width: int = 200
    exponents: tuple[float, ...] = (-2.0, -1.0, 0.0, 1.0, 2.0)
    """c: of the variance of the first weights"""
    kappa: float = 10.0
    lr: float = 0.005
    batch: int = 128
    epochs: int = 300
    every: int = 5
    """epochs from one measurement of the accuracies to the next"""

    def positive(self) -> Array:
        """Which of the exponents are in the kernel phase, by Theorem 2."""
        return numpy.array(self.exponents) > 0


def scaling(c: float) -> phases.Exponents:
    """Sec. 4.2: c_w = c, c_u = max(0, c), c_gamma = min(0, -c/2). App. B.4 prints the sign of the last reversed."""
    return phases.Exponents(d=0, gamma=min(0.0, -c / 2), u=max(0.0, c), w=c, rate_u=0, rate_w=0)


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """By c: best training and test accuracy, first deviation of the output, and distance by layer (c, 3)."""
    data, test = (
        loaded(setup.data, split, samples, 1, context)
        for split, samples in (("train", setup.samples), ("test", setup.test_samples))
    )
    schemes = [scaling(c) for c in setup.exponents]
    networks = drawn(
        data[0].shape[1], setup.width, schemes, setup.lr, context, base_width=setup.width, kappa=setup.kappa
    )
    return {**networks.train(data, test, context, batch=setup.batch, epochs=setup.epochs, every=setup.every)}


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """(1) to (3) of Sec. 4.2, and the initial output."""
    kernel, largest = setup.positive(), setup.exponents[-1]
    first = int(kernel.argmax())  # behind 0, which is of the learning phase
    train, test, distance = runs["train"], runs["test"], runs["distance"][:, :, : len(LAYERS)]
    paper_width = setup.width >= 2000 and setup.epochs < 10_000
    short = f"{setup.epochs} of 10,000 epochs on {setup.samples} of 50,000 images" if paper_width else None
    found = " ".join(str(phases.classify(scaling(c)).value) for c in setup.exponents)
    yield Claim(
        id="phases",
        claim="The network is in the kernel phase if and only if c > 0 (Theorem 2)",
        paper="yes",
        values=found,
        band=" ".join("kernel" if yes else "learning" for yes in kernel),
        band_from="theory",
        check=True,
    )
    yield Claim(
        id="train-learning",
        not_judged=short,
        claim="(1) The training accuracy reaches 1 in the learning phase (a): lowest, c <= 0",
        paper=1.0,
        values=train[:, ~kernel].min(1),
        band=(0.995, 1),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="train-kernel",
        not_judged=short,
        claim="(1) But not in the kernel phase (a): at the largest c",
        paper="below 1",
        values=train[:, -1],
        band=(None, 0.99),
        band_from="print",
        least=Scale.LAPTOP,
        why="The paper trains on 50000 images. A fixed kernel can fit all of them where weights are more than images, "
        "as here: that it has not is a matter of the epochs.",
        choices=[Choice(made="the largest c", other="the least c > 0", values=train[:, first])],
    )
    yield Claim(
        id="test-gap",
        not_judged=short,
        claim="(2) Test accuracy is higher in the learning phase (a): mean of c < 0 less mean of c > 0",
        paper="about 0.05",
        values=test[:, numpy.array(setup.exponents) < 0].mean(1) - test[:, kernel].mean(1),
        band=(0.02, 0.08),
        band_from="choice",
        least=Scale.LAPTOP,
        why=f"Ours with {setup.samples} images and {setup.epochs} epochs, the paper's with 50000 and 10000.",
        choices=[Choice(made="all c of a phase", other="the c next to 0", values=test[:, first - 2] - test[:, first])],
    )
    yield Claim(
        id="moves",
        claim="(3) The weights evolve significantly in the learning phase (b): relative distance of the "
        f"first layer, c = {setup.exponents[0]:g}",
        paper="yes",
        values=distance[:, 0, 0],
        band=(0.5, None),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="the smallest c, whose weights begin small", other="c = 0", values=distance[:, first - 1, 0])
        ],
    )
    yield Claim(
        id="stays",
        claim=f"(3) But not in the kernel phase (b): largest of both layers, c = {largest:g}",
        paper="about 0",
        values=distance[:, -1].max(1),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
    )
    slopes = exponents_of(setup, distance)
    furthest = numpy.take_along_axis(slopes, abs(slopes + 0.5).argmax(1)[:, None], axis=1)[:, 0]
    yield Claim(
        id="law",
        claim="In the kernel phase the distance falls as kappa^(-c/2): exponent furthest from -1/2 of both layers",
        paper=None,
        values=furthest,
        band=(-0.6, -0.4),
        band_from="theory",
        least=Scale.LAPTOP,
        why="Changes of the weights are rate x gamma x weights of the other layer, of order kappa^0; the weights "
        "themselves are of order kappa^(c/2). Fitted from c = 0 on. It takes errors to be of order 1; the run showed "
        "that they are not: the initial output, which has to be unlearned, grows with c (see the last claim).",
    )
    yield Claim(
        id="output",
        claim="The initial output is of order 1: its exponent over c > 0",
        paper=0.0,
        values=exponents_of(setup, runs["output"]),
        band=(-0.1, 0.1),
        band_from="print",
        known="Its exponent is c_gamma + (c_u + c_w) / 2 = -c/2 + c = c/2 for c > 0, so 1/2 for each unit of c.",
    )


def exponents_of(setup: Setup, values: Array) -> Array:
    """Slope of log_kappa of values (S, c, ...) over c >= 0, by least squares."""
    c = numpy.array(setup.exponents)
    rows = c >= 0
    return exponent(setup.kappa ** c[rows], values[:, rows], axis=1)


def plot(setup: Setup, runs: Runs) -> Any:
    """a: accuracies over c; b: distance from the initial weights."""
    figure, (left, right) = panels(1, 2, height=2.4, titles=("a", "b"))
    for i, name in enumerate(("train", "test")):
        curve(left, setup.exponents, runs[name], name, color=COLORS[i], style="o-")
    for i, name in enumerate(LAYERS):
        curve(right, setup.exponents, runs["distance"][:, :, i], name, color=COLORS[i], style="o-")
    c = numpy.array([value for value in setup.exponents if value >= 0])
    start = float(runs["distance"][:, list(setup.exponents).index(0.0), 0].mean())
    curve(right, c, start * setup.kappa ** (-c / 2), r"$\kappa^{-c/2}$", color="black", style=":")
    for ax in (left, right):
        ax.axvline(0, color="0.7", linewidth=0.8, linestyle="--", label="_boundary of the phases")
        ax.set(xlabel="c (kernel phase: c > 0)", xticks=setup.exponents)
        ax.legend()
    left.set(ylabel="best accuracy", ylim=(0, 1.05))
    right.set(ylabel="|W - W(0)| / |W(0)|", yscale="log")
    return figure


EXPERIMENT = Experiment(
    id="004/fig5",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(data="digits", samples=200, test_samples=100, width=50, batch=64, epochs=10, every=5),
            seeds=1,
            seconds=2,
            mebibytes=20,
        ),
        Scale.LAPTOP: Size(setup=Setup(), seeds=3, seconds=85, mebibytes=100),
        Scale.PAPER: Size(
            setup=Setup(samples=10_000, test_samples=10_000, width=2000, epochs=1000, every=20),
            seeds=3,
            seconds=45,
            mebibytes=2000,
            device="cuda",
        ),
    },
    measure=measure,
)

FIG_5 = Reproduction(
    id="004/fig5",
    about=(
        "Two-layer ReLU networks of fixed width on CIFAR-10, cross-entropy, SGD, whose weights begin with variances "
        "kappa^c / inputs (first layer) and kappa^max(0, c) / width (readout), and whose output is multiplied by "
        "kappa^min(0, -c/2), kappa = 10. App. B.4 prints the sign of that exponent reversed, which is unstable for c "
        "> 0, and exchanges the layers: ours is that of Sec. 4.2. The paper does not say its c (ours: -2, -1, 0, 1, "
        "2), nor what the variances are at c = 0 (ours: 1 / fan-in). Learning rate 0.005 and batches of 128 as in "
        "the paper, which has 50000 images, width 2000 and 10000 epochs, in all 4 million steps. At paper scale we "
        "have its width, 10000 images and 1000 epochs, 79000 steps, with accuracies at every twentieth; at laptop "
        "scale 500 images, width 200 and 300 epochs, with accuracies at every fifth."
    ),
    experiment=EXPERIMENT,
    plot=plot,
    claims=claims,
)
