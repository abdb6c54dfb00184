"""Xu & Ziyin 2024, Fig. 2.

In deep ReLU networks on MNIST consecutive layers align, unless their initial weights are large.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import COLORS, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.initial_scales import FOUR_LAYERS, FOUR_LAYERS_RAW, NORMS, Setup


def ends(runs: Runs, norm: str) -> tuple[Array, Array]:
    """First and last zeta, (S, sigmas, pairs) each."""
    curves = runs["alignment"][:, :, NORMS.index(norm)]
    return curves[..., 0], curves[..., -1]


def numbers(setup: Setup, runs: Runs) -> dict[str, Array]:
    """(S,): what each claim is about."""
    first, last = ends(runs, "fro")
    spectral_first, spectral_last = ends(runs, "spectral")
    return {
        "accuracy": runs["accuracy"][:, :, -1].min(1),
        "start": first.mean((1, 2)) * math.sqrt(setup.width),
        "rises": numpy.all((last > first)[:, setup.unscaled], axis=1),
        "falls-with-scale": (numpy.diff(last.mean(2), axis=1) < 0).all(1),
        "small": (last / first)[:, 0].min(1),
        "large": abs(last / first - 1)[:, -1].max(1),
        "spectral": numpy.all((spectral_last > spectral_first)[:, 0], axis=1),
        "spectral-large": abs(spectral_last / spectral_first - 1)[:, -1].max(1),
    }


def claims(setups: Mapping[str, Setup], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """Caption and text, in the Frobenius norm; and what holds in the other."""
    setup, found = setups["chosen"], numbers(setups["chosen"], runs["chosen"])
    raw = numbers(setups["raw"], runs["raw"])
    largest = setup.sigmas[-1]

    def judged(id: str) -> dict[str, Any]:
        """The numbers of a claim, and the same on raw pixels."""
        other = Choice(made="pixels of mean 0 and deviation 1", other="pixels from 0 to 1", values=raw[id])
        return {"id": id, "values": found[id], "choices": [] if id == "start" else [other]}

    yield Claim(
        **judged("accuracy"),
        claim="Models converge well (App. B.1): lowest training accuracy over sigma",
        paper="> 0.95",
        band=(0.95, 1),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        **judged("start"),
        claim="The initial alignment (dashed) times sqrt(width)",
        paper=1.0,
        band=(0.97, 1.03),
        band_from="theory",
        check=True,
        why="1 / sqrt(width) for random weights in the Frobenius norm; the paper draws it, without a number.",
    )
    yield Claim(
        **judged("rises"),
        claim="The alignment between consecutive layers increases during training, sigma = 1 (a)",
        paper="yes",
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="All pairs of layers. Expected to be small: 0.089, 0.090, 0.101 from 0.088 on a made-up task.",
    )
    yield Claim(
        **judged("falls-with-scale"),
        claim="Final alignment falls with sigma, mean over pairs (b)",
        paper="yes",
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        **judged("small"),
        claim=f"Layers align at sigma = {setup.sigmas[0]:g} (b): least ratio of last to first",
        paper="yes",
        band=(1.3, None),
        band_from="trial",
        least=Scale.LAPTOP,
        why="1.7 to 2.6 on a made-up task.",
    )
    yield Claim(
        **judged("large"),
        claim=f"They stop being aligned at sigma = {largest:g} (b): largest relative change",
        paper="about 0",
        band=(None, 0.1),
        band_from="trial",
        least=Scale.LAPTOP,
        why="0.05 on a made-up task.",
    )
    yield Claim(
        **judged("spectral"),
        claim=f"In the spectral norm layers align as well at sigma = {setup.sigmas[0]:g}: all pairs",
        paper="yes",
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        why='"The L2 norm for matrices is used" can mean either norm.',
    )
    yield Claim(
        **judged("spectral-large"),
        claim="And not at the largest sigma: largest relative change",
        paper="about 0",
        band=(None, 0.1),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def plot(setups: Mapping[str, Setup], every: Mapping[str, Runs]) -> Any:
    """On normalized pixels."""
    return alignment_panels(setups["chosen"], every["chosen"])


def alignment_panels(setup: Setup, runs: Runs) -> Any:
    """Panels a and b in the Frobenius norm, below them the same in the spectral norm."""
    figure, axes = panels(2, 2, height=2.0, titles=("a", "b", "a, spectral norm", "b, spectral norm"))
    for row, norm in enumerate(NORMS):
        left, right = axes[2 * row : 2 * row + 2]
        first, last = ends(runs, norm)
        for pair in range(last.shape[2]):
            label = f"layers {pair + 1} and {pair + 2}"
            curve(left, runs["steps"][0], runs["alignment"][:, setup.unscaled, row, pair], label, color=COLORS[pair])
            curve(right, setup.sigmas, last[:, :, pair], label, color=COLORS[pair], style="o-")
            curve(
                right,
                setup.sigmas,
                first[:, :, pair].mean(0),
                f"_{label}, initial",
                color=COLORS[pair],
                style="--",
                linewidth=0.8,
            )
        left.set(xlabel="iteration", ylabel=r"$\zeta$ at $\sigma = 1$")
        right.set(xlabel=r"$\sigma$ (dashed: initial)", ylabel=r"$\zeta$ after training", xscale="log")
        right.set_xticks(setup.sigmas, [f"{sigma:g}" for sigma in setup.sigmas])
        right.minorticks_off()
        right.legend()
    return figure


FIG_2 = Reproduction(
    id="004/fig2",
    about=(
        "Alignment zeta = |U W| / (|U| |W|) of consecutive weight matrices of a ReLU network with four layers on "
        "MNIST, full-batch gradient descent: during training at the standard initial scale, and after it for weights "
        "that begin sigma times as large. The paper leaves open widths (ours: 128), the loss (cross-entropy), the "
        "sigmas, the learning rates (ours by the training accuracy alone, as in the paper) and which norm it means by "
        '"L2 for matrices": claims are judged in the Frobenius norm, the only one that vanishes with the width as '
        "its text says, and the spectral norm is shown as well. Pixels have mean 0 and deviation 1; "
        "all is run again on pixels from 0 to 1 (learning rates times 3 for sigma below 1), to say where that decides. "
        "At laptop scale 500 images, 2000 at the paper's."
    ),
    experiment={"chosen": FOUR_LAYERS, "raw": FOUR_LAYERS_RAW},
    plot=plot,
    claims=claims,
)
