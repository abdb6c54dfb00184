"""Beaglehole et al. 2024, Fig. 6: whether the PTK aligns with the initial weights."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, COLORS, curve
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.initial_scales import (
    KINDS,
    OPEN,
    SCALES,
    Setup,
    correlation,
    drawn,
    spectrum_panels,
)

SHOWN = (0, 1)
"""places of the two spectra on which claims are judged"""


def change(runs: Runs, place: int, kind: str = "cosine", until: int = -1) -> Any:
    """(S, scales, layers): of the PTK-centered correlation since the first measured step."""
    found = correlation(runs, "ptk_centered", place, kind)
    return found[:, :, until] - found[:, :, 1]


def largest(runs: Runs, pick: Callable[[Any], Any], places: tuple[int, ...] = SHOWN, **options: Any) -> Any:
    """(S,): the largest of the changes that `pick` takes from (S, scales, layers), over spectra."""
    each = [pick(change(runs, place, **options)).reshape(len(runs), -1).max(1) for place in places]
    return numpy.maximum.reduce(each)


def _decreases(setup: Setup, runs: Runs, pick: Callable[[Any], Any]) -> dict[str, Any]:
    hundred = max(i for i, step in enumerate(setup.measured) if step <= setup.steps // 8)
    return {
        "paper": "< 0",
        "values": largest(runs, pick),
        "band": (None, 0.0),
        "band_from": "print",
        "choices": [
            Choice(
                made="cosine, as printed",
                other="Pearson, as in the authors' code",
                values=largest(runs, pick, kind="pearson"),
            ),
            Choice(
                made=f"until step {setup.steps}",
                other=f"until step {setup.measured[hundred]}",
                values=largest(runs, pick, until=hundred),
            ),
            Choice(made="eigenvalues 1 and 1/(1+k)", other="1/(1+k^2)", values=largest(runs, pick, places=(2,))),
        ],
    }


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """App. C: the correlation decreases, so that it does not drive the alignment."""
    words = f"last value less that after {setup.first} steps, the largest over spectra"
    yield Claim(
        id="decreases-1",
        claim=f"Layer 1, small weights: it decreases through training; {words} and scales below 1",
        **_decreases(setup, runs, lambda found: found[:, 1:, 0]),
    )
    yield Claim(
        id="decreases-1-large",
        claim=f"Layer 1, scale 1: it decreases through training; {words}",
        least=Scale.LAPTOP,
        why="On isotropic inputs a trial had 0.31 at first and 0.50 in the end.",
        **_decreases(setup, runs, lambda found: found[:, 0, 0]),
    )
    yield Claim(
        id="decreases-2",
        claim=f"Layer 2: it decreases through training; {words} and scales",
        least=Scale.LAPTOP,
        **_decreases(setup, runs, lambda found: found[:, :, 1]),
    )
    yield Claim(
        id="not-driving",
        claim="It does not drive the UC-NFC: its change over training less that of the UC-NFC, the "
        "largest over spectra, scales and layers",
        paper="< 0",
        values=_behind(runs),
        band=(None, 0.0),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(
                made="cosine, as printed", other="Pearson, as in the authors' code", values=_behind(runs, "pearson")
            ),
        ],
    )


def _behind(runs: Runs, kind: str = "cosine") -> Any:
    """(S,): the largest difference of the changes of both correlations; the UC-NFC changes since step 0."""
    found = []
    for place in SHOWN:
        uncentered = correlation(runs, "uncentered", place, kind)
        difference = change(runs, place, kind) - (uncentered[:, :, -1] - uncentered[:, :, 0])
        found.append(difference.max((1, 2)))
    return numpy.maximum.reduce(found)


def plot(setup: Setup, runs: Runs) -> Any:
    """Both layers and both spectra of the claims, and the third spectrum; lines are cosines, dotted ones Pearson's."""
    figure, axes = spectrum_panels(setup, "PTK-centered NFC", highest=1.02)
    places = drawn(setup)
    steps = [setup.measured[place] for place in places]
    for (layer, decay), ax in axes.items():
        for i, scale in enumerate(setup.scales):
            cosine, pearson = (correlation(runs, "ptk_centered", decay, kind)[:, i, places, layer] for kind in KINDS)
            curve(ax, steps, cosine, f"scale {scale:g}", color=COLORS[i])
            curve(ax, steps, pearson.mean(0), f"_scale {scale:g}, Pearson", color=COLORS[i], style=":")
    axes[1, 0].plot([], [], ":", color=BLACK, label="Pearson")
    axes[1, 0].legend()
    return figure


FIG_6 = Reproduction(
    id="003/fig6",
    about=(
        "The PTK-centered correlation rho(W0^T W0, W0^T Kb W0), Kb made of the change J - J0 of the gradients: whether "
        "the PTK moves toward the initial weights, for both layers. It has no value before the first step. "
        + OPEN
        + "Nor does the paper say which two spectra this figure has: claims are judged on eigenvalues 1 and 1/(1+k), "
        "and 1/(1+k^2) is beside them. The cosine is the printed correlation; Pearson's, which subtracts the mean of "
        "all entries, that of the authors' code for Fig. 2."
    ),
    experiment=SCALES,
    plot=plot,
    claims=claims,
)
