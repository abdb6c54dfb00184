"""Beaglehole et al. 2024, Fig. 14: losses of perceptrons on six data sets, and how far their weights move."""

from collections.abc import Iterable, Mapping
from typing import Any

from featlearn_papers.frame.claims import Claim
from featlearn_papers.frame.drawing import panels
from featlearn_papers.frame.reproduction import Reproduction
from featlearn_papers.paper_003 import weight_changes
from featlearn_papers.paper_003.fig2 import TITLES, TRAINING, AllRuns
from featlearn_papers.paper_003.networks import PERCEPTRONS


def claims(setups: Mapping[str, Any], runs: AllRuns) -> Iterable[Claim]:
    """Those of all networks; layers are looked at one by one."""
    return weight_changes.claims(runs)


def plot(setups: Mapping[str, Any], runs: AllRuns) -> Any:
    """For each data set, in the order of Fig. 13, its losses and the changes of its layers."""
    figure, axes = panels(3, 4, height=1.75)
    for i, (letter, name) in enumerate(zip("ABCDEF", runs, strict=True)):
        loss, change = axes[2 * i], axes[2 * i + 1]
        weight_changes.losses(loss, runs, name, f"{letter}  {TITLES[name]}, loss")
        layers = range(runs[name]["change"].shape[2])
        labels = [f"layer {layer + 1}" for layer in layers]
        weight_changes.changes(change, runs, name, layers, labels, f"{TITLES[name]}, change of W")
    for ax in axes[-4:]:
        ax.set_xlabel("step")
    parts = [ax.get_legend_handles_labels() for ax in axes[:2]]
    handles, labels = ([one for part in parts for one in part[kind]] for kind in (0, 1))
    figure.legend(handles, labels, loc="outside upper center", ncols=7, columnspacing=1.0)
    return figure


FIG_14 = Reproduction(
    id="003/fig14",
    about=(
        "The runs of Fig. 2, perceptrons of five hidden layers on six data sets: losses on up to 10,000 samples of the "
        "training set and on the test set, and |W - W0| / |W| of each hidden layer. A correlation of W - W0 can raise "
        "that of W only if weights move. Which losses the paper shows is not said; the share of tr(F G) that W - W0 "
        f"has (the ratio of Fig. 4) is judged as well. {TRAINING}"
    ),
    experiment=PERCEPTRONS,
    plot=plot,
    claims=claims,
)
