"""Losses of networks and how far their weights have moved: what Fig. 14 and 15 of Beaglehole et al. 2024 share."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLACK, COLORS, GRAY, curve
from featlearn_papers.frame.runs import Array
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.fig2 import TITLES, AllRuns


def each(runs: AllRuns, name: str) -> list[Array]:
    """(S, L) of every network: a number of its layers at the end."""
    return [one[name][:, -1] for one in runs.values()]


def claims(runs: AllRuns) -> Iterator[Claim]:
    """Sec. 3: the weights move significantly, which lets the change of the weights take over."""
    change, share = each(runs, "change"), each(runs, "share")
    yield Claim(
        id="moves",
        claim="The weights move significantly: mean over layers of |W - W0| / |W| at the end, in the "
        "network where it is smallest",
        paper="significantly",
        values=numpy.min([one.mean(1) for one in change], 0),
        band=(0.1, None),
        band_from="choice",
        least=Scale.LAPTOP,
        why="The paper gives no number; a tenth of the weights is our reading.",
        choices=[
            Choice(
                made="the mean over layers",
                other="the layer that moves least",
                values=numpy.concatenate(change, 1).min(1),
            ),
            *(
                Choice(made="the network that moves least", other=TITLES[name], values=one.mean(1))
                for name, one in zip(runs, change, strict=True)
            ),
        ],
    )
    growing = [(numpy.diff(one["change"], axis=1) > 0).reshape(len(one), -1).mean(1) for one in runs.values()]
    yield Claim(
        id="grows",
        claim="They move ever further: share of the moments, over layers, at which |W - W0| / |W| has "
        "grown; mean over networks",
        paper=1.0,
        values=numpy.mean(growing, 0),
        band=(0.9, 1.0),
        band_from="choice",
    )
    left = [one["train"][:, -1] / one["train"][:, 0] for one in runs.values()]
    yield Claim(
        id="learns",
        claim="All networks learn: training loss at the end over that of the first step, largest of the networks",
        paper="falls",
        values=numpy.max(left, 0),
        band=(None, 0.95),
        band_from="choice",
        least=Scale.LAPTOP,
        choices=[
            Choice(made="the network that learns least", other=TITLES[name], values=one)
            for name, one in zip(runs, left, strict=True)
        ],
    )
    yield Claim(
        id="dominates",
        claim="The change of the weights dominates the start: its share in tr(F G) at the end, mean "
        "over layers and networks",
        paper="dominates",
        values=numpy.mean([one.mean(1) for one in share], 0),
        band=(0.5, None),
        band_from="choice",
        least=Scale.PAPER,
        choices=[
            Choice(made="the mean over networks", other=TITLES[name], values=one.mean(1))
            for name, one in zip(runs, share, strict=True)
        ],
    )


def losses(ax: Any, runs: AllRuns, name: str, title: str) -> None:
    """Of the training set and of unseen samples, along training."""
    one = runs[name]
    for part, color in (("train", BLACK), ("test", GRAY)):
        curve(ax, one["steps"][0], one[part], part, color=color)
    ax.set(xscale="log")
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=7.5)


def changes(ax: Any, runs: AllRuns, name: str, layers: Sequence[int], labels: Sequence[str], title: str) -> None:
    """|W - W0| / |W| of some layers, along training."""
    one = runs[name]
    for layer, label, color in zip(layers, labels, COLORS, strict=False):
        curve(ax, one["steps"][0], one["change"][..., layer], label, color=color)
    ax.set(xscale="log", ylim=(0, None))
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=7.5)
