"""Shan & Bordelon 2021b, Fig. 5: deeper ReLU networks align their kernels more."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, COLORS, GRAY, ORANGE, SKY, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000.depth import DEPTH, MEASURES, Setup
from featlearn_papers.paper_000.fig6 import OTHERS, OWN, WORDS, curves, rates, smallest_step


def start_ratio(runs: Runs, measure: str = OWN) -> Any:
    """(S,): largest over smallest alignment at the start, over depths."""
    first = curves(runs, measure)[:, :, 0]
    return first.max(1) / first.min(1)


def end_step(runs: Runs, measure: str = OWN) -> Any:
    """(S,): smallest step from one depth to the next of the alignment after training."""
    return smallest_step(curves(runs, measure)[:, :, -1])


def end_difference(runs: Runs, measure: str = OWN) -> Any:
    """(S,): alignment of the deepest network after training less that of the shallowest."""
    last = curves(runs, measure)[:, :, -1]
    return last[:, -1] - last[:, 0]


def rate_step(runs: Runs, measure: str = OWN) -> Any:
    """(S,): smallest step from one depth to the next of the feature rate."""
    return smallest_step(rates(runs, measure))


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption and Sec. 5.1."""

    def given(value: Callable[[Runs, str], Any]) -> dict[str, Any]:
        choices = [Choice(made=WORDS[OWN], other=f"{WORDS[one]} ({one})", values=value(runs, one)) for one in OTHERS]
        return {"values": value(runs, OWN), "choices": choices, "least": Scale.LAPTOP}

    yield Claim(
        id="same-start",
        claim="Networks of all depths start with comparable alignments (A): largest over smallest",
        paper="comparable",
        band=(None, 1.25),
        band_from="choice",
        why="A quarter, for 'comparable'.",
        **given(start_ratio),
    )
    yield Claim(
        id="deeper-higher",
        claim="Deeper networks end with a higher alignment (A): smallest step from one depth to the next",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        **given(end_step),
        why="The paper defines alignment for one output only; at ten outputs there are several ways.",
    )
    yield Claim(
        id="deepest-higher",
        claim="The deepest ends with a higher alignment than the shallowest (A): difference",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        **given(end_difference),
    )
    yield Claim(
        id="rate-grows",
        claim="The estimated feature rate grows with depth (B): smallest step from one depth to the next",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        **given(rate_step),
        why="The gamma at which K0 + gamma y y^T is aligned as the last kernel is.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Both panels of the paper, and A by another measure."""
    figure, axes = panels(1, 3, height=2.4, titles=("A", "B", "A, centered"))
    draw = partial(curve, spread="standard error")
    steps = runs["steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for i, count in enumerate(setup.hidden_layers):
        for ax, measure in ((axes[0], OWN), (axes[2], f"centered {OWN}")):
            draw(ax, steps, curves(runs, measure)[:, i], f"{count + 1}-layer", color=COLORS[i])
    for ax in (axes[0], axes[2]):
        ax.set(xscale="log", xlabel="step", ylabel="mean of $A(K^{cc}, y^c)$")
    layers = numpy.array(setup.hidden_layers) + 1
    for measure, color in zip(MEASURES, (ORANGE, SKY, BLUE, GRAY), strict=True):
        draw(axes[1], layers, rates(runs, measure), measure.replace("centered", "centered"), color=color, style="o-")
    axes[1].set(xlabel="layers", ylabel=r"feature rate $\hat\gamma$", xticks=layers)
    for ax in axes:
        ax.legend()
    return figure


FIG_5 = Reproduction(
    id="001/fig5",
    about=(
        "ReLU networks of width 500 and two to five layers on ten classes of MNIST, the experiment of Shan & Bordelon "
        "2021a, Fig. 6: kernel-task alignment along training (A), and the feature rate gamma with which K0 + gamma "
        "y y^T would be aligned as the last kernel is (B; 2021a, Eq. 20, corrected). Layers are weight matrices here, "
        "so that two- to five-layer networks have one to four hidden layers; the learning rate is 20 at all depths. "
        "What alignment means for ten outputs is open: judged is the mean over outputs of that of K^cc with its own "
        "target, raw; that of the mean kernel with Y Y^T, and both centered, are the other choices."
    ),
    experiment=DEPTH,
    plot=plot,
    claims=claims,
)
