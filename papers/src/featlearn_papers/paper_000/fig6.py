"""Shan & Bordelon 2021a, Fig. 6: deeper networks align their kernels more, earlier, and output by output."""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, BLUE, COLORS, GRAY, ORANGE, SKY, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_000 import specialization
from featlearn_papers.paper_000.depth import DEPTH, MEASURES, Setup, alignments, effective_rate

OWN, *OTHERS = MEASURES
WORDS = {
    "own": "mean over outputs of the alignment of K^cc with its own target",
    "centered own": "the same, kernels and targets centered",
    "traced": "alignment of the mean kernel with Y Y^T",
    "centered traced": "alignment of the mean kernel with Y Y^T, both centered",
}


def curves(runs: Runs, measure: str = OWN) -> Any:
    """(S, depths, T): alignment, mean over outputs."""
    found = alignments(runs, measure)
    return found if found.ndim == 3 else found.mean(-1)


def rates(runs: Runs, measure: str = OWN) -> Any:
    """(S, depths): effective feature rate, mean over outputs."""
    found = alignments(runs, measure)
    rate = effective_rate(found[:, :, 0], found[:, :, -1])
    return rate if rate.ndim == 2 else rate.mean(-1)


def smallest_step(values: Any) -> Any:
    """(S,): from one depth to the next, of values (S, depths); above zero where they grow with every layer."""
    return numpy.diff(values, axis=1).min(1)


def starts(runs: Runs, measure: str = OWN) -> Any:
    """(S, depths): the step from which the alignment has risen by half of what it rises in the shallowest network.

    nan where the alignment of the shallowest one falls, or another never rises so far.
    """
    steps, found = runs["steps"][0].astype(float), curves(runs, measure)
    level = (found[:, 0, -1] - found[:, 0, 0]) / 2
    return numpy.array(
        [
            [_last_crossing(steps, one - one[0] - low) if low > 0 else numpy.nan for one in seed]
            for seed, low in zip(found, level, strict=True)
        ]
    )


def _last_crossing(steps: Any, above: Any) -> float:
    """The step at which a curve leaves the values below zero for good."""
    below = int(numpy.flatnonzero(above < 0)[-1])
    if below == len(steps) - 1:
        return float("nan")
    share = above[below] / (above[below] - above[below + 1])
    return float(steps[below] + share * (steps[below + 1] - steps[below]))


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """The caption, and the rate of descent that it rests on."""
    yield from _alignment(runs)
    yield from _specialization(setup, runs)
    yield Claim(
        id="stable",
        claim="Descent is stable at every depth: largest rate times eigenvalue of the whole kernel, "
        "before and after training",
        paper=None,
        values=runs["stability"].max((1, 2)),
        band=(None, 2.0),
        band_from="theory",
        check=True,
        why="The learning rate is the same at every depth, and deeper networks have larger kernels.",
    )


def _measured_otherwise(values: Any) -> list[Choice]:
    """`values` takes runs by one of the other measures of alignment."""
    return [Choice(made=WORDS[OWN], other=WORDS[one], values=values(one)) for one in OTHERS]


def _alignment(runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="deeper-higher",
        claim="Deeper networks reach a higher alignment (A): smallest step from one depth to the next",
        paper="> 0",
        values=smallest_step(curves(runs)[:, :, -1]),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="The paper defines alignment for one output only.",
        choices=_measured_otherwise(lambda measure: smallest_step(curves(runs, measure)[:, :, -1])),
    )
    yield Claim(
        id="deepest-higher",
        claim="The deepest network is aligned better than the shallowest after training (A): difference",
        paper="> 0",
        values=curves(runs)[:, -1, -1] - curves(runs)[:, 0, -1],
        band=(0.0, None),
        band_from="print",
        choices=_measured_otherwise(lambda measure: curves(runs, measure)[:, [0, -1], -1] @ [-1, 1]),
    )
    yield Claim(
        id="deeper-earlier",
        claim="They begin to rise earlier (A): largest ratio of the steps at which they have "
        "risen by half of what the shallowest does, each depth over the one before",
        paper="< 1",
        values=(starts(runs)[:, 1:] / starts(runs)[:, :-1]).max(1),
        band=(None, 1.0),
        band_from="print",
        least=Scale.LAPTOP,
        why="Measured at the same rise for all depths: a share of the own rise would be another rise for each.",
        choices=_measured_otherwise(lambda one: (starts(runs, one)[:, 1:] / starts(runs, one)[:, :-1]).max(1)),
    )
    yield Claim(
        id="rate-grows",
        claim="Deeper networks have a larger feature rate gamma, Eq. 20 corrected (D): smallest step "
        "from one depth to the next",
        paper="> 0",
        values=smallest_step(rates(runs)),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="Kernel and task kernel have norm 1; a rate for each output, and their mean.",
        choices=_measured_otherwise(lambda measure: smallest_step(rates(runs, measure))),
    )


