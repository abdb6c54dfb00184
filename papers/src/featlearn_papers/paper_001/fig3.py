"""Shan & Bordelon 2021b, Fig. 3: the kernel of each output turns to its own target."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, ORANGE, SKY, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import specialization
from featlearn_papers.paper_000.mnist import MNIST
from featlearn_papers.paper_000.specialization import contrast, own_peaks
from featlearn_papers.paper_001.convolution import CONVOLUTION, FAST_CONVOLUTION


def mnist_classes(runs: Runs, name: str = "classes") -> Any:
    """(S, T, C, C): class alignments of the whole kernel."""
    return runs[f"mse/{name}"][:, :, 0]


def claims(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """The caption and Sec. 4.3."""
    yield from _mnist(runs["mnist"])
    yield from _cifar(runs["cifar"], runs["fast"])


def _mnist(runs: Runs) -> Iterable[Claim]:
    raw, centered = mnist_classes(runs), mnist_classes(runs, "centered_classes")
    other = Choice(made="raw alignments", other="centered ones", values=contrast(centered[:, -1]))
    yield Claim(
        id="mnist",
        claim="MNIST: the diagonal of the KSM is higher than the rest (A): difference of the means",
        paper="> 0",
        values=contrast(raw[:, -1]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[other],
        why="One-hot targets have a mean of 1/10, so that raw alignments are mostly those with a "
        "constant; centered ones leave it out.",
    )
    yield Claim(
        id="mnist-trained",
        claim="MNIST: training makes it so (A): the same at the end less at the start",
        paper="> 0",
        values=contrast(raw[:, -1]) - contrast(raw[:, 0]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(
                made="raw alignments",
                other="centered ones",
                values=contrast(centered[:, -1]) - contrast(centered[:, 0]),
            ),
        ],
    )
    yield Claim(
        id="mnist-columns",
        claim="MNIST: diagonal elements are higher than off-diagonal ones (Sec. 4.3): share of "
        "targets whose own kernel is aligned best with them",
        paper=1.0,
        values=own_peaks(raw[:, -1]),
        band=(0.9, None),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="raw alignments", other="centered ones", values=own_peaks(centered[:, -1])),
        ],
    )


def _cifar(runs: Runs, fast: Runs) -> Iterable[Claim]:
    rate = "a loss divided by ten, as printed"
    other = "by the two outputs that there are: five times the rate"
    yield Claim(
        id="cifar",
        claim="CIFAR-10: the diagonal of the KSM is higher than the rest (B): difference of the means",
        paper="> 0",
        values=contrast(runs["classes"][:, -1]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[Choice(made=rate, other=other, values=contrast(fast["classes"][:, -1]))],
        why="Raw alignments: centered ones cannot tell two targets that add up to one.",
    )
    grown = [contrast(each["classes"][:, -1]) - contrast(each["classes"][:, 0]) for each in (runs, fast)]
    yield Claim(
        id="cifar-trained",
        claim="CIFAR-10: training makes it so (B): the same at the end less at the start",
        paper="> 0",
        values=grown[0],
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[Choice(made=rate, other=other, values=grown[1])],
    )
    yield Claim(
        id="cifar-columns",
        claim="CIFAR-10: diagonal elements are higher than off-diagonal ones (Sec. 4.3): share of "
        "targets whose own kernel is aligned best with them",
        paper=1.0,
        values=own_peaks(runs["classes"][:, -1]),
        band=(1.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[Choice(made=rate, other=other, values=own_peaks(fast["classes"][:, -1]))],
    )
    yield Claim(
        id="cifar-learns",
        claim="CIFAR-10: the network tells the classes apart: accuracy on the probe",
        paper=None,
        values=runs["accuracy"][:, -1],
        band=(0.6, None),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[Choice(made=rate, other=other, values=fast["accuracy"][:, -1])],
        why="The paper does not say how long it trains.",
    )
    yield Claim(
        id="cifar-centered",
        claim="Centered, the KSM of two complementary targets has a contrast of 0: largest",
        paper=None,
        values=abs(contrast(runs["centered_classes"])).max(1),
        band=(None, 1e-6),
        band_from="theory",
        check=True,
        why="y_1 = 1 - y_0: centered, both are the same up to a sign.",
    )


def plot(setups: Mapping[str, Any], runs: Mapping[str, Runs]) -> Any:
    """Both panels of the paper, and how the contrast comes about."""
    figure, axes = panels(1, 3, height=2.6, titles=("A  MNIST", "B  CIFAR-10", "along training"))
    cifar = runs["cifar"]["classes"][:, -1]
    for ax, classes in ((axes[0], mnist_classes(runs["mnist"])[:, -1]), (axes[1], cifar)):
        specialization.draw(ax, classes, span=specialization.span(classes))
    matrix = specialization.specialization(cifar).mean(0)
    axes[1].set(xticks=range(len(matrix)), yticks=range(len(matrix)))
    for (row, column), value in numpy.ndenumerate(matrix):  # of two outputs: cells are all dark, and have room
        axes[1].text(column, row, f"{value:.3f}", ha="center", va="center", color="white", fontweight="bold")
    mnist, fast = runs["mnist"], runs["fast"]["classes"]
    finite = numpy.array([numpy.isfinite(one).all() for one in fast])
    shown = "B, 5 × rate" + ("" if finite.all() else f", {finite.sum()} of {len(finite)} seeds")
    for steps, classes, label, color, style in (
        (mnist["mse/steps"][0], mnist_classes(mnist), "A", BLUE, "-"),
        (mnist["mse/steps"][0], mnist_classes(mnist, "centered_classes"), "A, centered", SKY, "-"),
        (runs["cifar"]["steps"][0], runs["cifar"]["classes"], "B", ORANGE, "-"),
        (runs["fast"]["steps"][0], fast[finite], shown, ORANGE, ":"),
    ):
        curve(axes[2], steps + 0.5, contrast(classes), label, color=color, style=style, spread="standard error")
    axes[2].axhline(0.0, color=BLACK, linewidth=0.5, label="_none")
    axes[2].set(xscale="log", xlabel="step", ylabel="KSM contrast")
    axes[2].legend(loc="upper center", bbox_to_anchor=(0.4, -0.22), ncols=2)
    return figure


FIG_3 = Reproduction(
    id="001/fig3",
    about=(
        "The kernel specialization matrix (KSM): how the kernel K^cc of each output is aligned with each target, "
        "divided by the mean over outputs. A, a network with two hidden layers of 500 ReLUs on ten digits, the "
        "experiment of Shan & Bordelon 2021a, Fig. 1. B, two convolutions of 33 channels and 7 x 7 filters on two "
        "classes of CIFAR-10. The paper has 9000 images of 32 x 32, batches of 100, a learning rate of 20 and kernels "
        "of 300 images; laptop scale has 1000 images, averaged to 16 x 16. It leaves open how the last layer is read "
        "out (here the mean over positions and a linear layer), how long it trains (here 20 epochs), how pixels are "
        "scaled (here mean 0 and variance 1 for each channel) and which weights it starts from (here as in A). It says "
        "that the loss is averaged over ten classes, and that there are two: here the sum over both outputs is divided "
        "by ten; the mean of two is run beside it, and overflows in two seeds of five at paper scale."
    ),
    experiment={"mnist": MNIST, "cifar": CONVOLUTION, "fast": FAST_CONVOLUTION},
    plot=plot,
    claims=claims,
)
