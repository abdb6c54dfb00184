"""Atanasov et al. 2022, Fig. C.1.

On anisotropic inputs the kernel of a two-layer linear network turns twice, the second time while the loss falls.
"""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, GREEN, PINK, curve, paper_value
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_002.phases import (
    EXPERIMENTS,
    Setup,
    add_key,
    at,
    elongation,
    form_difference,
    plane_panels,
    silent_index,
    time_of_loss,
)


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption, panel by panel, and Eq. 48."""
    silent = runs["silent"]
    yield Claim(
        id="round",
        claim="At the start the level curves are round (a): longest over shortest axis",
        paper=1.0,
        values=elongation(runs["form"])[:, 0],
        band=(1.0, 1.2),
        band_from="choice",
        why="Round up to the draw: 1 for infinitely many hidden units.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="early-spike",
        claim="After phase I the kernel has a spike along Sigma beta (b): cosine of its first eigenvector",
        paper=1.0,
        values=at(runs, runs["along_tilted"], silent),
        band=(0.98, 1.0),
        band_from="theory",
        why="1 up to what is left of the initial weights.",
    )
    yield Claim(
        id="not-beta",
        claim="Not along beta (b): cosine of the first eigenvector with beta, over that of Sigma beta with beta",
        paper=1.0,
        values=at(runs, runs["along"], silent) / runs["slant"],
        band=(0.9, 1.1),
        band_from="theory",
        why=f"Sigma beta has a cosine of {runs['slant'].mean():.2f} with beta.",
    )
    yield Claim(
        id="late-spike",
        claim="At long times the spike is along the least-norm solution (c): cosine of the first eigenvector with beta",
        paper=1.0,
        values=runs["along"][:, -1],
        band=(0.99, 1.0),
        band_from="theory",
    )
    yield Claim(
        id="function",
        claim="So is the function (c): distance from the least-norm solution over its length",
        paper="0",
        values=numpy.linalg.norm(runs["position"][:, -1] - [1, 0], axis=1),
        band=(None, 0.01),
        band_from="theory",
    )
    turned = turned_late(runs, 0.9)
    yield Claim(
        id="realigns",
        claim="The kernel realigns at late times, which eliminates silent alignment (c): share of its "
        "way from Sigma beta to beta, as an angle, while the loss falls from 9/10 on",
        paper="all",
        values=turned,
        band=(0.8, 1.2),
        band_from="choice",
        choices=[Choice(made="from 9/10 of the loss", other="from 1/2", values=turned_late(runs, 0.5))],
    )
    ratio = at(runs, runs["spike"], silent)
    yield Claim(
        id="spike-strength",
        claim="The early spike is as strong as the isotropic part (Eq. 48, corrected): first "
        "eigenvalue over the mean of the others",
        paper=2.0,
        values=ratio,
        band=(1.9, 2.1),
        band_from="theory",
        why="Sigma beta beta^T Sigma / (beta^T Sigma^2 beta) + 1; what is left of the initial weights takes 0.05.",
    )
    printed = 1 + runs["size"]
    yield Claim(
        id="spike-strength-printed",
        claim="M = Sigma beta beta^T Sigma / sqrt(beta^T Sigma^2 beta) + 1 (Eq. 48): "
        "measured ratio of eigenvalues over the one that follows",
        paper=1.0,
        values=ratio / printed,
        band=(0.95, 1.05),
        band_from="print",
        known="W = a v^T with |v| = 1 has v = Sigma beta / |Sigma beta|, whose outer product is "
        "over beta^T Sigma^2 beta, without the root.",
    )
    shown = [0, silent_index(runs), -1]
    yield Claim(
        id="theory",
        claim="The ellipses are those of the closed forms (all): largest relative difference",
        paper="overlay",
        values=form_difference(runs["form"][:, shown], runs["theory"]).max(1),
        band=(None, 0.03),
        band_from="theory",
        why="Errors of order sigma^2, of the learning rate and of the time still to run.",
    )


def turned_late(runs: Runs, share: float) -> Any:
    """(S,): angle to beta of the first eigenvector when so much of the loss is left, over that of Sigma beta."""
    angle = numpy.arccos(numpy.clip(runs["along"], 0, 1))
    return at(runs, angle, time_of_loss(runs, share)) / numpy.arccos(runs["slant"])


def plot(setup: Setup, runs: Runs) -> Any:
    """Panels a to c in the plane of beta and Sigma beta; d, the way there, is ours."""
    titles = ("a  start", "b  transition", "c  end", "d  along training (not in the paper)")
    figure, squares, below = plane_panels(titles, runs)
    slant, along = float(runs["slant"][0]), numpy.array([-1.5, 1.5])
    for ax in squares:
        ax.plot(along, 0 * along, color=GREEN, linewidth=0.9, label="β")
        ax.plot(along * slant, along * (1 - slant**2) ** 0.5, color=PINK, linewidth=0.9, label="Σβ")
    add_key(figure, squares)
    times = runs["times"][0]
    curve(below, times, runs["along_tilted"], "first eigenvector: cosine to Σβ", color=PINK)
    curve(below, times, runs["along"], "first eigenvector: cosine to β", color=GREEN)
    curve(below, times, runs["loss"], "loss / initial loss", color=BLUE)
    paper_value(below, float(runs["slant"].mean()), "cosine of Σβ and β")
    below.set(xlabel="time × s", ylim=(0, None), xlim=(0, 20))
    below.legend(loc="center right")
    return figure


FIG_C1 = Reproduction(
    id="002/figC1",
    about=(
        "A sketch in the paper, computed here: level sets of w^T M^-1 w, drawn as lines in the plane of the solution "
        "beta and of Sigma beta. The network is that of Fig. 2 (300 hidden units, sigma = 0.001, 20 inputs of 30 "
        "dimensions), but the eigenvalues of Sigma go as 1/k, which puts Sigma beta 50 degrees off beta. The kernel "
        "first turns to Sigma beta while the function is at the origin, then to beta while the loss falls. Both "
        "directions lie in the span of the inputs, so that the plane has one interpolator and no line of them. The end "
        "of phase I is taken at 2 / (s |Sigma beta|), as in Fig. 2."
    ),
    experiment=EXPERIMENTS["phases-anisotropic"],
    plot=plot,
    claims=claims,
)
