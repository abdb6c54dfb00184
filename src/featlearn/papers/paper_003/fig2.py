"""Beaglehole et al. 2024, Fig. 2.

The change of the weights agrees with the gradients before the weights themselves do.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy

from featlearn.papers.claims import Choice, Claim
from featlearn.papers.drawing import BLUE, COLOURS, GREEN, GREY, curve, panels
from featlearn.papers.paper_003.networks import TRACKED, Setup
from featlearn.papers.reproduction import Reproduction
from featlearn.papers.runs import Array, Runs
from featlearn.papers.scale import Scale

UNCENTRED, CENTRED = 0, 1
"""of the last axis of correlations (S, T, L, 2): seeds, moments, layers"""
EARLY = 0.1
"""share of the steps that counts as early"""
SHORT = {
    "mlp": "0.08 on MNIST, 0.34 on CIFAR-10: there we have 11700 steps for the paper's 58000, the loss is at 0.6 of "
    "its start, and the distance is still falling.",
    "vgg": "0.25, 0.24 and 0.09 in three seeds, the last of which has learned most: we have 1950 steps for the paper's "
    "9750, at a smaller rate, and the weights have changed by a tenth.",
    "gpt": "",
}
"""why our networks may not have got there"""


def gap(runs: Runs, name: str, kind: str = "cosine") -> Array:
    """C-NFC less UC-NFC, (S, T, L)."""
    values = runs[f"{name}/{kind}"]
    difference: Array = values[..., CENTRED] - values[..., UNCENTRED]
    return difference


def early(runs: Runs, name: str, share: float = EARLY) -> Array:
    """(T,): which moments belong to the first tenth of training, or another share of it."""
    steps = runs[f"{name}/steps"][0]
    chosen: Array = steps <= max(share * steps[-1], steps[0])
    return chosen


def over(values: Iterable[Array]) -> Array:
    """(S,): the mean over networks of what each has for every seed."""
    means: Array = numpy.mean([value.reshape(len(value), -1).mean(1) for value in values], axis=0)
    return means


def claims(setup: Setup, runs: Runs) -> Iterable[Claim]:
    """Sec. 1 and 3 and the caption; the cosine of the print unless said otherwise."""
    yield from higher(setup, runs)
    yield from when(setup, runs)
    every = [gap(runs, name) > 0 for names in setup.architectures.values() for name in names]
    yield Claim(
        id="consistently", claim="The C-NFC is consistently higher across times, architectures and data: share of "
        "all layers and moments", paper=1.0, values=over(every), band=(0.95, 1.0),
        band_from="choice", least=Scale.LAPTOP,
        why="Not in all: at paper scale single layers of the MNIST perceptron are below by up to 0.09 between steps 50 "
            "and 600, of VGG by 0.06 at the end. On the chain monomial (Fig. 4, scale 1) it ends below in most seeds.",
    )  # fmt: skip


def data_choices(names: list[str], number: Callable[[list[str]], Array]) -> list[Choice]:
    """What single data sets say, where a number is a mean over several."""
    if len(names) < 2:
        return []
    made = f"the mean over {len(names)} data sets"
    return [
        Choice(made=made, other=f"{name.removeprefix('mlp-')} alone", values=number([name])) for name in names
    ]  # fmt: skip


def higher(setup: Setup, runs: Runs) -> Iterator[Claim]:
    """The C-NFC is above the UC-NFC: for each kind of network."""
    for kind, names in setup.architectures.items():
        for correlation in ("cosine", "pearson"):

            def mean(chosen: list[str], correlation: str = correlation) -> Array:
                return over([gap(runs, name, correlation) for name in chosen])

            yield Claim(
                id=f"{kind}-higher" + ("" if correlation == "cosine" else "-pearson"),
                claim=f"{kind.upper()}: the C-NFC is higher than the UC-NFC: difference of their means over layers and "
                "moments" + ("" if correlation == "cosine" else ", Pearson's correlation as in the authors' code"),
                paper="positive", values=mean(names), band=(0.0, None), band_from="print",
                least=Scale.SMOKE if kind == "mlp" and correlation == "cosine" else Scale.LAPTOP,
                why="Moments are equally spaced in the logarithm of the step.", choices=data_choices(names, mean),
            )  # fmt: skip


def when(setup: Setup, runs: Runs) -> Iterator[Claim]:
    """Where and when the two differ: for each kind of network."""
    for kind, names in setup.architectures.items():
        yield from _along(kind, names, runs)
        if kind != "mlp":  # the paper says so of C and D
            parts = [numpy.array_split(gap(runs, name)[:, early(runs, name)], 2, axis=2) for name in names]
            first, second = (over([part[half] for part in parts]) for half in (0, 1))
            yield Claim(
                id=f"{kind}-deep", claim=f"{kind.upper()}: early, they differ more in the deeper half of the layers",
                paper="yes", values=second > first, band=(1, None), band_from="print", least=Scale.LAPTOP,
                why="At laptop scale the first convolution of VGG has eight filters, and its UC-NFC begins anywhere "
                    "from 0.46 to 0.92." if kind == "vgg" else "",
            )  # fmt: skip


def _along(kind: str, names: list[str], runs: Runs) -> Iterator[Claim]:
    steps = f"{runs[f'{names[0]}/steps'][0, -1]:.0f} steps"

    def end(chosen: list[str], share: float = 1.0) -> Array:
        last = {name: int(early(runs, name, share).sum()) - 1 for name in chosen}
        return over([gap(runs, name)[:, last[name]] for name in chosen])

    def start(chosen: list[str]) -> Array:
        return over([gap(runs, name)[:, early(runs, name)] for name in chosen])

    def centred(chosen: list[str], share: float = EARLY) -> Array:
        return over([runs[f"{name}/cosine"][:, early(runs, name, share)][..., CENTRED] for name in chosen])

    yield Claim(
        id=f"{kind}-early", claim=f"{kind.upper()}: they differ more early (first tenth of the steps) than at the end",
        paper="yes", values=start(names) > end(names), band=(1, None), band_from="print", least=Scale.LAPTOP,
        choices=[
            Choice(made=f"an end after {steps}", other="half of them", values=start(names) > end(names, 0.5)),
            *data_choices(names, lambda chosen: start(chosen) > end(chosen)),
        ],
    )  # fmt: skip
    yield Claim(
        id=f"{kind}-near-one", claim=f"{kind.upper()}: the C-NFC is close to 1 at early times (Sec. 1): mean over "
        "layers and the first tenth of the steps", paper=1.0, values=centred(names), band=(0.8, 1.0),
        band_from="trial", least=Scale.LAPTOP,
        why="The paper gives no number; 0.87 to 0.89 were seen on the chain monomial before.",
        choices=[
            Choice(made=f"the first tenth of {steps}", other="the first hundredth", values=centred(names, EARLY / 10)),
            *data_choices(names, centred),
        ],
    )  # fmt: skip
    yield Claim(
        id=f"{kind}-converge", claim=f"{kind.upper()}: the UC-NFC converges to the C-NFC at late times: their distance "
        "at the end", paper=0.0, values=abs(end(names)), band=(None, 0.1), band_from="choice", least=Scale.PAPER,
        why=SHORT[kind], choices=[
            Choice(made=f"an end after {steps}", other="half of them", values=abs(end(names, 0.5))),
            *data_choices(names, lambda chosen: abs(end(chosen))),
        ],
    )  # fmt: skip


def plot(setup: Setup, runs: Runs) -> Any:
    """A, C, D: along training; B: over layers; then what is not in the paper's figure."""
    parts = ("query", "key", "value")
    others = (("loss", "loss / first loss"), ("change", "|W - W0| / |W|"), ("pearson", "C - UC, Pearson"))
    lines = -(-(len(setup.mlps) + 1) // 4), 1, setup.gpt.blocks, 1
    figure, axes = panels(sum(lines), 4, height=1.5)
    rows = numpy.array(axes).reshape(-1, 4)
    first, *rest = numpy.split(rows, numpy.cumsum(lines)[:-1])
    for ax, name in zip(first.flat, setup.mlps, strict=False):
        pair(ax, runs, name, slice(None), f"A  MLP, {name.removeprefix('mlp-')}")
    depth(first.flat[len(setup.mlps)], setup, runs)
    layers = runs["vgg/cosine"].shape[2]
    for ax, layer in zip(rest[0][0], numpy.linspace(0, layers - 1, 4).round().astype(int), strict=True):
        pair(ax, runs, "vgg", slice(layer, layer + 1), f"C  VGG, convolution {layer + 1}")
    for block in range(setup.gpt.blocks):
        for ax, part, name in zip(rest[1][block], range(3), parts, strict=False):
            layer = 3 * block + part
            pair(ax, runs, "gpt", slice(layer, layer + 1), f"D  GPT {block + 1}, {name}")
    for ax, (what, title) in zip(rest[2][0], others, strict=False):
        beside(ax, setup, runs, what, title)
    for ax in axes:
        ax.set_axis_on() if ax.lines else ax.set_axis_off()
    for ax in rows[-1]:
        ax.set_xlabel("step")
    rest[0][0, 1].legend(loc="lower left")
    handles, labels = rest[2][0, 0].get_legend_handles_labels()
    rest[2][0, 3].legend(handles, labels, loc="center left")
    return figure


def pair(ax: Any, runs: Runs, name: str, layers: slice, title: str) -> None:
    """Both correlations, averaged over some layers, along training."""
    values = runs[f"{name}/cosine"][:, :, layers].mean(2)
    for which, label, colour in ((UNCENTRED, "UC-NFC", BLUE), (CENTRED, "C-NFC", GREEN)):
        curve(ax, runs[f"{name}/steps"][0], values[..., which], label, colour=colour)
    ax.set(xscale="log", ylim=(0, 1.05))
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=7.5)


