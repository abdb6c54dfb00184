"""Networks from first weights of several scales, on Gaussian data of several spectra.

The experiment behind Fig. 5, 6, 8, 9 and 10 of Beaglehole et al. 2024.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch

import featlearn as fl
from featlearn.quantities.layer_features import Kind
from featlearn_papers.frame.context import Context
from featlearn_papers.frame.drawing import panels
from featlearn_papers.frame.experiment import Experiment, Size
from featlearn_papers.frame.runs import Numbers, Runs
from featlearn_papers.frame.scale import Scale
from featlearn_papers.paper_003.chain import ChainTask, descend, network, squared_error
from featlearn_papers.paper_003.spectra import eigenbasis, eigenvalues, rotated_chain

LAYERS = ("hidden.0", "hidden.1")
KINDS: tuple[Kind, ...] = ("cosine", "pearson")
CORRELATIONS = ("uncentered", "centered", "ptk_centered")
ALL, AXES = "all/", "axes/"
"""prefixes of numbers: the scale on all hidden layers, and data whose eigenvectors are the axes"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """App. I: two hidden ReLU layers, rate, steps and every fifth step measured; the rest is open there."""

    samples: int = 256
    unseen: int = 2048
    dimension: int = 32
    degree: int = 5
    width: int = 256
    decays: tuple[float, ...] = (0.0, 1.0, 2.0)
    """eigenvalues 1 / (1 + k^decay) of the data covariance, 1 for decay 0"""
    scales: tuple[float, ...] = (1.0, 0.1, 0.01)
    """factors of the first layer, or of all hidden layers, largest first; the others start as torch starts them"""
    lr: float = 0.05
    steps: int = 800
    first: int = 5
    """the first measured step"""
    early: int = 50
    """up to here every `first` steps are measured"""
    stride: int = 5
    """beyond `early`"""

    @property
    def measured(self) -> list[int]:
        """Steps: 0, the early ones, and on to the last."""
        return [*range(0, self.early, self.first), *range(self.early, self.steps, self.stride), self.steps]


def measure(setup: Setup, context: Context) -> dict[str, Numbers]:
    """Measure along training, (decays, scales, T, ...), where the scale multiplies the first layer.

    Under "all/" it multiplies all hidden layers; under "axes/" the eigenvectors of the data are the axes, at three
    steps. Networks of one seed begin alike, but for the factor.
    """
    numbers: dict[str, Numbers] = {"steps": setup.measured}
    for place, rotated, layers in (("", True, "hidden.0"), (ALL, True, "hidden.*"), (AXES, False, "hidden.0")):
        steps = setup.measured if rotated else [0, setup.first, setup.steps]
        paths: list[list[dict[str, list[Any]]]] = []
        for decay in setup.decays:
            variances, basis = eigenvalues(setup.dimension, decay), eigenbasis(context, setup.dimension, rotated)
            task = rotated_chain(context, setup.samples, setup.unseen, variances, basis, degree=setup.degree)
            paths.append([train(setup, context, task, scale, steps, layers) for scale in setup.scales])
            ends = ", ".join(f"{path['test'][-1]:.3f}" for path in paths[-1])
            context.say(f"{place}decay={decay:g}: test losses {ends}")
        numbers |= {f"{place}{name}": [[path[name] for path in row] for row in paths] for name in paths[0][0]}
    return numbers


def train(
    setup: Setup, context: Context, task: ChainTask, scale: float, steps: list[int], layers: str
) -> dict[str, list[Any]]:
    """Train one network.

    Returns cosine and pearson (T, layers, correlations), double_share (T, layers), train and test (T,).
    """
    model = network(context, task, setup.width, scale, layers=layers)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    path: dict[str, list[Any]] = {name: [] for name in (*KINDS, "double_share", "train", "test")}

    def at(step: int) -> None:
        if step not in steps:
            return
        # in double: in single precision some gate in some of the many measurements is too near to zero to be told
        features = fl.neural_features(model, task.x, initial=initial, layers=LAYERS, dtype=torch.float64)
        for kind in KINDS:
            each = [features[name].correlations(kind) for name in LAYERS]
            path[kind].append([[getattr(pair, name) for name in CORRELATIONS] for pair in each])
        path["double_share"].append([features[name].double_centered_share for name in LAYERS])
        with torch.no_grad():
            for name, pair in (("train", task[:2]), ("test", task[2:4])):
                path[name].append(float(squared_error(model, *pair)))

    descend(model, task, torch.optim.SGD(model.parameters(), lr=setup.lr), setup.steps, at)
    return path


def correlation(runs: Runs, name: str, decay: int, kind: str = "cosine", place: str = "") -> Any:
    """(S, scales, T, layers) of one spectrum; nan at step 0 for what is centered."""
    return runs[f"{place}{kind}"][:, decay, ..., CORRELATIONS.index(name)]


def step_weights(setup: Setup) -> list[int]:
    """Of the measured steps but 0 in a mean over training: how many steps each stands for."""
    return [after - before for before, after in pairwise(setup.measured)]


def drawn(setup: Setup) -> list[int]:
    """Places of the measured steps that pictures show, without step 0: ever further apart, some forty in all."""
    found: list[int] = []
    for place, step in enumerate(setup.measured[1:], start=1):
        if not found or step >= 1.08 * setup.measured[found[-1]] or step == setup.steps:
            found.append(place)
    return found


def spectrum_words(decay: float) -> str:
    """As in the captions."""
    return {0.0: r"$\lambda_k = 1$", 1.0: r"$\lambda_k = 1/(1+k)$"}.get(decay, rf"$\lambda_k = 1/(1+k^{{{decay:g}}})$")


def spectrum_panels(setup: Setup, ylabel: str, highest: float) -> tuple[Any, dict[tuple[int, int], Any]]:
    """A figure and its axes by (layer, decay): layers in rows, spectra in columns, steps to the right."""
    figure, axes = panels(len(LAYERS), len(setup.decays), height=2.2)
    placed = dict(zip(product(range(len(LAYERS)), range(len(setup.decays))), axes, strict=True))
    for (layer, decay), ax in placed.items():
        ax.set_title(f"layer {layer + 1}, {spectrum_words(setup.decays[decay])}", loc="left")
        ax.set(xlabel="step" if layer else "", ylabel="" if decay else ylabel, xscale="log", ylim=(0, highest))
    return figure, placed


OPEN = (
    "Samples (256), dimension (32), width (256), the task (chain monomial of degree 5, targets of variance 1), the "
    "loss (mean squared error), the scales and what they multiply (the first layer; where a choice says all, every "
    "hidden layer) are not in the paper; the rate of 0.05, 800 steps and every fifth step measured are. Inputs have a "
    "random eigenbasis, as in App. G; where a choice says axes, the eigenvectors are the coordinates, so that the task "
    "depends on the five directions of largest variance alone. "
)
"""for the pages of the figures"""

SCALES = Experiment(
    id="003/initial-scales",
    sizes={
        Scale.SMOKE: Size(
            setup=Setup(
                samples=48,
                unseen=64,
                dimension=10,
                degree=3,
                width=24,
                scales=(1.0, 0.01),
                lr=0.2,
                steps=40,
                early=10,
                stride=30,
            ),
            seeds=1,
            seconds=2,
            mebibytes=10,
        ),
        Scale.LAPTOP: Size(setup=Setup(stride=50), seeds=3, seconds=110, mebibytes=100),
        Scale.PAPER: Size(setup=Setup(), seeds=5, seconds=220, mebibytes=100),
    },
    measure=measure,
)
