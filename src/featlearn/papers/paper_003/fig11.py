"""Beaglehole et al. 2024, Fig. 11: neural features at the end of training, from first weights of four scales."""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn.papers.claims import Claim
from featlearn.papers.drawing import panels
from featlearn.papers.paper_003.speed_limits import METHODS, SLO, SPEED_LIMITS, STANDARD, Setup
from featlearn.papers.reproduction import Reproduction
from featlearn.papers.runs import Runs
from featlearn.papers.scale import Scale


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """App. H; quality is the cosine with the EGOP of the task, (S, methods, scales), scales from large to small."""
    uc, nfm, agop = (runs[name][..., -1] for name in ("uncentered", "nfm_egop", "agop_egop"))
    falls = {name: one[:, STANDARD, -1] - one[:, STANDARD, 0] for name, one in (("nfm", nfm), ("agop", agop))}
    yield Claim(
        id="small", claim="From the smallest weights the NFM shows the task with and without limited speeds: lower of "
        "its two cosines with the EGOP", paper="good", values=nfm[:, :, -1].min(1), band=(0.7, 1.0),
        band_from="trial", why="0.85 was seen in trials of Fig. 4; the identity has 0.32.", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="correspondence", claim="Standard training: NFM and AGOP agree less from larger weights: UC-NFC of scale "
        "1 less that of 0.001", paper="negative",
        values=uc[:, STANDARD, 0] - uc[:, STANDARD, -1], band=(None, 0.0), band_from="print", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="quality", claim="Standard training: the quality of the NFM falls with the initial scale, at every step of "
        "the scale", paper="yes", values=numpy.diff(nfm[:, STANDARD], axis=1).min(1) > 0, band=(1, None),
        band_from="print", least=Scale.LAPTOP,
    )  # fmt: skip
    yield Claim(
        id="faster", claim="Standard training: the quality of the NFM falls more than that of the AGOP (scale 1 "
        "against 0.001): difference of the falls", paper="positive", values=falls["nfm"] - falls["agop"],
        band=(0.0, None), band_from="print", least=Scale.LAPTOP,
    )  # fmt: skip
    for name, values in (("nfm", nfm), ("agop", agop)):
        yield Claim(
            id=f"{name}-invariant", claim=f"SLO: the quality of the {name.upper()} does not depend on the initial "
            "scale: range of its cosine with the EGOP", paper=0.0, values=numpy.ptp(values[:, SLO], axis=1),
            band=(None, 0.15), band_from="trial" if name == "nfm" else "choice", least=Scale.LAPTOP,
            why="That of Fig. 4, set after trials there." if name == "nfm" else "As for the NFM.",
        )  # fmt: skip
    yield Claim(
        id="better", claim="From scale 1 the NFM is nearer to the EGOP with SLO than without: difference of cosines",
        paper="positive", values=nfm[:, SLO, 0] - nfm[:, STANDARD, 0], band=(0.0, None), band_from="print",
    )  # fmt: skip


def plot(setup: Setup, runs: Runs) -> Any:
    """Rows: NFM with standard training and with SLO, as in the paper; then the AGOP of both. First seed."""
    figure, axes = panels(4, len(setup.scales), height=1.75)
    rows = numpy.array(axes).reshape(4, -1)
    for row, (kind, method) in zip(
        rows, [(kind, method) for kind in ("nfm", "agop") for method in (STANDARD, SLO)], strict=True
    ):
        for i, (ax, scale) in enumerate(zip(row, setup.scales, strict=True)):
            matrix = runs[kind][0, method, i]
            name = f"{kind.upper()}, {METHODS[method]}"
            ax.imshow(matrix / abs(matrix).max(), cmap="RdBu_r", vmin=-1, vmax=1, label=name)
            ax.set_title(f"{name}, $s_0$ = {scale:g}", loc="left", fontsize=7.5)
            near = runs[f"{kind}_egop"][:, method, i, -1]
            ax.set(xticks=[], yticks=[], xlabel=f"cosine with EGOP {near.mean():.2f}")
    return figure


FIG_11 = Reproduction(
    id="003/fig11",
    about=(
        "The runs of Fig. 4: first weights of four scales, trained on the chain monomial of five of 32 coordinates by "
        "gradient descent and by speed limited optimisation. NFM and AGOP of the first layer at the end, of the first "
        "seed and in units of their largest entry; below each the cosine with the expected gradient outer product of "
        "the task, mean over seeds. The paper shows the NFM and speaks of the AGOP as well. Sizes, rates and the "
        "reading of the readout's factor are those of Fig. 4."
    ),
    experiment=SPEED_LIMITS,
    plot=plot,
    claims=claims,
)
