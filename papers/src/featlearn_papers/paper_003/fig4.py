"""Beaglehole et al. 2024, Fig. 4.

With limited speeds a network learns features from large initial weights as well as from small ones.
"""

from collections.abc import Iterable
from typing import Any

import numpy

from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.drawing import COLORS, WIDTH, curve
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.speed_limits import METHODS, SLO, SPEED_LIMITS, STANDARD, Setup


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Sec. 5.1 on initialization, Sec. 5.2 and App. H on SLO: values after training, (S, methods, scales)."""
    uc, c, share = (runs[name][..., -1] for name in ("uncentered", "centered", "share"))
    nfm, agop = runs["nfm_egop"][..., -1], runs["agop_egop"][..., -1]
    yield Claim(
        id="share-falls",
        claim="Standard training: the centered part dominates more the smaller the first weights",
        paper="yes",
        values=numpy.diff(share[:, STANDARD], axis=1).min(1) > 0,
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="uc-falls",
        claim="Standard training: the UC-NFC is lower for larger first weights (scale 1 against 0.001)",
        paper="yes",
        values=uc[:, STANDARD, 0] < uc[:, STANDARD, -1],
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="c-falls",
        claim="Standard training: the C-NFC is lower for larger first weights (scale 1 against 0.001)",
        paper="yes",
        values=c[:, STANDARD, 0] < c[:, STANDARD, -1],
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="uc-less",
        claim="Standard training, scale 1: the UC-NFC fails to develop",
        paper="low",
        values=uc[:, STANDARD, 0],
        band=(None, 0.75),
        band_from="trial",
        least=Scale.LAPTOP,
        why="0.57 to 0.67 in trials before; the figure gives no numbers.",
    )
    yield Claim(
        id="c-fraction",
        claim="Standard training: the C-NFC falls less than the UC-NFC (scale 1 against 0.001)",
        paper="yes",
        values=(c[:, STANDARD, -1] - c[:, STANDARD, 0]) < (uc[:, STANDARD, -1] - uc[:, STANDARD, 0]),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="At scale 1 and the end of training the C-NFC is often below the UC-NFC: in two of three seeds of an "
        "earlier trial, 0.45 to 0.50 against 0.67.",
    )
    yield Claim(
        id="slo-uc",
        claim="SLO: the UC-NFC is close to 1 whatever the scale; lowest scale's value",
        paper=1.0,
        values=uc[:, SLO].min(1),
        band=(0.85, 1.0),
        band_from="trial",
        least=Scale.LAPTOP,
        why="0.90 to 0.96 in trials; the figure gives no numbers.",
    )
    yield Claim(
        id="slo-c",
        claim="SLO: the C-NFC is close to 1 whatever the scale; lowest scale's value",
        paper=1.0,
        values=c[:, SLO].min(1),
        band=(0.85, 1.0),
        band_from="trial",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="slo-share",
        claim="SLO: the ratio of C to UC is close to 1 whatever the scale; lowest scale's value",
        paper=1.0,
        values=share[:, SLO].min(1),
        band=(0.95, 1.05),
        band_from="trial",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="standard-share",
        claim="Standard training, scale 1: the centered part hardly contributes",
        paper="low",
        values=share[:, STANDARD, 0],
        band=(None, 0.1),
        band_from="trial",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="slo-features",
        claim="SLO at scale 1 brings NFM and AGOP nearer to the EGOP than standard training",
        paper="yes",
        values=(nfm[:, SLO, 0] > nfm[:, STANDARD, 0]) & (agop[:, SLO, 0] > agop[:, STANDARD, 0]),
        band=(1, None),
        band_from="print",
    )
    yield Claim(
        id="identity",
        claim="Standard training, scale 1: the NFM resembles the identity; its cosine with the EGOP is "
        "that of the identity",
        paper=0.323,
        values=nfm[:, STANDARD, 0],
        band=(0.28, 0.45),
        band_from="theory",
        least=Scale.LAPTOP,
        why="No number in the print; tr(EGOP) / (sqrt(d) |EGOP|) is 0.323 for d = 32 and r = 5.",
    )
    yield Claim(
        id="slo-invariant",
        claim="SLO: the quality of the NFM does not depend on the scale (App. H): range of its cosine with the EGOP",
        paper=0.0,
        values=numpy.ptp(nfm[:, SLO], axis=1),
        band=(None, 0.15),
        band_from="trial",
        why="Against a range of 0.5 for standard training in trials.",
        least=Scale.LAPTOP,
    )
    yield Claim(
        id="interpolates",
        claim="SLO with eps lets the network interpolate: largest training loss over scales (App. I)",
        paper=0.0,
        values=runs["train"][:, SLO, :, -1].max(1),
        band=(None, 0.05),
        band_from="choice",
        least=Scale.LAPTOP,
        why="From scale 1 earlier trials ended at 0.04 to 0.13: it is still falling after the paper's 600 steps.",
    )


PATHS = (("uncentered", "UC-NFC"), ("centered", "C-NFC"), ("share", "C / UC"), ("train", "training loss"))


def plot(setup: Setup, runs: Runs) -> Any:
    """A, B: along training for each scale, standard and SLO; C, D: matrices of the first seed from scale 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    rows: list[Any] = [[f"{name}/{method}" for name, _ in PATHS] for method in (STANDARD, SLO)]
    rows.append([f"{kind}/{method}" for method in (STANDARD, SLO) for kind in ("nfm", "agop")])
    axes = figure.subplot_mosaic(rows)
    for method, panel in ((STANDARD, "A"), (SLO, "B")):
        for name, label in PATHS:
            ax = axes[f"{name}/{method}"]
            for i, scale in enumerate(setup.scales):
                # the C-NFC has no value before the first step
                curve(ax, runs["steps"][0][1:], runs[name][:, method, i, 1:], f"$s_0$ = {scale:g}", color=COLORS[i])
            ax.set(xscale="log", ylim=(0, 1.3) if name == "train" else (0, 1.04))
            ax.set_title(f"{panel}  {label}" if name == "uncentered" else label, loc="left")
            ax.set_xlabel("step" if method == SLO else "")
        axes[f"uncentered/{method}"].set_ylabel(METHODS[method])
    axes[f"centered/{SLO}"].legend(loc="lower center", handlelength=1)
    for method, panel in ((STANDARD, "C"), (SLO, "D")):
        for kind in ("nfm", "agop"):
            matrix, ax = runs[kind][0, method, 0], axes[f"{kind}/{method}"]
            ax.imshow(matrix / abs(matrix).max(), cmap="RdBu_r", vmin=-1, vmax=1, label=kind)
            near = runs[f"{kind}_egop"][:, method, 0, -1].mean()
            ax.set_title(f"{panel}  {kind.upper()}, {METHODS[method]}", loc="left")
            ax.set(xticks=[], yticks=[], xlabel=f"cosine with EGOP {near:.2f}")
    return figure


FIG_4 = Reproduction(
    id="003/fig4",
    about=(
        "Two hidden ReLU layers learn the chain monomial from first weights of four scales, by gradient descent and by "
        "speed limited optimization, which moves the first layer fast and the others slowly. The paper's sizes, rates, "
        "speeds and steps; the loss, which it does not give, is the mean squared error. Its App. I divides the readout "
        "by 0.01; only multiplied does it train. NFM and AGOP are those of the first seed from scale 1, in units of "
        "their largest entry."
    ),
    experiment=SPEED_LIMITS,
    plot=plot,
    claims=claims,
)
