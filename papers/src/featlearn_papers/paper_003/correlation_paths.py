"""Correlations and losses along training from several scales: what Fig. 8, 9 and 10 of Beaglehole et al. 2024 share.

Each of the three has its own spectrum of the data covariance.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import COLORS, WIDTH, curve
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.initial_scales import (
    ALL,
    AXES,
    LAYERS,
    OPEN,
    SCALES,
    Setup,
    correlation,
    drawn,
    spectrum_words,
    step_weights,
)

FIRST, SECOND = range(len(LAYERS))
Pair = tuple[Any, Any]
"""UC-NFC and C-NFC, both (S, scales, T, layers)"""


def pair(runs: Runs, decay: int, kind: str = "cosine", place: str = "") -> Pair:
    """Of one spectrum; the C-NFC is nan at step 0."""
    uncentered, centered = (correlation(runs, name, decay, kind, place) for name in ("uncentered", "centered"))
    return uncentered, centered


def judged(runs: Runs, decay: int, value: Callable[[Any, Any], Any], *, axes: bool = True) -> dict[str, Any]:
    """Return values of a claim by `value` of UC-NFC and C-NFC, and its choices.

    These are Pearson's correlation, the scale on all hidden layers, and eigenvectors along the axes. Along the axes
    only steps 0, the first measured and the last are there.
    """
    choices = [
        Choice(
            made="cosine, as printed",
            other="Pearson, as in the authors' code",
            values=value(*pair(runs, decay, "pearson")),
        ),
        Choice(
            made="the scale multiplies the first layer",
            other="all hidden layers",
            values=value(*pair(runs, decay, place=ALL)),
        ),
    ]
    if axes:
        choices.append(
            Choice(made="random eigenvectors (App. G)", other="axes", values=value(*pair(runs, decay, place=AXES)))
        )
    return {"values": value(*pair(runs, decay)), "choices": choices}


def spread_gap(uncentered: Any, centered: Any, layer: int, weights: Any) -> Any:
    """(S,): range over scales of the C-NFC less that of the UC-NFC, mean over steps with these weights."""
    ranges = [numpy.ptp(each[:, :, 1:, layer], axis=1) for each in (centered, uncentered)]
    return (ranges[0] - ranges[1]) @ numpy.asarray(weights) / sum(weights)


def claims(setup: Setup, runs: Runs, decay: int) -> Iterable[Claim]:
    """App. G, and what Sec. 3 says with a reference to it."""
    yield from _robust(setup, runs, decay)
    yield from _uncentered(runs, decay)
    yield from _centered(setup, runs, decay)
    yield from _losses(runs, decay)


def _robust(setup: Setup, runs: Runs, decay: int) -> Iterable[Claim]:
    steps = setup.measured[1:]
    early, last = [float(step <= setup.early) for step in steps], [float(step == setup.steps) for step in steps]
    for layer in (FIRST, SECOND):
        found = judged(runs, decay, partial(spread_gap, layer=layer, weights=step_weights(setup)), axes=False)
        for words, weights in ((f"the first {setup.early} steps", early), ("the last step", last)):
            values = spread_gap(*pair(runs, decay), layer, weights)
            found["choices"].append(Choice(made="mean over training", other=words, values=values))
        yield Claim(
            id=f"robust-{layer + 1}",
            claim=f"Layer {layer + 1}: the C-NFC is more robust to the initial scale than "
            "the UC-NFC; its range over scales less that of the UC-NFC, mean over training",
            paper="< 0",
            band=(None, 0.0),
            band_from="print",
            least=Scale.LAPTOP,
            **found,
        )


def _uncentered(runs: Runs, decay: int) -> Iterable[Claim]:
    yield Claim(
        id="uc-start",
        claim="The UC-NFC is small at initialization: largest over scales and layers",
        paper="small",
        band=(None, 0.6),
        band_from="choice",
        why="A trial had 0.41 to 0.45 in the first layer.",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: uc[:, :, 0].max((1, 2))),
    )
    yield Claim(
        id="uc-rises",
        claim="The UC-NFC rises through training: last less first value, the smallest over scales and layers",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        **judged(runs, decay, lambda uc, c: (uc[:, :, -1] - uc[:, :, 0]).min((1, 2))),
    )
    yield Claim(
        id="uc-high-1",
        claim="Layer 1, smallest scale: the UC-NFC becomes high",
        paper="high",
        band=(0.8, None),
        band_from="trial",
        why="0.93 to 0.95 in a trial with one seed.",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: uc[:, -1, -1, FIRST]),
    )
    yield Claim(
        id="uc-high-1-large",
        claim="Layer 1, scale 1: the UC-NFC becomes high",
        paper="high",
        band=(0.8, None),
        band_from="choice",
        why="As for the smallest scale. A trial with one seed had 0.45 to 0.60.",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: uc[:, 0, -1, FIRST]),
    )
    yield Claim(
        id="uc-high-2",
        claim="Layer 2: the UC-NFC becomes high; lowest over scales",
        paper="high",
        band=(0.8, None),
        band_from="choice",
        why="As for the first layer.",
        cause="Fails because the network of scale 1 starts with large weights in either reading of the scale: its "
        "UC-NFC ends at 0.27 to 0.70. It holds for the smaller scales when they multiply all hidden layers.",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: uc[:, :, -1, SECOND].min(1)),
    )
    yield Claim(
        id="uc-high-2-small",
        claim="Layer 2, smallest scale: the UC-NFC becomes high",
        paper="high",
        band=(0.8, None),
        band_from="choice",
        why="As for the first layer.",
        cause="Fails because the scale multiplies the first layer alone (0.40 to 0.66). It holds when the scale "
        "multiplies all hidden layers (0.92 to 1.00).",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: uc[:, -1, -1, SECOND]),
    )


def _centered(setup: Setup, runs: Runs, decay: int) -> Iterable[Claim]:
    yield Claim(
        id="c-early",
        claim=f"The C-NFC is large at early times (Sec. 3.1): after {setup.first} steps, lowest over scales and layers",
        paper="close to 1",
        band=(0.8, None),
        band_from="trial",
        why="0.87 to 0.89 in the first layer in a trial with one seed.",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: c[:, :, 1].min((1, 2))),
    )
    yield Claim(
        id="c-early-above",
        claim=f"At early times it is above the UC-NFC (Sec. 3): difference after {setup.first} "
        "steps, the smallest over scales and layers",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        **judged(runs, decay, lambda uc, c: (c - uc)[:, :, 1].min((1, 2))),
    )
    above = judged(runs, decay, lambda uc, c: (c - uc)[:, :, 1:].min((1, 2, 3)), axes=False)
    above["choices"].append(
        Choice(made="any difference", other="less than 0.01 is none", values=above["values"], band=(-0.01, None))
    )
    yield Claim(
        id="c-above",
        claim="It is consistently above the UC-NFC (Sec. 3, said of Fig. 2): smallest difference over "
        "steps, scales and layers",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        why="In a trial it was below after training from scale 1. From the smallest weights both are the same to "
        "0.001, and either may be above.",
        **above,
    )
    yield Claim(
        id="small-higher",
        claim="UC-NFC and C-NFC are higher from smaller weights: layer 1 after training, smallest "
        "scale less scale 1, the smaller of both differences",
        paper="> 0",
        band=(0.0, None),
        band_from="print",
        least=Scale.LAPTOP,
        **judged(
            runs, decay, lambda uc, c: numpy.minimum(*((each[:, -1] - each[:, 0])[:, -1, FIRST] for each in (uc, c)))
        ),
    )


def largest_step(losses: Any) -> Any:
    """(S,): from one scale to the next smaller one, of losses (S, scales); below zero where they fall each time."""
    return numpy.diff(losses, axis=1).max(1)


def _losses(runs: Runs, decay: int) -> Iterable[Claim]:
    test = runs["test"][:, decay]
    yield Claim(
        id="test-order",
        claim="The test loss improves for smaller initial weights: largest step from one scale to the "
        "next smaller one, after training",
        paper="< 0",
        values=largest_step(test[..., -1]),
        band=(None, 0.0),
        band_from="print",
        least=Scale.LAPTOP,
        why="In a trial with one seed and eigenvectors along the axes: 0.65, 0.35, 0.25 for eigenvalues 1, and 0.19, "
        "0.25, 0.26 for 1/(1+k^2), which is the other order.",
        choices=[
            Choice(
                made="every step of the scales",
                other="smallest scale against scale 1",
                values=test[:, -1, -1] - test[:, 0, -1],
            ),
            Choice(made="after training", other="the best along the way", values=largest_step(test.min(-1))),
            Choice(
                made="random eigenvectors (App. G)",
                other="axes",
                values=largest_step(runs[f"{AXES}test"][:, decay, :, -1]),
            ),
        ],
    )


PEARSON = " (Pearson)"
ROWS = (
    ("UC-NFC 1", "C-NFC 1", "train loss", "test loss"),
    ("UC-NFC 2", "C-NFC 2", "train loss", "test loss"),
    tuple(f"{which} {layer}{PEARSON}" for layer in (1, 2) for which in ("UC-NFC", "C-NFC")),
)


def plot(setup: Setup, runs: Runs, decay: int) -> Any:
    """As in the paper, layer 1 above layer 2, with losses that belong to both; below, Pearson's correlations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 6.0), layout="constrained")
    axes = figure.subplot_mosaic([list(row) for row in ROWS])
    steps, shown = numpy.array(setup.measured), [0, *drawn(setup)]
    for i, scale in enumerate(setup.scales):
        name: dict[str, Any] = {"label": f"scale {scale:g}", "color": COLORS[i]}
        for kind, ending in (("cosine", ""), ("pearson", PEARSON)):
            for which, values in zip(("UC-NFC", "C-NFC"), pair(runs, decay, kind), strict=True):
                for layer in (FIRST, SECOND):
                    # the C-NFC has no value before the first step
                    places = shown[int(which == "C-NFC") :]
                    ax = axes[f"{which} {layer + 1}{ending}"]
                    curve(ax, steps[places], values[:, i, places, layer], **name)
        for which in ("train", "test"):
            losses = runs[which][:, decay]
            curve(axes[f"{which} loss"], steps[shown], losses[:, i, shown] / losses.max(), **name)
    for title, ax in axes.items():
        lowest = min(0.0, *(float(numpy.nanmin(line.get_ydata())) for line in ax.lines))
        ax.set(ylim=(lowest * 1.1, 1.03))
        words = title.replace("loss", "loss / largest")
        ax.set_title(words if PEARSON in title else words.replace("NFC ", "NFC, layer "), loc="left")
        if "NFC" in title:
            ax.set_xscale("symlog", linthresh=setup.first)
            ax.set(xlim=(0, setup.steps), xticks=[0, *(ten for ten in (10, 100) if ten < setup.steps)])
        ax.set_xlabel("step" if "loss" in title or PEARSON in title else "")
    figure.suptitle(spectrum_words(setup.decays[decay]), fontsize=8)
    axes["test loss"].legend()
    return figure


def reproduction(id: str, decay: int, about: str) -> Reproduction:
    """The figure of one spectrum."""
    return Reproduction(
        id=id,
        about=(
            f"{about} UC-NFC and C-NFC of both layers (rows) and losses, in units of the largest over scales, steps "
            "and seeds, from first weights of three scales. "
            + OPEN
            + "The cosine is the printed correlation; the last row has Pearson's, which subtracts the mean of all "
            "entries of a matrix first, as the authors' code does for Fig. 2. The axis of correlations is logarithmic "
            "here, for early times to be seen."
        ),
        experiment=SCALES,
        plot=partial(plot, decay=decay),
        claims=partial(claims, decay=decay),
    )