def _specialization(setup: Setup, runs: Runs) -> Iterable[Claim]:
    contrasts, centered = (specialization.contrast(runs[name][:, :, -1, 0]) for name in ("classes", "centered_classes"))
    three, five = places(setup)
    yield Claim(
        id="deeper-specialized",
        claim="The 5-layer network is more specialized than the 3-layer one (B, C): difference of diagonal less rest",
        paper="> 0",
        values=contrasts[:, five] - contrasts[:, three],
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[Choice(made="raw alignments", other="centered ones", values=centered[:, five] - centered[:, three])],
    )
    yield Claim(
        id="specialization-grows",
        claim="Specialization grows with every layer (B and C compared with Fig. 4A): smallest step",
        paper="> 0",
        values=smallest_step(contrasts),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[Choice(made="raw alignments", other="centered ones", values=smallest_step(centered))],
    )
    yield Claim(
        id="specialized",
        claim="Both are specialized (B, C): smaller of their diagonals less rest",
        paper="> 0",
        values=contrasts[:, [three, five]].min(1),
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[Choice(made="raw alignments", other="centered ones", values=centered[:, [three, five]].min(1))],
    )


def places(setup: Setup) -> tuple[int, int]:
    """Of the 3-layer and the 5-layer network: two and four hidden layers."""
    return setup.hidden_layers.index(2), setup.hidden_layers.index(4)


def plot(setup: Setup, runs: Runs) -> Any:
    """The four panels of the paper; then the other measures of alignment, and how stable descent is."""
    figure, axes = panels(2, 3, height=2.4, titles=("A", "B: 3-layer", "C: 5-layer", "D", "mean kernel", "stability"))
    steps = runs["steps"][0] + 0.5  # step 0 has a place on a logarithmic axis
    for i, count in enumerate(setup.hidden_layers):
        name: dict[str, Any] = {"label": f"{count + 1}-layer", "color": COLORS[i]}
        curve(axes[0], steps, curves(runs)[:, i], **name)
        curve(axes[4], steps, curves(runs, "centered traced")[:, i], **name)
        curve(
            axes[4],
            steps,
            curves(runs, "traced")[:, i].mean(0),
            f"_{count + 1}-layer, raw",
            color=COLORS[i],
            style=":",
        )
        curve(axes[5], steps, runs["sharpness"][:, i], **name)
        axes[5].plot(
            steps[[0, -1]],
            runs["stability"][:, i].mean(0),
            "x",
            color=COLORS[i],
            label=f"_{count + 1}-layer, all outputs",
        )
    matrices = [runs["classes"][:, place, -1, 0] for place in places(setup)]
    for ax, matrix in zip(axes[1:3], matrices, strict=True):
        specialization.draw(ax, matrix, span=specialization.span(*matrices))
    layers = numpy.array(setup.hidden_layers) + 1
    for measure, color in zip(MEASURES, (ORANGE, SKY, BLUE, GRAY), strict=True):
        curve(axes[3], layers, rates(runs, measure), measure.replace("centered", "centered"), color=color, style="o-")
    axes[5].axhline(2.0, color=BLACK, linestyle=":", linewidth=1, label="limit")
    for ax, label in (
        (axes[0], "mean of $A(K^{cc}, y^c)$"),
        (axes[4], r"$A(\bar K, Y Y^T)$"),
        (axes[5], r"$\eta\,\lambda_1$"),
    ):
        ax.set(xscale="log", xlabel="step", ylabel=label)
    axes[0].legend()
    _explain(axes[4], {"centered": "-", "raw": ":"})
    _explain(axes[5], {"mean kernel": "-", "all outputs": "x", "limit": ":"})
    axes[3].set(xlabel="layers", ylabel=r"feature rate $\hat\gamma$", xticks=layers, yscale="log")
    axes[3].legend()
    return figure


def _explain(ax: Any, styles: dict[str, str]) -> None:
    """A legend of line styles; colors are those of A."""
    ax.legend(handles=[ax.plot([], [], style, color=BLACK, label=name)[0] for name, style in styles.items()])


FIG_6 = Reproduction(
    id="000/fig6",
    about=(
        "ReLU networks of width 500 and of several depths on ten classes of MNIST, all else as in Fig. 1 (at laptop "
        "scale 1000 steps): kernel-task alignment along training (A), the specialization matrix of a 3-layer (B) and a "
        "5-layer network (C), and the feature rate gamma with which K0 + gamma y y^T would be aligned as the last "
        "kernel is (D; Eq. 20, whose print has the wrong kernel in the numerator). Open are the learning rate, which "
        "is 20 for all depths here, how layers are counted, and what alignment means for ten outputs. Layers are "
        "weight matrices here, so that 2- to 5-layer networks have one to four hidden layers. Alignment is the mean "
        "over outputs of that of K^cc with its own target, raw; the mean kernel with Y Y^T, and both centered, are "
        "shown beside it. Two panels are beyond the print: the mean kernel's alignment, and the rate of descent times "
        "the largest eigenvalue of the mean kernel, with crosses for the whole kernel between all outputs; at 2 "
        "descent becomes unstable."
    ),
    experiment=DEPTH,
    plot=plot,
    claims=claims,
)
