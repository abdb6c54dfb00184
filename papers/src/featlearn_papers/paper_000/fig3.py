"""Shan & Bordelon 2021a, Fig. 3: the kernel of a linear network aligns with its task, more from smaller weights."""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, GREEN, ORANGE, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.paper_000.linear import LARGE, LINEAR, MEDIUM, SMALL, Setup

PLAIN = (SMALL, MEDIUM, LARGE)
"""starts without weight decay, smallest first"""


def risen(runs: Runs, name: str, start: int = SMALL) -> Any:
    """(S,): from the first to the last moment."""
    return runs[name][:, start, -1] - runs[name][:, start, 0]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption and Sec. 5, for the smallest weights; what larger ones give stands beside it."""
    ends = runs["alignment"][:, PLAIN, -1]
    made, others = (
        f"initial weights of deviation {setup.starts[SMALL].deviation:g}",
        {place: f"of {setup.starts[place].deviation:g}" for place in (MEDIUM, LARGE)},
    )

    def otherwise(values: Any) -> list[Choice]:
        return [Choice(made=made, other=words, values=values(place)) for place, words in others.items()]

    yield Claim(
        id="converges",
        claim="Gradient descent reaches the global minimum (Sec. 5): largest loss at the end over its "
        "start, of three initial scales",
        paper=0.0,
        values=(runs["loss"][:, PLAIN, -1] / runs["loss"][:, PLAIN, 0]).max(1),
        band=(None, 1e-6),
        band_from="choice",
    )
    yield Claim(
        id="teacher",
        claim="Network weights align with the teacher (A): cosine of W^T V and s at the end",
        paper="rises to 1",
        values=runs["teacher"][:, SMALL, -1],
        band=(0.99, None),
        band_from="choice",
        choices=otherwise(lambda place: runs["teacher"][:, place, -1]),
    )
    yield Claim(
        id="aligns",
        claim="The kernel becomes more aligned with y y^T (B): rise",
        paper="> 0",
        values=risen(runs, "alignment"),
        band=(0.0, None),
        band_from="print",
        choices=otherwise(lambda place: risen(runs, "alignment", place)),
    )
    yield Claim(
        id="limit",
        claim="... up to that of |s| / N X (s s^T / |s|^2 + 1) X^T, the limit of small weights (B): difference",
        paper="not drawn",
        values=ends[:, 0] - runs["best"],
        band=(-0.01, 0.01),
        band_from="theory",
        why="Corrections are of the order of the weights' variance, 0.0025.",
        choices=otherwise(lambda place: runs["alignment"][:, place, -1] - runs["best"]),
    )
    yield Claim(
        id="top-eigenvector",
        claim="The top eigenvector becomes more aligned with y (C): rise of its cosine",
        paper="> 0",
        values=risen(runs, "top"),
        band=(0.0, None),
        band_from="print",
        choices=otherwise(lambda place: risen(runs, "top", place)),
    )
    yield Claim(
        id="smaller-stronger",
        claim="Smaller initial weights learn features more strongly (Sec. 5): smallest "
        "difference of the final alignment from one scale to the next larger one",
        paper="> 0",
        values=-numpy.diff(ends, axis=1).max(1),
        band=(0.0, None),
        band_from="print",
    )
    yield Claim(
        id="bulk",
        claim="Even at infinite time the alignment stays below 1 (Sec. 5): final alignment",
        paper="< 1",
        values=ends[:, 0],
        band=(None, 0.99),
        band_from="theory",
        check=True,
        why="The kernel always has the part |V|^2 X X^T / N^2, of rank N.",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """The three panels of the paper."""
    figure, axes = panels(1, 3, height=2.5, titles="ABC")
    steps = runs["steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for place, color in zip(PLAIN, (ORANGE, GREEN, BLUE), strict=True):
        label = f"σ = {setup.starts[place].deviation:g}"
        for ax, name in zip(axes, ("teacher", "alignment", "top"), strict=True):
            curve(ax, steps, runs[name][:, place], label, color=color)
    limit = axes[1].axhline(runs["best"].mean(), color=BLACK, linestyle="--", linewidth=1, label="limit of small σ")
    for ax, label in zip(
        axes, (r"cosine of $W^T V$ and $s$", "kernel-task alignment", r"cosine of $u_1$ and $y$"), strict=True
    ):
        ax.set(xscale="log", xlabel="step", ylabel=label, xlim=(0.4, 600))
    axes[0].legend(loc="lower right")
    axes[1].legend(handles=[limit], loc="lower right")
    return figure


FIG_3 = Reproduction(
    id="000/fig3",
    about=(
        "A two-layer linear network r = V^T W x / N learns a linear teacher by gradient descent: the cosine of its "
        "weights with the teacher (A), kernel-task alignment (B), and the cosine of the kernel's top eigenvector with "
        "the targets (C). The paper gives no sizes; here N = 40, P = 80 Gaussian inputs, a teacher of length 1, full "
        "batch, learning rate 2 for the loss P^-1 sum (r - y)^2. The initial scale, which is not given either, decides "
        "how large the effect is: entries of V and W have deviation σ = 0.05 for the verdicts, and 0.3 and 1 beside "
        "it. Dashed, the closed form for small weights."
    ),
    experiment=LINEAR,
    plot=plot,
    claims=claims,
)
