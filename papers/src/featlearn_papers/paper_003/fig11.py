"""Beaglehole et al. 2024, Fig. 11: neural features at the end of training, from first weights of four scales."""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.drawing import BLUE, GREEN, WIDTH, curve
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.speed_limits import METHODS, SLO, SPEED_LIMITS, STANDARD, Setup


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """App. H; quality is the cosine with the EGOP of the task, (S, methods, scales), scales from large to small."""
    uc, nfm, agop = (runs[name][..., -1] for name in ("uncentered", "nfm_egop", "agop_egop"))
    falls = {name: one[:, STANDARD, -1] - one[:, STANDARD, 0] for name, one in (("nfm", nfm), ("agop", agop))}
    yield Claim(
        id="small",
        claim="From the smallest weights the NFM shows the task with and without limited speeds: lower of "
        "its two cosines with the EGOP",
        paper="good",
        values=nfm[:, :, -1].min(1),
        band=(0.7, 1.0),
        band_from="trial",
        why="0.85 was seen in trials of Fig. 4; the identity has 0.32.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="correspondence",
        claim="Standard training: NFM and AGOP agree less from larger weights: UC-NFC of scale 1 less that of 0.001",
        paper="negative",
        values=uc[:, STANDARD, 0] - uc[:, STANDARD, -1],
        band=(None, 0.0),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="quality",
        claim="Standard training: the quality of the NFM falls with the initial scale, at every step of the scale",
        paper="yes",
        values=numpy.diff(nfm[:, STANDARD], axis=1).min(1) > 0,
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="faster",
        claim="Standard training: the quality of the NFM falls more than that of the AGOP (scale 1 "
        "against 0.001): difference of the falls",
        paper="positive",
        values=falls["nfm"] - falls["agop"],
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    for name, values in (("nfm", nfm), ("agop", agop)):
        yield Claim(
            id=f"{name}-invariant",
            claim=f"SLO: the quality of the {name.upper()} does not depend on the initial "
            "scale: range of its cosine with the EGOP",
            paper=0.0,
            values=numpy.ptp(values[:, SLO], axis=1),
            band=(None, 0.15),
            band_from="trial" if name == "nfm" else "choice",
            least=Scale.LAPTOP,
            why="That of Fig. 4, set after trials there." if name == "nfm" else "As for the NFM.",
        )
    yield Claim(
        id="better",
        claim="From scale 1 the NFM is nearer to the EGOP with SLO than without: difference of cosines",
        paper="positive",
        values=nfm[:, SLO, 0] - nfm[:, STANDARD, 0],
        band=(0.0, None),
        band_from="print",
    )


def plot(setup: Setup, runs: Runs) -> Any:
    """The NFM of the first seed, with standard training and with SLO; below, how near to the EGOP features are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    count = len(setup.scales)
    rows: list[Any] = [[f"{METHODS[method]} {i}" for i in range(count)] for method in (STANDARD, SLO)]
    rows.append(["egop"] * (count // 2) + ["uc"] * (count - count // 2))
    axes = figure.subplot_mosaic(rows)
    for method in (STANDARD, SLO):
        for i, scale in enumerate(setup.scales):
            matrix, ax = runs["nfm"][0, method, i], axes[f"{METHODS[method]} {i}"]
            # three digits are enough for a picture, and for its table of numbers
            ax.imshow((matrix / abs(matrix).max()).round(3), cmap="RdBu_r", vmin=-1, vmax=1, label=METHODS[method])
            ax.set_title(f"$s_0$ = {scale:g}", loc="left")
            ax.set(xticks=[], yticks=[], ylabel=f"NFM, {METHODS[method]}" if i == 0 else "")
    for method, style in ((STANDARD, "o--"), (SLO, "s-")):
        for kind, color in (("nfm", BLUE), ("agop", GREEN)):
            label = f"{kind.upper()}, {METHODS[method]}"
            curve(axes["egop"], setup.scales, runs[f"{kind}_egop"][:, method, :, -1], label, color=color, style=style)
        curve(axes["uc"], setup.scales, runs["uncentered"][:, method, :, -1], METHODS[method], style=style)
    for name, title in (("egop", "cosine with the EGOP"), ("uc", "UC-NFC: cosine of NFM and AGOP")):
        axes[name].set(xscale="log", xlabel="$s_0$", ylim=(0, 1.05))
        axes[name].set_title(title, loc="left")
        axes[name].legend(loc="lower left")
    return figure


FIG_11 = Reproduction(
    id="003/fig11",
    about=(
        "The runs of Fig. 4: first weights of four scales, trained on the chain monomial of five of 32 coordinates by "
        "gradient descent and by speed limited optimization. NFM of the first layer at the end, of the first seed and "
        "in units of its largest entry; below, the cosines of NFM and AGOP with the expected gradient outer product of "
        "the task, over seeds. The paper shows the NFM and speaks of the AGOP as well. Sizes, rates and the "
        "reading of the readout's factor are those of Fig. 4."
    ),
    experiment=SPEED_LIMITS,
    plot=plot,
    claims=claims,
)
