"""Beaglehole et al. 2024, Fig. 15: losses of VGG-11 and GPT, and how far their weights move."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.drawing import panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.paper_003 import weight_changes
from featlearn_papers.paper_003.fig2 import TRAINING, AllRuns
from featlearn_papers.paper_003.networks import GPT, VGG


def claims(setups: Mapping[str, Any], runs: AllRuns) -> Iterable[Claim]:
    """Those of all networks; layers are looked at one by one."""
    return weight_changes.claims(runs)


def plot(setups: Mapping[str, Any], runs: AllRuns) -> Any:
    """A: loss and convolutions of VGG-11; B: loss, queries, keys and values of GPT."""
    figure, axes = panels(2, 4, height=2.2)
    weight_changes.losses(axes[0], runs, "vgg", "A  VGG-11, loss")
    parts = numpy.array_split(numpy.arange(runs["vgg"]["change"].shape[2]), 3)
    for ax, part in zip(axes[1:4], parts, strict=True):
        layers = [int(layer) for layer in part]
        labels = [f"convolution {layer + 1}" for layer in layers]
        weight_changes.changes(ax, runs, "vgg", layers, labels, "|W - W0| / |W|")
    weight_changes.losses(axes[4], runs, "gpt", "B  GPT, loss")
    blocks = range(setups["gpt"].blocks)
    for position, (ax, name) in enumerate(zip(axes[5:], ("query", "key", "value"), strict=True)):
        layers, labels = [3 * block + position for block in blocks], [f"block {block + 1}" for block in blocks]
        weight_changes.changes(ax, runs, "gpt", layers, labels, f"|W - W0| / |W|, {name}")
    for ax in axes:
        ax.legend(loc="upper left")
        ax.set_xlabel("step")
    return figure


FIG_15 = Reproduction(
    id="003/fig15",
    about=(
        "The runs of Fig. 2, VGG-11 on CIFAR-10 and a GPT on characters of Shakespeare: losses on up to 10,000 images "
        "(256 stretches of text) of the training and of the test set, and |W - W0| / |W| of each convolution and each "
        f"query, key and value layer. {TRAINING}"
    ),
    experiment={"vgg": VGG, "gpt": GPT},
    plot=plot,
    claims=claims,
)
