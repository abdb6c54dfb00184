"""Atanasov et al. 2022, Fig. 2.

The kernel of a two-layer linear network turns while the function it computes is still at the origin.
"""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, GRAY, GREEN, ORANGE, curve, paper_value
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
    gained,
    plane_panels,
    silent_index,
    time_of_loss,
)


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The sentences of the caption, panel by panel, and its two times."""
    long = elongation(runs["form"])
    grown, moved = gained(long), numpy.linalg.norm(runs["position"], axis=2)
    yield Claim(
        id="round",
        claim="At the start the level sets of the kernel's norm are round (a): longest over shortest axis",
        paper=1.0,
        values=long[:, 0],
        band=(1.0, 1.2),
        band_from="choice",
        why="Round up to the draw: 1 for infinitely many hidden units.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="power",
        claim="In phase I the kernel gains power along the least-norm interpolator (b): cosine of its "
        "first eigenvector with beta",
        paper="enhanced",
        values=at(runs, runs["along"], runs["silent"]),
        band=(0.9, 1.0),
        band_from="choice",
    )
    yield Claim(
        id="turning-time",
        claim="The kernel turns at t_1 of about 1/s: share of the final elongation that it has then (b)",
        paper="most",
        values=at(runs, grown, runs["silent"]),
        band=(0.8, 1.1),
        band_from="theory",
        why="From a round kernel q - q0 = q0 (cosh 2st - 1) makes 0.62 of the way at 1/s and 0.94 at 2/s.",
        choices=[Choice(made="t = 2/s stands for phase I", other="t = 1/s", values=at(runs, grown, 1.0))],
    )
    yield Claim(
        id="silent",
        claim="The function has not moved far from the origin then (b): its length over that of the solution",
        paper="not far",
        values=at(runs, moved, runs["silent"]),
        band=(None, 0.05),
        band_from="choice",
    )
    learned = at(runs, moved, time_of_loss(runs, 0.25))
    half = time_of_loss(runs, 0.25)
    yield Claim(
        id="second-phase",
        claim="It moves at t_2 = log(s / sigma^2) / (2s): time of half the solution over t_2",
        paper="about 1",
        values=half / (-numpy.log(setup.sigma**2) / 2),
        band=(0.8, 1.2),
        band_from="theory",
        why=f"The time of the corrected formula, without the factor (1 + N/D)/4 in c0 = q0 / 2; the function has "
        f"{learned.mean():.2f} of its length then.",
    )
    yield Claim(
        id="second-phase-printed",
        claim="It moves for t > t_2 = log(s / sigma^2) / s: time of half the solution over t_2",
        paper="> 1",
        values=half / -numpy.log(setup.sigma**2),
        band=(1.0, None),
        band_from="print",
        known="Half is learned at (1/2s) log((s - c0) / c0) with c0 of order sigma^2: the factor 1/2 is lost in print.",
    )
    yield Claim(
        id="solution",
        claim="In phase II it moves to the least-norm interpolator (c): distance over length",
        paper="0",
        values=numpy.linalg.norm(runs["position"][:, -1] - [1, 0], axis=1),
        band=(None, 0.01),
        band_from="theory",
        why="sigma is 0.001.",
    )
    yield Claim(
        id="scale-only",
        claim="There the kernel changes in scale only (Sec. 3.1.2): change of its elongation from the "
        "end of phase I on",
        paper="0",
        values=1 - at(runs, grown, time_of_loss(runs, 0.95)),
        band=(-0.02, 0.02),
        band_from="choice",
        why="As a share of the whole change, from when a twentieth of the loss is gone.",
    )
    late = [0, silent_index(runs), -1]
    yield Claim(
        id="theory",
        claim="The ellipses are those of the closed form (all): largest relative difference",
        paper="overlay",
        values=form_difference(runs["form"][:, late], runs["theory"]).max(1),
        band=(None, 0.02),
        band_from="theory",
        why="Errors of order sigma^2, and of the learning rate.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Panels a to c in the plane of the solution and of a direction that no input has; d, the way there, is ours."""
    titles = ("a  start", "b  phase I", "c  phase II", "d  along training (not in the paper)")
    figure, squares, below = plane_panels(titles, runs)
    for ax in squares:
        ax.plot([1, 1], [-1.6, 1.6], color=GRAY, linewidth=0.9, label="interpolators")
    add_key(figure, squares)
    times = runs["times"][0]
    curve(below, times, elongation(runs["form"]), "longest over shortest axis", color=ORANGE)
    curve(below, times, runs["along"], "first eigenvector: cosine to β", color=GREEN)
    curve(below, times, numpy.linalg.norm(runs["position"], axis=2), "length of function", color=BLUE)
    paper_value(below, 2**0.5, r"$\sqrt{2}$, theory")
    for factor, label in ((0.5, "$t_2$, corrected"), (1.0, "$t_2$, printed")):
        below.axvline(
            -factor * numpy.log(setup.sigma**2), color=GRAY, linestyle="--" if factor < 1 else ":", label=label
        )
    below.set(xlabel="time × s", ylim=(0, None))
    below.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=3)
    return figure


FIG_2 = Reproduction(
    id="002/fig2",
    about=(
        "A sketch in the paper, computed here: level sets of the kernel's norm w^T M^-1 w of linear functions w . x, "
        "drawn as lines in the plane of the least-norm solution beta and of a direction v in which no input lies, so "
        "that all interpolators are one line. A two-layer linear network of 300 hidden units starts at sigma = 0.001 "
        "on 20 whitened inputs of 30 dimensions with a teacher of length s = 1. First the circles become ellipses with "
        "axes in the ratio sqrt(2), then the function moves. The paper names no sizes. The level sets are "
        "those of 1/3, 2/3, 1 and 4/3 of the norm of the solution."
    ),
    experiment=EXPERIMENTS["phases"],
    plot=plot,
    claims=claims,
)