def depth(ax: Any, setup: Setup, runs: Runs) -> None:
    """Each layer of the perceptrons, averaged over data sets, early and at the end."""
    index = 1 + numpy.arange(setup.hidden_layers)
    for which, label, colour in ((UNCENTRED, "UC", BLUE), (CENTRED, "C", GREEN)):
        for when, style in (("early", "o:"), ("end", "s-")):
            chosen = []
            for name in setup.mlps:
                moments = early(runs, name) if when == "early" else [-1]
                chosen.append(runs[f"{name}/cosine"][..., which][:, moments].mean(1))
            curve(ax, index, numpy.mean(chosen, axis=0), f"{label}, {when}", colour=colour, style=style)
    ax.set(ylim=(0, 1.05), xlabel="hidden layer", xticks=index)
    ax.set_title("B  MLP, mean over data", loc="left", fontsize=7.5)
    ax.legend(ncols=2, loc="lower left", handlelength=1, columnspacing=0.8)


def beside(ax: Any, setup: Setup, runs: Runs, what: str, title: str) -> None:
    """One more quantity of all networks, averaged over layers."""
    for i, name in enumerate([*setup.mlps, "vgg", "gpt"]):
        values = runs[f"{name}/loss"] if what == "loss" else runs[f"{name}/change"].mean(2)
        values = gap(runs, name, "pearson").mean(2) if what == "pearson" else values
        values = values / values[:, :1] if what == "loss" else values
        curve(ax, runs[f"{name}/steps"][0], values, name.replace("mlp-", "MLP "), colour=COLOURS[i])
    if what == "pearson":
        ax.axhline(0, color=GREY, linewidth=0.5, label="_zero")
    ax.set(xscale="log", yscale="log" if what == "loss" else "linear")
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=7.5)


