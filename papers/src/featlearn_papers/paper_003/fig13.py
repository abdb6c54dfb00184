"""Beaglehole et al. 2024, Fig. 13: both correlations of every layer of perceptrons on six data sets."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.fig2 import CENTERED, TITLES, TRAINING, UNCENTERED, AllRuns, early, gap, pair
from featlearn_papers.paper_003.networks import PERCEPTRONS

NEAR = 0.1
"""distance of two correlations that counts as none"""


def share(runs: AllRuns, question: Callable[[Runs], Array]) -> Array:
    """(S,): of all layers of all networks, those of which a question is answered by yes; answers are (S, L)."""
    found: Array = numpy.concatenate([question(one) for one in runs.values()], axis=1).mean(1)
    return found


def higher(runs: Runs, kind: str = "cosine") -> Array:
    """(S, L): the C-NFC is above the UC-NFC on average over moments."""
    found: Array = gap(runs, kind).mean(1) > 0
    return found


def earlier(runs: Runs, kind: str = "cosine") -> Array:
    """(S, L): they differ more in the first tenth of the steps than at the end."""
    difference = gap(runs, kind)
    found: Array = difference[:, early(runs)].mean(1) > difference[:, -1]
    return found


def near(runs: Runs, kind: str = "cosine", distance: float = NEAR) -> Array:
    """(S, L): they have come together at the end."""
    found: Array = abs(gap(runs, kind)[:, -1]) < distance
    return found


def rises(runs: Runs, kind: str = "cosine") -> Array:
    """(S, L): the UC-NFC ends above where it began."""
    values = runs[kind][..., UNCENTERED]
    found: Array = values[:, -1] > values[:, 0]
    return found


def claims(setups: Mapping[str, Any], runs: AllRuns) -> Iterable[Claim]:
    """Sec. 3 on what the trajectories show, layer by layer; nothing is averaged over layers."""
    for id, question, words, low, least in (
        ("higher", higher, "the C-NFC is higher than the UC-NFC", 0.9, Scale.SMOKE),
        ("early", earlier, "they differ more early (first tenth of the steps) than at the end", 0.9, Scale.LAPTOP),
        ("rises", rises, "the UC-NFC rises in training", 0.9, Scale.PAPER),
        ("converge", near, "the UC-NFC has converged to the C-NFC at the end (distance below 0.1)", 0.5, Scale.PAPER),
    ):
        choices = [
            Choice(
                made="the cosine of the print",
                other="Pearson's of the authors' code",
                values=share(runs, partial(question, kind="pearson")),
            ),
        ]
        if id == "converge":
            choices.append(
                Choice(made="a distance of 0.1", other="0.2", values=share(runs, partial(near, distance=2 * NEAR)))
            )
        yield Claim(
            id=id,
            claim=f"Share of the layers of all six networks in which {words}",
            paper="most" if id == "converge" else 1.0,
            values=share(runs, question),
            band=(low, 1.0),
            band_from="choice",
            least=least,
            choices=choices,
            why="Sec. 3 says most of the settings." if id == "converge" else "Nine of ten layers count as all.",
        )
    last = numpy.stack([one["cosine"][:, -1] for one in runs.values()])
    yield Claim(
        id="centered",
        claim="The C-NFC is high in every layer: lowest mean over data sets of a layer at the end",
        paper="high",
        values=last[..., CENTERED].mean(0).min(1),
        band=(0.7, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
    )


def plot(setups: Mapping[str, Any], runs: AllRuns) -> Any:
    """One row for each data set, in the paper's order, one column for each hidden layer."""
    depths = [one["cosine"].shape[2] for one in runs.values()]
    figure, axes = panels(len(runs), max(depths), height=1.3)
    rows = numpy.array(axes).reshape(len(runs), -1)
    for letter, row, (name, one) in zip("ABCDEF", rows, runs.items(), strict=True):
        for layer, ax in enumerate(row):
            first = layer == 0
            title = f"{letter}  {TITLES[name]}, layer 1" if first else f"layer {layer + 1}"
            pair(ax, one, slice(layer, layer + 1), title)
            if not first:
                ax.set_yticklabels([])
    for ax in rows[-1]:
        ax.set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return figure


FIG_13 = Reproduction(
    id="003/fig13",
    about=(
        "The runs of Fig. 2, perceptrons of five hidden layers on six data sets, with each layer by itself: "
        "correlation of W^T W with W^T K W (UC-NFC) and of the same with W - W0 (C-NFC) along training; the cosine, "
        f"and dotted Pearson's as in the authors' code. {TRAINING}"
    ),
    experiment=PERCEPTRONS,
    plot=plot,
    claims=claims,
)
