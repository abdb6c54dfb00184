"""Xu & Ziyin 2024, Fig. 6: the alignment of consecutive layers of Fig. 2, in ReLU networks with six layers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_004.fig2 import alignment_panels, ends, numbers
from featlearn_papers.paper_004.initial_scales import FOUR_LAYERS_UNSCALED, NORMS, SIX_LAYERS, Setup


def unsteadiness(setup: Setup, runs: Runs) -> Array:
    """(S,): the way that zeta goes back and forth at sigma = 1, in its initial values, mean over pairs of layers."""
    curves = runs["alignment"][:, setup.unscaled, NORMS.index("fro")]
    way, net = abs(numpy.diff(curves, axis=-1)).sum(-1), abs(curves[..., -1] - curves[..., 0])
    extra: Array = ((way - net) / curves[..., 0]).mean(1)
    return extra


def rising_losses(setup: Setup, runs: Runs) -> Array:
    """(S,): share of the moments at which the loss is above that of the moment before, at sigma = 1."""
    share: Array = (numpy.diff(runs["loss"][:, setup.unscaled], axis=-1) > 0).mean(-1)
    return share


def claims(setups: Mapping[str, Setup], runs: Mapping[str, Runs]) -> Iterable[Claim]:
    """Those of Fig. 2 that "extend to deeper networks" (App. B.1), and that these are less stable."""
    setup, found = setups["six"], numbers(setups["six"], runs["six"])
    first, last = ends(runs["six"], "fro")
    smallest, largest = setup.sigmas[0], setup.sigmas[-1]

    def judged(id: str) -> dict[str, Any]:
        return {"id": id, "values": found[id], "least": Scale.LAPTOP}

    yield Claim(
        **judged("accuracy"),
        claim="Models converge well: lowest training accuracy over sigma",
        paper="> 0.95",
        band=(0.95, 1),
        band_from="print",
    )
    yield Claim(
        **judged("start"),
        claim="The initial alignment (dashed) times sqrt(width)",
        paper=1.0,
        band=(0.97, 1.03),
        band_from="theory",
        check=True,
        why="1 / sqrt(width) for random weights in the Frobenius norm.",
    )
    yield Claim(
        **judged("rises"),
        claim="The alignment between consecutive layers increases during training, sigma = 1 (a)",
        paper="yes",
        band=(1, None),
        band_from="print",
        why="All pairs of layers.",
        choices=[
            Choice(made="all pairs", other="mean over pairs", values=(last.mean(2) > first.mean(2))[:, setup.unscaled])
        ],
    )
    yield Claim(
        **judged("falls-with-scale"),
        claim="Final alignment falls with sigma, mean over pairs (b)",
        paper="yes",
        band=(1, None),
        band_from="print",
        choices=[
            Choice(
                made="at every step of sigma",
                other="rises below 1 % are taken as equal",
                values=(numpy.diff(numpy.log(last.mean(2)), axis=1) < 0.01).all(1),
            )
        ],
    )
    yield Claim(
        **judged("small"),
        claim=f"Layers align at sigma = {smallest:g} (b): least ratio of last to first",
        paper="yes",
        band=(1.3, None),
        band_from="choice",
        why="The band of Fig. 2, where the least ratio was 1.8.",
    )
    yield Claim(
        **judged("large"),
        claim=f"They stop being aligned at sigma = {largest:g} (b): largest relative change",
        paper="about 0",
        band=(None, 0.1),
        band_from="choice",
        why="The band of Fig. 2.",
    )
    yield Claim(
        **judged("spectral"),
        claim=f"In the spectral norm layers align as well at sigma = {smallest:g}: all pairs",
        paper="yes",
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        **judged("spectral-large"),
        claim="And not at the largest sigma: largest relative change",
        paper="about 0",
        band=(None, 0.1),
        band_from="choice",
    )
    four, deep = (setups["four"], runs["four"]), (setup, runs["six"])
    yield Claim(
        id="less-stable",
        claim="Training is less stable than with four layers (App. B.1): zeta at sigma = 1 goes back and forth further",
        paper="yes",
        values=unsteadiness(*deep) > unsteadiness(*four),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="At the same learning rate, images, moments and steps. The paper does not say what it means by stable.",
        choices=[
            Choice(
                made="the way of zeta beyond its net change",
                other="the loss rises at more moments",
                values=rising_losses(*deep) > rising_losses(*four),
            )
        ],
    )


def plot(setups: Mapping[str, Setup], every: Mapping[str, Runs]) -> Any:
    """As Fig. 2."""
    return alignment_panels(setups["six"], every["six"])


FIG_6 = Reproduction(
    id="004/fig6",
    about=(
        "Fig. 2 with six layers: alignment zeta = |U W| / (|U| |W|) of consecutive weight matrices of a ReLU network "
        "on MNIST, full-batch gradient descent for 1000 steps, during training at the standard initial scale, and "
        "after it for weights that begin sigma times as large. Open in the paper and chosen as in Fig. 2: width 128, "
        "cross-entropy, the sigmas, pixels of mean 0 and deviation 1, the Frobenius norm (the spectral one is shown as "
        "well). Learning rates are 0.1 up to sigma = 1, 0.001 and 0.00003 for 2 and 3, by the training accuracy "
        "alone, as in the paper, on a seed that is not shown. Beside it four layers at sigma = 1, to see which is less "
        "stable. At laptop scale 500 images, 2000 at the paper's."
    ),
    experiment={"six": SIX_LAYERS, "four": FOUR_LAYERS_UNSCALED},
    plot=plot,
    claims=claims,
)