FIG_2 = Reproduction(
    id="003/fig2",
    about=(
        "Correlation of W^T W with W^T K W (UC-NFC), and of the same with W - W0 in place of W (C-NFC), in layers of "
        "perceptrons, of VGG-11 and in queries, keys and values of a GPT, along training. The cosine is what the paper "
        "defines; Pearson's, which its code computes, is the last panel. Losses: squared error to one-hot targets less "
        "1/C as in that code (without its slow first epoch), cross-entropy for GPT with all logits of all places as "
        "outputs, in random directions. At laptop scale: 2000 images of all six data sets, those with colours averaged "
        "to 16 x 16, with ten times the paper's rates (2 for CIFAR and SVHN, 1 for STL-10 and GTSRB), since there are "
        "750 steps and not 58000 (some hardly begin to be learned); VGG-11 an eighth as wide on 500 "
        "images; GPT of width 64 on 32 characters. At paper scale: the paper's networks; 50000 MNIST images for 20 "
        "epochs in place of 50, the 10000 images of the first file of CIFAR-10 for all epochs, which is a fifth of the "
        "paper's steps, 1000 steps of GPT, and no SVHN. VGG "
        "has rate 0.1 with momentum 0.9 for the paper's rate 1 (0.03 at full width: two of three seeds overflowed at "
        "0.1, and at 0.03 the loss is up to 20 times its start at step 3, before it falls), and starts by Kaiming's "
        "rule and a small readout: from torch's default a small one did not learn in "
        "300 steps, at rate 1 it diverged or hardly learned. Rates were chosen by the loss of one seed. "
        "At paper scale CIFAR-100, STL-10 and GTSRB are left out as well."
    ),
    experiment=TRACKED,
    plot=plot,
    claims=claims,
)
