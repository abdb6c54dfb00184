"""Atanasov et al. 2022, Fig. J.3: wide residual networks of several widths on whitened images."""

from collections.abc import Iterable
from typing import Any

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.residual import WIDTHS, Setup, adams, compare, faster, ordered, silent, times


def labels(setup: Setup) -> list[str]:
    """By the widening factor."""
    return [f"k={part.k:g}" for part in setup.networks]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption."""
    norms = runs["norm"]
    yield Claim(
        id="faster",
        claim="Wider networks train more quickly (a): half-loss time, ratio to the next narrower one",
        paper="< 1",
        **faster(runs),
    )
    yield Claim(
        id="norm-rate",
        claim="The kernel's norm increases more rapidly in wider networks (b): time to half of its "
        "last, ratio to the next narrower one",
        paper="< 1",
        **ordered(times(runs, "norm", 0.5), rising=False),
    )
    change = ordered(norms[:, :, -1] - norms[:, :, 0], rising=False)
    relative = ordered(norms[:, :, -1] / norms[:, :, 0], rising=False)["values"]
    change["choices"].append(Choice(made="last norm less the first", other="last over first", values=relative))
    yield Claim(
        id="norm-change",
        claim="It changes by a smaller amount (b): change, ratio to the next narrower network",
        paper="< 1",
        **change,
    )
    yield from silent(runs, labels(setup))
    errors, correlations = runs["error"], runs["correlation"]
    for i, label in enumerate(labels(setup)):
        yield Claim(
            id=f"final-{label}",
            claim="The final kernel is a much better predictor than the initial one (d): ratio of "
            f"relative errors, {label}",
            paper="< 1",
            values=errors[:, i, 0] / errors[:, i, 1],
            band=(None, 0.5),
            band_from="choice",
            why="The band of Fig. 1c.",
            least=Scale.LAPTOP,
            choices=[
                Choice(
                    made="relative errors",
                    other="correlations, difference above 0",
                    values=correlations[:, i, 0] - correlations[:, i, 1],
                    band=(0, None),
                ),
            ],
        )
    yield adams(runs)


def plot(setup: Setup, runs: Runs) -> Any:
    """The four panels of the paper, and two of ours."""
    return compare(labels(setup), runs, "widening factor")


FIG_J3 = Reproduction(
    id="002/figJ3",
    about=(
        "Wide residual networks with two blocks in each of three groups and 16 k, 32 k and 64 k channels, trained by "
        "Adam on whitened images of two classes of CIFAR-10. Paper scale has k = 1 to 4, as the axis of panel d, 100 "
        "images and a learning rate of 0.00001 for 7000 steps, the axis of panel a. At laptop scale 40 images averaged "
        "to 8 x 8, 60 to test, k = 1/4, 1/2 and 1, and a learning rate of 0.0002 for 250 steps. Inputs, initial "
        "scales and regressions are those of 002/fig1. Beside the paper's panels stand centered alignments, and the "
        "alignment of the kernel of Adam's update (Eq. 91), which the paper does not compute; before the first step "
        "there is none. The learning rate of laptop scale decides whether alignment is silent: 002/figJ2 says what a "
        "tenth of it gives with one block."
    ),
    experiment=WIDTHS,
    plot=plot,
    claims=claims,
)
