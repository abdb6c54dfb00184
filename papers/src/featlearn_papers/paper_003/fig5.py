"""Beaglehole et al. 2024, Fig. 5: how much the change of the PTK contributes to the centered correlation."""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, COLORS, curve
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.initial_scales import OPEN, SCALES, Setup, drawn, spectrum_panels, step_weights

ISOTROPIC = 0
"""place of the spectrum on which claims are judged"""
INSIGNIFICANT = 0.1


def shares(runs: Runs, decay: int = ISOTROPIC) -> Any:
    """(S, scales, T, layers), from the first measured step: before it nothing has changed."""
    return runs["double_share"][:, decay, :, 1:]


def over_training(setup: Setup, values: Any) -> Any:
    """(S, layers): mean of (S, T, layers) over steps, from the first measured one."""
    return numpy.average(values, axis=1, weights=step_weights(setup))


def _other_spectra(setup: Setup, runs: Runs, values: Any) -> list[Choice]:
    """`values` takes the shares of another spectrum."""
    return [
        Choice(made="isotropic inputs", other=f"eigenvalues 1/(1+k^{decay:g})", values=values(shares(runs, place)))
        for place, decay in enumerate(setup.decays)
        if place != ISOTROPIC
    ]


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """App. C: small early and from large weights, and relevant later."""
    yield from _small(setup, runs)
    yield from _later(setup, runs)


def _small(setup: Setup, runs: Runs) -> Iterable[Claim]:
    early = setup.measured.index(setup.early)  # steps 0 to here, of which shares() leaves out the first
    yield Claim(
        id="early",
        claim=f"Early in training the ratio is insignificant: largest over scales and layers after {setup.first} steps",
        paper="insignificant",
        values=shares(runs)[:, :, 0].max((1, 2)),
        band=(None, INSIGNIFICANT),
        band_from="choice",
        why="A tenth, our reading of insignificant.",
        choices=[
            Choice(
                made=f"{setup.first} steps",
                other=f"{setup.early} steps",
                values=shares(runs)[:, :, early - 1].max((1, 2)),
            ),
            *_other_spectra(setup, runs, lambda found: found[:, :, 0].max((1, 2))),
        ],
        least=Scale.LAPTOP,
    )
    large = over_training(setup, shares(runs)[:, 0])
    yield Claim(
        id="large",
        claim="From large weights (scale 1) the ratio is insignificant: mean over training, the larger of both layers",
        paper="insignificant",
        values=large.max(1),
        band=(None, INSIGNIFICANT),
        band_from="choice",
        why="A tenth. A trial had 0.36 to 0.67 in the first layer after 50 steps already, and 0.55 and more after 800.",
        choices=[
            Choice(
                made="mean over training",
                other=f"mean over the first {setup.early} steps",
                values=shares(runs)[:, 0, :early].mean(1).max(1),
            ),
            Choice(made="the larger of both layers", other="the smaller", values=large.min(1)),
            *_other_spectra(setup, runs, lambda found: over_training(setup, found[:, 0]).max(1)),
        ],
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="larger-less",
        claim="It is smaller from larger weights: mean over training, scale 1 less the smallest "
        "scale, the layer where this is larger",
        paper="< 0",
        values=over_training(setup, shares(runs)[:, 0] - shares(runs)[:, -1]).max(1),
        band=(None, 0.0),
        band_from="print",
        choices=[
            Choice(
                made="mean over training",
                other=f"mean over the first {setup.early} steps",
                values=(shares(runs)[:, 0] - shares(runs)[:, -1])[:, :early].mean(1).max(1),
            ),
            *_other_spectra(setup, runs, lambda found: over_training(setup, found[:, 0] - found[:, -1]).max(1)),
        ],
        least=Scale.LAPTOP,
    )


def _later(setup: Setup, runs: Runs) -> Iterable[Claim]:
    yield Claim(
        id="grows",
        claim="It grows over training: last less first value, the smallest over scales and layers",
        paper="> 0",
        values=(shares(runs)[:, :, -1] - shares(runs)[:, :, 0]).min((1, 2)),
        band=(0.0, None),
        band_from="print",
        choices=_other_spectra(setup, runs, lambda found: (found[:, :, -1] - found[:, :, 0]).min((1, 2))),
    )
    yield Claim(
        id="late",
        claim="It becomes relevant over longer periods: value after training, the smallest over scales and layers",
        paper="relevant",
        values=shares(runs)[:, :, -1].min((1, 2)),
        band=(0.5, None),
        band_from="trial",
        why="0.55 to 0.98 in a trial with one seed.",
        least=Scale.LAPTOP,
        choices=_other_spectra(setup, runs, lambda found: found[:, :, -1].min((1, 2))),
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """Both layers; the first column is what claims are judged on, the others have the spectra of Fig. 9 and 10."""
    figure, axes = spectrum_panels(setup, "double-centered / centered", highest=1.25)
    places = drawn(setup)
    for (layer, decay), ax in axes.items():
        for i, scale in enumerate(setup.scales):
            values = runs["double_share"][:, decay, i, places, layer]
            curve(ax, [setup.measured[place] for place in places], values, f"scale {scale:g}", color=COLORS[i])
        ax.axhline(INSIGNIFICANT, color=BLACK, linestyle=":", linewidth=1, label=f"{INSIGNIFICANT:g}")
    axes[1, 0].legend()
    return figure


FIG_5 = Reproduction(
    id="003/fig5",
    about=(
        "The centered neural feature correlation has in it the change of the PTK since the start; here is how much of "
        "it, tr(Wb^T Wb Wb^T Kb Wb) / tr(Wb^T Wb Wb^T K Wb), Wb the change of the weights and Kb that of the gradients "
        "J - J0, for both layers. The ratio has no centering of its entries: cosine and Pearson do not enter. "
        + OPEN
        + "The paper does not name the spectrum of this figure: claims are judged on isotropic inputs, with the two "
        "others beside them."
    ),
    experiment=SCALES,
    plot=plot,
    claims=claims,
)
