"""Atanasov et al. 2022, Fig. J.2: wide residual networks of several depths on whitened images."""

from collections.abc import Iterable
from typing import Any

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.residual import BLOCKS, Setup, adams, compare, faster, ordered, silent


def labels(setup: Setup) -> list[str]:
    """By the number of blocks."""
    return [f"b={part.b}" for part in setup.networks]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption."""
    yield Claim(
        id="faster",
        claim="Deeper networks train faster with Adam (a): half-loss time, ratio to one block less",
        paper="< 1",
        **faster(runs),
    )
    yield Claim(
        id="norm",
        claim="The norm of the final kernel increases with depth (b): ratio to one block less",
        paper="> 1",
        **ordered(runs["norm"][:, :, -1], rising=True),
    )
    yield from silent(runs, labels(setup))
    errors, correlations = runs["error"], runs["correlation"]
    for i, label in enumerate(labels(setup)):
        yield Claim(
            id=f"final-{label}",
            claim=f"Predictions are very close to those of the final kernel (d): relative error, {label}",
            paper="very close",
            values=errors[:, i, 0],
            band=(None, 0.15),
            band_from="choice",
            why="The band of Fig. 1b.",
            least=Scale.LAPTOP,
            choices=[
                Choice(
                    made="relative error", other="correlation, above 0.95", values=correlations[:, i, 0], band=(0.95, 1)
                ),
            ],
        )
        yield Claim(
            id=f"initial-{label}",
            claim=f"The initial kernel does not predict them accurately (d): relative error, {label}",
            paper="not",
            values=errors[:, i, 1],
            band=(0.2, None),
            band_from="choice",
            why="The band of Fig. 1b.",
            least=Scale.LAPTOP,
            choices=[
                Choice(
                    made="relative error",
                    other="correlation, below 0.95",
                    values=correlations[:, i, 1],
                    band=(None, 0.95),
                ),
            ],
        )
    yield adams(runs)


def plot(setup: Setup, runs: Runs) -> Any:
    """The four panels of the paper, and two of ours."""
    return compare(labels(setup), runs, "blocks in a group")


FIG_J2 = Reproduction(
    id="002/figJ2",
    about=(
        "Wide residual networks with b blocks in each of three groups (6 b + 1 convolutions), trained by Adam on "
        "whitened images of two classes of CIFAR-10. The paper does not say which b, nor k: paper scale has 1 to 4 and "
        "k = 4, with 100 images and a learning rate of 0.00001 for 1500 steps. At laptop scale 40 images averaged to "
        "8 x 8, 60 to test, k = 1/2, b = 1 to 3, and a learning rate of 0.0002 for 200 steps. Inputs, initial "
        "scales and regressions are those of 002/fig1. Beside the paper's panels stand centered alignments, and the "
        "alignment of the kernel of Adam's update (Eq. 91), which the paper does not compute; before the first step "
        "there is none. The learning rate of laptop scale decides whether alignment is silent: one block was tried "
        "with a tenth of it and ten times the steps, and when the norm is a tenth of its last the raw alignment is at "
        "0.94, 0.92 and 1.07 of its end in the three seeds, which holds; the centered one at 0.69, 0.63 and 0.70, "
        "which fails."
    ),
    experiment=BLOCKS,
    plot=plot,
    claims=claims,
)
