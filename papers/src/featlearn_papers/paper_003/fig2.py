"""Beaglehole et al. 2024, Fig. 2.

The change of the weights agrees with the gradients before the weights themselves do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Choice, Claim
from featlearn_papers.frame.drawing import BLUE, GREEN, curve, panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.frame.runs import Array, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.networks import NETWORKS, PERCEPTRONS

UNCENTERED, CENTERED = 0, 1
"""of the last axis of correlations (S, T, L, 2): seeds, moments, layers"""
EARLY = 0.1
"""share of the steps that counts as early"""
ARCHITECTURES = {"mlp": list(PERCEPTRONS), "vgg": ["vgg"], "gpt": ["gpt"]}
"""Kind of network -> the names of its experiments."""
TITLES = {
    "cifar100": "CIFAR-100",
    "mnist": "MNIST",
    "svhn": "SVHN",
    "cifar10": "CIFAR-10",
    "gtsrb": "GTSRB",
    "stl10": "STL-10",
    "vgg": "VGG-11",
    "gpt": "GPT",
}
"""of panels"""

AllRuns = Mapping[str, Runs]


def gap(runs: Runs, kind: str = "cosine") -> Array:
    """C-NFC less UC-NFC, (S, T, L)."""
    difference: Array = runs[kind][..., CENTERED] - runs[kind][..., UNCENTERED]
    return difference


def early(runs: Runs, share: float = EARLY) -> Array:
    """(T,): which moments belong to the first tenth of training, or another share of it."""
    steps = runs["steps"][0]
    chosen: Array = steps <= max(share * steps[-1], steps[0])
    return chosen


def over(values: Iterable[Array]) -> Array:
    """(S,): the mean over networks of what each has for every seed."""
    means: Array = numpy.mean([value.reshape(len(value), -1).mean(1) for value in values], axis=0)
    return means


def claims(setups: Mapping[str, Any], runs: AllRuns) -> Iterable[Claim]:
    """Sec. 1 and 3 and the caption; the cosine of the print unless said otherwise."""
    yield from higher(runs)
    yield from when(runs)
    yield Claim(
        id="consistently",
        claim="The C-NFC is consistently higher across times, architectures and data: share of all layers and moments",
        paper=1.0,
        values=over([gap(one) > 0 for one in runs.values()]),
        band=(0.95, 1.0),
        band_from="choice",
        least=Scale.LAPTOP,
        why="On the chain monomial (Fig. 4, scale 1) it ends below in most seeds.",
        choices=[
            Choice(
                made="the cosine of the print",
                other="Pearson's correlation of the authors' code",
                values=over([gap(one, "pearson") > 0 for one in runs.values()]),
            ),
        ],
    )


def data_choices(names: list[str], number: Callable[[list[str]], Array]) -> list[Choice]:
    """What single data sets say, where a number is a mean over several."""
    if len(names) < 2:
        return []
    made = f"the mean over {len(names)} data sets"
    return [Choice(made=made, other=f"{TITLES[name]} alone", values=number([name])) for name in names]


def higher(runs: AllRuns) -> Iterator[Claim]:
    """The C-NFC is above the UC-NFC: for each kind of network."""
    for kind, names in ARCHITECTURES.items():
        for correlation in ("cosine", "pearson"):

            def mean(chosen: list[str], correlation: str = correlation) -> Array:
                return over([gap(runs[name], correlation) for name in chosen])

            yield Claim(
                id=f"{kind}-higher" + ("" if correlation == "cosine" else "-pearson"),
                claim=f"{kind.upper()}: the C-NFC is higher than the UC-NFC: difference of their means over layers and "
                "moments" + ("" if correlation == "cosine" else ", Pearson's correlation as in the authors' code"),
                paper="positive",
                values=mean(names),
                band=(0.0, None),
                band_from="print",
                least=Scale.SMOKE if kind == "mlp" and correlation == "cosine" else Scale.LAPTOP,
                why="Moments are equally spaced in the logarithm of the step.",
                choices=data_choices(names, mean),
            )


def when(runs: AllRuns) -> Iterator[Claim]:
    """Where and when the two differ: for each kind of network."""
    for kind, names in ARCHITECTURES.items():
        yield from _along(kind, names, runs)
        if kind != "mlp":  # the paper says so of C and D
            parts = [numpy.array_split(gap(runs[name])[:, early(runs[name])], 2, axis=2) for name in names]
            first, second = (over([part[half] for part in parts]) for half in (0, 1))
            yield Claim(
                id=f"{kind}-deep",
                claim=f"{kind.upper()}: early, they differ more in the deeper half of the layers",
                paper="yes",
                values=second > first,
                band=(1, None),
                band_from="print",
                least=Scale.LAPTOP,
                why="At laptop scale the first convolution of VGG has eight filters, and its UC-NFC begins anywhere "
                "from 0.46 to 0.92."
                if kind == "vgg"
                else "",
            )


def _along(kind: str, names: list[str], runs: AllRuns) -> Iterator[Claim]:
    lengths = [int(runs[name]["steps"][0, -1]) for name in names]
    steps = f"{min(lengths)} steps" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)} steps"

    def end(chosen: list[str], share: float = 1.0) -> Array:
        return over([gap(runs[name])[:, int(early(runs[name], share).sum()) - 1] for name in chosen])

    def start(chosen: list[str]) -> Array:
        return over([gap(runs[name])[:, early(runs[name])] for name in chosen])

    def centered(chosen: list[str], share: float = EARLY) -> Array:
        return over([runs[name]["cosine"][:, early(runs[name], share)][..., CENTERED] for name in chosen])

    yield Claim(
        id=f"{kind}-early",
        claim=f"{kind.upper()}: they differ more early (first tenth of the steps) than at the end",
        paper="yes",
        values=start(names) > end(names),
        band=(1, None),
        band_from="print",
        least=Scale.LAPTOP,
        choices=[
            Choice(made=f"an end after {steps}", other="half of them", values=start(names) > end(names, 0.5)),
            *data_choices(names, lambda chosen: start(chosen) > end(chosen)),
        ],
    )
    yield Claim(
        id=f"{kind}-near-one",
        claim=f"{kind.upper()}: the C-NFC is close to 1 at early times (Sec. 1): mean over "
        "layers and the first tenth of the steps",
        paper=1.0,
        values=centered(names),
        band=(0.8, 1.0),
        band_from="trial",
        least=Scale.LAPTOP,
        why="The paper gives no number; 0.87 to 0.89 were seen on the chain monomial before.",
        choices=[
            Choice(made=f"the first tenth of {steps}", other="the first hundredth", values=centered(names, EARLY / 10)),
            *data_choices(names, centered),
        ],
    )
    yield Claim(
        id=f"{kind}-converge",
        claim=f"{kind.upper()}: the UC-NFC converges to the C-NFC at late times: their distance at the end",
        paper=0.0,
        values=abs(end(names)),
        band=(None, 0.1),
        band_from="choice",
        least=Scale.PAPER,
        choices=[
            Choice(made=f"an end after {steps}", other="half of them", values=abs(end(names, 0.5))),
            *data_choices(names, lambda chosen: abs(end(chosen))),
        ],
    )


def plot(setups: Mapping[str, Any], runs: AllRuns) -> Any:
    """A, C, D: along training; B: over layers."""
    blocks = setups["gpt"].blocks
    figure, axes = panels(3 + blocks, 4, height=1.5)
    rows = numpy.array(axes).reshape(-1, 4)
    for ax, name in zip(axes, PERCEPTRONS, strict=False):
        pair(ax, runs[name], slice(None), f"A  MLP, {TITLES[name]}")
    depth(axes[len(PERCEPTRONS)], runs)
    axes[len(PERCEPTRONS) + 1].legend(*axes[len(PERCEPTRONS)].get_legend_handles_labels(), loc="center left")
    layers = runs["vgg"]["cosine"].shape[2]
    for ax, layer in zip(rows[2], numpy.linspace(0, layers - 1, 4).round().astype(int), strict=True):
        pair(ax, runs["vgg"], slice(layer, layer + 1), f"C  VGG, convolution {layer + 1}")
    for block in range(blocks):
        for part, name in enumerate(("query", "key", "value")):
            layer = 3 * block + part
            pair(rows[3 + block, part], runs["gpt"], slice(layer, layer + 1), f"D  GPT {block + 1}, {name}")
    for ax in axes:
        ax.set_axis_on() if ax.lines else ax.set_axis_off()
    for ax in rows[-1, :3]:
        ax.set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    rows[3, 3].legend(handles, labels, loc="center left")
    return figure


def pair(ax: Any, runs: Runs, layers: slice, title: str) -> None:
    """Both correlations, averaged over some layers, along training: cosine as printed, Pearson's as in the code."""
    steps = runs["steps"][0]
    # some twenty moments, the last among them: there are many panels, and numbers.csv has them all
    drawn = numpy.arange(len(steps))[:: -(1 + len(steps) // 25)][::-1]
    for kind, style in (("cosine", "-"), ("pearson", ":")):
        values = runs[kind][:, :, layers].mean(2)[:, drawn]
        for which, label, color in ((UNCENTERED, "UC-NFC", BLUE), (CENTERED, "C-NFC", GREEN)):
            if kind == "cosine":
                curve(ax, steps[drawn], values[..., which], label, color=color)
            else:
                mean = values[..., which].mean(0)
                curve(ax, steps[drawn], mean, f"{label}, Pearson's", color=color, style=style)
    ax.set(xscale="log", ylim=(0, 1.05))
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=7.5)


def depth(ax: Any, runs: AllRuns) -> None:
    """Each layer of the perceptrons, averaged over data sets, early and at the end."""
    index = 1 + numpy.arange(runs["cifar10"]["cosine"].shape[2])
    for which, label, color in ((UNCENTERED, "UC", BLUE), (CENTERED, "C", GREEN)):
        for moment, style in (("early", "o:"), ("end", "s-")):
            chosen = []
            for name in PERCEPTRONS:
                moments = early(runs[name]) if moment == "early" else [-1]
                chosen.append(runs[name]["cosine"][..., which][:, moments].mean(1))
            curve(ax, index, numpy.mean(chosen, axis=0), f"{label}, {moment}", color=color, style=style)
    ax.set(ylim=(0, 1.05), xlabel="hidden layer", xticks=index)
    ax.set_title("B  MLP, mean over data", loc="left", fontsize=7.5)


TRAINING = (
    "Pixels are standardized by channel over the training images, as in the authors' code. Losses: squared error to "
    "one-hot targets less 1/C and rates times C/10 as in the authors' code (without its slow first epoch), "
    "cross-entropy for GPT with all logits of all places as outputs, in random directions. At laptop scale: 2000 "
    "images of all six data sets, those with colors averaged to 16 x 16, with ten times the paper's rates (2 for CIFAR "
    "and SVHN, 1 for STL-10 and GTSRB), since there are 750 steps and not 58,000 (some hardly begin to be learned); "
    "VGG-11 an eighth as wide on 500 images; GPT of width 64 on 32 characters for 400 steps. At paper scale: the "
    "paper's networks, rates, batches and epochs on the images that were at hand: the first 50,000 of MNIST and "
    "CIFAR-10 as in the paper (19,500 and 58,500 steps), the first 20,000 of CIFAR-100 and of SVHN (rebuilt from the "
    "pictures of whole numbers; 23,400 steps each), 12,000 of GTSRB (13,950 steps), 3001 of STL-10 (reconstructed at "
    "32 x 32; 3450 steps). VGG on all 50,000 images for 50 epochs (9750 steps of 256), GPT for 5000 steps by nanoGPT's "
    "schedule (rate up to 0.005 over 100 steps, then down to 0.0001 along a cosine). VGG has rate 0.1 with momentum "
    "0.9 for the paper's rate 1, at full width 0.03 with one epoch of rising rate (at 0.1 two of three seeds "
    "overflowed), and starts by Kaiming's rule and a small readout: from torch's default a small one did not learn in "
    "300 steps, at rate 1 it diverged or hardly learned. Rates were chosen by the loss of one seed, before pixels were "
    "standardized. K is measured on 1000 images (the authors: all for perceptrons), VGG's on 256 (theirs: 1000); 128 "
    "and 64 at laptop scale."
)
"""how the networks of Fig. 2 are trained, which 13, 14 and 15 show as well"""

FIG_2 = Reproduction(
    id="003/fig2",
    about=(
        "Correlation of W^T W with W^T K W (UC-NFC), and of the same with W - W0 in place of W (C-NFC), in layers of "
        "perceptrons, of VGG-11 and in queries, keys and values of a GPT, along training. The cosine is what the paper "
        f"defines; Pearson's, which its code computes, is dotted. {TRAINING}"
    ),
    experiment=NETWORKS,
    plot=plot,
    claims=claims,
)
